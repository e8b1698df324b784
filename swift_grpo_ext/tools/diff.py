"""Two runs side by side: `swift-grpo-ext diff` and `swift-grpo-ext compare`.

`diff` names the first place where they differ, and the settings that differ. Samples are compared
by their identity: phase, round, group, index, turn. Rounds come in the order in which a training
generates them. Only the first difference is shown: later ones follow from it. Beside it stands the
first update that differs (`updates.py`): where it comes earlier, it is why.

`compare` says how much better candidate runs score than baselines, prompt by prompt. Runs with one
`--seed` meet the same prompts with the same noise. What two such runs share cancels in the
difference of each prompt's mean rewards, so that the interval is narrower than that of two means
that are compared unpaired. Of runs of different lengths the steps that both have are compared:
rewards rise as a run goes on. The 95% interval of the mean difference is Student's t. Several pairs
of runs count as one value each, for prompts within a run are not independent. Of one pair the
prompts count, which says nothing about other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow.compute as pc
from scipy.special import stdtrit

from swift_grpo_ext.record.query import Record, literal, open_record, where_round
from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS, SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import Phase, RoundId
from swift_grpo_ext.tools.runs import find_run, find_runs
from swift_grpo_ext.tools.updates import Updates, compare_updates

Decode = Callable[[Sequence[int]], str]

EQUAL, DIFFERENT, INCOMPARABLE = 0, 1, 2
"""Exit statuses."""

COMPARED = ("prompt", "media", "fingerprint", "seed", "weight_version", "token_ids",
            "finish_reason", "stop_reason", "text", "mask")  # fmt: skip
"""Columns in the order in which one decides the next. A fingerprint that differs alone says that
the media's content, tools or boxes differ."""

SAMPLE = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS[:-1])
ROUNDS_APART = {
    "samples": f"select {SAMPLE}, turn, hash({', '.join(COMPARED)}) as content from samples",
    "scores": f"select {SAMPLE}, hash(reward, advantage) as content from rewards",
}
"""What is joined of two runs, to find the first round that differs."""

TURNS = "turns"
"""In the place of a reward: how many turns a conversation has."""

WHERE_ONLY = frozenset(
    ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "external_plugins",
     "add_version", "local_rank", "vllm_server_port", "vllm_server_base_url",
     "vllm_server_group_port", "logging_steps", "save_steps", "save_total_limit", "save_strategy",
     "report_to", "callbacks", "training_args", "ignore_data_skip", "rank", "model_dir",
     "model_suffix", "model_info", "model_meta", "template_meta")
)  # fmt: skip
"""Settings that say where a run lives or what it writes, and change no token; and what ms-swift
derives from others."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value that differs."""

    what: str
    """A column of the record, or `turns` where a conversation goes on in one run alone, or
    `samples` where the rounds hold other samples, or `rounds` where one run lacks the round."""

    values: tuple[Any, Any]
    """The value in each run."""

    phase: str
    step: int
    number: int
    group: int | None = None
    index: int | None = None
    turn: int | None = None
    """From 0; None where no sample of the round, or of the group, is a conversation. As text, turns
    count from 1, as in `--max_turns`."""

    token: int | None = None
    """The first position in the completion whose token differs, from 0."""

    def __str__(self) -> str:
        return self.describe()

    def describe(
        self,
        where: tuple[str, str] = ("in A", "in B"),
        decoders: tuple[Decode | None, Decode | None] = (None, None),
    ) -> str:
        """Return a sentence that names the place and both values.

        Args:
            where: follows each value.
            decoders: give the text of each run's tokens; None leaves them as numbers.
        """
        one, other = self.values
        token = self.token
        if self.what == "prompt":
            one, other = _messages_as_text(one), _messages_as_text(other)
        elif self.what == "media":
            one, other = next(pair for pair in zip_longest(one, other) if pair[0] != pair[1])
        elif self.what == "mask":  # None: all are trained on
            one, other = one or [True] * len(other), other or [True] * len(one)
            token, one, other = next(
                (at, a, b) for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b
            )
        if isinstance(one, str) and isinstance(other, str):
            one, other = from_where_they_part(one, other)
        one, other = map(self._show, (one, other), decoders)
        place = f"{self.phase} round {self.step}.{self.number}"
        turn = None if self.turn is None else self.turn + 1
        parts = {"group": self.group, "sample": self.index, "turn": turn, "token": token}
        for name, number in parts.items():
            place += "" if number is None else f", {name} {number}"
        return f"{place}: {SUBJECTS[self.what]} {one} {where[0]} and {other} {where[1]}"

    def _show(self, value: Any, decode: Decode | None) -> str:
        """Return one of the values as the sentence has it."""
        if self.what in CHOICES:
            return CHOICES[self.what][bool(value)]
        if self.what in ("samples", "turns"):
            return f"{value} {self.what}"
        if self.what == "tokens":
            if isinstance(value, str):
                return "missing (the completion has ended)"
            told = [] if decode is None else [json.dumps(decode(value["id"]), ensure_ascii=False)]
            told.append(f"id {value['id'][0]}")
            told += [f"log-probability {logprob:.3f}" for logprob in value["logprob"]]
            return told[0] + (f" ({', '.join(told[1:])})" if told[1:] else "")
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        return "none" if value is None else str(value)


