"""Questions to a `Snapshot`, as the addresses of pages ask them: which samples, which groups. Pure.

A filter is a URL's values: `steps=10:20`, `min_reward=0.5`, `truncated=true`, `text=seven`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.tools.view.runs import GROUP_KEYS, PART, Snapshot

RANGES = ("reward", "advantage", "num_tokens", "surprisal", "gap_max")
"""Columns that a least and a greatest value bound; a sample without a value is out of all."""

EXACT = ("phase", "finish_reason", "stop_reason", "fate", "truncated")
"""Columns that are filtered by equality."""

MAX_VALUES = 50
"""Values of such a column in a menu."""

MAX_TEXT = 400
"""Characters of a completion in a list."""


def parse_round(text: str) -> RoundName:
    """Read `train.3.0`; raises ValueError."""
    phase, step, number = text.split(".")
    return RoundName(phase, int(step), int(number))


def parse_steps(text: str) -> tuple[float, float]:
    """Read `10:20`, `10:`, `:20` or `10` as the first and the last step; raises ValueError."""
    first, colon, last = text.partition(":")
    try:
        return float(first or -np.inf), float((last if colon else first) or np.inf)
    except ValueError as e:
        raise ValueError(f"steps={text}: expected steps such as 10:20.") from e


def matching(snapshot: Snapshot, values: Mapping[str, str]) -> np.ndarray:
    """Return the numbers of the rows of `snapshot.table` that a filter lets pass.

    Args:
        values: those of a URL; `sort=reward` sorts by a column of `RANGES`, `sort=-reward` puts the
            greatest first. Rows without a value come last. Without `sort`, the newest come first.

    Raises:
        ValueError: a value is no number, no column, or no regular expression.
    """
    table = snapshot.table
    conditions = []
    bounds = {"step": parse_steps(values.get("steps", ""))}
    for column in RANGES:
        bounds[column] = (
            _number(values, f"min_{column}", -np.inf),
            _number(values, f"max_{column}", np.inf),
        )
    for column, (low, high) in bounds.items():
        if (low, high) != (-np.inf, np.inf):
            conditions.append(pc.greater_equal(table[column], low))
            conditions.append(pc.less_equal(table[column], high))
    for column in EXACT:
        if values.get(column):
            conditions.append(pc.equal(table[column].cast(pa.utf8()), values[column]))
    if values.get("text"):
        conditions.append(_holds_text(snapshot, values))
    if conditions:
        masks = [condition.fill_null(False).to_numpy() for condition in conditions]
        rows = np.flatnonzero(reduce(np.logical_and, masks))
    else:
        rows = np.arange(table.num_rows)

    column = values.get("sort", "").removeprefix("-")
    if column not in ("", *RANGES):
        raise ValueError(f"sort={column}: expected one of {', '.join(RANGES)}.")
    if column:
        keys = table[column].combine_chunks().take(pa.array(rows))
        order = "descending" if values["sort"].startswith("-") else "ascending"
        rows = rows[pc.array_sort_indices(keys, order=order).to_numpy()]
    return rows


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(values.get(name) or default)
    except ValueError as e:
        raise ValueError(f"{name}={values[name]}: expected a number.") from e


def _holds_text(snapshot: Snapshot, values: Mapping[str, str]) -> pa.ChunkedArray:
    """Tell which rows' completions, or prompts with `in_prompt`, hold a text or match a pattern,
    in lower or upper case. The syntax is RE2's, which no pattern can make slow."""
    match = pc.match_substring_regex if values.get("regex") else pc.match_substring
    table, text = snapshot.table, values["text"]
    try:
        if not values.get("in_prompt"):
            return match(table["text"], text, ignore_case=True)
        prompts = snapshot.prompts  # each is looked at once, and not once a sample
        texts = pa.array([prompt.text for prompt in prompts.values()], pa.utf8())
        hashes = pa.array(prompts, pa.utf8()).filter(match(texts, text, ignore_case=True))
        return pc.is_in(table["fingerprint"], value_set=hashes)
    except pa.ArrowInvalid as e:
        raise ValueError(f"text={text}: no regular expression ({e}).") from e


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
    samples = []
    for number in rows.tolist():
        [row] = snapshot.table.slice(number, 1).to_pylist()
        samples.append({**describe(snapshot, row), "text": row["text"][:MAX_TEXT]})
    return samples


def describe(snapshot: Snapshot, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its round's name, its reward functions' values under `parts`, and the
    number of its prompt's media."""
    parts = {name: row[PART + name] for name in snapshot.functions if PART + name in row}
    place = f"{row['phase']}.{row['step']}.{row['number']}"
    num_media = len(snapshot.prompts[row["fingerprint"]].media)
    return {**row, "round": place, "parts": parts, "num_media": num_media}


def list_groups(
    snapshot: Snapshot, of_round: RoundName | None = None, steps: str = "", limit: int = 50
) -> list[dict[str, Any]]:
    """Return the groups of a round in their order; without a round, `limit` groups of the run whose
    rewards lie furthest apart (by standard deviation), the widest first.

    Raises:
        ValueError: `steps` cannot be read.
    """
    groups = snapshot.groups
    if of_round is not None:
        is_here = [pc.equal(groups[key], value) for key, value in of_round._asdict().items()]
        rows = groups.filter(reduce(pc.and_, is_here)).sort_by("group")
    else:
        first, last = parse_steps(steps)
        is_here = [pc.greater_equal(groups["step"], first), pc.less_equal(groups["step"], last)]
        rows = groups.filter(pc.and_(*is_here))
        order = pc.array_sort_indices(rows["spread"].combine_chunks(), order="descending")
        rows = rows.take(order[:limit])
    listed = []
    for group in rows.to_pylist():
        prompt = snapshot.prompts[group["fingerprint"]]
        group["round"] = ".".join(str(group[key]) for key in GROUP_KEYS[:3])
        group["prompt"] = read_messages(prompt.text)[-1]["content"][:160]
        group["num_media"] = len(prompt.media)
        listed.append(group)
    return listed


def pick_groups(snapshot: Snapshot, steps: str, count: int) -> list[dict[str, Any]]:
    """Return up to `count` groups: a quarter are those whose rewards lie furthest apart, the others
    are spread evenly over the steps.

    Raises:
        ValueError: `steps` cannot be read.
    """
    groups = list_groups(snapshot, steps=steps, limit=snapshot.groups.num_rows)
    best, others = groups[: count // 4], groups[count // 4 :]
    others.sort(key=lambda group: [group[key] for key in GROUP_KEYS])
    num_others = min(count - len(best), len(others))
    at = np.linspace(0, len(others) - 1, num_others).round().astype(int)
    return best + [others[i] for i in at]


def read_messages(prompt: str) -> list[dict[str, str]]:
    """Return role and content of each message; a prompt that is no list of messages is one message
    without a role."""
    try:
        messages = [(message["role"], message["content"]) for message in json.loads(prompt)]
    except (ValueError, TypeError, KeyError):
        messages = [("", prompt)]
    return [
        {"role": str(r), "content": c if isinstance(c, str) else json.dumps(c, ensure_ascii=False)}
        for r, c in messages or [("", "")]
    ]
