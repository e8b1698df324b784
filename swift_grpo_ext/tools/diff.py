"""`swift-grpo-ext diff`: where two runs part, and why.

Samples are held against each other by their place: phase, round, group, index, turn. Rounds come in
the order in which a training draws them. What comes first counts; later differences follow from it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from swift_grpo_ext.record.reader import RoundName, SampleIndex, index_rewards, index_samples
from swift_grpo_ext.record.row import LOGPROB_STEPS
from swift_grpo_ext.tools.replay.compare import first_difference

EQUAL, DIFFERENT, INCOMPARABLE = 0, 1, 2
"""Exit statuses."""

BLOCK_ROUNDS = 64
"""That are read at a time."""

PLACE = ("group", "index", "turn")
COMPARED = (*PLACE, "fingerprint", "seed", "weight_version", "token_ids", "finish_reason",
            "stop_reason", "text")  # fmt: skip
SCORES = ("group", "index", "reward", "advantage")

WHERE_ONLY = frozenset(
    ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "external_plugins",
     "add_version", "local_rank", "vllm_server_port", "vllm_server_base_url", "logging_steps",
     "save_steps", "save_total_limit", "save_strategy", "report_to",
     "callbacks", "training_args",
     "ignore_data_skip")
)  # fmt: skip
"""Settings that say where a run lives or what it writes, not what it draws."""

SAMPLING = frozenset(
    ("model", "adapters", "template", "system", "temperature", "top_p", "top_k", "min_p",
     "repetition_penalty", "torch_dtype", "max_pixels", "max_length", "truncation_strategy",
     "rollout_seed_mode", "vllm_max_model_len", "quant_method", "num_generations")
)  # fmt: skip
"""Settings under which weights draw other tokens."""

STOPS = frozenset(
    ("stop_words", "stop_token_ids", "include_stop_str_in_output", "max_completion_length",
     "vllm_max_model_len", "new_special_tokens")
)  # fmt: skip

TOLERANCE = {"float32": 1e-4}
OTHER_TOLERANCE = 0.05
"""Nats by which the log-probabilities of one token differ with equal weights and prompts: what
kernels whose result depends on the batch leave, in float32 and in bfloat16."""


class IncomparableError(ValueError):
    """The runs have nothing to hold against each other; says why."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where the runs part."""

    cause: str
    """`settings`, `prompt order`, `prompt text`, `pixels`, `seed`, `weights`, `near tie`, `stop`,
    `rewards`, `rounds`."""

    phase: str
    step: int
    number: int
    group: int | None = None
    index: int | None = None
    turn: int | None = None
    token: int | None = None
    """Position in the completion, from 0; None where the tokens are equal."""

    why: str

    @property
    def place(self) -> str:
        words = [f"{self.phase} round {self.step}.{self.number}"]
        names = (("group", self.group), ("sample", self.index), ("turn", self.turn or None))
        words += [f"{name} {value}" for name, value in names if value is not None]
        return ", ".join([*words, *([f"token {self.token}"] if self.token is not None else ())])


@dataclass(kw_only=True)
class Diff:
    """What `--json` prints."""

    runs: tuple[str, str]
    parts: list[Part] = field(default_factory=list)
    """In order: rewards may part before tokens do. Empty for equal runs."""

    num_rounds: int = 0
    """Common rounds whose tokens are equal."""

    num_samples: int = 0
    logprob_gap: float = 0.0
    """The greatest |A - B| log-probability of their tokens, in nats beyond rounding."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Those that differ."""


