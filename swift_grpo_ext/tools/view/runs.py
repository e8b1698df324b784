"""Reads a run's log and record while the run goes on, with the queries that pages need.

The values of an address are a search: `min_step=10`, `max_reward=0.5`, `truncated=true`,
`text=seven`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from swift_grpo_ext.record.query import Record, diversity_of, literal, where_round
from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS, DiversityRow
from swift_grpo_ext.sampling.seeding import PHASES, RoundId
from swift_grpo_ext.tools.diff import Decode, find_decoder
from swift_grpo_ext.tools.runs import LOGS, STEP, by_step, find_runs, read_logs

# DuckDB's memory: enough for a million samples, and for rounds of 10,240 of 4,000 characters.
MAX_MB = 96

# A search bounds and sorts by RANGES, selects one value of each of MENUS (by table), and looks for
# a text in one of TEXTS.
RANGES = ("step", "reward", "advantage", "num_tokens", "gap_max")
MENUS = {"samples": ("phase", "finish_reason", "stop_reason"), "rewards": ("fate", "truncated")}
TEXTS = ("text", "prompt", "columns")

MAX_TEXT, MAX_QUESTION = 400, 160  # characters of a completion, and of a question, in a list

IDENTITY = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS)

# Only a group's page reads the long columns. DuckDB reads the others only for the chosen rows.
SEARCH = f"""
select * exclude (token_ids, logprobs, mask, pictures, gaps)
from scored semi join (
    select {IDENTITY} from scored where {{where}} order by {{order}} limit ? offset ?
) using ({IDENTITY})
order by {{order}}
"""
NEWEST = 'step desc, phase, number desc, "group", "index", turn'

# The groups of a round. A conversation is one sample; its text is that of all turns.
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


class NotFoundError(ValueError):
    """No record has the run, round or sample of an address, or a value of it is wrong."""


class Facts:
    """The facts of a whole run that pages show; each is read once for a version of its files."""

    def __init__(self, run_dir: Path, record: Record) -> None:
        self.version = version_of(run_dir, record)
        self._run_dir, self._record = run_dir, record

    @cached_property
    def rounds(self) -> list[RoundId]:
        """The rounds, newest first; an evaluation comes beside the training rounds of its step."""
        return self._record.rounds()

    @cached_property
    def num_rows(self) -> int:
        """The number of completions; each turn of a conversation counts."""
        return int(self._record.rows("select count(*) as number from samples")[0]["number"])

    @cached_property
    def best_reward(self) -> float:
        """The greatest reward, at least 1: the page colours it green."""
        return max(self._record.rows("select max(reward) as best from rewards")[0]["best"] or 0, 1)

    @cached_property
    def ranges(self) -> dict[str, str]:
        """The SQL of `RANGES`, and of `reward.NAME` for each reward function."""
        query = "select any_value(map_keys(rewards)) as names from rewards group by session"
        names = {name: None for row in self._record.rows(query) for name in row["names"]}
        functions = {f"reward.{name}": f"rewards[{literal(name)}]" for name in names}
        return {**{name: name for name in RANGES}, **functions}

    @cached_property
    def menus(self) -> dict[str, dict[str, int]]:
        """The count of each value, for each column of `MENUS`."""
        menus = {}
        for table, columns in MENUS.items():
            values = ", ".join(f"histogram({name}::varchar) as {name}" for name in columns)
            menus.update(self._record.rows(f"select {values} from {table}")[0])
        return {column: counts or {} for column, counts in menus.items()}

    @cached_property
    def diversity(self) -> list[DiversityRow]:
        """The monitor's rows, in the order of the steps."""
        return diversity_of(self._record)

    @cached_property
    def logs(self) -> list[dict[str, Any]]:
        """The lines of `logging.jsonl`."""
        try:
            return read_logs(self._run_dir)
        except OSError:  # nothing is logged yet
            return []

    @cached_property
    def steps(self) -> dict[int, dict[str, Any]]:
        """The logged values of each optimizer step."""
        return by_step(self.logs)

    @cached_property
    def step(self) -> int:
        """The number of steps that are done; `--logging_steps` leaves some out of the log."""
        return max([0, *self.steps, *(r.step + 1 for r in self.rounds if r.phase == "train")])

    @cached_property
    def max_steps(self) -> int:
        """The training's number of steps; 0 before the first is logged."""
        return int(self.steps[max(self.steps)][STEP].partition("/")[2]) if self.steps else 0

    @property
    def has_ended(self) -> bool:
        """True after ms-swift's last lines: one with `train_runtime`, and the model's summary."""
        return any("train_runtime" in log for log in self.logs[-2:])

    @property
    def updated(self) -> str:
        """The time of the log's last change, by this machine's clock; empty before the first."""
        seconds = self.version[1] // 10**9
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""

    @property
    def has_begun(self) -> bool:
        """True once a sample, a step or a measurement is there."""
        return bool(self.rounds or self.steps or self.diversity)


