"""`swift-grpo-ext diff`: the first place where two runs differ, and the settings that differ.

Samples are compared by their identity: phase, round, group, index, turn. Rounds come in the order
in which a training generates them. Only the first difference is shown: later ones follow from it.
Beside it stands the first update that differs (`updates.py`): where it comes earlier, it is why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from swift_grpo_ext.record.reader import RunIndex
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.runs import find_run
from swift_grpo_ext.tools.updates import Updates, compare_updates

Decode = Callable[[Sequence[int]], str]

EQUAL, DIFFERENT, INCOMPARABLE = 0, 1, 2
"""Exit statuses."""

COMPARED = ("prompt", "media", "fingerprint", "seed", "weight_version", "token_ids",
            "finish_reason", "stop_reason", "text", "mask")  # fmt: skip
"""Columns in the order in which one decides the next. A fingerprint that differs alone says that
the media's content, tools or boxes differ."""

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


def diff(run_a: str | os.PathLike[str], run_b: str | os.PathLike[str]) -> Diff:
    """Compare two runs round by round, up to the first difference.

    Raises:
        FileNotFoundError: a run has no record.
        ValueError: no round is common.
    """
    indices = [RunIndex(run).refresh() for run in (run_a, run_b)]
    samples, scores = zip(*indices, strict=True)
    result = Diff(
        updates=compare_updates(run_a, run_b),
        settings=differing_settings(read_args(run_a), read_args(run_b)),
    )
    common = samples[0].rounds.keys() & samples[1].rounds.keys()
    if not common:
        raise ValueError(f"{run_a} and {run_b} have no round in common.")
    names = samples[0].rounds.keys() | samples[1].rounds.keys()
    # An evaluation at step s comes before the training round that begins at s.
    for name in sorted(names, key=lambda name: (name.step, name.phase == "train", name.number)):
        if name not in common:
            has_round = name in samples[0].rounds, name in samples[1].rounds
            result.difference = Difference(what="rounds", values=has_round, **name._asdict())
            return result
        one, other = (index.read_rounds([name])[0] for index in samples)
        columns = ["group", "index", "turn", *COMPARED, "logprobs"]
        # Of equal tables no rows are made, which takes seconds a round.
        if not one.select(columns).equals(other.select(columns)):
            found = _compare_samples(name, to_rows(one), to_rows(other))
            result.difference = found[0]
            result.logprob_gap = max(result.logprob_gap, found[1])
        if result.difference is None and all(name in index.rounds for index in scores):
            columns = ["group", "index", "reward", "advantage"]
            scored = [index.read_rounds([name], columns)[0].to_pylist() for index in scores]
            result.difference = _compare_scores(name, *scored)
        if result.difference is not None:
            return result
        result.num_rounds += 1
        result.num_samples += pc.sum(pc.equal(one["turn"], 0)).as_py()
    return result


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
    pairs = zip(one[:end], other[:end], strict=True)
    # Two infinities of one sign do not differ; their difference would be NaN.
    gaps = [0.0 if a == b else abs(a - b) for a, b in pairs]
    return max(gaps, default=None) if not any(map(math.isnan, gaps)) else math.nan


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


def run(options: argparse.Namespace) -> int:
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