def diff(
    run_a: str | os.PathLike[str],
    run_b: str | os.PathLike[str],
    *,
    tolerance: float | None = None,
    common_only: bool = False,
) -> Diff:
    """Hold two runs against each other.

    Args:
        tolerance: nats between the log-probabilities of one token that say nothing; None: as
            `TOLERANCE` has it for the runs' --torch_dtype.
        common_only: a run that has more rounds is no difference.

    Raises:
        IncomparableError: a record is missing or cannot be read, or no round is common.
    """
    runs = (_Run(run_a), _Run(run_b))
    one, other = runs
    result = Diff(runs=(str(run_a), str(run_b)), settings=_differing(one.settings, other.settings))
    if tolerance is None:
        types = {str(run.settings.get("torch_dtype")) for run in runs}
        tolerance = max(TOLERANCE.get(kind, OTHER_TOLERANCE) for kind in types)
    common = [name for name in one.rounds if name in other.samples.rounds]
    if not common:
        raise IncomparableError(f"{run_a} and {run_b} have no round in common.")
    missing = _missing(one, other, common[-1], common_only)
    for name, tables, scores in _pairs(runs, common):
        if missing is not None and _order(missing) < _order(name):
            break
        part = _compare(runs, name, tables, result, tolerance)
        if part is not None:
            result.parts.append(part)
            return result
        result.num_rounds += 1
        result.num_samples += tables[0].num_rows
        scored_apart = None if result.parts else _rewards_part(name, scores)
        result.parts += [scored_apart] if scored_apart else []
    if missing is not None:
        holder, lacking = (one, other) if missing in one.samples.rounds else (other, one)
        result.parts.append(
            Part(
                **missing._asdict(),
                cause="rounds",
                why=f"{holder.folder} has this round, and {lacking.folder} lacks it: it ended "
                "earlier, evaluates at other steps, or drew another number of rounds.",
            )
        )
    return result


