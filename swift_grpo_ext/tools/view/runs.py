"""A run while it goes on, and the questions that pages ask of its record, in SQL.

A filter is a URL's values: `min_step=10`, `max_reward=0.5`, `truncated=true`, `text=seven`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from swift_grpo_ext.record.query import Record, diversity_of, literal, where_round
from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS, SAMPLES, DiversityRow
from swift_grpo_ext.sampling.seeding import PHASES, RoundId
from swift_grpo_ext.tools.diff import Decode, find_decoder
from swift_grpo_ext.tools.runs import find_runs, run_name
from swift_grpo_ext.tools.view.log import Log, read_log

MAX_MB = 128
"""DuckDB's memory: reading a round of 10,240 samples of 4,000 characters needs more than 96 MB."""

RANGES = ("step", "reward", "advantage", "num_tokens", "gap_max")
"""Columns that a least and a greatest value bound, and that samples are sorted by."""

EXACT = ("phase", "finish_reason", "stop_reason", "fate", "truncated")
"""Columns that are filtered by equality."""

TEXTS = ("text", "prompt", "columns")
"""Columns that a text is looked for in."""

MAX_TEXT, MAX_QUESTION = 400, 160
"""Characters of a completion, and of a prompt's last message, in a list."""

LONG_COLUMNS = "token_ids, logprobs, mask, pictures, gaps"
"""Only a group's page shows these."""

IDENTITY = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS)
NEWEST = 'step desc, phase, number desc, "group", "index", turn'

GROUPS = """
with whole as (
    select "group", "index", list(hash(text) order by turn) as texts, any_value(reward) as reward
    from scored where {round} group by all),
groups as (
    select "group", list(reward order by "index") as rewards, avg(reward) as reward,
           stddev_pop(reward) as spread, count(*) as samples, count(distinct texts) as num_texts
    from whole group by "group")
select * from groups join (
    select "group", "index", turn, prompt, media, columns
    from samples where {round} and "index" = 0 and turn = 0) using ("group")
order by "group"
"""
"""The groups of a round: a conversation is one sample, and its text that of all turns."""


class NotFoundError(ValueError):
    """A page asks for something that is in no record."""


