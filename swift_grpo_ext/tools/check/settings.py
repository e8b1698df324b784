"""The settings of a run: both sides' YAML files, read by the parsers of `swift rlhf` and
`swift rollout`, and how many ranks there are.

Keys, types, choices and defaults are ms-swift's own. Nothing is imported that loads a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import yaml

from swift_grpo_ext.checks.finding import did_you_mean
from swift_grpo_ext.tools.check.glance import COMMANDS, Side, by_flag, check_names

if TYPE_CHECKING:
    from swift.template import Template

    from swift_grpo_ext.command_line import Parser

Settings = Mapping[str, Any]
MODEL = ("model", "model_type", "template")
"""`launch.sh` gives servers these settings of the training, where their own file has none."""

COMMAND_WORDS = {word for command in COMMANDS.values() for word in command.split()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one run."""

    training: Settings | None = None
    """What was given to `swift rlhf`, and ENV; None where only servers are looked at."""

    rollout: Settings | None = None
    """What was given to `swift rollout`, and ENV; None where the run has no servers, or they are
    not known."""

    ranks: int | None = None
    """Training processes over all nodes; None: as the training's ENV says (NPROC_PER_NODE x NNODES,
    else 1)."""

    templates: dict[Side, Template] = field(default_factory=dict, compare=False)
    """Those that were made."""

    @property
    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        env = {**environment(self.training), **os.environ}  # which wins in ms-swift
        return int(env.get("NPROC_PER_NODE", 1)) * int(env.get("NNODES", 1))

    @property
    def has_servers(self) -> bool:
        return bool(self.train("vllm_mode") == "server")

    @property
    def sides(self) -> Iterator[tuple[Side, Settings]]:
        """Yield the sides that there are, with their settings."""
        if self.training is not None:
            yield "training", self.training
        if self.rollout is not None:
            yield "rollout", self.rollout

    @property
    def num_rollout_gpus(self) -> int:
        return int(self.serve("vllm_data_parallel_size") * self.serve("vllm_tensor_parallel_size"))

    def batch(self) -> SimpleNamespace:
        """Return the training's arguments with the sizes of a round, as ms-swift works them out;
        raise its `ValueError` where groups do not fill the batch."""
        from swift_grpo_ext.checks.preflight import round_of

        return round_of(self.arguments("training"), self.num_ranks)

    def train(self, name: str) -> Any:
        """Return a setting of the training, or its default."""
        value = (self.training or {}).get(name)
        return defaults("training").get(name) if value is None else value

    def serve(self, name: str) -> Any:
        """Return a setting of the servers, or its default."""
        value = (self.rollout or {}).get(name)
        return defaults("rollout").get(name) if value is None else value

    def arguments(self, side: Side) -> SimpleNamespace:
        """Return all settings of a side as attributes, as `swift` has them after parsing."""
        given = self.training if side == "training" else self.rollout
        return SimpleNamespace(**{**defaults(side), **(given or {})})

    @contextmanager
    def environment(self, side: Side) -> Iterator[None]:
        """Set what a side's ENV and `--model_kwargs` say within the block; what the shell says
        wins, as in ms-swift."""
        from swift.utils import json_parse_to_dict

        given = dict(environment(self.training if side == "training" else self.rollout))
        for name, value in json_parse_to_dict(self.arguments(side).model_kwargs).items():
            given[name.upper()] = value
        env = {name: str(value) for name, value in given.items()}
        with patch.dict(os.environ, {**env, **os.environ}):
            yield


def environment(settings: Settings | None) -> Settings:
    """Return the `ENV` block, which ms-swift puts into the environment."""
    return (settings or {}).get("ENV") or {}


def devices_of(settings: Settings | None) -> list[str]:
    """Return the GPUs that a side's ENV names."""
    value = environment(settings).get("CUDA_VISIBLE_DEVICES")
    return [part for part in str(value).split(",") if part] if value is not None else []


# --- from files ---


class Source(NamedTuple):
    """The settings of one side, as arguments: those of its file, and those that win."""

    side: Side
    argv: list[str]
    env: Settings


