"""The settings of a run: both sides' YAML files, read by the parsers of `swift rlhf` and
`swift rollout`, and how many ranks there are.

Keys, types, choices and defaults are ms-swift's own. Nothing is imported that loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from swift_grpo_ext.checks.finding import Finding, did_you_mean, error, warning, words
from swift_grpo_ext.flags import flag_names

Side = Literal["training", "rollout"]
COMMANDS: Mapping[Side, str] = {"training": "swift rlhf", "rollout": "swift rollout"}

# ms-swift fills these in after it has parsed the command line (arguments/rlhf_args.py,
# `_set_default`; transformers' TrainingArguments).
_LATER_DEFAULTS = {"gradient_accumulation_steps": 1, "save_strategy": "steps"}
_NO_BOOLEAN = ("eval_strategy", "save_strategy", "report_to")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one run."""

    training: Mapping[str, Any] | None = None
    """What was given to `swift rlhf`, and ENV; None where only servers are looked at."""

    rollout: Mapping[str, Any] | None = None
    """What was given to `swift rollout`, and ENV; None where the run has no servers, or they are
    not known."""

    ranks: int | None = None
    """Training processes over all nodes; None: as the training's ENV says (NPROC_PER_NODE x NNODES,
    else 1)."""

    names: Mapping[Side, str] = field(default_factory=dict)
    """How to call the two sides, for messages: usually their files."""

    unread: tuple[Finding, ...] = ()
    """What the parsers did not take."""

    @property
    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        env = environment(self.training)
        return int(env.get("NPROC_PER_NODE", 1)) * int(env.get("NNODES", 1))

    @property
    def has_servers(self) -> bool:
        return bool(self.train("vllm_mode") == "server")

    @property
    def sides(self) -> Iterator[tuple[Side, Mapping[str, Any]]]:
        """The sides that there are, with their settings."""
        for side, settings in (("training", self.training), ("rollout", self.rollout)):
            if settings is not None:
                yield side, settings  # type: ignore[misc]

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches that one round serves, as ms-swift works it out (args_mixin.py)."""
        steps, size = self.train("steps_per_generation"), self.train("generation_batch_size")
        if steps is None and size is not None:
            return int(max(size // self.global_batch, 1))
        return int(self.train("gradient_accumulation_steps") if steps is None else steps)

    @property
    def global_batch(self) -> int:
        """Samples of one micro-batch, over all ranks."""
        return int(self.train("per_device_train_batch_size")) * self.num_ranks

    @property
    def generation_batch(self) -> int:
        """Samples of one round."""
        size = self.train("generation_batch_size")
        return self.global_batch * self.steps_per_generation if size is None else int(size)

    @property
    def num_rollout_gpus(self) -> int:
        return int(self.serve("vllm_data_parallel_size") * self.serve("vllm_tensor_parallel_size"))

    def train(self, name: str) -> Any:
        """A setting of the training, or its default."""
        found = [(self.training or {}).get(name), defaults("training").get(name)]
        return next((v for v in [*found, _LATER_DEFAULTS.get(name)] if v is not None), None)

    def serve(self, name: str) -> Any:
        """A setting of the servers, or its default."""
        value = (self.rollout or {}).get(name)
        return defaults("rollout").get(name) if value is None else value

    def arguments(self, side: Side) -> SimpleNamespace:
        """All settings of a side, as attributes: what `swift` itself has after parsing."""
        given = self.training if side == "training" else self.rollout
        return SimpleNamespace(**{**defaults(side), **(given or {})})

    def name(self, side: Side) -> str:
        return self.names.get(side, COMMANDS[side])


def environment(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The `ENV` block, which ms-swift puts into the environment."""
    return (settings or {}).get("ENV") or {}


def devices_of(settings: Mapping[str, Any] | None) -> list[str]:
    """The GPUs that a side's ENV names."""
    value = environment(settings).get("CUDA_VISIBLE_DEVICES")
    return [part for part in str(value).split(",") if part] if value is not None else []


# --- from files ---


