"""The settings of a run as they are written: both sides' YAML files, and arguments that win.

Values stay words: `swift rlhf` and `swift rollout` parse them. Light to import.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from swift_grpo_ext.checks.finding import did_you_mean

Side = Literal["training", "rollout"]
COMMANDS: Mapping[Side, str] = {"training": "swift rlhf", "rollout": "swift rollout"}

MODEL = ("model", "model_type", "template")
"""`launch.sh` gives servers these settings of the training, where their own file has none."""


class Source(NamedTuple):
    """The settings of one side, as arguments: those of its file, and those that win."""

    side: Side
    argv: list[str]
    env: Mapping[str, str]  # of its ENV; the shell's own variables win, as in ms-swift

    @property
    def given(self) -> dict[str, list[str]]:
        return by_flag(self.argv)


def read_sources(
    path: str | Path | None, *, model: str | None = None, overrides: Sequence[str] = ()
) -> dict[Side, Source]:
    """Read the files of a run: `NAME.train.yaml` and `NAME.rollout.yaml` belong together.

    Args:
        path: one file, or `NAME`, which names both; None: `overrides` are all.
        model: the model of both sides, instead of the files'.
        overrides: arguments of `swift rlhf` that win.

    Raises:
        ValueError: a file is missing, or is no YAML, or other words are among the arguments.
    """
    if overrides and not overrides[0].startswith("--"):
        raise ValueError(f"{overrides[0]}: expected arguments of swift rlhf, as --name value.")
    files = files_of(Path(path)) if path else (None, None)
    own = ["--model", model] if model else []
    sources: dict[Side, Source] = {}
    for side, file in zip(COMMANDS, files, strict=True):
        words = [*own, *(overrides if side == "training" else [])]
        if file or (not path and side == "training" and words):
            settings = read_settings(file) if file else {}
            env = {name: str(value) for name, value in (settings.get("ENV") or {}).items()}
            sources[side] = Source(side, [*to_argv(settings), *words], env)
    if len(sources) == 2:
        training, rollout = sources.values()
        for name in MODEL:
            if name in training.given and name not in rollout.given:
                rollout.argv.extend([f"--{name}", *training.given[name]])
    return sources


def files_of(path: Path) -> tuple[Path | None, Path | None]:
    """Return the training's file and the servers' file that belong to a path."""
    stem = path.name.removesuffix(".train.yaml").removesuffix(".rollout.yaml")
    training, rollout = (path.with_name(f"{stem}.{side}.yaml") for side in ("train", "rollout"))
    pair = (training if training.is_file() else None, rollout if rollout.is_file() else None)
    if any(pair) and (path.is_file() or path.name == stem):
        return pair
    if not path.is_file():
        hint = did_you_mean(path.name, (other.name for other in path.parent.glob("*.y*ml")))
        raise ValueError(f"{path}: there is no such file. {hint}".rstrip())
    return path, None


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"{path.name}: is no YAML file: {e}") from e
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path.name}: holds no settings: expected lines such as `num_generations: 8`."
        )
    return settings


def to_argv(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as ms-swift's own reader of YAML does (cli/main.py, `parse_yaml_args`)."""
    for name, value in settings.items():
        if name == "ENV":
            continue
        if value is None:
            raise ValueError(f"{name}: is empty, and arrives as the text 'None'. Leave it out.")
        yield f"--{name}"
        if isinstance(value, list):
            yield from map(str, value)
        else:
            yield json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def by_flag(argv: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each flag, by its name as ms-swift spells it; the last wins."""
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