SUBJECTS = {
    "rounds": "the round is",
    "samples": "the round has",
    "turns": "the conversation has",
    "prompt": "the prompt is",
    "media": "the first of the media that differs is",
    "fingerprint": "the prompt reads the same, and what its media hold, its tools or its boxes "
    "differ: its hash is",
    "seed": "the seed is",
    "weight_version": "the weights are those of step",
    "tokens": "the token is",
    "finish_reason": "the completion was finished by",
    "stop_reason": "the stop reason is",
    "text": "the tokens are the same, and their text is",
    "mask": "the token is",
    "reward": "the reward is",
    "advantage": "the advantage is",
}
"""How the sentence about a difference begins."""

CHOICES = {"rounds": ("missing", "there"), "mask": ("not trained on", "trained on")}


def _messages_as_text(prompt: str) -> str:
    lines = []
    for message in json.loads(prompt):
        role, others = message.get("role"), {k: v for k, v in message.items() if k != "role"}
        content = others["content"] if others.keys() == {"content"} else others
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        lines.append(f"{role}: {text}")
    return "\n".join(lines)


def from_where_they_part(one: str, other: str) -> tuple[str, str]:
    """Cut two texts to the place where they part: long prompts often begin alike."""
    start = max(len(os.path.commonprefix([one, other])) - 20, 0)  # noqa: RUF071
    first, second = (
        f"{'…' * (start > 0)}{text[start : start + 60]}{'…' * (len(text) > start + 60)}"
        for text in (one, other)
    )
    return first, second


@dataclass(kw_only=True)
class Diff:
    """The result, as `--json` prints it."""

    difference: Difference | None = None
    num_rounds: int = 0
    """The number of common rounds before the first difference."""

    num_samples: int = 0
    """All turns of a conversation are one."""

    logprob_gap: float = 0.0
    """The largest difference of log-probabilities in nats, over all tokens before the first
    difference. The record rounds each (`record.tables`). Up to about 1e-3 in float32 and 0.1 in
    bfloat16 the weights are the same, and a token that differs was a near tie."""

    updates: Updates = field(default_factory=Updates)

    settings: dict[str, tuple[Any, ...]]
    """The settings of `args.json` that differ; none where a run has no readable one."""

    @property
    def is_equal(self) -> bool:
        """All that was compared is the same, but for log-probabilities (`logprob_gap`)."""
        return self.difference is None and self.updates.difference is None


Run: TypeAlias = "str | os.PathLike[str] | Record"
"""A run's folder, or its record where that is open."""


def _opened(run: Run) -> Record:
    return run if isinstance(run, Record) else open_record(run)


def diff(run_a: Run, run_b: Run) -> Diff:
    """Compare two runs round by round, up to the first difference.

    Raises:
        FileNotFoundError: a run has no record.
        ValueError: no round is common.
    """
    records = _opened(run_a), _opened(run_b)
    one, other = (record.run_dir for record in records)
    result = Diff(
        updates=compare_updates(one, other),
        settings=differing_settings(read_args(one), read_args(other)),
    )
    rounds = [{*record.rounds()} for record in records]
    if rounds[0].isdisjoint(rounds[1]):
        raise ValueError(f"{one} and {other} have no round in common.")
    first = _first_round_apart(records)
    equal: list[RoundId] = []
    for name in sorted(rounds[0] | rounds[1], key=_in_order):
        has_round = name in rounds[0], name in rounds[1]
        if not all(has_round):
            result.difference = Difference(what="rounds", values=has_round, **name._asdict())
            break
        if name == first:
            result.difference, result.logprob_gap = _compare_round(name, records)
        if result.difference is not None:
            break
        equal.append(name)
    result.num_rounds = len(equal)
    result.num_samples = _num_samples(records[0], equal)
    result.logprob_gap = max(result.logprob_gap, _largest_gap(records, equal))
    return result