class Facts:
    """It answers what pages show of a whole run, once while the record stays as it is."""

    def __init__(self, record: Record) -> None:
        self.version = record.version
        self._record = record

    @cached_property
    def rounds(self) -> list[RoundId]:
        """Newest first; an evaluation comes beside the training rounds of its step."""
        return self._record.rounds()

    @cached_property
    def num_rows(self) -> int:
        """How many samples there are; of a conversation, each turn counts."""
        return int(self._record.rows("select count(*) as number from samples")[0]["number"])

    @cached_property
    def functions(self) -> list[str]:
        """The names of the reward functions."""
        query = "select any_value(map_keys(rewards)) as names from rewards group by session"
        found = self._record.rows(query)
        return [*dict.fromkeys(name for row in found for name in row["names"])]

    @cached_property
    def best_reward(self) -> float:
        """The greatest reward, 1 at the least: a reward's colour is full here."""
        return max(self._record.rows("select max(reward) as best from rewards")[0]["best"] or 0, 1)

    @cached_property
    def ranges(self) -> dict[str, str]:
        """The SQL of what samples are bounded and sorted by: `RANGES`, and `reward.NAME` of each
        reward function."""
        functions = {f"reward.{name}": f"rewards[{literal(name)}]" for name in self.functions}
        return {**{name: name for name in RANGES}, **functions}

    @cached_property
    def menus(self) -> dict[str, list[tuple[str, int]]]:
        """The 50 most frequent values of each of the `EXACT` columns, with their numbers."""
        menus = {}
        for name in EXACT:
            query = (
                f"select cast({name} as varchar) as value, count(*) as number "
                f"from {'samples' if name in SAMPLES.schema.names else 'rewards'} "
                f"where {name} is not null "
                f"group by all order by number desc, value limit 50"
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
        self._open(Path(run_dir))

    def _open(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.record = Record(run_dir, max_mb=MAX_MB)
        self._facts = Facts(self.record)
        self._log = Log()

    @property
    def name(self) -> str:
        return run_name(self.run_dir)

    @property
    def facts(self) -> Facts:
        if self._facts.version != self.record.version:
            self._facts = Facts(self.record)
        return self._facts

    @property
    def log(self) -> Log:
        """What the run has logged; its file is read again only after a change."""
        self._log = read_log(self.run_dir, self._log)
        return self._log

    @property
    def has_begun(self) -> bool:
        """True once a sample, a step or a measurement is there."""
        return bool(self.facts.rounds or self.log.steps or self.facts.diversity)

    def refresh(self, seconds: float = float("inf")) -> None:
        """Look for what is new on disk, for some seconds. A folder that was served before its
        training began may get the run in a folder of its own (`--add_version`)."""
        if not self.facts.rounds and not self.log.steps:
            with suppress(OSError):
                [folder] = find_runs(self.run_dir)[:1]
                if folder != self.run_dir:
                    self._open(folder)
        self.record.refresh(seconds)

    @cached_property
    def decode(self) -> Decode | None:
        """The tokenizer of a checkpoint, or of the model; None where neither is on this machine."""
        return find_decoder(self.run_dir)


# --- which samples, which groups ---


def parse_place(values: Mapping[str, Any], *names: str) -> tuple[RoundId, list[int]]:
    """Return the round that an address names, such as `round=train.3.0`, and the numbers that it
    gives under some names; raises NotFoundError where one is missing or unreadable."""
    try:
        phase, step, number = values["round"].split(".")
        round_ = RoundId(PHASES[PHASES.index(phase)], int(step), int(number))
        return round_, [int(values[name]) for name in names]
    except (KeyError, ValueError) as e:
        asked = ", ".join(f"{name}={value}" for name, value in values.items()) or "no round"
        wanted = "".join(f" and {name}=0" for name in names)
        raise NotFoundError(f"{asked}: expected round=train.3.0{wanted}") from e


def search_of(facts: Facts, values: Mapping[str, str]) -> tuple[str, dict[str, Any], str]:
    """Return the samples that a URL's values ask for as SQL, `from ... where ...`, with the values
    of its parameters, and their order. Rows without a value are out of its range, and come last.

    Args:
        values: `sort=reward` sorts by one of the run's `ranges`, `sort=-reward` puts the greatest
            first; without it, the newest come first. `where` names the one of `TEXTS` that holds
            `text`.

    Raises:
        NotFoundError: a value is no number, or no column.
    """
    conditions: list[tuple[str, str, Any]] = []  # column, SQL up to the value and ")", value
    for column, sql in facts.ranges.items():
        for name, compare in ((f"min_{column}", ">="), (f"max_{column}", "<=")):
            if bound := values.get(name):
                try:
                    conditions.append((column, f"({sql} {compare}", float(bound)))
                except ValueError as e:
                    raise NotFoundError(f"{name}={bound}: expected a number") from e
    for column in EXACT:
        if value := values.get(column):
            conditions.append((column, f"(cast({column} as varchar) =", value))
    if text := values.get("text"):
        where = values.get("where")
        column = where if where in TEXTS else "text"
        conditions.append((column, f"contains(lower({column}),", text.lower()))

    sort = values.get("sort", "")
    column, order = sort.removeprefix("-"), NEWEST
    if column not in ("", *facts.ranges):
        raise NotFoundError(f"sort={column}: expected one of {', '.join(facts.ranges)}")
    if column:
        direction = "desc" if sort.startswith("-") else "asc"
        order = f"{facts.ranges[column]} {direction} nulls last, {NEWEST}"
    used = {column or "step", *(name for name, _, _ in conditions)}
    where = "".join(f" and {sql} $v{at})" for at, (_, sql, _) in enumerate(conditions))
    source = "samples" if used <= {*SAMPLES.schema.names} else "scored"
    parameters = {f"v{at}": value for at, (_, _, value) in enumerate(conditions)}
    return f"from {source} where true{where}", parameters, order


def find_samples(
    run: Run, values: Mapping[str, str], *, offset: int = 0, limit: int = 50
) -> tuple[int, list[dict[str, Any]]]:
    """Return how many samples match a URL's values, and some of them as `described`, with the
    beginnings of texts; raises what `search_of` does."""
    matching, parameters, order = search_of(run.facts, values)
    count = run.facts.num_rows
    if parameters:
        query = f"select count(*) as number {matching}"
        count = run.record.rows(query, parameters)[0]["number"]
    query = f"select {IDENTITY} {matching} order by {order} limit {limit} offset {offset}"
    names = [tuple(row.values()) for row in run.record.rows(query, parameters)]
    if not names:
        return count, []
    # The long columns of these rows alone are read. A phase is a plain word.
    steps = ", ".join({str(name[1]) for name in names})
    rows = run.record.rows(
        f"select * exclude ({LONG_COLUMNS}) from scored "
        f"where step in ({steps}) and ({IDENTITY}) in ({', '.join(map(str, names))})"
    )
    by_name = {tuple(row[c] for c in SAMPLE_ID_COLUMNS): described(row) for row in rows}
    listed = [by_name[name] for name in names if name in by_name]
    return count, [{**row, "text": row["text"][:MAX_TEXT]} for row in listed]


def list_groups(run: Run, round_: RoundId) -> list[dict[str, Any]]:
    """Return the groups of a round as `described`, each as its first sample: `reward` is the mean
    of the `rewards` and `spread` their standard deviation, None without any."""
    rows = run.record.rows(GROUPS.format(round=where_round(round_)))
    return [described({**round_._asdict(), **row}) for row in rows]


def described(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `scored`, or of `GROUPS`, with its round's name, its data row's `columns`,
    its prompt's `messages` as (role, text), and the beginning of the last one, the `question`."""
    messages = [(str(m.get("role", "")), text_of(m)) for m in json.loads(row["prompt"])]
    return {
        **row,
        "round": f"{row['phase']}.{row['step']}.{row['number']}",
        "columns": json.loads(row["columns"] or "{}"),
        "messages": messages,
        "question": messages[-1][1][:MAX_QUESTION],
    }


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says: its text, or JSON of what is none, such as calls of tools."""
    others = {k: v for k, v in message.items() if k not in ("role", "content", "loss") and v}
    parts = [part for part in (message.get("content"), others) if part]
    return "\n".join(
        part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts
    )
