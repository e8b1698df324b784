"""A run's samples in memory, newest round first, while the run writes them. Pure.

`Follower.refresh` reads the rounds that are new on disk, block by block, and publishes a `Snapshot`
after each block, so that the first page need not wait for a million samples. Tokens and
log-probabilities stay on disk: a sample takes its text and about 120 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.reader import RoundName, SampleIndex, index_rewards, index_samples
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import SAMPLES

BLOCK_ROUNDS = 32
"""Rounds that are read before the next snapshot is published."""

SAMPLE_COLUMNS = (
    *("phase", "step", "number", "group", "index", "turn", "seed", "replica", "weight_version"),
    *("finish_reason", "stop_reason", "num_tokens", "text", "fingerprint"),
)
SCORE_COLUMNS = (
    *("group", "index", "reward", "advantage", "gap_mean", "gap_max"),
    *("truncated", "replaced", "fate"),
)
GROUP_KEYS = ("phase", "step", "number", "group")

PART = "part:"
"""Begins the name of the column that holds one reward function's values."""


class Prompt(NamedTuple):
    """A prompt as the record has it: its messages as JSON, and the names of its media."""

    text: str
    media: list[str]


@dataclass(frozen=True, kw_only=True)
class Round:
    """The samples of one round with their scores, by group, index and turn."""

    rows: pa.Table
    prompts: dict[str, Prompt]
    """By `fingerprint`."""

    stored: tuple[Any, ...]
    """Where the rows stand on disk: rows that were replaced stand elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was read so far; it never changes."""

    version: int
    rounds: dict[RoundName, Round] = field(default_factory=dict)
    """Newest first; an evaluation stands beside the training rounds of its step."""

    is_whole: bool = False
    """True if all that was on disk is read."""

    samples: SampleIndex | None = None
    scores: SampleIndex | None = None
    problem: str = ""
    """Says why nothing can be read; empty where something can."""

    @cached_property
    def table(self) -> pa.Table:
        """All samples, in the order of `rounds`."""
        rows = [r.rows for r in self.rounds.values()]
        return pa.concat_tables([_EMPTY, *rows], promote_options="default")

    @cached_property
    def prompts(self) -> dict[str, Prompt]:
        """The prompts of all rounds; where one came again, as its newest round has it."""
        rounds = reversed(self.rounds.values())
        return {key: prompt for r in rounds for key, prompt in r.prompts.items()}

    @cached_property
    def functions(self) -> list[str]:
        """The names of the reward functions."""
        names = self.table.schema.names
        return [name.removeprefix(PART) for name in names if name.startswith(PART)]

    @cached_property
    def groups(self) -> pa.Table:
        """One row per group: `GROUP_KEYS`, `fingerprint`, `samples`, the means of the samples'
        numbers under their names, `spread` (the standard deviation of the rewards), `rewards` (a
        list), and `distinct` (how many texts differ)."""
        parts = [PART + name for name in self.functions]
        numbers = ["reward", *parts, "num_tokens", "surprisal", "gap_mean"]
        others = {
            ("fingerprint", "one"): "fingerprint",
            ("index", "count"): "samples",
            ("reward", "stddev"): "spread",
            ("reward", "list"): "rewards",
            ("text", "count_distinct"): "distinct",
        }
        # One thread keeps groups and rewards in the samples' order.
        grouped = self.table.group_by(list(GROUP_KEYS), use_threads=False)
        groups = grouped.aggregate([*((name, "mean") for name in numbers), *others])
        names = {f"{name}_mean": name for name in numbers}
        names |= {f"{name}_{function}": new for (name, function), new in others.items()}
        return groups.rename_columns([names.get(name, name) for name in groups.schema.names])


