"""Fill examples/presets from the table and the two templates of scripts/dev/presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).resolve().parents[2] / "examples/presets"
TEMPLATES = Path(__file__).with_suffix("")


def presets() -> dict[str, dict[str, Any]]:
    """Return what the templates leave open, by the preset's name."""
    table = yaml.safe_load((TEMPLATES / "presets.yaml").read_text(encoding="utf-8"))
    shared = table.pop("all")
    return {name: {**shared, **table[name]} for name in sorted(table)}


def filled() -> dict[str, str]:
    """Return all files by name."""
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
    for file, text in filled().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