def version_of(run_dir: Path, record: Record) -> tuple[int, int, int]:
    """Return the version of a run's record, and the time and size of its log."""
    try:
        status = (run_dir / LOGS).stat()
    except OSError:
        return record.version, 0, 0
    return record.version, status.st_mtime_ns, status.st_size


class Run:
    """A run's folder, read again and again."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._open(Path(run_dir))

    def _open(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.record = Record(run_dir, max_mb=MAX_MB)
        self.record.cursor().execute("set threads = 1")  # each takes memory
        self._facts = Facts(run_dir, self.record)

    @property
    def facts(self) -> Facts:
        if self._facts.version != version_of(self.run_dir, self.record):
            self._facts = Facts(self.run_dir, self.record)
        return self._facts

    def refresh(self, seconds: float = float("inf")) -> None:
        """Read new files, for at most `seconds`."""
        # A folder that was served before its training began may get the run in a folder of its own
        # (`--add_version`).
        if not self.facts.has_begun:
            with suppress(OSError):
                [folder] = find_runs(self.run_dir)[:1]
                if folder != self.run_dir:
                    self._open(folder)
        self.record.refresh(seconds)

    @cached_property
    def decode(self) -> Decode | None:
        """The tokenizer of a checkpoint, or of the model; None if neither is on this machine."""
        return find_decoder(self.run_dir)


# --- an address's values ---


def parse(values: Mapping[str, Any], name: str, kind: type[int] | type[float] = int) -> Any:
    """Return a value of an address: its `round`, or a number; raises NotFoundError."""
    try:
        if name != "round":
            return kind(values[name])
        phase, step, number = values[name].split(".")
        return RoundId(PHASES[PHASES.index(phase)], int(step), int(number))
    except (KeyError, ValueError) as e:
        expected = "a round such as train.3.0" if name == "round" else "a number"
        raise NotFoundError(f"{name}={values.get(name, '')}: expected {expected}") from e


# --- which samples, which groups ---


def find_samples(
    run: Run, values: Mapping[str, str], limit: int = 50
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of samples that match an address, and those of its page as `describe`
    returns them, with the beginnings of their texts. The newest come first. `sort=reward` sorts by
    one of the run's `ranges`, the least first; `sort=-reward` sorts the greatest first. A sample
    without a value is outside of all bounds. Raises NotFoundError if a value is no number, or names
    no column."""
    ranges, conditions, wanted = run.facts.ranges, ["true"], list[Any]()
    for column, sql in ranges.items():
        for name, compare in ((f"min_{column}", ">="), (f"max_{column}", "<=")):
            if values.get(name):
                conditions.append(f"{sql} {compare} ?")
                wanted.append(parse(values, name, float))
    for column in (name for names in MENUS.values() for name in names):
        if value := values.get(column):
            conditions.append(f"{column}::varchar = ?")
            wanted.append(value)
    if text := values.get("text"):
        column = values.get("where", "")
        conditions.append(f"contains(lower({column if column in TEXTS else 'text'}), ?)")
        wanted.append(text.lower())
    order = NEWEST
    if sort := values.get("sort"):
        column = sort.removeprefix("-")
        if column not in ranges:
            raise NotFoundError(f"sort={column}: expected one of {', '.join(ranges)}")
        order = f"{ranges[column]} {'desc' if sort[0] == '-' else 'asc'} nulls last, {NEWEST}"
    offset = max(parse(values, "offset"), 0) if "offset" in values else 0
    where = " and ".join(conditions)
    matching = f"select count(*) as number from scored where {where}"
    count = run.record.rows(matching, wanted)[0]["number"] if wanted else run.facts.num_rows
    query = SEARCH.format(where=where, order=order)
    rows = map(describe, run.record.rows(query, [*wanted, limit, offset]))
    return count, [{**row, "text": row["text"][:MAX_TEXT]} for row in rows]


def list_groups(run: Run, round_: RoundId) -> list[dict[str, Any]]:
    """Return the groups of a round, each as `describe` returns its first sample; `reward` is the
    mean of the `rewards` and `spread` their standard deviation, None without any."""
    rows = run.record.rows(GROUPS.format(round=where_round(round_)))
    return [describe({**round_._asdict(), **row}) for row in rows]


def describe(row: dict[str, Any]) -> dict[str, Any]:
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
    """Return the text of a message, and its other fields, such as calls of tools, as JSON."""
    others = {k: v for k, v in message.items() if k not in ("role", "content", "loss") and v}
    parts = [part for part in (message.get("content"), others) if part]
    return "\n".join(
        part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts
    )