def _in_order(name: RoundId) -> tuple[int, bool, int]:
    """Sort rounds as a training generates them: an evaluation at step s comes before the training
    round that begins at s."""
    return name.step, name.phase == "train", name.number


def _first_round_apart(records: tuple[Record, Record]) -> RoundId | None:
    """Return the first round with a sample or a score that is not the same in two runs; None where
    there is none. Scores that one run alone has do not count."""
    found = []
    for what, query in ROUNDS_APART.items():
        cursor = records[0].cursor()
        cursor.register("other", records[1].table(query))
        join, identity = ("full join", f"{SAMPLE}, turn") if what == "samples" else ("join", SAMPLE)
        rows = cursor.execute(
            f"with one as ({query}) select phase, step, number from one {join} other "
            f"using ({identity}) where one.content is distinct from other.content "
            "order by step, phase, number limit 1"
        ).fetchall()
        found += [RoundId(*row) for row in rows]
    return min(found, key=_in_order, default=None)


def _compare_round(
    name: RoundId, records: tuple[Record, Record]
) -> tuple[Difference | None, float]:
    """Return the first difference of a round, in its samples or else in its scores, and the largest
    gap of log-probabilities before it, in nats."""
    query = f"from samples where {where_round(name)} order by {SAMPLE}, turn"
    one, other = (to_rows(record.table(query)) for record in records)
    difference, gap = _compare_samples(name, one, other)
    if difference is None:
        query = (
            f'select "group", "index", reward, advantage from rewards where {where_round(name)} '
            f"order by {SAMPLE}"
        )
        difference = _compare_scores(name, *(record.rows(query) for record in records))
    return difference, gap


def _num_samples(record: Record, rounds: Sequence[RoundId]) -> int:
    query = "select phase, step, number, count(*) as num from samples where turn = 0 group by all"
    counts = {RoundId(*row): num for *row, num in (row.values() for row in record.rows(query))}
    return sum(counts[name] for name in rounds)


def _largest_gap(records: tuple[Record, Record], rounds: Sequence[RoundId]) -> float:
    """Return the largest difference of log-probabilities in nats, over rounds that have the same
    tokens in two runs."""
    if not rounds:
        return 0.0
    last = _in_order(rounds[-1])
    query = (
        f"select logprobs from samples where (step, phase = 'train', number) <= {last} "
        f"order by {SAMPLE}, turn"
    )
    one, other = (record.table(query)["logprobs"].combine_chunks() for record in records)
    are_known = pc.and_(one.is_valid(), other.is_valid())
    values = (
        column.filter(are_known).flatten().to_numpy(zero_copy_only=False) for column in (one, other)
    )
    return _greatest_gap(*values) or 0.0


