"""A run's samples in memory, newest round first, and the questions that pages ask of them. Pure.

`Follower.refresh` reads the rounds that are new on disk, block by block, and publishes a `Snapshot`
after each block, so that the first page need not wait for a million samples. Tokens and
log-probabilities stay on disk: a sample takes its text and about 120 bytes.

A filter is a URL's values: `steps=10:20`, `min_reward=0.5`, `truncated=true`, `text=seven`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.reader import (
    DiversityReader,
    Failed,
    RunIndex,
    SampleIndex,
    version_of,
)
from swift_grpo_ext.record.tables import REWARDS, SAMPLES
from swift_grpo_ext.sampling.seeding import PHASES, RoundId

BLOCK_ROUNDS = 32
"""Rounds that are read before the next snapshot is published."""

SAMPLE_COLUMNS = [
    *("phase", "step", "number", "group", "index", "turn", "seed", "rank", "replica"),
    "weight_version",
    *("finish_reason", "stop_reason", "num_tokens", "text", "fingerprint"),
    *("engine_seconds", "tool_seconds", "columns"),
]
SCORE_COLUMNS = [
    *("reward", "rewards", "advantage", "gap_mean", "gap_max", "truncated", "replaced", "fate"),
]
RANGES = ("reward", "advantage", "num_tokens", "gap_max")
"""Columns that a least and a greatest value bound, beside those of the reward functions; a sample
without a value is out of all."""

FUNCTION = "reward."
"""Stands before the name of a reward function where a column is named."""

EXACT = ("phase", "finish_reason", "stop_reason", "fate", "truncated")
"""Columns that are filtered by equality."""

MAX_VALUES = 50
"""Values of such a column in a menu."""

MAX_TEXT = 400
"""Characters of a completion in a list."""

MAX_QUESTION = 160
"""Characters of a prompt's last message in a list."""


MARK = re.compile(r"<(image|video|audio)>")
"""ms-swift writes this mark in a text at the place of a medium."""


class NotFoundError(ValueError):
    """A page asks for something that is not there: what its address names is in no record."""


class Prompt(NamedTuple):
    """A prompt as the record has it: its messages as JSON, and the names of its media."""

    text: str
    media: list[str]

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = json.loads(self.text)
        return messages

    @property
    def question(self) -> str:
        """The beginning of its last message, without marks: its media stand beside it."""
        return text_of(self.messages[-1], has_marks=not self.media)[:MAX_QUESTION]


def text_of(message: Mapping[str, Any], *, has_marks: bool = True) -> str:
    """Return what a message says: its text, or JSON of what is none, such as calls of tools; with
    the marks of its media, or without."""
    others = {k: v for k, v in message.items() if k not in ("role", "content", "loss") and v}
    content = message.get("content")
    parts = [content] if content not in (None, "") else []
    parts += [others] if others else []
    text = "\n".join(
        part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts
    )
    return text if has_marks else MARK.sub("", text).strip()


@dataclass(frozen=True, kw_only=True)
class Round:
    """The samples of one round with their scores, by group, index and turn."""

    rows: pa.Table
    stored: tuple[Any, ...]
    """Where the rows stand on disk: rows that were replaced stand elsewhere."""

    left_out: Failed = field(default_factory=dict)
    """Those of these files that could not be read."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was read so far; it never changes."""

    version: int
    rounds: dict[RoundId, Round] = field(default_factory=dict)
    """Newest first; an evaluation stands beside the training rounds of its step."""

    prompts: dict[str, Prompt] = field(default_factory=dict)
    """By `fingerprint`."""

    is_whole: bool = False
    """True if all that was on disk is read."""

    samples: SampleIndex | None = None
    scores: SampleIndex | None = None

    @cached_property
    def table(self) -> pa.Table:
        """All samples, in the order of `rounds`; of a conversation, each turn is a row."""
        return pa.concat_tables([_EMPTY, *(r.rows for r in self.rounds.values())])

    @cached_property
    def has_turns(self) -> bool:
        """True if some samples are conversations."""
        return (pc.max(self.table["turn"]).as_py() or 0) > 0

    @cached_property
    def functions(self) -> list[str]:
        """The names of the reward functions."""
        names: list[str] = pc.unique(self.table["rewards"].combine_chunks().keys).to_pylist()
        return names

    @cached_property
    def best_reward(self) -> float:
        """The greatest reward, 1 at the least: what is coloured by its reward has all of its colour
        here."""
        return max(pc.max(self.table["reward"]).as_py() or 0.0, 1.0)

    @property
    def ranges(self) -> list[str]:
        """The columns that are bounded and sorted by: `RANGES`, and the reward functions'."""
        return [*RANGES, *(FUNCTION + name for name in self.functions)]

    def column(self, name: str) -> pa.ChunkedArray:
        """Return the values of one of `ranges`, or another column of `table`."""
        if name.startswith(FUNCTION):
            return pc.map_lookup(self.table["rewards"], name.removeprefix(FUNCTION), "first")
        return self.table[name]