class Follower:
    """Keeps the newest `Snapshot` of a run; one thread at a time may call `refresh`."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.snapshot = Snapshot(version=0)
        self._files: set[Path] | None = None
        self._rounds: dict[RoundName, Round] = {}

    def refresh(self) -> bool:
        """Read what is new on disk; return True if anything was."""
        folders = [table.folder(self.run_dir) for table in (SAMPLES, REWARDS)]
        # A file never changes; what is new has a new name.
        files = {path for folder in folders if folder.is_dir() for path in folder.iterdir()}
        if files == self._files:
            return False
        try:
            samples = index_samples(self.run_dir)
            scores = index_rewards(samples, self.run_dir)
        except FileNotFoundError as e:
            self._publish(is_whole=True, problem=str(e))
            self._files = files
            return True
        stored = {n: (places, scores.rounds.get(n)) for n, places in samples.rounds.items()}
        # Rounds that were read before stay in sight until their new rows are there.
        self._rounds = {n: r for n, r in self._rounds.items() if n in stored}
        kept = {n for n, r in self._rounds.items() if r.stored == stored[n]}
        changed = sorted(stored.keys() - kept, key=_newest_first)
        for start in range(0, max(len(changed), 1), BLOCK_ROUNDS):
            block = changed[start : start + BLOCK_ROUNDS]
            for name, rows, prompts in _read_rounds(samples, scores, block):
                self._rounds[name] = Round(rows=rows, prompts=prompts, stored=stored[name])
            is_whole = start + BLOCK_ROUNDS >= len(changed)
            self._publish(samples=samples, scores=scores, is_whole=is_whole)
        self._files = files
        return True

    def _publish(self, **values: Any) -> None:
        names = sorted(self._rounds, key=_newest_first)
        rounds = {name: self._rounds[name] for name in names}
        self.snapshot = Snapshot(version=self.snapshot.version + 1, rounds=rounds, **values)


def _newest_first(name: RoundName) -> tuple[int, str, int]:
    return -name.step, name.phase, -name.number


def _read_rounds(
    samples: SampleIndex, scores: SampleIndex, names: Iterable[RoundName]
) -> Iterator[tuple[RoundName, pa.Table, dict[str, Prompt]]]:
    """Yield each round's samples, joined with their scores, and its prompts by fingerprint."""
    names = list(names)
    scored = [name for name in names if name in scores.rounds]
    columns = [*SCORE_COLUMNS, "rewards"]
    scores_of = dict(zip(scored, scores.read_rounds(scored, columns), strict=True))
    columns = [*SAMPLE_COLUMNS, "logprobs", "prompt", "media"]
    for name, rows in zip(names, samples.read_rounds(names, columns), strict=True):
        hashes = rows["fingerprint"].combine_chunks().dictionary_encode()
        _, firsts = np.unique(hashes.indices.to_numpy(), return_index=True)
        prompts = {
            rows["fingerprint"][at].as_py(): Prompt(
                rows["prompt"][at].as_py(), rows["media"][at].as_py()
            )
            for at in firsts.tolist()
        }
        surprisal = pa.array(mean_surprisal(rows["logprobs"]), from_pandas=True)
        rows = rows.select(SAMPLE_COLUMNS).append_column("surprisal", surprisal)
        yield name, _with_scores(rows, scores_of.get(name)), prompts


def mean_surprisal(logprobs: pa.ChunkedArray) -> np.ndarray:
    """Return the mean of -log-probability over each sample's tokens, in nats; NaN for a sample
    without log-probabilities."""
    lists = logprobs.combine_chunks()
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
    values = lists.flatten().to_numpy().astype(np.float64)
    sums = np.full(len(lengths), np.nan)
    filled = lengths > 0
    if filled.any():
        starts = np.cumsum(lengths) - lengths
        sums[filled] = np.add.reduceat(values, starts[filled])
    return -sums / np.maximum(lengths, 1)


def _with_scores(rows: pa.Table, scores: pa.Table | None) -> pa.Table:
    """Append the scores of each row's sample, and one column per reward function; null where the
    sample has none. All turns of a conversation share its scores."""
    if scores is None:
        scores = REWARDS.schema.empty_table()
    parts = scores["rewards"].combine_chunks()
    scores = scores.select(SCORE_COLUMNS)
    for name in parts.keys.unique().to_pylist():
        scores = scores.append_column(PART + name, pc.map_lookup(parts, name, "first"))
    order = [(name, "ascending") for name in ("group", "index", "turn")]
    return rows.join(scores, keys=["group", "index"]).sort_by(order)


_COLUMNS = [SAMPLES.schema.field(name) for name in SAMPLE_COLUMNS]
_EMPTY = _with_scores(
    pa.schema([*_COLUMNS, ("surprisal", pa.float64())]).empty_table(),
    None,
)
