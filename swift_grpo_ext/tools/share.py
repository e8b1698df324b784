"""What the installed package brings along: the plugin file, the presets, the launch script.

`swift_grpo_ext/share` has the layout of a clone: there, its entries are links to `plugins/`,
`examples/` and `scripts/`; in a wheel, they are the files.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from swift_grpo_ext.tools.check.settings import files_of, read_settings

SHARE = Path(__file__).resolve().parents[1] / "share"
PLUGIN_FILE = SHARE / "plugins" / "grpo_ext.py"
PRESETS = SHARE / "examples" / "presets"
LAUNCH_SCRIPT = SHARE / "scripts" / "launch.sh"


def plugin_path(options: argparse.Namespace) -> None:
    """Print where the plugin file is."""
    print(PLUGIN_FILE)


def init(options: argparse.Namespace) -> None:
    """Copy a preset and print how to run it, or list the presets."""
    if options.list:
        for name in preset_names():
            # The first line of its file says what a preset is for.
            title = _main_file(name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            print(f"{name:20} {title}")
        return
    if options.directory is None:
        raise ValueError("where to? swift-grpo-ext init DIRECTORY; --list shows the presets.")
    print(*copy_preset(options.preset, options.directory), sep="\n")
    print(f"\nIn {options.directory}: {command(options.preset)}")


def preset_names() -> list[str]:
    """Return the presets by name; one with servers has two files."""
    return sorted({file.name.partition(".")[0] for file in PRESETS.glob("*.yaml")})


def command(name: str) -> str:
    """Return how a preset is run from the folder that it was copied to: its second line says so."""
    return _main_file(name).read_text(encoding="utf-8").splitlines()[1].removeprefix("#   ")


def copy_preset(name: str, directory: Path) -> list[Path]:
    """Copy a preset to start from, with the plugins that it names, and the script that launches it.

    Args:
        name: of the preset.
        directory: where to; made where it is missing. Run the preset from there.

    Returns:
        The files written.

    Raises:
        ValueError: there is no such preset, or a file of that name is there already.
    """
    if name not in preset_names():
        raise ValueError(f"there is no preset {name}; choose from {', '.join(preset_names())}.")
    training, rollout = files_of(PRESETS / name if _is_pair(name) else _main_file(name))
    files = {file.name: file for file in (training, rollout) if file}
    if rollout:
        files["launch.sh"] = LAUNCH_SCRIPT
    for file in (training, rollout):
        for plugin in read_settings(file).get("external_plugins", ()) if file else ():
            files[plugin] = SHARE / plugin
    taken = [target for target in files if (directory / target).exists()]
    if taken:
        raise ValueError(f"{directory / taken[0]} is there already: nothing was copied.")
    for target, source in files.items():
        (directory / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, directory / target)
    return [directory / target for target in files]


def _main_file(name: str) -> Path:
    return PRESETS / (f"{name}.train.yaml" if _is_pair(name) else f"{name}.yaml")


def _is_pair(name: str) -> bool:
    return (PRESETS / f"{name}.train.yaml").is_file()
