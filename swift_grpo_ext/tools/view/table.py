"""A run's samples in memory, with what they are filtered and sorted by; follows the run's files.

`Follower.refresh` reads what is new, round by round, the newest first, and publishes a `Snapshot`
after each block of rounds: the first page need not wait for a million samples. Tokens and
log-probabilities stay on disk; a row takes its text and about 120 bytes. Pure.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.reader import (
    RoundName,
    SampleIndex,
    index_rewards,
    index_samples,
)
from swift_grpo_ext.record.rewards import REWARDS
from swift_grpo_ext.record.row import SAMPLES

BLOCK_ROUNDS = 32
"""Rounds that are read before the next snapshot."""

FIRST_ROUNDS = 4
"""That are shown before the scores are found."""

SAMPLE_COLUMNS = (
    *("phase", "step", "number", "group", "index", "turn", "seed", "replica", "weight_version"),
    *("finish_reason", "stop_reason", "num_tokens", "text", "fingerprint"),
)
SCORE_COLUMNS = ("reward", "advantage", "gap_mean", "gap_max", "truncated", "replaced", "fate")
EXACT = ("phase", "finish_reason", "stop_reason", "fate")
"""Columns that are filtered by equality."""

MAX_VALUES = 50
"""Of such a column, in a menu."""

PART = "part:"
"""Begins the column of a reward function's values."""

MAX_GROUP = 1 << 24
"""More than a round's groups: one number stands for group and index."""


def parse_round(text: str) -> RoundName:
    """`train.3.0`; raises ValueError."""
    phase, step, number = text.split(".")
    return RoundName(phase, int(step), int(number))


@dataclass(frozen=True, kw_only=True)
class Round:
    """The rows of one round."""

    name: RoundName
    rows: pa.Table
    prompts: dict[str, tuple[str, list[str]]]
    """Prompt text and media by fingerprint."""

    places: tuple[Any, ...]
    """Where its rows stand on disk: another round has others."""

    group_means: dict[str, np.ndarray] = field(default_factory=dict)
    """By column, as `curves.group_means` made them: what does not change is computed once."""

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What a list of rounds shows; `reward` is the mean, None without scores."""
        rewards = numbers(self.rows["reward"])
        has_reward = bool(np.isfinite(rewards).any())
        return {
            "round": ".".join(map(str, self.name)),
            "samples": self.rows.num_rows,
            "groups": len(pc.unique(self.rows["group"])),
            "reward": float(np.nanmean(rewards)) if has_reward else None,
        }


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was read so far; never changes."""

    version: int
    rounds: list[Round] = field(default_factory=list)
    """Newest first; evaluations beside the training rounds of their step."""

    is_whole: bool = False
    """Whether all that was on disk is read."""

    index: SampleIndex | None = None
    scores: SampleIndex | None = None
    problem: str = ""
    """Why nothing can be read; empty where something can."""

    @cached_property
    def table(self) -> pa.Table:
        """All rows, in the order of `rounds`."""
        rows = [r.rows for r in self.rounds]
        return pa.concat_tables(rows, promote_options="default") if rows else _EMPTY

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each round."""
        return np.cumsum([0, *(r.rows.num_rows for r in self.rounds)])

    @cached_property
    def functions(self) -> list[str]:
        """Names of the reward functions."""
        return [name[len(PART) :] for name in self.table.schema.names if name.startswith(PART)]

    @cached_property
    def facets(self) -> dict[str, list[list[Any]]]:
        """The values of `EXACT` columns with their numbers, most frequent first."""
        answer = {}
        for name in EXACT:
            counts = pc.value_counts(self.table[name]).to_pylist()
            known = [[c["values"], c["counts"]] for c in counts if c["values"] is not None]
            answer[name] = sorted(known, key=lambda pair: -pair[1])[:MAX_VALUES]
        return answer

    def round(self, name: RoundName) -> Round:
        """Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[RoundName, Round]:
        return {r.name: r for r in self.rounds}

    def numbers(self, column: str) -> np.ndarray:
        """A column as float64, NaN for null; made once."""
        if column not in self._numbers:
            self._numbers[column] = numbers(self.table[column])
        return self._numbers[column]

    @cached_property
    def _numbers(self) -> dict[str, np.ndarray]:
        return {}

    def rows(self, numbers: Sequence[int]) -> Iterator[tuple[Round, dict[str, Any]]]:
        """Rows by their numbers in `table`."""
        for number in numbers:
            at = int(np.searchsorted(self.starts, number, side="right")) - 1
            row = self.rounds[at].rows.slice(number - int(self.starts[at]), 1)
            yield self.rounds[at], row.to_pylist()[0]


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """float64, NaN for null."""
    return column.cast(pa.float64()).to_numpy()