def read_run(
    path: str | Path,
    *,
    ranks: int | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """The run of a YAML file: `NAME.train.yaml` and `NAME.rollout.yaml` belong together.

    Args:
        path: one file, or `NAME`, which stands for both.
        ranks: training processes, instead of what ENV says.
        model: of both sides, instead of the files'.
        overrides: arguments of `swift rlhf` that win over its file.

    Raises:
        ValueError: a file is missing, is no YAML, or holds no settings.
    """
    both = ["--model", model] if model else []
    read: dict[str, Any] = {}
    unread: list[Finding] = []
    names: dict[Side, str] = {}
    for side, file in zip(COMMANDS, files_of(Path(path)), strict=True):
        if file:
            more = [*both, *(overrides if side == "training" else ())]
            read[side], findings = parse(side, read_settings(file), more)
            unread += findings
            names[side] = file.name
    return Run(**read, ranks=ranks, names=names, unread=tuple(unread))


def files_of(path: Path) -> tuple[Path | None, Path | None]:
    """The training's file and the servers' file that belong to a path."""
    stem = path.name.removesuffix(".train.yaml").removesuffix(".rollout.yaml")
    training, rollout = (path.with_name(f"{stem}.{side}.yaml") for side in ("train", "rollout"))
    is_there = path.is_file()
    if stem != path.name and not is_there:
        raise ValueError(f"{path}: there is no such file.")
    if training.is_file() or rollout.is_file():
        return training if training.is_file() else None, rollout if rollout.is_file() else None
    if not is_there:
        raise ValueError(f"{path}: there is no such file, nor {training.name} beside it.")
    return path, None


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no YAML file: {e}") from e
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no settings: expected lines such as `num_generations: 8`.")
    return settings


# --- through ms-swift's parsers ---


@cache
def _parser(side: Side) -> Any:
    from swift_grpo_ext import command_line

    extended = (
        command_line.RLHFExtArguments if side == "training" else command_line.RolloutExtArguments
    )
    return command_line.Parser([extended], allow_abbrev=False)


@cache
def defaults(side: Side) -> Mapping[str, Any]:
    """The value of every flag that was not given."""
    return vars(_parser(side).parse_args([]))


def parse(
    side: Side, settings: Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Finding]]:
    """Settings with the types that `swift` gives them, and what it would not take.

    Args:
        settings: as a YAML file holds them.
        overrides: `--name value ...`, which win.
    """
    from swift_grpo_ext import command_line

    parsed: dict[str, Any] = {"ENV": settings["ENV"]} if settings.get("ENV") else {}
    findings: list[Finding] = []
    for name, values in [*_from_yaml(settings, findings), *from_command_line(overrides)]:
        full = _flag(side, name, findings)
        if full is None:
            continue
        try:
            argv = command_line.off_again([f"--{full}", *values])
            parsed[full] = getattr(_parser(side).parse_args(argv), full)
        except ValueError as e:
            text = str(e).partition(": ")[2] or str(e)
            findings.append(error(full, f"{text} Received: {words(values) or 'nothing'}."))
    return parsed, findings


def _from_yaml(
    settings: Mapping[str, Any], findings: list[Finding]
) -> Iterable[tuple[str, list[str]]]:
    """Names and values as on the command line that ms-swift makes (cli/main.py,
    `parse_yaml_args`)."""
    for name, value in settings.items():
        if name == "ENV":
            continue
        if value is None:
            text = "is empty, and arrives as the text 'None': leave the line out."
            findings.append(error(name, text))
        elif value is False and name in _NO_BOOLEAN:
            text = 'is a boolean: YAML reads `no` and `off` so. Write "no".'
            findings.append(error(name, text))
        elif isinstance(value, dict):
            yield name, [json.dumps(value, ensure_ascii=False)]
        else:
            yield name, [str(v) for v in (value if isinstance(value, list) else [value])]


def from_command_line(argv: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(token)
    return found


def _flag(side: Side, name: str, findings: list[Finding]) -> str | None:
    """The flag that a name means; ms-swift takes the beginning of one of its own, too."""
    name = name.replace("-", "_")
    known = defaults(side)
    if name in known:
        return name
    longer = [flag for flag in known if flag.startswith(name)]
    if len(longer) == 1 and longer[0] not in flag_names():
        findings.append(warning(name, f"is read as {longer[0]}: write it out."))
        return longer[0]
    hint = did_you_mean(name, known) or "leave it out."
    findings.append(error(name, f"is no setting of {COMMANDS[side]}: {hint}"))
    return None
