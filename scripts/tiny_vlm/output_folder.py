"""An output folder that knows which settings built it, and whether the build came to its end.

`claim` decides whether to build, and `finish` marks the build complete. Both go through
`manifest.json` in the folder, so that a second run with the same settings does nothing, an
interrupted one is taken up again, and a folder of the user's own is never written into unasked.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def claim(output: Path, settings: Mapping[str, Any], *, force: bool) -> bool:
    """Whether `output` has to be built; if so, it exists afterwards and is marked unfinished.

    `settings` holds JSON values only. The user's mistakes are `ValueError`s.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(
            f"--output {output} is a file, expected a folder or a path that does not exist yet; "
            "name another path"
        )
    manifest = read_manifest(output)
    if manifest is None:
        if output.is_dir() and any(output.iterdir()) and not force:
            raise ValueError(
                f"--output {output} holds files but no {MANIFEST}, so this script did not make "
                "it; name an empty or new folder, or pass --force to write into this one"
            )
    elif manifest["settings"] == settings:
        if manifest["complete"] and not force:
            return False
    elif not force:
        raise ValueError(
            f"--output {output} was built with {manifest['settings']}, but {dict(settings)} was "
            "asked for; name another folder, or pass --force to build this one again"
        )
    output.mkdir(parents=True, exist_ok=True)
    _write_manifest(output, settings, complete=False)
    return True


def finish(output: Path, settings: Mapping[str, Any]) -> None:
    """Mark the build of `output` with `settings` as complete."""
    _write_manifest(output, settings, complete=True)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest with its keys `settings` and `complete`, or None if it has none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {"settings": manifest["settings"], "complete": bool(manifest["complete"])}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a manifest that this script wrote ({error!r}); name another folder, "
            "or move that file away"
        ) from error


def _write_manifest(output: Path, settings: Mapping[str, Any], *, complete: bool) -> None:
    text = json.dumps({"complete": complete, "settings": dict(settings)}, indent=2) + "\n"
    partial = output / f"{MANIFEST}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(output / MANIFEST)
