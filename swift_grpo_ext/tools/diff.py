"""Two runs side by side: `swift-grpo-ext diff` and `swift-grpo-ext compare`.

`diff` joins two runs by the identity of their samples (phase, round, group, index, turn) and names
the first one that differs, in the order in which a training generates them. Later differences
follow from it. It also names the settings that differ, and the first update that differs
(`updates.py`): an update that differs earlier is the cause.

`compare` says how much better candidate runs score than baselines, prompt by prompt. Runs with one
`--seed` meet the same prompts with the same noise. What two such runs share cancels in the
difference of each prompt's mean rewards, so that the interval is narrower than that of two means
that are compared unpaired. Rewards rise as a run goes on: the steps that both runs have are
compared. The 95% interval of the mean difference is Student's t. Each of several pairs of runs
counts as one value, because prompts within a run are not independent. In a single pair the prompts
count, which says nothing about other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow.compute as pc
from scipy.special import stdtrit

from swift_grpo_ext.record.query import Record, literal, open_record, where_round
from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS, SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import Phase, SampleId
from swift_grpo_ext.tools.runs import find_run, find_runs
from swift_grpo_ext.tools.updates import Updates, compare_updates

Decode = Callable[[Sequence[int]], str]

EQUAL, DIFFERENT, INCOMPARABLE = 0, 1, 2  # exit statuses

COMPARED = ("prompt", "media", "fingerprint", "seed", "weight_version", "token_ids",
            "finish_reason", "stop_reason", "text", "mask")  # fmt: skip
"""Columns in the order in which one decides the next. A fingerprint that differs alone says that
the media's content, tools or boxes differ."""

SCORES = ("reward", "advantage")
SAMPLE = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS[:-1])
ROUND_IN_ORDER = "step, phase = 'train', number"  # an evaluation precedes the round of its step
IN_ORDER = f'{ROUND_IN_ORDER}, "group", "index", turn'

TURNS = "turns"  # in the place of a reward: the number of a conversation's turns

WHERE_ONLY = frozenset(
    ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "external_plugins",
     "add_version", "local_rank", "vllm_server_port", "vllm_server_base_url",
     "vllm_server_group_port", "logging_steps", "save_steps", "save_total_limit", "save_strategy",
     "report_to", "callbacks", "training_args", "ignore_data_skip", "rank", "model_dir",
     "model_suffix", "model_info", "model_meta", "template_meta")
)  # fmt: skip
"""Settings that say where a run lives or what it writes, and change no token; and what ms-swift
derives from others."""

SUBJECTS = {
    "rounds": "the round is",
    "samples": "the sample is",
    "tokens": "the token is",
    "media": "the media are",
    "fingerprint": "the prompt reads the same, and what its media hold, its tools or its boxes "
    "differ: its hash is",
}
"""How the sentence about a difference begins; else with the column."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value that differs."""

    what: str  # a column, `tokens`, or `samples` or `rounds` where one run lacks them
    values: tuple[Any, Any]  # in each run
    phase: str
    step: int
    number: int
    group: int | None = None
    index: int | None = None
    turn: int | None = None  # from 0; None for the first
    token: int | None = None  # the first position with another token, from 0

    def __str__(self) -> str:
        return self.describe()

    def describe(
        self,
        where: tuple[str, str] = ("in A", "in B"),
        decoders: tuple[Decode | None, Decode | None] = (None, None),
    ) -> str:
        """Return a sentence that names the place and both values, each followed by its `where`; the
        decoders give the text of each run's tokens. Turns count from 1, as in `--max_turns`."""
        one, other = map(self._show, self.values, decoders)
        if self.what != "tokens":
            one, other = from_where_they_part(one, other)
        place = f"{self.phase} round {self.step}.{self.number}"
        turn = None if self.turn is None else self.turn + 1
        parts = {"group": self.group, "sample": self.index, "turn": turn, "token": self.token}
        for name, number in parts.items():
            place += "" if number is None else f", {name} {number}"
        subject = SUBJECTS.get(self.what, f"the {self.what.replace('_', ' ')} is")
        return f"{place}: {subject} {one} {where[0]} and {other} {where[1]}"

    def _show(self, value: Any, decode: Decode | None) -> str:
        if self.what in ("rounds", "samples"):
            return "there" if value else "missing"
        if self.what != "tokens":
            value = json.loads(value) if self.what == "prompt" else value
            return "none" if value is None else json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            return "missing (the completion has ended)"
        shown = [] if decode is None else [json.dumps(decode(value["id"]), ensure_ascii=False)]
        shown.append(f"id {value['id'][0]}")
        shown += [f"log-probability {logprob:.3f}" for logprob in value["logprob"]]
        return shown[0] + (f" ({', '.join(shown[1:])})" if shown[1:] else "")