class Follower:
    """Keeps the newest `Snapshot` of a run; one thread at a time may call `refresh`."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.follow(run_dir)

    def follow(self, run_dir: str | os.PathLike[str]) -> None:
        """Begin with a folder."""
        self.run_dir = Path(run_dir)
        self.snapshot = Snapshot(version=0)
        self.diversity = DiversityReader(run_dir)
        self._index = RunIndex(run_dir)
        self._prompts: dict[str, Prompt] = {}

    def refresh(self) -> bool:
        """Read what is new on disk; return True if anything was."""
        before = self.snapshot
        try:
            samples, scores = self._index.refresh()
        except FileNotFoundError:  # the run has just begun
            if before.rounds or not before.is_whole:
                self._publish({})
            return before is not self.snapshot
        stored = {name: (of, scores.rounds.get(name)) for name, of in samples.rounds.items()}
        # Rounds that were read before stay in sight until their new rows are there.
        rounds = {name: of for name, of in before.rounds.items() if name in stored}
        changed = [
            name
            for name in sorted(stored, key=_newest_first)
            if name not in rounds
            or rounds[name].stored != stored[name]
            or may_be_read(rounds[name].left_out)
        ]
        is_new = len(rounds) < len(before.rounds) or not before.is_whole
        for start in range(0, max(len(changed), 1), BLOCK_ROUNDS):
            block = changed[start : start + BLOCK_ROUNDS]
            for name, found in zip(block, self._read(samples, scores, block), strict=True):
                known, is_cut = rounds.get(name), None in found.left_out.values()
                if known is None or not is_cut or found.rows.num_rows > known.rows.num_rows:
                    rounds[name], is_new = found, True
            is_whole = start + BLOCK_ROUNDS >= len(changed)
            if is_new:
                self._publish(rounds, samples=samples, scores=scores, is_whole=is_whole)
        return is_new

    def _read(
        self, samples: SampleIndex, scores: SampleIndex, names: Sequence[RoundId]
    ) -> list[Round]:
        """Return each round's samples with their scores, null where a sample has none; keep their
        prompts."""
        scored = [name for name in names if name in scores.rounds]
        tables = scores.read_rounds(scored, ["group", "index", *SCORE_COLUMNS])
        scores_of = dict(zip(scored, tables, strict=True))
        read = []
        tables = samples.read_rounds(names, [*SAMPLE_COLUMNS, "prompt", "media"])
        for name, rows in zip(names, tables, strict=True):
            hashes = rows["fingerprint"].combine_chunks().dictionary_encode()
            _, firsts = np.unique(hashes.indices.to_numpy(), return_index=True)
            prompts = rows.select(["fingerprint", "prompt", "media"]).take(firsts).to_pylist()
            self._prompts |= {p["fingerprint"]: Prompt(p["prompt"], p["media"]) for p in prompts}
            rows = _with_scores(
                rows.select(SAMPLE_COLUMNS), scores_of.get(name, REWARDS.schema.empty_table())
            )
            stored = samples.rounds[name], scores.rounds.get(name)
            left_out = {
                group.file: index.failed.get(group.file)
                for index, groups in zip((samples, scores), stored, strict=True)
                for group in groups or ()
                if group.file in index.failed
            }
            read.append(Round(rows=rows, stored=stored, left_out=left_out))
        return read

    def _publish(
        self, rounds: dict[RoundId, Round], *, is_whole: bool = True, **values: Any
    ) -> None:
        self.snapshot = Snapshot(
            version=self.snapshot.version + 1,
            rounds={name: rounds[name] for name in sorted(rounds, key=_newest_first)},
            prompts=dict(self._prompts),  # pages iterate over it while the next block is read
            is_whole=is_whole,
            **values,
        )


def may_be_read(files: Failed) -> bool:
    """Return whether files that could not be read are worth another try: one at which the system
    failed always is, a damaged one is once it is another file."""
    for file, version in files.items():
        with suppress(OSError):
            if version is not None and version_of(file.path) == version:
                continue
        return True
    return False


def _newest_first(name: RoundId) -> tuple[int, str, int]:
    return -name.step, name.phase, -name.number


def _with_scores(rows: pa.Table, scores: pa.Table) -> pa.Table:
    """Append the scores of each row's sample; all turns of a conversation share them."""
    keys = [
        pc.add(pc.multiply(table["group"], 2**32), table["index"].cast(pa.int64()))
        for table in (rows, scores)
    ]
    scores = scores.take(pc.index_in(keys[0], value_set=keys[1].combine_chunks()))
    for name in SCORE_COLUMNS:
        rows = rows.append_column(REWARDS.schema.field(name).with_nullable(True), scores[name])
    # All samples of a prompt have the same.
    place = rows.column_names.index("columns")
    return rows.set_column(place, "columns", rows["columns"].dictionary_encode())