def read_args(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of a run's `args.json`; none where it has no readable one."""
    try:
        settings: dict[str, Any] = json.loads(
            (Path(run_dir) / "args.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return settings


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


def _compare_samples(
    name: RoundId, one: list[SampleRow], other: list[SampleRow]
) -> tuple[Difference | None, float]:
    """Return the first difference of a round's samples, and the largest gap of log-probabilities
    before it, in nats."""
    largest = 0.0
    turns = [Counter(replace(row.sample_id, turn=0) for row in rows) for rows in (one, other)]
    has_turns = has_later_turns([*one, *other])
    for a, b in zip_longest(one, other):
        if a is None or b is None or a.sample_id != b.sample_id:
            if turns[0].keys() != turns[1].keys():
                counts = len(turns[0]), len(turns[1])
                return Difference(what="samples", values=counts, **name._asdict()), largest
            # The one that goes on comes before the other's next sample.
            longer = min(row.sample_id for row in (a, b) if row is not None)
            first = replace(longer, turn=0)
            values = turns[0][first], turns[1][first]
            return Difference(what="turns", values=values, **asdict(longer)), largest
        difference, gap = compare_sample(a, b, has_turns=has_turns)
        if a.fingerprint == b.fingerprint:
            largest = max(largest, gap or 0.0)
        if difference is not None:
            return difference, largest
    return None, largest


def has_later_turns(rows: Iterable[SampleRow]) -> bool:
    """Return whether some of the samples are conversations."""
    return any(row.sample_id.turn for row in rows)


def compare_sample(
    one: SampleRow, other: SampleRow, *, has_turns: bool = False
) -> tuple[Difference | None, float | None]:
    """Return the first difference of one sample, or turn, in two runs, and the largest gap of
    log-probabilities before it, in nats; None where a side has none.

    Args:
        has_turns: the difference names the turn, also if it is the first.
    """
    place = asdict(one.sample_id)
    if not has_turns:
        place["turn"] = None
    end = first_difference(one.token_ids, other.token_ids)
    gap = logprob_gap(one.logprobs, other.logprobs, end)
    column = next((c for c in COMPARED if getattr(one, c) != getattr(other, c)), None)
    if column == "token_ids" and end is not None:
        tokens: list[Any] = []
        for row in (one, other):
            token_id = row.token_ids[end : end + 1]
            logprob = (row.logprobs or [])[end : end + 1]
            tokens.append({"id": token_id, "logprob": logprob} if token_id else "ended")
        values = tokens[0], tokens[1]
        return Difference(what="tokens", values=values, token=end, **place), gap
    if column is not None:
        values = getattr(one, column), getattr(other, column)
        return Difference(what=column, values=values, **place), gap
    return None, gap


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first position where tokens differ or one side has ended; None if all agree."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (a, b) in pairs if a != b), None)


def logprob_gap(
    one: Sequence[float] | None, other: Sequence[float] | None, end: int | None
) -> float | None:
    """Return the largest difference of log-probabilities of tokens before `end`, in nats; None
    where a side has none."""
    if one is None or other is None:
        return None
    return _greatest_gap(np.asarray(one[:end]), np.asarray(other[:end]))


def _greatest_gap(one: np.ndarray, other: np.ndarray) -> float | None:
    # Two infinities of one sign do not differ; their difference would be NaN.
    with np.errstate(invalid="ignore"):
        gaps = np.where(one == other, 0.0, np.abs(one - other))
    return float(gaps.max()) if len(gaps) else None


def _compare_scores(
    name: RoundId, one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> Difference | None:
    """Return the first sample of a round whose reward or advantage differs."""
    for a, b in zip(one, other, strict=False):
        for column in ("reward", "advantage"):
            if a[column] != b[column]:
                place = {**name._asdict(), "group": a["group"], "index": a["index"]}
                return Difference(what=column, values=(a[column], b[column]), **place)
    return None


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
    """Say what was compared of two runs without a difference."""
    parts = ["prompts, media, seeds, tokens, log-probabilities, rewards and advantages"]
    if updates.num_steps:
        parts.append(f"{', '.join(updates.names)} of {updates.num_steps:,} steps in logging.jsonl")
    if updates.checkpoint:
        parts.append(f"the weights of {updates.checkpoint}")
    missing = []
    if not updates.num_steps:
        missing.append("no step is in both logs")
    if not updates.checkpoint:
        missing.append("no checkpoint of weights is in both runs")
    return "; ".join(parts) + (f" ({' and '.join(missing)})" if missing else "")


# --- compare ---


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result, as `--json` prints it."""

    num_pairs: int
    num_prompts: int
    """The prompts that both runs of a pair met, summed over pairs."""

    num_alone: int
    """The prompts that only one run of a pair met; they are left out."""

    baseline: float
    candidate: float
    """Mean rewards, over pairs and their prompts."""

    difference: float
    interval: tuple[float, float]
    """Of the difference, at 95%."""

    differences: dict[str, float]
    """The difference of each pair, by seed."""

    steps: dict[str, tuple[int, int]]
    """The first and the last step that were compared of each pair, by seed."""

    num_steps: dict[str, tuple[int, int]]
    """How many steps each run of a pair has, by seed."""


class Pair(NamedTuple):
    """Two runs side by side."""

    means: tuple[dict[str, float], dict[str, float]]
    """Each run's mean rewards by the prompts' hashes."""

    steps: range
    """From the first step that both runs have to the last one, which are compared."""

    num_steps: tuple[int, int]
    """How many each run has."""

    @property
    def common(self) -> dict[str, tuple[float, float]]:
        """The mean rewards of the prompts that both runs met."""
        one, other = self.means
        return {prompt: (one[prompt], other[prompt]) for prompt in one if prompt in other}

    def describe_lengths(self, which: str = "") -> str:
        """Return a sentence where the runs are of different lengths, else nothing."""
        one, other = self.num_steps
        if one == other:
            return ""
        return (
            f"Runs{which} are of different lengths ({one} and {other} steps): steps "
            f"{self.steps[0]} to {self.steps[-1]} are compared."
        )


def pair_by_seed(
    baselines: Sequence[Path], candidates: Sequence[Path]
) -> dict[str, tuple[Path, Path]]:
    """Return the folders of runs with one `--seed`, by it; one run on each side is a pair whatever
    its seed.

    Raises:
        ValueError: a seed is on one side only, or twice.
    """
    seeds = [
        [str(read_args(folder).get("seed", "unknown")) for folder in side]
        for side in (baselines, candidates)
    ]
    if len(baselines) > 1 or len(candidates) > 1:
        is_single = all(len(set(side_seeds)) == len(side_seeds) for side_seeds in seeds)
        if not is_single or set(seeds[0]) != set(seeds[1]):
            raise ValueError(
                f"--baseline has the seeds {seeds[0]} and --candidate {seeds[1]}; expected each "
                "seed once on both sides. Give runs that were started with equal --seed."
            )
        candidates = [candidates[seeds[1].index(seed)] for seed in seeds[0]]
    return dict(zip(seeds[0], zip(baselines, candidates, strict=True), strict=True))


def read_pair(
    runs: tuple[Run, Run],
    *,
    phase: Phase = "train",
    steps: range | None = None,
    reward: str | None = None,
) -> Pair:
    """Read two runs in the steps that both have.

    Args:
        steps: count these rounds only; None for all.
        reward: a reward function's name, or `turns`; None for the total.

    Raises:
        FileNotFoundError: a run has no record.
        ValueError: there is no scored round, no such function, or no step in common.
    """
    sides = []
    for record in map(_opened, runs):
        scores = _scores(record, reward)
        among = f" and step between {steps[0]} and {steps[-1]}" if steps else ""
        scores = f"{scores} where value is not null and phase = {literal(phase)}{among}"
        [found] = record.rows(f"select min(step) as first, max(step) as last {scores}")
        if found["first"] is None:
            among = f" in the steps {steps[0]} to {steps[-1]}" if steps else ""
            raise ValueError(f"{record.run_dir} has no scored {phase} round{among}.")
        sides.append((record, scores, range(found["first"], found["last"] + 1)))
    spans = [span for _, _, span in sides]
    common = range(max(span.start for span in spans), min(span.stop for span in spans))
    if not common:
        had = " and ".join(
            f"{record.run_dir} has the steps {span[0]} to {span[-1]}" for record, _, span in sides
        )
        raise ValueError(f"{had}: expected some in common.")
    baseline, candidate = (
        {
            row["fingerprint"]: row["mean"]
            for row in record.rows(
                f"select fingerprint, favg(value) as mean {scores} "
                f"and step between {common[0]} and {common[-1]} group by all order by all"
            )
        }
        for record, scores, _ in sides
    )
    return Pair((baseline, candidate), common, (len(spans[0]), len(spans[1])))


def _scores(record: Record, reward: str | None) -> str:
    """Return SQL for a run's scored samples, with `phase`, `step`, `fingerprint` and `value`; all
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
    """Compare pairs of runs by their mean rewards of each prompt.

    Args:
        pairs: by seed.

    Raises:
        ValueError: a pair has fewer than two prompts in common.
    """
    num_alone = num_prompts = 0
    means = []
    for seed, pair in pairs.items():
        common = np.array([*pair.common.values()])
        if len(common) < 2:
            raise ValueError(
                f"The runs of seed {seed} have {len(common)} prompts in common, expected 2 or "
                "more: other data, or the same elsewhere (a prompt is known by its row, paths of "
                "images included). Give runs on one data set in one folder."
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
    for seed, pair in pairs.items():
        if told := pair.describe_lengths(f" of seed {seed}" if len(pairs) > 1 else ""):
            print(told)
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
