"""An output folder that knows which settings built it, by its `manifest.json`.

A second build with the same settings does nothing, an interrupted one is made again, and a folder
of the user's own is never written into.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def claim(output: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether `output` has to be built; then it exists and is marked unfinished.

    Raises:
        SystemExit: it holds files that no build with these settings has made.
    """
    path = output / MANIFEST
    made = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if made == {"complete": True, "settings": settings}:
        print(f"{output} is complete already; nothing to do")
        return False
    if output.exists() and (made or {}).get("settings") != settings:
        raise SystemExit(f"--output {output} is not of {settings}: remove it, or name a new folder")
    output.mkdir(parents=True, exist_ok=True)
    finish(output, settings, complete=False)
    return True


def finish(output: Path, settings: Mapping[str, Any], *, complete: bool = True) -> None:
    """Mark the build of `output` with `settings` as complete."""
    text = json.dumps({"complete": complete, "settings": dict(settings)}, indent=2) + "\n"
    partial = output / f"{MANIFEST}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(output / MANIFEST)
