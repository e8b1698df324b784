"""The questions that pages ask of a run's record, in SQL.

A filter is a URL's values: `steps=10:20`, `min_reward=0.5`, `truncated=true`, `text=seven`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift_grpo_ext.record.query import Record, diversity_of, literal, where_round
from swift_grpo_ext.record.tables import REWARDS, SAMPLE_ID_COLUMNS, DiversityRow
from swift_grpo_ext.sampling.seeding import PHASES, RoundId

MAX_MB = 64
"""Memory of DuckDB for a page: a million samples need no more, and 300 MB are for all."""

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

LONG_COLUMNS = "token_ids, logprobs, mask, pictures, gaps"
"""Only a group's page shows these."""

IDENTITY = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS)
NEWEST = 'step desc, phase, number desc, "group", "index", turn'

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


class Facts:
    """What pages say of a whole run, each asked once while its record stays as it is."""

    def __init__(self, record: Record) -> None:
        self.version, self.is_whole = record.version, record.is_whole
        self._record = record

    @cached_property
    def rounds(self) -> list[RoundId]:
        """Newest first; an evaluation stands beside the training rounds of its step."""
        return self._record.rounds()

    @cached_property
    def num_rows(self) -> int:
        """How many samples there are; of a conversation, each turn counts."""
        return int(self._record.rows("select count(*) as number from samples")[0]["number"])

    @cached_property
    def has_turns(self) -> bool:
        """True if some samples are conversations."""
        return bool(self._record.rows("select max(turn) > 0 as has from samples")[0]["has"])

    @cached_property
    def functions(self) -> list[str]:
        """The names of the reward functions."""
        query = "select any_value(map_keys(rewards)) as names from rewards group by session"
        found = self._record.rows(query)
        return [*dict.fromkeys(name for row in found for name in row["names"])]

    @cached_property
    def best_reward(self) -> float:
        """The greatest reward, 1 at the least: what is coloured by its reward has all of its colour
        here."""
        return max(self._record.rows("select max(reward) as best from rewards")[0]["best"] or 0, 1)

    @property
    def ranges(self) -> list[str]:
        """The columns that are bounded and sorted by: `RANGES`, and the reward functions'."""
        return [*RANGES, *(FUNCTION + name for name in self.functions)]

    @cached_property
    def menus(self) -> dict[str, list[tuple[str, int]]]:
        """The values of the `EXACT` columns with their numbers of samples, most frequent first."""
        menus = {}
        for name in EXACT:
            query = (
                f"select cast({name} as varchar) as value, count(*) as number "
                f"from {'rewards' if _is_of_scores(name) else 'samples'} where {name} is not null "
                f"group by all order by number desc, value limit {MAX_VALUES}"
            )
            menus[name] = [(row["value"], row["number"]) for row in self._record.rows(query)]
        return menus

    @cached_property
    def diversity(self) -> list[DiversityRow]:
        """What the monitor measured, in the order of the steps."""
        return diversity_of(self._record)


class Run:
    """A run while it goes on."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.follow(run_dir)

    def follow(self, run_dir: str | os.PathLike[str]) -> None:
        """Begin with a folder."""
        self.run_dir = Path(run_dir)
        self.record = Record(run_dir, max_mb=MAX_MB)
        self._facts = Facts(self.record)

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Look for what is new on disk, for some seconds; return True if anything was."""
        return self.record.refresh(seconds)

    @property
    def facts(self) -> Facts:
        known, now = self._facts, (self.record.version, self.record.is_whole)
        if (known.version, known.is_whole) != now:
            self._facts = known = Facts(self.record)
        return known


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


class Search(NamedTuple):
    """A filter and an order of samples in SQL, with the values of its parameters."""

    where: str
    values: dict[str, Any]
    order: str
    source: str
    """`samples`, or `scored` where it asks for scores."""