def from_where_they_part(one: str, other: str) -> tuple[str, str]:
    """Cut two texts to the place where they part: long prompts often begin alike."""
    start = max(len(os.path.commonprefix([one, other])) - 20, 0)  # noqa: RUF071
    first, second = (
        f"{'…' * (start > 0)}{text[start : start + 60]}{'…' * (len(text) > start + 60)}"
        for text in (one, other)
    )
    return first, second


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The result, as `--json` prints it."""

    difference: Difference | None
    num_rounds: int  # before the round of the first difference
    num_samples: int  # of these rounds; all turns of a conversation are one

    logprob_gap: float
    """The largest difference of log-probabilities in nats, over all tokens before the first
    difference. The record rounds each (`record.tables`). Up to about 1e-3 in float32 and 0.1 in
    bfloat16 the weights are the same, and a token that differs was a near tie."""

    updates: Updates
    settings: dict[str, tuple[Any, ...]]  # those of `args.json` that differ

    @property
    def is_equal(self) -> bool:
        """All that was compared is the same, but for log-probabilities (`logprob_gap`)."""
        return self.difference is None and self.updates.difference is None


Run: TypeAlias = "str | os.PathLike[str] | Record"  # a folder, or its record where that is open


def _opened(run: Run) -> Record:
    return run if isinstance(run, Record) else open_record(run)


def diff(run_a: Run, run_b: Run) -> Diff:
    """Compare two runs up to the first difference.

    Raises:
        FileNotFoundError: a run has no record.
        ValueError: no round is common.
    """
    records = _opened(run_a), _opened(run_b)
    folders = [record.run_dir for record in records]
    if set(records[0].rounds()).isdisjoint(records[1].rounds()):
        raise ValueError(f"{folders[0]} and {folders[1]} have no round in common.")
    difference: Difference | None = None
    gap = 0.0
    is_before = is_before_round = "true"
    if apart := _first_apart(records):
        difference, gap = _compare_at(apart, records)
        round_in_order = (apart.step, apart.phase == "train", apart.number)
        is_before_round = f"({ROUND_IN_ORDER}) < {round_in_order}"
        place = (*round_in_order, apart.group, apart.index, apart.turn)
        is_before = f"({IN_ORDER}) < {place}"
    [counts] = records[0].rows(
        "select count(distinct (phase, step, number)) as num_rounds, count(*) as num_samples "
        f"from samples where turn = 0 and {is_before_round}"
    )
    return Diff(
        difference=difference,
        logprob_gap=max(gap, _largest_gap(records, is_before)),
        updates=compare_updates(*folders),
        settings=differing_settings(*map(read_args, folders)),
        **counts,
    )


def _first_apart(records: tuple[Record, Record]) -> SampleId | None:
    """Return the first sample that is not the same in two runs, or that scored differently; None
    where there is none. In a round, samples come first. Scores that one run alone has do not count.
    """
    found: list[SampleId] = []
    for table, join, turn, columns in (
        ("samples", "full join", "turn", COMPARED),
        ("rewards", "join", "0 as turn", SCORES),
    ):
        query = f"select {SAMPLE}, {turn}, hash({', '.join(columns)}) as content from {table}"
        cursor = records[0].cursor()
        cursor.register("other", records[1].table(query))
        rows = cursor.execute(
            f"with one as ({query}) select {SAMPLE}, turn from one {join} other "
            f"using ({SAMPLE}, turn) where one.content is distinct from other.content "
            f"order by {IN_ORDER} limit 1"
        ).fetchall()
        found += [SampleId(**dict(zip(SAMPLE_ID_COLUMNS, row, strict=True))) for row in rows]
    return min(found, key=lambda a: (a.step, a.phase == "train", a.number), default=None)


def _compare_at(apart: SampleId, records: tuple[Record, Record]) -> tuple[Difference, float]:
    """Return the difference of a sample that `_first_apart` found, and the largest gap of
    log-probabilities before it in the sample, in nats."""
    name = apart.round
    has_round = name in records[0].rounds(), name in records[1].rounds()
    if not all(has_round):
        return Difference(what="rounds", values=has_round, **name._asdict()), 0.0
    where = f'{where_round(name)} and "group" = {apart.group} and "index" = {apart.index}'
    query = f"from samples where {where} and turn = {apart.turn}"
    one, other = (next(iter(to_rows(record.table(query))), None) for record in records)
    if one is None or other is None:
        values = one is not None, other is not None
        return Difference(what="samples", values=values, **_place(apart)), 0.0
    difference, gap = compare_sample(one, other)
    if difference is None:
        query = f"select reward, advantage from rewards where {where}"
        scores = [record.rows(query)[0] for record in records]
        what = next(name for name in SCORES if scores[0][name] != scores[1][name])
        values = scores[0][what], scores[1][what]
        difference = Difference(what=what, values=values, **_place(apart))
    return difference, gap or 0.0 if one.fingerprint == other.fingerprint else 0.0


def _place(sample_id: SampleId) -> dict[str, Any]:
    return {**asdict(sample_id), "turn": sample_id.turn or None}


def _largest_gap(records: tuple[Record, Record], where: str) -> float:
    """Return the largest difference of log-probabilities in nats, over samples with the same
    tokens in two runs."""
    query = f"select logprobs from samples where {where} order by {IN_ORDER}"
    one, other = (record.table(query)["logprobs"].combine_chunks() for record in records)
    are_known = pc.and_(one.is_valid(), other.is_valid())
    values = (
        column.filter(are_known).flatten().to_numpy(zero_copy_only=False) for column in (one, other)
    )
    return logprob_gap(*values) or 0.0


def read_args(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of a run's `args.json`; none where it has no readable one."""
    try:
        return dict(json.loads(Path(run_dir, "args.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def find_decoder(run_dir: Path) -> Decode | None:
    """Return what gives the text of a run's tokens, by the tokenizer of a checkpoint or of its
    model; None where neither is on this machine."""
    from tokenizers import Tokenizer

    folders = sorted(run_dir.glob("checkpoint-*"))
    if model := read_args(run_dir).get("model"):
        folders.append(Path(model))
    for folder in folders:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the package raises no narrower class
            continue
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    return None


def differing_settings(*runs: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return each run's value of the settings that are not the same in all; none where a run has no
    settings."""
    if not all(runs):
        return {}
    names = dict.fromkeys(name for run in runs for name in run if name not in WHERE_ONLY)
    values = {name: tuple(run.get(name) for run in runs) for name in names}
    return {name: own for name, own in values.items() if any(value != own[0] for value in own)}


def compare_sample(one: SampleRow, other: SampleRow) -> tuple[Difference | None, float | None]:
    """Return the first difference of one sample, or turn, in two runs, and the largest gap of
    log-probabilities before it, in nats; None where a side has none."""
    place = _place(one.sample_id)
    end = first_difference(one.token_ids, other.token_ids)
    gap = logprob_gap(one.logprobs, other.logprobs, end)
    column = next((c for c in COMPARED if getattr(one, c) != getattr(other, c)), None)
    if column is None:
        return None, gap
    if column == "token_ids" and end is not None:
        values = _token(one, end), _token(other, end)
        return Difference(what="tokens", values=values, token=end, **place), gap
    values = getattr(one, column), getattr(other, column)
    return Difference(what=column, values=values, **place), gap


def _token(row: SampleRow, position: int) -> dict[str, Any] | str:
    if position >= len(row.token_ids):
        return "ended"
    at = slice(position, position + 1)
    return {"id": row.token_ids[at], "logprob": (row.logprobs or [])[at]}


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first position where tokens differ or one side has ended; None if all agree."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (a, b) in pairs if a != b), None)


def logprob_gap(
    one: Sequence[float] | None, other: Sequence[float] | None, end: int | None = None
) -> float | None:
    """Return the largest difference of log-probabilities of tokens before `end`, in nats; None
    where a side has none."""
    if one is None or other is None or not len(one[:end]) or not len(other[:end]):
        return None
    # Two infinities of one sign do not differ; their difference would be NaN.
    a, b = np.asarray(one[:end]), np.asarray(other[:end])
    with np.errstate(invalid="ignore"):
        return float(np.where(a == b, 0.0, np.abs(a - b)).max())


def run_diff(options: argparse.Namespace) -> int:
    """Print what differs; return `EQUAL`, `DIFFERENT` or `INCOMPARABLE`."""
    try:
        run_a, run_b = find_run(options.run_a), find_run(options.run_b)
        result = diff(run_a, run_b)
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext diff: {e}", file=sys.stderr)
        return INCOMPARABLE
    if options.json:
        print(json.dumps(asdict(result), ensure_ascii=False, indent=2))
    else:
        print(f"A: {run_a}\nB: {run_b}")
        if result.num_rounds:
            print(
                f"{result.num_rounds:,} rounds with {result.num_samples:,} samples are equal; "
                f"log-probabilities agree within {result.logprob_gap:.1e} nats."
            )
        if result.difference is not None:
            decoders = find_decoder(run_a), find_decoder(run_b)
            print(f"First difference: {result.difference.describe(decoders=decoders)}.")
        if result.updates.difference is not None:
            print(f"First update that differs: {result.updates.difference}.")
        if result.is_equal and not result.logprob_gap:
            print(f"Equal to the end: {_what_is_equal(result.updates)}.")
        if result.settings:
            print("Settings that differ, in A and B:")
        for name, (one, other) in result.settings.items():
            print(f"  --{name}: {str(one)[:80]} and {str(other)[:80]}")
    return EQUAL if result.is_equal else DIFFERENT


def _what_is_equal(updates: Updates) -> str:
    steps = f"{', '.join(updates.names)} of {updates.num_steps:,} steps in logging.jsonl"
    weights = f"the weights of {updates.checkpoint}"
    return (
        "prompts, media, seeds, tokens, log-probabilities, rewards and advantages; "
        f"{steps if updates.num_steps else 'no step is in both logs'}; "
        f"{weights if updates.checkpoint else 'no checkpoint of weights is in both runs'}"
    )


# --- compare ---


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result, as `--json` prints it."""

    num_pairs: int
    num_prompts: int  # that both runs of a pair met, summed over pairs
    num_alone: int  # prompts that only one run of a pair met: they are left out
    baseline: float  # mean rewards, over pairs and their prompts
    candidate: float
    difference: float
    interval: tuple[float, float]  # of the difference, at 95%
    # By seed, of each pair:
    differences: dict[str, float]
    steps: dict[str, tuple[int, int]]  # the first and the last that were compared
    num_steps: dict[str, tuple[int, int]]  # of each run


class Pair(NamedTuple):
    """Two runs side by side."""

    means: tuple[dict[str, float], dict[str, float]]  # rewards by the prompts' hashes
    steps: range  # that both runs have, and that are compared
    num_steps: tuple[int, int]  # of each run

    @property
    def common(self) -> dict[str, tuple[float, float]]:
        """The mean rewards of the prompts that both runs met."""
        one, other = self.means
        return {prompt: (one[prompt], other[prompt]) for prompt in one if prompt in other}


def pair_by_seed(
    baselines: Sequence[Path], candidates: Sequence[Path]
) -> dict[str, tuple[Path, Path]]:
    """Return the folders of runs with one `--seed`, by that seed; one run on each side is a pair
    with any seeds. Raises ValueError where a seed is on one side only, or twice."""
    one, other = (
        {str(read_args(folder).get("seed", "unknown")): folder for folder in side}
        for side in (baselines, candidates)
    )
    if len(baselines) == len(candidates) == 1:
        return {next(iter(one)): (baselines[0], candidates[0])}
    counts = len(baselines), len(candidates)
    if one.keys() != other.keys() or counts != (len(one), len(other)):
        raise ValueError(
            f"--baseline has {counts[0]} runs of the seeds {', '.join(one)} and --candidate "
            f"{counts[1]} of {', '.join(other)}; expected each seed once on both sides. Give runs "
            "that were started with equal --seed."
        )
    return {seed: (run, other[seed]) for seed, run in one.items()}


def read_pair(
    runs: tuple[Run, Run],
    *,
    phase: Phase = "train",
    steps: range | None = None,
    reward: str | None = None,
) -> Pair:
    """Read two runs in the steps that both have, among `steps` where these are given; `reward` is a
    reward function's name, or `turns`, or None for the total.

    Raises:
        FileNotFoundError: a run has no record.
        ValueError: no scored round is common, or there is no such function.
    """
    records = [_opened(run) for run in runs]
    chosen = f"where value is not null and phase = {literal(phase)}"
    if steps is not None:
        chosen += f" and step between {steps[0]} and {steps[-1]}"
    scores = [f"{_scores(record, reward)} {chosen}" for record in records]
    spans = []
    for record, query in zip(records, scores, strict=True):
        [found] = record.rows(f"select min(step) as first, max(step) as last {query}")
        has_any = found["first"] is not None
        spans.append(range(found["first"], found["last"] + 1) if has_any else range(0))
    common = range(max(span.start for span in spans), min(span.stop for span in spans))
    if not common:
        had = " and ".join(
            f"{record.run_dir} has {f'the steps {span[0]} to {span[-1]}' if span else 'none'}"
            for record, span in zip(records, spans, strict=True)
        )
        raise ValueError(f"expected scored {phase} rounds of the same steps; {had}.")
    means = [
        record.rows(
            f"select fingerprint, favg(value) as mean {query} "
            f"and step between {common[0]} and {common[-1]} group by all order by all"
        )
        for record, query in zip(records, scores, strict=True)
    ]
    one, other = ({row["fingerprint"]: row["mean"] for row in rows} for rows in means)
    return Pair((one, other), common, (len(spans[0]), len(spans[1])))


def _scores(record: Record, reward: str | None) -> str:
    """Return SQL for a run's scored samples, with `phase`, `step`, `fingerprint` and `value`; the
    turns of a conversation share one score."""
    if reward == TURNS:
        value = "count(*)"
    elif reward is None:
        value = "any_value(reward)"
    else:
        query = "select distinct unnest(map_keys(rewards)) as name from rewards order by name"
        functions = [row["name"] for row in record.rows(query)]
        if reward not in functions:
            known = ", ".join([*functions, TURNS])
            raise ValueError(f"--reward {reward!r}: {record.run_dir} has {known}.")
        value = f"any_value(rewards[{literal(reward)}])"
    return (
        f"from (select {SAMPLE}, arg_min(fingerprint, turn) as fingerprint, {value} as value "
        "from scored where fate <> 'generated' group by all)"
    )


def compare(pairs: Mapping[str, Pair]) -> Comparison:
    """Compare pairs of runs, by seed, by their mean rewards of each prompt; raises ValueError where
    a pair has fewer than two prompts in common."""
    num_alone = num_prompts = 0
    means = []
    for seed, pair in pairs.items():
        common = np.array([*pair.common.values()])
        if len(common) < 2:
            raise ValueError(
                f"The runs of seed {seed} have {len(common)} prompts in common, expected 2 or "
                "more: a prompt is known by its row, paths of images included. Give runs on one "
                "data set in one folder."
            )
        num_alone += sum(len(side) - len(common) for side in pair.means)
        num_prompts += len(common)
        means.append(common.mean(axis=0))
    baseline, candidate = np.array(means).T
    gains = candidate - baseline
    units = gains if len(pairs) > 1 else np.diff(common).ravel()
    # `scipy.stats` takes 70 MB and a second to import, of which this is Student's t.
    margin = float(stdtrit(len(units) - 1, 0.975) * units.std(ddof=1) / len(units) ** 0.5)
    difference = float(gains.mean())
    return Comparison(
        num_pairs=len(pairs),
        num_prompts=num_prompts,
        num_alone=num_alone,
        baseline=float(baseline.mean()),
        candidate=float(candidate.mean()),
        difference=difference,
        interval=(difference - margin, difference + margin),
        differences=dict(zip(pairs, gains.tolist(), strict=True)),
        steps={seed: (pair.steps[0], pair.steps[-1]) for seed, pair in pairs.items()},
        num_steps={seed: pair.num_steps for seed, pair in pairs.items()},
    )


def run_compare(options: argparse.Namespace) -> int:
    """Print the comparison as a table or as JSON."""
    sides = [
        [run for folder in folders for run in find_runs(folder)]
        for folders in (options.baseline, options.candidate)
    ]
    chosen = {"phase": options.phase, "steps": options.steps, "reward": options.reward}
    pairs = {seed: read_pair(runs, **chosen) for seed, runs in pair_by_seed(*sides).items()}
    result = compare(pairs)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    low, high = result.interval
    print(f"{result.num_pairs} pair(s) of runs, {result.num_prompts:,} prompts")
    for seed, (_, steps, num_steps) in pairs.items():
        if num_steps[0] != num_steps[1]:
            print(
                f"The runs of seed {seed} have {num_steps[0]} and {num_steps[1]} steps: steps "
                f"{steps[0]} to {steps[-1]} are compared."
            )
    print(f"  baseline    {result.baseline:8.4f}")
    print(f"  candidate   {result.candidate:8.4f}")
    print(f"  difference  {result.difference:+8.4f}  [{low:+.4f}, {high:+.4f}] (95%)")
    if result.num_alone:
        print(f"{result.num_alone:,} prompts that only one run of a pair met are left out.")
    if result.num_pairs == 1:
        print("This is about these two runs: other seeds may differ by more.")
    else:
        by_seed = ", ".join(f"{seed}: {gain:+.4f}" for seed, gain in result.differences.items())
        print(f"  by seed     {by_seed}")
    return 0