class _Run:
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.samples = index_samples(folder)
            self.scores = index_rewards(self.samples, folder)
        except (OSError, ValueError) as e:
            raise IncomparableError(str(e)) from e
        self.rounds = sorted(self.samples.rounds, key=_order)
        try:
            found = json.loads((self.folder / "args.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self.settings: dict[str, Any] = found if isinstance(found, dict) else {}

    def prompts(self) -> set[str]:
        """The fingerprints of all its prompts."""
        tables = self.samples.read_rounds(self.rounds, ["fingerprint"])
        return {value.as_py() for table in tables for value in table["fingerprint"].unique()}


def _order(name: RoundName) -> tuple[int, bool, int]:
    """As a training draws them: an evaluation at step s comes before the round of step s."""
    return name.step, name.phase == "train", name.number


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*one, *(name for name in other if name not in one)] if one and other else []
    return {
        name: (one.get(name), other.get(name))
        for name in names
        if name not in WHERE_ONLY and one.get(name) != other.get(name)
    }


def _missing(one: _Run, other: _Run, last: RoundName, common_only: bool) -> RoundName | None:
    """The first round that one run lacks; with `common_only`, before the last common one."""
    lacking = set(one.samples.rounds) ^ set(other.samples.rounds)
    if common_only:
        lacking = {name for name in lacking if _order(name) < _order(last)}
    return min(lacking, key=_order, default=None)


def _pairs(
    runs: tuple[_Run, _Run], names: Sequence[RoundName]
) -> Iterator[tuple[RoundName, list[pa.Table], list[pa.Table | None]]]:
    """Samples and scores of each round in both runs."""
    left = iter(names)
    while block := list(islice(left, BLOCK_ROUNDS)):
        columns = [*COMPARED, "logprobs", "prompt", "media"]
        samples = [run.samples.read_rounds(block, columns) for run in runs]
        scores = [_scores(run.scores, block) for run in runs]
        for number, name in enumerate(block):
            yield name, [s[number] for s in samples], [s[number] for s in scores]


def _scores(index: SampleIndex, names: Sequence[RoundName]) -> list[pa.Table | None]:
    known = [name for name in names if name in index.rounds]
    tables = dict(zip(known, index.read_rounds(known, SCORES), strict=True))
    return [tables.get(name) for name in names]


def _rewards_part(name: RoundName, scores: Sequence[pa.Table | None]) -> Part | None:
    """Where equal tokens have other rewards."""
    if scores[0] is None or scores[1] is None:
        return None
    values = [table.to_pylist() for table in scores if table is not None]
    for one, other in zip(*values, strict=False):
        if one != other:
            return Part(
                **name._asdict(),
                cause="rewards",
                group=one["group"],
                index=one["index"],
                why=f"Equal tokens got the rewards {one['reward']} and {other['reward']} "
                f"(advantages {one['advantage']} and {other['advantage']}): reward functions, "
                "their weights, or a judge that does not repeat itself. Weights part from here.",
            )
    return None


def _compare(
    runs: tuple[_Run, _Run],
    name: RoundName,
    tables: Sequence[pa.Table],
    result: Diff,
    tolerance: float,
) -> Part | None:
    """Where a round's samples part; None where tokens, prompts, seeds and stops are equal."""
    one, other = (table.select(COMPARED) for table in tables)
    if one.equals(other):
        gaps = _gaps(*(table.to_pylist() for table in tables))
        result.logprob_gap = max(result.logprob_gap, *gaps.values(), 0.0)
        return None
    rows = [table.to_pylist() for table in tables]
    for a, b in zip(*rows, strict=False):
        if any(a[column] != b[column] for column in COMPARED):
            cause, why, token = _cause(runs, rows, a, b, result, tolerance)
            place = {column: a[column] for column in PLACE}
            return Part(**name._asdict(), **place, token=token, cause=cause, why=why)
    return Part(
        **name._asdict(),
        cause="settings",
        why=f"{one.num_rows} and {other.num_rows} samples in the round: --num_generations, batch "
        "sizes, or prompts that were left out.",
    )


def _cause(
    runs: tuple[_Run, _Run],
    rows: Sequence[list[dict[str, Any]]],
    a: dict[str, Any],
    b: dict[str, Any],
    result: Diff,
    tolerance: float,
) -> tuple[str, str, int | None]:
    """Cause, its explanation, and the first token that differs, of two samples that differ."""
    if any(a[column] != b[column] for column in PLACE):
        return "settings", "Groups have other sizes: --num_generations or batch sizes.", None
    if a["fingerprint"] != b["fingerprint"]:
        return (*_prompt_cause(runs[1], a, b), None)
    token = first_difference(a["token_ids"], b["token_ids"])
    if a["seed"] != b["seed"]:
        seeds = [run.settings.get("seed") for run in runs]
        return (
            "seed",
            f"Seeds {a['seed']} and {b['seed']} (--seed {seeds[0]} and {seeds[1]}).",
            token,
        )
    if a["weight_version"] != b["weight_version"]:
        versions = f"{a['weight_version']} and {b['weight_version']}"
        return "weights", f"Weights of the steps {versions} drew them.", token
    gaps = _gaps(*rows)
    if not gaps and token is not None and token < min(len(r["token_ids"]) for r in (a, b)):
        named = _named(result.settings, SAMPLING)
        return (
            "settings" if named else "weights",
            "No token of the round with a log-probability is equal in both runs: other weights, or "
            f"other settings.{named}",
            token,
        )
    gap = max(gaps.values(), default=0.0)
    if gap > tolerance:
        return (*_model_cause(a, gaps, tolerance, result), token)
    found = f"log-probabilities before agree within {gap:.1e} nats and the record's rounding"
    if token is None or token in (len(a["token_ids"]), len(b["token_ids"])):
        ends = " and ".join(f"{r['finish_reason']} {r['stop_reason']!r}" for r in (a, b))
        named = _named(result.settings, STOPS)
        return (
            "stop",
            f"One completion goes on where the other ended ({ends}); {found}.{named}",
            token,
        )
    chances = [math.exp(r["logprobs"][token]) if r["logprobs"] else math.nan for r in (a, b)]
    ids = [r["token_ids"][token] for r in (a, b)]
    why = (
        f"Token {ids[0]} (probability {chances[0]:.4g}) against {ids[1]} ({chances[1]:.4g}); "
        f"{found}: weights, prompt and noise are the same, and rounding decided between two "
        "tokens that tied with their noise. Kernels whose result depends on the batch do that."
    )
    return "near tie", why, token


def _prompt_cause(other: _Run, a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str]:
    if a["fingerprint"] in other.prompts():
        return "prompt order", (
            f"{other.folder} meets this prompt at another place: --data_seed, the data set's "
            "order, batch sizes, or prompts that were left out before."
        )
    if a["prompt"] != b["prompt"]:
        at = len(os.path.commonprefix([a["prompt"], b["prompt"]]))  # noqa: RUF071 (characters)
        texts = " and ".join(repr(r["prompt"][max(at - 20, 0) : at + 40]) for r in (a, b))
        return "prompt text", f"The prompts differ from character {at}: {texts}."
    if a["media"] != b["media"]:
        pair = next(
            (p for p in zip(a["media"], b["media"], strict=False) if p[0] != p[1]),
            (len(a["media"]), len(b["media"])),
        )
        return "pixels", f"Other media: {pair[0]} and {pair[1]}."
    return "pixels", "Words and names of media are equal: their content differs, or tools or boxes."


def _model_cause(
    a: dict[str, Any], gaps: Mapping[int, float], tolerance: float, result: Diff
) -> tuple[str, str]:
    """Equal prompts, seeds and steps, and other log-probabilities."""
    gap = max(gaps.values())
    differ = sorted(group for group, value in gaps.items() if value > tolerance)
    found = f"Log-probabilities of equal tokens differ by up to {gap:.3g} nats"
    if len(differ) < len(gaps):
        return "pixels", (
            f"{found} in the groups {', '.join(map(str, differ[:8]))} of {len(gaps)} only: their "
            "images are others under equal names, or were scaled otherwise (MAX_PIXELS)."
        )
    named = _named(result.settings, SAMPLING)
    if named:
        return "settings", f"{found}.{named}"
    before = "the runs were trained differently before (see the settings)"
    if a["weight_version"] == 0:
        before = "the model's files, or its processor's, are others"
    return "weights", f"{found} in all groups, of step {a['weight_version']}: {before}."


def _named(settings: Mapping[str, tuple[Any, Any]], names: frozenset[str]) -> str:
    found = [f"--{name} {a} and {b}" for name, (a, b) in settings.items() if name in names]
    return f" Settings: {'; '.join(found)}." if found else ""


def _gaps(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By group, how far log-probabilities lie apart at most: of the tokens before the first that
    differs, over samples of one place and prompt; groups without such tokens are left out."""
    gaps: dict[int, float] = {}
    of_place = {tuple(row[column] for column in PLACE): row for row in other}
    for a in one:
        b = of_place.get(tuple(a[column] for column in PLACE))
        if (
            b is None
            or a["fingerprint"] != b["fingerprint"]
            or not (a["logprobs"] and b["logprobs"])
        ):
            continue
        end = first_difference(a["token_ids"], b["token_ids"])
        pairs = zip(a["logprobs"][:end], b["logprobs"][:end], strict=False)
        found = [_apart(x, y) for x, y in pairs]
        if found:
            gaps[a["group"]] = max(gaps.get(a["group"], 0.0), *found)
    return gaps


def _apart(one: float, other: float) -> float:
    """|one - other| as far as the record's rounding, to one step each, does not explain it."""
    if one == other:  # equal infinities, too
        return 0.0
    return max(0.0, abs(one - other) - max(1.0, abs(one), abs(other)) / LOGPROB_STEPS)


# --- the command ---


def run(options: Any) -> int:
    """Print what `diff` found; returns `EQUAL`, `DIFFERENT` or `INCOMPARABLE`."""
    try:
        result = diff(
            *(options.run_a, options.run_b),
            tolerance=options.tolerance,
            common_only=options.common,
        )
    except IncomparableError as e:
        print(f"swift-grpo-ext diff: {e}", file=sys.stderr)
        return INCOMPARABLE
    if options.json:
        print(json.dumps(asdict(result), ensure_ascii=False, indent=2))
    else:
        print("\n".join(describe(result)))
    return DIFFERENT if result.parts else EQUAL


def describe(result: Diff) -> list[str]:
    """Lines for people."""
    equal = f"{result.num_rounds:,} rounds with {result.num_samples:,} samples have equal tokens"
    lines = [
        f"{equal}; their log-probabilities agree within {result.logprob_gap:.1e} nats "
        "and the record's rounding."
    ]
    lines += [f"They part in {p.place}.\n  Cause: {p.cause}. {p.why}" for p in result.parts]
    if result.settings:
        lines.append("Settings that differ:")
        pairs = result.settings.items()
        lines += [f"  --{name}: {str(a)[:80]} and {str(b)[:80]}" for name, (a, b) in pairs]
    return lines