class Follower:
    """Keeps the newest `Snapshot` of a run; `refresh` is for one thread at a time."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.snapshot = Snapshot(version=0)
        self._sizes: dict[str, int] | None = None
        self._rounds: dict[RoundName, Round] = {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Of `args.json`; empty where it cannot be read."""
        try:
            found = json.loads((self.run_dir / "args.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def refresh(self) -> bool:
        """Read what is new on disk; returns whether anything was."""
        sizes = self._file_sizes()
        if sizes == self._sizes:
            return False
        try:
            samples = index_samples(self.run_dir)
            if not self._rounds:
                self._show_first(samples)
            scores = index_rewards(samples, self.run_dir)
        except FileNotFoundError as e:
            problem, self._sizes = str(e), sizes
            self._publish(None, is_whole=True, problem=problem)
            return True
        places = {name: _places(samples, name) + _places(scores, name) for name in samples.rounds}
        kept = {n: r for n, r in self._rounds.items() if places.get(n) == r.places}
        changed = [name for name in places if name not in kept]
        # Rounds that were read before stay in sight until their new rows are there.
        self._rounds = {n: r for n, r in self._rounds.items() if n in places}
        changed.sort(key=_age)
        for start in range(0, len(changed), BLOCK_ROUNDS):
            for read in _read(samples, scores, changed[start : start + BLOCK_ROUNDS], places):
                self._rounds[read.name] = read
            self._publish(samples, scores, is_whole=start + BLOCK_ROUNDS >= len(changed))
        if not changed:
            self._publish(samples, scores, is_whole=True)
        self._sizes = sizes
        return True

    def _show_first(self, samples: SampleIndex) -> None:
        """The newest rounds without their scores, which take as long to find as the samples."""
        unscored = SampleIndex(table=REWARDS, rounds={})
        newest = sorted(samples.rounds, key=_age)[:FIRST_ROUNDS]
        for read in _read(samples, unscored, newest, dict.fromkeys(newest, ())):
            self._rounds[read.name] = read
        self._publish(samples, is_whole=False)

    def _publish(
        self,
        index: SampleIndex | None,
        scores: SampleIndex | None = None,
        *,
        is_whole: bool,
        problem: str = "",
    ) -> None:
        self.snapshot = Snapshot(
            version=self.snapshot.version + 1,
            rounds=sorted(self._rounds.values(), key=lambda r: _age(r.name)),
            is_whole=is_whole,
            index=index,
            scores=scores,
            problem=problem,
        )

    def _file_sizes(self) -> dict[str, int]:
        folders = [table.folder(self.run_dir) for table in (SAMPLES, REWARDS)]
        paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
        # Files are never changed; while they are looked at, a run may roll some into one.
        return {str(path): 0 for path in paths}


def _age(name: RoundName) -> tuple[Any, ...]:
    """Sorts the newest round first."""
    return -name.step, name.phase, -name.number


def _places(index: SampleIndex, name: RoundName) -> tuple[Any, ...]:
    return tuple(index.rounds.get(name, ()))


def _read(
    samples: SampleIndex,
    scores: SampleIndex,
    names: Sequence[RoundName],
    places: dict[RoundName, tuple[Any, ...]],
) -> Iterator[Round]:
    columns = [*SAMPLE_COLUMNS, "logprobs", "prompt", "media"]
    of_samples = samples.read_rounds(names, columns)
    scored = [name for name in names if name in scores.rounds]
    of_scores = dict(zip(scored, scores.read_rounds(scored), strict=True))
    for name, rows in zip(names, of_samples, strict=True):
        prompts = {}
        for key, number in _first_rows(rows["fingerprint"]).items():
            prompts[key] = (rows["prompt"][number].as_py(), rows["media"][number].as_py())
        surprisal = pa.array(mean_surprisal(rows["logprobs"]), from_pandas=True)
        rows = rows.select(SAMPLE_COLUMNS).append_column("surprisal", surprisal)
        rows = _with_scores(rows, of_scores.get(name, REWARDS.schema.empty_table()))
        yield Round(name=name, rows=rows, prompts=prompts, places=places[name])


def _first_rows(column: pa.ChunkedArray) -> dict[str, int]:
    found: dict[str, int] = {}
    codes = column.combine_chunks().dictionary_encode()
    _, firsts = np.unique(codes.indices.to_numpy(), return_index=True)
    for first in firsts:
        found[column[int(first)].as_py()] = int(first)
    return found


def mean_surprisal(logprobs: pa.ChunkedArray) -> np.ndarray:
    """Mean of -log-probability over each sample's tokens, in nats; NaN where there is none."""
    lists = logprobs.combine_chunks()
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
    values = lists.flatten().to_numpy().astype(np.float64)
    sums = np.full(len(lengths), np.nan)
    filled = lengths > 0
    if filled.any():
        starts = np.cumsum(lengths) - lengths
        sums[filled] = np.add.reduceat(values, starts[filled])
    return -sums / np.maximum(lengths, 1)


def _with_scores(rows: pa.Table, scores: pa.Table) -> pa.Table:
    """Append the scores of each row's sample; null where it has none."""
    keys = pa.array(_keys(scores))
    at = pc.index_in(pa.array(_keys(rows)), value_set=keys)
    for name in SCORE_COLUMNS:
        rows = rows.append_column(name, scores[name].take(at))
    parts = scores["rewards"].combine_chunks()
    for name in parts.keys.unique().to_pylist():
        values = pc.map_lookup(parts, name, "first").take(at)
        rows = rows.append_column(PART + name, values)
    return rows


def _keys(table: pa.Table) -> np.ndarray:
    groups, indices = (table[name].to_numpy().astype(np.int64) for name in ("group", "index"))
    return indices * MAX_GROUP + groups


class _Once(logging.Filter):
    """Lets each message of the reader pass once: a file that is being written has no end yet."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        key = f"{record.msg}{record.args[0] if isinstance(record.args, tuple) else ''}"
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def warn_once() -> None:
    """The reader's warnings about a file come once, however often it is read."""
    logging.getLogger(index_samples.__module__).addFilter(_Once())


_EMPTY = _with_scores(
    pa.schema([*(SAMPLES.schema.field(n) for n in SAMPLE_COLUMNS), ("surprisal", pa.float64())])
    .empty_table(),
    REWARDS.schema.empty_table(),
)  # fmt: skip