_EMPTY = _with_scores(
    SAMPLES.schema.empty_table().select(SAMPLE_COLUMNS), REWARDS.schema.empty_table()
)


# --- which samples, which groups ---


def parse_place(values: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    """Return the round that an address names, such as `round=train.3.0`, and the numbers that it
    gives under some names; raises NotFoundError where one is missing or unreadable."""
    try:
        phase, step, number = values["round"].split(".")
        place = RoundId(PHASES[PHASES.index(phase)], int(step), int(number))
        return place, *(int(values[name]) for name in names)
    except (KeyError, ValueError) as e:
        asked = ", ".join(f"{name}={value}" for name, value in values.items()) or "no round"
        raise NotFoundError(f"{asked}: expected round=train.3.0 and a number as {names}") from e


def matching(snapshot: Snapshot, values: Mapping[str, str]) -> np.ndarray:
    """Return the numbers of the rows of `snapshot.table` that a filter lets pass.

    Args:
        values: those of a URL; `sort=reward` sorts by one of the snapshot's `ranges`,
            `sort=-reward` puts the greatest first. Rows without a value come last. Without `sort`,
            the newest come first. `text` is looked for in what `where` says: the completion, or
            `prompt`, or the data row's other `columns`.

    Raises:
        ValueError: a value is no number, or no column.
    """
    table = snapshot.table
    first, colon, last = values.get("steps", "").partition(":")
    bounds = [("step", "steps", first, pc.greater_equal)]
    bounds += [("step", "steps", last if colon else first, pc.less_equal)]
    for column in snapshot.ranges:
        for end, compare in (("min", pc.greater_equal), ("max", pc.less_equal)):
            bounds.append((column, f"{end}_{column}", values.get(f"{end}_{column}", ""), compare))
    conditions = []
    for column, name, bound, compare in bounds:
        if bound:
            try:
                conditions.append(compare(snapshot.column(column), float(bound)))
            except ValueError as e:
                raise ValueError(f"{name}={values[name]}: {bound} is no number.") from e
    for column in EXACT:
        if values.get(column):
            conditions.append(pc.equal(table[column].cast(pa.utf8()), values[column]))
    if text := values.get("text"):
        has_text = partial(pc.match_substring, pattern=text, ignore_case=True)
        if values.get("where") == "prompt":  # each is looked at once, and not once a sample
            prompts = [prompt.text for prompt in snapshot.prompts.values()]
            hashes = pa.array(snapshot.prompts, pa.utf8())
            found = hashes.filter(has_text(pa.array(prompts, pa.utf8())))
            conditions.append(pc.is_in(table["fingerprint"], value_set=found))
        elif values.get("where") == "columns":
            encoded = table["columns"].combine_chunks()
            has_it = has_text(encoded.dictionary).take(encoded.indices)
            conditions.append(pa.chunked_array([has_it]))
        else:
            conditions.append(has_text(table["text"]))
    rows = np.arange(table.num_rows)
    if conditions:
        masks = (condition.fill_null(False).to_numpy() for condition in conditions)
        rows = np.flatnonzero(reduce(np.logical_and, masks))

    column = values.get("sort", "").removeprefix("-")
    if column not in ("", *snapshot.ranges):
        raise ValueError(f"sort={column}: expected one of {', '.join(snapshot.ranges)}.")
    if column:
        keys = snapshot.column(column).combine_chunks().take(pa.array(rows))
        order = "descending" if values["sort"].startswith("-") else "ascending"
        rows = rows[pc.array_sort_indices(keys, order=order).to_numpy()]
    return rows


def facets(snapshot: Snapshot) -> dict[str, list[tuple[str, int]]]:
    """Return the values of the `EXACT` columns with their numbers of samples, most frequent first,
    for menus."""
    menus = {}
    for name in EXACT:
        counts = pc.value_counts(snapshot.table[name].cast(pa.utf8())).to_pylist()
        known = [(c["values"], c["counts"]) for c in counts if c["values"] is not None]
        menus[name] = sorted(known, key=lambda pair: -pair[1])[:MAX_VALUES]
    return menus


def list_samples(snapshot: Snapshot, rows: np.ndarray) -> list[dict[str, Any]]:
    """Return some rows of `snapshot.table` as a page shows them, with the beginnings of texts."""
    # Slices, as `take` would copy the texts of a whole chunk.
    found = [snapshot.table.slice(number, 1).to_pylist()[0] for number in rows.tolist()]
    return [{**describe(snapshot, row), "text": row["text"][:MAX_TEXT]} for row in found]


def describe(snapshot: Snapshot, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its round's name, its reward functions' values under `parts`, its data
    row's `columns`, the last words of its prompt, and the number of that one's media."""
    prompt = snapshot.prompts[row["fingerprint"]]
    return {
        **row,
        "round": f"{row['phase']}.{row['step']}.{row['number']}",
        "parts": dict(row["rewards"] or ()),
        "columns": json.loads(row["columns"] or "{}"),
        "question": prompt.question,
        "num_media": len(prompt.media),
    }


def list_groups(snapshot: Snapshot, name: RoundId) -> list[dict[str, Any]]:
    """Return the groups of a round as a page shows them: `reward` is the mean of the `rewards` and
    `spread` their standard deviation, None without any; `distinct` is how many texts differ, of
    conversations the texts of all turns."""
    listed = []
    rows = snapshot.rounds[name].rows.to_pylist()
    for group, group_rows in groupby(rows, key=lambda row: row["group"]):
        samples = [list(turns) for _, turns in groupby(group_rows, key=lambda row: row["index"])]
        prompt = snapshot.prompts[samples[0][0]["fingerprint"]]
        rewards = [turns[0]["reward"] for turns in samples]
        known = [reward for reward in rewards if reward is not None]
        listed.append(
            {
                "round": ".".join(map(str, name)),
                "group": group,
                "prompt": prompt.question,
                "columns": json.loads(samples[0][0]["columns"] or "{}"),
                "num_media": len(prompt.media),
                "samples": len(samples),
                "distinct": len({tuple(turn["text"] for turn in turns) for turns in samples}),
                "rewards": rewards,
                "reward": float(np.mean(known)) if known else None,
                "spread": float(np.std(known)) if known else None,
            }
        )
    return listed
