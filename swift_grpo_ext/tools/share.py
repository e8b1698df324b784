"""Files of the installed package: the plugin file, the presets, the launch script."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import yaml

# It has the layout of a clone. In a clone, its entries are links to `plugins/`, `examples/` and
# `scripts/`; in a wheel, they are the files.
SHARE = Path(__file__).resolve().parents[1] / "share"
PLUGIN_FILE = SHARE / "plugins" / "grpo_ext.py"
PRESETS = SHARE / "examples" / "presets"
LAUNCH_SCRIPT = SHARE / "scripts" / "launch.sh"


def plugin_path(options: argparse.Namespace) -> None:
    print(PLUGIN_FILE)


def presets() -> dict[str, list[Path]]:
    """Return the files of each preset by its name: the training's, then the servers' if any."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PRESETS.iterdir(), reverse=True):  # `.train` before `.rollout`
        found.setdefault(path.name.partition(".")[0], []).append(path)
    return dict(sorted(found.items()))


def init(options: argparse.Namespace) -> None:
    """Copy a preset, its plugins and its launch script, and print how to run it; or list all."""
    known, directory = presets(), options.directory
    if options.list:
        for name, (training, *_) in known.items():
            print(f"{name:20} {_lines(training)[0].removeprefix('# ')}")
        return
    if directory is None:
        raise ValueError("give a folder: swift-grpo-ext init DIRECTORY; --list shows the presets.")
    if options.preset not in known:
        raise ValueError(f"there is no preset {options.preset}; choose from {', '.join(known)}.")
    settings = known[options.preset]
    files = {path.name: path for path in settings}
    if len(settings) > 1:
        files["launch.sh"] = LAUNCH_SCRIPT
    for path in settings:
        plugins = yaml.safe_load(path.read_text(encoding="utf-8"))["external_plugins"]
        files |= {plugin: SHARE / plugin for plugin in plugins}
    # Before the first copy: a file of the user's must not be replaced.
    if taken := [name for name in files if (directory / name).exists()]:
        raise ValueError(f"{directory / taken[0]} exists already: nothing was copied.")
    for name, path in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        print(shutil.copyfile(path, directory / name))
    print(f"\nIn {directory}: {_lines(settings[0])[1].removeprefix('#   ')}")


def _lines(preset: Path) -> list[str]:
    """Return the lines of a preset: the first is its title, the second its command."""
    return preset.read_text(encoding="utf-8").splitlines()
