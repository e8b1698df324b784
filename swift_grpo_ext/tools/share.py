"""Files of the installed package: the plugin file, the presets, the launch script.

`swift_grpo_ext/share` has the layout of a clone: there, its entries are links to `plugins/`,
`examples/` and `scripts/`; in a wheel, they are the files. `share/presets` is no link: it holds a
table, and two templates that the table fills.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from swift_grpo_ext.tools.sources import Side, Source, read_sources, to_argv

SHARE = Path(__file__).resolve().parents[1] / "share"
PLUGIN_FILE = SHARE / "plugins" / "grpo_ext.py"
PRESETS = SHARE / "presets"
LAUNCH_SCRIPT = SHARE / "scripts" / "launch.sh"

DEFAULTS: Mapping[str, Any] = {
    "rlhf_type": "grpo",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "reward_funcs": ["format"],
    "lazy_tokenize": True,
    "vllm_enforce_eager": True,
    "external_plugins": [str(PLUGIN_FILE)],
}
"""Settings of `check` and `selftest` where only a model and a data set are given."""


def sources_of(options: argparse.Namespace) -> dict[Side, Source]:
    """Return the settings that `check` or `selftest` was given; raises ValueError for bad files."""
    dataset = ["--dataset", *options.dataset] if options.dataset else []
    defaults = [*to_argv(DEFAULTS)] if dataset and not options.config else []
    overrides = [*defaults, *options.rest, *dataset]
    return read_sources(options.config, model=options.model, overrides=overrides)


def plugin_path(options: argparse.Namespace) -> None:
    """Print where the plugin file is."""
    print(PLUGIN_FILE)


def init(options: argparse.Namespace) -> None:
    """Write a preset, the plugins that it names, and the script that launches it, and print how to
    run it; or list the presets."""
    name, directory = options.preset, options.directory
    if options.list:
        for known, preset in presets().items():
            print(f"{known:20} {preset['title']}")
        return
    if directory is None:
        raise ValueError("where to? swift-grpo-ext init DIRECTORY; --list shows the presets.")
    if name not in presets():
        raise ValueError(f"there is no preset {name}; choose from {', '.join(presets())}.")
    settings = filled(name)
    files = dict(settings)
    if len(settings) > 1:
        files["launch.sh"] = LAUNCH_SCRIPT.read_text(encoding="utf-8")
    for text in settings.values():
        for plugin in yaml.safe_load(text)["external_plugins"]:
            files[plugin] = (SHARE / plugin).read_text(encoding="utf-8")
    if taken := [file for file in files if (directory / file).exists()]:
        raise ValueError(f"{directory / taken[0]} is there already: nothing was copied.")
    for file, text in files.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(text, encoding="utf-8")
        print(directory / file)
    # The second line of its first file says how it is run.
    command = next(iter(files.values())).splitlines()[1].removeprefix("#   ")
    print(f"\nIn {directory}: {command}")


def presets() -> dict[str, dict[str, Any]]:
    """Return what the template leaves open, by the preset's name."""
    table = yaml.safe_load((PRESETS / "presets.yaml").read_text(encoding="utf-8"))
    shared = table.pop("all")
    return {name: {**shared, **table[name]} for name in sorted(table)}


def filled(name: str) -> dict[str, str]:
    """Return a preset's files by name: the training's first, and the servers' where it has any."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    preset = presets()[name]
    templates = Environment(
        loader=FileSystemLoader(PRESETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    files = {f"{name}.yaml": "train"}
    if preset["servers"]:
        files = {f"{name}.{side}.yaml": side for side in ("train", "rollout")}
    return {
        file: templates.get_template(f"{side}.yaml.j2").render(preset, name=name)
        for file, side in files.items()
    }
