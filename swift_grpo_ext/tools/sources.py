"""Reads the settings of a run: both sides' YAML files, and the arguments that override them.

Values stay texts: `swift rlhf` and `swift rollout` parse them. It imports no heavy module.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from swift_grpo_ext.checks.finding import did_you_mean
from swift_grpo_ext.tools.share import PLUGIN_FILE

Side = Literal["training", "rollout"]
COMMANDS: Mapping[Side, str] = {"training": "swift rlhf", "rollout": "swift rollout"}

# `launch.sh` gives servers these settings of the training, if their own file has none.
MODEL = ("model", "model_type", "template")

# For `check` and `selftest`, if only a model and a data set are given. The plugin file's path
# follows.
DEFAULTS = (
    "--rlhf_type grpo --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 "
    "--num_generations 8 --per_device_train_batch_size 8 --reward_funcs format "
    "--lazy_tokenize true --vllm_enforce_eager true --external_plugins"
)


class Source(NamedTuple):
    """The settings of one side, as arguments: its file's, then those that override them."""

    side: Side
    argv: list[str]
    env: Mapping[str, str]  # the file's ENV; variables of the shell override it, as in ms-swift

    @property
    def given(self) -> dict[str, list[str]]:
        return by_flag(self.argv)


def sources_of(options: argparse.Namespace) -> dict[Side, Source]:
    """Return the settings for `check` or `selftest`; raises ValueError for bad files."""
    dataset = ["--dataset", *options.dataset] if options.dataset else []
    defaults = [*DEFAULTS.split(), str(PLUGIN_FILE)] if dataset and not options.config else []
    overrides = [*defaults, *options.rest, *dataset]
    return read_sources(options.config, model=options.model, overrides=overrides)


def read_sources(
    path: str | Path | None, *, model: str | None = None, overrides: Sequence[str] = ()
) -> dict[Side, Source]:
    """Read one file of settings, or the two of `NAME`. `model` (of both sides) and `overrides`
    (arguments of `swift rlhf`) override the files. Raises ValueError if a file is missing or is not
    YAML."""
    files: dict[Side, Path | None] = {"training": None} if model or overrides else {}
    if path:
        files = files_of(Path(path))
    own = ["--model", model] if model else []
    sources: dict[Side, Source] = {}
    for side, file in files.items():
        settings = read_settings(file) if file else {}
        env = {name: str(value) for name, value in (settings.get("ENV") or {}).items()}
        words = [*own, *(overrides if side == "training" else [])]
        sources[side] = Source(side, [*to_argv(settings), *words], env)
    if len(sources) == 2:
        training, rollout = sources.values()
        for name in MODEL:
            if name in training.given and name not in rollout.given:
                rollout.argv.extend([f"--{name}", *training.given[name]])
    return sources


def files_of(path: Path) -> dict[Side, Path | None]:
    """Return the file of each side: one, or both for `NAME` and for the path of either."""
    stem = path.name.removesuffix(".train.yaml").removesuffix(".rollout.yaml")
    pair: dict[Side, Path] = {
        "training": path.with_name(f"{stem}.train.yaml"),
        "rollout": path.with_name(f"{stem}.rollout.yaml"),
    }
    found: dict[Side, Path | None] = {side: file for side, file in pair.items() if file.is_file()}
    if found and (path.is_file() or path.name == stem):
        return found
    if not path.is_file():
        hint = did_you_mean(path.name, (other.name for other in path.parent.glob("*.y*ml")))
        raise ValueError(f"{path}: there is no such file. {hint}".rstrip())
    return {"training": path}


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"{path.name}: is not a YAML file: {e}") from e
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name}: expected lines such as `num_generations: 8`.")
    return settings


def to_argv(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as ms-swift's own reader of YAML does (cli/main.py, `parse_yaml_args`)."""
    for name, value in settings.items():
        if name == "ENV":
            continue
        if value is None:
            raise ValueError(f"{name}: is empty, and arrives as the text 'None'. Leave it out.")
        yield f"--{name}"
        given = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        yield from map(str, given if isinstance(given, list) else [given])


def by_flag(argv: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each flag, by its name with underscores; the last values count."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    return values
