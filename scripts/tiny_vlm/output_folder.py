"""Output folders with a `manifest.json` of the settings that built them.

A second build with the same settings does nothing, an interrupted build starts again, and other
folders are never written into.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def claim(output: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether `output` must be built; if so, create it and mark it as unfinished.

    Raises:
        SystemExit: the folder exists and was not built with these settings.
    """
    path = output / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if manifest == {"complete": True, "settings": settings}:
        print(f"{output} is already complete; nothing to do")
        return False
    if output.exists() and manifest.get("settings") != settings:
        raise SystemExit(
            f"--output {output} was not built with {settings}. Remove it, or name another folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    finish(output, settings, complete=False)
    return True


def finish(output: Path, settings: Mapping[str, Any], *, complete: bool = True) -> None:
    text = json.dumps({"complete": complete, "settings": dict(settings)}, indent=2) + "\n"
    partial = output / f"{MANIFEST}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(output / MANIFEST)