def read_run(
    path: str | Path | None,
    *,
    ranks: int | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Return the run of a YAML file; arguments are those of `read_sources` and `parse_run`."""
    return parse_run(read_sources(path, model=model, overrides=overrides), ranks)


def read_sources(
    path: str | Path | None, *, model: str | None = None, overrides: Sequence[str] = ()
) -> list[Source]:
    """Read the files of a run: `NAME.train.yaml` and `NAME.rollout.yaml` belong together.

    Args:
        path: one file, or `NAME`, which stands for both; None: `overrides` are all.
        model: the model of both sides, instead of the files'.
        overrides: arguments of `swift rlhf` that win over its file.

    Raises:
        ValueError: a file is missing, is no YAML, or names a flag that `swift` does not know.
    """
    file_of_words, env, side_of_words, words = as_pasted(overrides)
    path = path or file_of_words
    files = files_of(Path(path)) if path else (None, None)
    sources = []
    for side, file in zip(COMMANDS, files, strict=True):
        is_meant = side == side_of_words
        own = [*(["--model", model] if model else []), *(words if is_meant else [])]
        if not file and (not is_meant or not (words or (own and not path))):
            continue
        settings = read_settings(file) if file else {}
        argv = [*to_argv(settings), *own]
        check_names(side, by_flag(argv))
        env_of_side = {**environment(settings), **(env if is_meant else {})}
        sources.append(Source(side, argv, env_of_side))
    return sources


def parse_run(sources: Sequence[Source], ranks: int | None = None) -> Run:
    """Return a run's settings with the types that `swift` gives them; raise `ValueError` for a
    value that it would not take."""
    parsed: dict[Side, Settings] = {}
    for side, argv, env in sources:
        settings = parse_argv(side, argv)
        parsed[side] = {"ENV": env, **settings} if env else settings
    if len(parsed) == 2:
        model = {n: v for n, v in parsed["training"].items() if n in MODEL}
        parsed["rollout"] = {**model, **parsed["rollout"]}
    return Run(training=parsed.get("training"), rollout=parsed.get("rollout"), ranks=ranks)


def as_pasted(words: Sequence[str]) -> tuple[str | None, dict[str, str], Side, list[str]]:
    """Return the file, the environment, the side and the arguments of a command that was pasted,
    such as `NPROC_PER_NODE=8 swift rlhf train.yaml --model M`, or of arguments alone."""
    start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    head = [word for word in words[:start] if word not in COMMAND_WORDS]
    env = dict(word.split("=", 1) for word in head if "=" in word)
    bare = [word for word in head if "=" not in word]
    if len(bare) > 1 or not all(word.endswith((".yaml", ".yml")) for word in bare):
        raise ValueError(f"{' '.join(head)}: expected arguments of swift rlhf, as --name value.")
    side: Side = "rollout" if "rollout" in words[:start] else "training"
    return next(iter(bare), None), env, side, list(words[start:])


def files_of(path: Path) -> tuple[Path | None, Path | None]:
    """Return the training's file and the servers' file that belong to a path."""
    stem = path.name.removesuffix(".train.yaml").removesuffix(".rollout.yaml")
    training, rollout = (path.with_name(f"{stem}.{side}.yaml") for side in ("train", "rollout"))
    pair = (training if training.is_file() else None, rollout if rollout.is_file() else None)
    if any(pair) and (path.is_file() or path.name == stem):
        return pair
    if not path.is_file():
        beside = "" if path.suffix else f", nor {training.name} beside it"
        hint = did_you_mean(path.name, (other.name for other in path.parent.glob("*.y*ml")))
        raise ValueError(f"{path}: there is no such file{beside}. {hint}".rstrip())
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


# --- through ms-swift's parsers ---


@cache
def _parsers(side: Side) -> tuple[Parser, Parser]:
    """Return the parser with our flags, and ms-swift's own, which takes abbreviations."""
    from swift.arguments import RLHFArguments, RolloutArguments

    from swift_grpo_ext.command_line import EXTENDED, Parser

    upstream = RLHFArguments if side == "training" else RolloutArguments
    return Parser([EXTENDED[upstream]], allow_abbrev=False), Parser([upstream])


@cache
def defaults(side: Side) -> Settings:
    """Return the value of every flag that was not given."""
    return vars(_parsers(side)[0].parse_args([]))


def parse(side: Side, settings: Settings, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a YAML file, and of `--name value ...` behind them, with the types
    that `swift` gives them; raises as `read_run`."""
    argv = [*to_argv(settings), *overrides]
    check_names(side, by_flag(argv))
    given = parse_argv(side, argv)
    return {"ENV": settings["ENV"], **given} if settings.get("ENV") else given


def parse_argv(side: Side, argv: Sequence[str]) -> dict[str, Any]:
    """Return what `swift` makes of arguments; raises `ValueError` for the first wrong value."""
    from swift_grpo_ext.command_line import as_typed

    parser, upstream = _parsers(side)
    argv = as_typed([*argv])
    values, unknown = parser.parse_known_args(argv)
    values, unknown = upstream.parse_known_args(unknown, values)
    if unknown:
        raise ValueError(f"{' '.join(unknown)}: left over; a setting of {COMMANDS[side]} is --name")
    typed = by_flag(argv)
    return {
        name: value
        for name, value in vars(values).items()
        if name in typed or value != defaults(side)[name]
    }


def to_argv(settings: Settings) -> Iterator[str]:
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
