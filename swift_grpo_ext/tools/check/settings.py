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
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import yaml

from swift_grpo_ext.checks.finding import did_you_mean
from swift_grpo_ext.checks.former_flags import flag_hint

if TYPE_CHECKING:
    from swift.template import Template

    from swift_grpo_ext.command_line import Parser

Settings = Mapping[str, Any]
Side = Literal["training", "rollout"]
COMMANDS: Mapping[Side, str] = {"training": "swift rlhf", "rollout": "swift rollout"}
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

    abbreviated: Mapping[str, str] = field(default_factory=dict)
    """The names that were given in part, and what ms-swift takes them for."""

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
        from swift.rlhf_trainers.args_mixin import RolloutTrainerArgumentsMixin

        args = self.arguments("training")
        args.world_size = self.num_ranks
        if args.rlhf_type == "gkd":
            args.num_generations = 1
        # As ms-swift fills them in before that (rlhf_args.py, `_set_default`; sft_args.py).
        args.gradient_accumulation_steps = args.gradient_accumulation_steps or 1
        args.eval_strategy = args.eval_strategy or args.save_strategy
        if not (args.val_dataset or args.split_dataset_ratio or args.eval_dataset):
            args.eval_strategy = "no"
        RolloutTrainerArgumentsMixin._init_generation_batch_params(args)
        return args

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


def plugins_of(settings: Settings) -> list[str]:
    """Return the files that a side imports; ms-swift joins an older flag's (base_args.py)."""
    names = ("external_plugins", "custom_register_path")
    return [plugin for name in names for plugin in settings.get(name) or ()]


# --- from files ---


def read_run(
    path: str | Path | None,
    *,
    ranks: int | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Return the run of a YAML file: `NAME.train.yaml` and `NAME.rollout.yaml` belong together.

    Args:
        path: one file, or `NAME`, which stands for both; None: `overrides` are all.
        ranks: training processes, instead of what ENV says.
        model: the model of both sides, instead of the files'.
        overrides: arguments of `swift rlhf` that win over its file.

    Raises:
        ValueError: a file is missing, is no YAML, or holds what `swift` would not take.
    """
    file_of_words, env, side_of_words, words = as_pasted(overrides)
    path = path or file_of_words
    files = files_of(Path(path)) if path else (None, None)
    parsed: dict[Side, dict[str, Any]] = {}
    abbreviated: dict[str, str] = {}
    for side, file in zip(COMMANDS, files, strict=True):
        own = ["--model", model] if model else []
        own += words if side == side_of_words else []
        if not file and (side != side_of_words or not (words or (own and not path))):
            continue
        try:
            settings = read_settings(file) if file else {}
            parsed[side] = parse(side, settings, own, abbreviated)
        except ValueError as e:
            beginning = f"{file.name}: " if file else ""
            raise ValueError(f"{beginning}{str(e).removeprefix(f'{file}: ')}") from e
        if env and side == side_of_words:
            parsed[side]["ENV"] = {**environment(parsed[side]), **env}
    if len(parsed) == 2:
        of_training = {n: parsed["training"][n] for n in MODEL if n in parsed["training"]}
        parsed["rollout"] = {**of_training, **parsed["rollout"]}
    return Run(
        training=parsed.get("training"),
        rollout=parsed.get("rollout"),
        ranks=ranks,
        abbreviated=abbreviated,
    )


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
        raise ValueError(f"{path}: is no YAML file: {e}") from e
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: holds no settings: expected lines such as `num_generations: 8`.")
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


def parse(
    side: Side,
    settings: Settings,
    overrides: Sequence[str] = (),
    abbreviated: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return settings with the types that `swift` gives them.

    Args:
        settings: the settings of a YAML file.
        overrides: `--name value ...`, which win.
        abbreviated: is given the names that ms-swift takes for others, with those.

    Raises:
        ValueError: `swift` would not take them; names the first value that is wrong, or all names
            that it does not know.
    """
    from swift_grpo_ext.command_line import as_typed

    argv = as_typed([*to_argv(settings), *overrides])
    parser, upstream = _parsers(side)
    problems = []
    for token in dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--")):
        if token in parser._option_string_actions:
            continue
        name = token[2:]
        near = [*dict.fromkeys(action.dest for action, *_ in upstream._get_option_tuples(token))]
        if not near:
            hint = flag_hint(name, {action.dest for action in parser._actions}) or "leave it out"
            problems.append(f"{name} ({hint})")
        elif len(near) > 1:
            problems.append(f"{name} (it may mean {' or '.join(near)})")
        elif abbreviated is not None:
            abbreviated[name] = near[0]
    if problems:
        raise ValueError(f"no setting of {COMMANDS[side]}: {', '.join(problems)}.")
    values, unknown = parser.parse_known_args(argv)
    values, unknown = upstream.parse_known_args(unknown, values)
    if unknown:
        raise ValueError(f"{' '.join(unknown)}: left over; a setting of {COMMANDS[side]} is --name")
    typed = {token[2:].partition("=")[0].replace("-", "_") for token in argv}
    given = {
        name: value
        for name, value in vars(values).items()
        if name in typed or value != defaults(side)[name]
    }
    return {"ENV": settings["ENV"], **given} if settings.get("ENV") else given


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