def search_of(facts: Facts, values: Mapping[str, str]) -> Search:
    """Return the search that a URL's values ask for.

    Args:
        values: `sort=reward` sorts by one of the run's `ranges`, `sort=-reward` puts the greatest
            first. Rows without a value come last. Without `sort`, the newest come first. `text` is
            looked for in what `where` says: the completion, or `prompt`, or the data row's other
            `columns`.

    Raises:
        ValueError: a value is no number, or no column.
    """
    conditions, found, used = ["true"], dict[str, Any](), set[str]()
    first, colon, last = values.get("steps", "").partition(":")
    bounds = [("step", "steps", first, ">="), ("step", "steps", last if colon else first, "<=")]
    for column in facts.ranges:
        for end, compare in (("min", ">="), ("max", "<=")):
            name = f"{end}_{column}"
            bounds.append((column, name, values.get(name, ""), compare))
    for column, name, bound, compare in bounds:
        if bound:
            try:
                number = float(bound)
            except ValueError as e:
                raise ValueError(f"{name}={values[name]}: {bound} is no number.") from e
            conditions.append(f"{_expression(column)} {compare} $v{len(found)}")
            found[f"v{len(found)}"] = number
            used.add(column)
    for column in EXACT:
        if value := values.get(column):
            conditions.append(f"cast({column} as varchar) = $v{len(found)}")
            found[f"v{len(found)}"] = value
            used.add(column)
    if text := values.get("text"):
        where = values.get("where")
        looked_at = where if where in ("prompt", "columns") else "text"
        conditions.append(f"contains(lower({looked_at}), lower($text))")
        found["text"] = text

    sort = values.get("sort", "")
    column, order = sort.removeprefix("-"), NEWEST
    if column not in ("", *facts.ranges):
        raise ValueError(f"sort={column}: expected one of {', '.join(facts.ranges)}.")
    if column:
        direction = "desc" if sort.startswith("-") else "asc"
        order = f"{_expression(column)} {direction} nulls last, {NEWEST}"
        used.add(column)
    source = "scored" if any(map(_is_of_scores, used)) else "samples"
    return Search(" and ".join(conditions), found, order, source)


def _expression(column: str) -> str:
    """Return the SQL of one of a run's `ranges`, or of another column."""
    if column.startswith(FUNCTION):
        return f"rewards[{literal(column.removeprefix(FUNCTION))}]"
    return f'"{column}"'


def _is_of_scores(column: str) -> bool:
    return column.startswith(FUNCTION) or (
        column in REWARDS.schema.names and column not in SAMPLE_ID_COLUMNS
    )


def find_samples(
    run: Run, values: Mapping[str, str], *, offset: int = 0, limit: int = 50
) -> tuple[int, list[dict[str, Any]]]:
    """Return how many samples match a URL's values, and some of them as a page shows them, with the
    beginnings of texts; raises what `search_of` does."""
    search = search_of(run.facts, values)
    found = f"from {search.source} where {search.where}"
    count = run.facts.num_rows
    if search.values:
        count = run.record.rows(f"select count(*) as number {found}", search.values)[0]["number"]
    # The long columns of these rows alone are read.
    query = f"select {IDENTITY} {found} order by {search.order} limit {limit} offset {offset}"
    names = [tuple(row.values()) for row in run.record.rows(query, search.values)]
    shown = {tuple(row[c] for c in SAMPLE_ID_COLUMNS): row for row in _rows_of(run, names)}
    listed = [describe(shown[name]) for name in names if name in shown]
    return count, [{**row, "text": row["text"][:MAX_TEXT]} for row in listed]


def _rows_of(run: Run, names: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return the samples with these identities, with their scores."""
    if not names:
        return []
    steps = ", ".join({str(name[1]) for name in names})
    identities = ", ".join(str(name) for name in names)  # a phase is a plain word
    return run.record.rows(
        f"select * exclude ({LONG_COLUMNS}) from scored "
        f"where step in ({steps}) and ({IDENTITY}) in ({identities})"
    )


def describe(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `scored` with its round's name, its reward functions' values under `parts`,
    its data row's `columns`, its `asked` prompt with the last words of it, and the number of that
    one's media."""
    prompt = Prompt(row["prompt"], row["media"])
    return {
        **row,
        "round": f"{row['phase']}.{row['step']}.{row['number']}",
        "parts": row["rewards"] or {},
        "columns": json.loads(row["columns"] or "{}"),
        "asked": prompt,
        "question": prompt.question,
        "num_media": len(prompt.media),
    }


def list_groups(run: Run, name: RoundId) -> list[dict[str, Any]]:
    """Return the groups of a round as a page shows them: `reward` is the mean of the `rewards` and
    `spread` their standard deviation, None without any; `distinct` is how many texts differ, of
    conversations the texts of all turns."""
    listed = []
    rows = run.record.rows(
        'select "group", "index", reward, text, prompt, media, columns from scored '
        f'where {where_round(name)} order by "group", "index", turn'
    )
    for group, group_rows in groupby(rows, key=lambda row: row["group"]):
        samples = [list(turns) for _, turns in groupby(group_rows, key=lambda row: row["index"])]
        first = samples[0][0]
        prompt = Prompt(first["prompt"], first["media"])
        rewards = [turns[0]["reward"] for turns in samples]
        known = [reward for reward in rewards if reward is not None]
        listed.append(
            {
                "round": ".".join(map(str, name)),
                "group": group,
                "prompt": prompt.question,
                "columns": json.loads(first["columns"] or "{}"),
                "num_media": len(prompt.media),
                "samples": len(samples),
                "distinct": len({tuple(turn["text"] for turn in turns) for turns in samples}),
                "rewards": rewards,
                "reward": float(np.mean(known)) if known else None,
                "spread": float(np.std(known)) if known else None,
            }
        )
    return listed
