"""Write examples/presets from the table and the templates in scripts/dev/presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).resolve().parents[2] / "examples/presets"
TEMPLATES = Path(__file__).with_suffix("")


def presets() -> dict[str, dict[str, Any]]:
    """Return the variables of the templates for each preset."""
    table = yaml.safe_load((TEMPLATES / "presets.yaml").read_text(encoding="utf-8"))
    shared = table.pop("all")
    return {name: {**shared, **table[name]} for name in sorted(table)}


def rendered() -> dict[str, str]:
    """Return the text of each file by name."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    files = {}
    for name, preset in presets().items():
        sides = ("train", "rollout") if preset["servers"] else ("train",)
        for side in sides:
            file = f"{name}.{side}.yaml" if len(sides) > 1 else f"{name}.yaml"
            template = templates.get_template(f"{side}.yaml.j2")
            files[file] = template.render(preset, name=name)
    return files


if __name__ == "__main__":
    for file, text in rendered().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
