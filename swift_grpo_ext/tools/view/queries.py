"""Questions to a `Snapshot`: which samples, in which order; which groups. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.tools.view.table import EXACT, MAX_GROUP, Round, Snapshot, parse_round

SORTS = ("reward", "advantage", "num_tokens", "surprisal", "gap_mean", "gap_max")
RANGES = ("reward", "advantage", "num_tokens", "surprisal", "gap_max")
MAX_ROWS = 500
"""Of one answer."""

MAX_TEXT = 400
"""Characters of a completion in a list."""


class BadQueryError(ValueError):
    """A value of a query cannot be used; says which, and what was expected."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which samples, in which order; `read_query` makes it from a URL's values."""

    steps: tuple[float, float] = (-np.inf, np.inf)
    ranges: Mapping[str, tuple[float, float]]
    """Least and greatest value by column; samples without a value are out of every range."""

    exact: Mapping[str, str]
    truncated: bool | None = None
    text: str = ""
    is_regex: bool = False
    """RE2's syntax, which no pattern can make slow."""

    in_prompt: bool = False
    group: tuple[RoundName, int] | None = None
    sort: str = ""
    """Empty for the newest round first."""

    descending: bool = False


def read_query(values: Mapping[str, str]) -> Query:
    """Raises BadQueryError."""
    sort = values.get("sort", "")
    if sort not in ("", *SORTS):
        raise BadQueryError(f"sort={sort}: expected one of {', '.join(SORTS)}.")
    ranges = {
        name: (
            _number(values, f"min_{name}", -np.inf),
            _number(values, f"max_{name}", np.inf),
        )
        for name in RANGES
        if values.get(f"min_{name}") or values.get(f"max_{name}")
    }
    try:
        low, colon, high = values.get("steps", "").partition(":")
        steps = (float(low or -np.inf), float((high if colon else low) or np.inf))
        group = None
        if values.get("round"):
            group = parse_round(values["round"]), int(values.get("group") or -1)
    except (ValueError, TypeError) as e:
        raise BadQueryError(
            f"steps={values.get('steps', '')} round={values.get('round', '')}: expected steps such "
            "as 10:20, and a round such as train.3.0."
        ) from e
    truncated = {"yes": True, "no": False}.get(values.get("truncated", ""))
    return Query(
        steps=steps,
        ranges=ranges,
        exact={name: values[name] for name in EXACT if values.get(name)},
        truncated=truncated,
        text=values.get("text", ""),
        is_regex=bool(values.get("regex")),
        in_prompt=bool(values.get("in_prompt")),
        group=group,
        sort=sort,
        descending=bool(values.get("descending")),
    )


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(values.get(name) or default)
    except ValueError as e:
        raise BadQueryError(f"{name}={values[name]}: expected a number.") from e


def matching(snapshot: Snapshot, query: Query) -> np.ndarray:
    """Numbers of the rows that match, in the query's order; rows without the value that they are
    sorted by come last.

    Raises:
        BadQueryError: the pattern is no regular expression.
    """
    found = np.flatnonzero(_mask(snapshot, query))
    if not query.sort:
        return found
    values = snapshot.numbers(query.sort)[found]
    order = np.argsort(-values if query.descending else values, kind="stable")
    return found[order]


def _mask(snapshot: Snapshot, query: Query) -> np.ndarray:
    table = snapshot.table
    mask = np.ones(table.num_rows, bool)
    if query.steps != (-np.inf, np.inf):
        steps = snapshot.numbers("step")
        mask &= (steps >= query.steps[0]) & (steps <= query.steps[1])
    for name, (low, high) in query.ranges.items():
        values = snapshot.numbers(name)
        mask &= (values >= low) & (values <= high)
    for name, value in query.exact.items():
        mask &= _to_numpy(pc.equal(table[name], value))
    if query.truncated is not None:
        mask &= _to_numpy(pc.equal(table["truncated"], query.truncated))
    if query.group is not None:
        mask &= _of_group(snapshot, *query.group)
    if query.text:
        mask &= _with_text(snapshot, query)
    return mask


def _to_numpy(values: pa.ChunkedArray) -> np.ndarray:
    return pc.fill_null(values, False).to_numpy()


def _of_group(snapshot: Snapshot, name: RoundName, group: int) -> np.ndarray:
    mask = np.zeros(snapshot.table.num_rows, bool)
    for number, found in enumerate(snapshot.rounds):
        if found.name == name:
            rows = slice(*snapshot.starts[number : number + 2])
            mask[rows] = True if group < 0 else found.rows["group"].to_numpy() == group
    return mask


def _with_text(snapshot: Snapshot, query: Query) -> np.ndarray:
    try:
        if not query.in_prompt:
            return _to_numpy(_match(snapshot.table["text"], query))
        prompts = {k: text for r in snapshot.rounds for k, (text, _) in r.prompts.items()}
        texts = pa.chunked_array([pa.array(prompts.values(), pa.utf8())])
        found = pa.array(prompts.keys(), pa.utf8()).filter(_match(texts, query).combine_chunks())
        return _to_numpy(pc.is_in(snapshot.table["fingerprint"], value_set=found))
    except pa.ArrowInvalid as e:
        raise BadQueryError(f"text={query.text}: no regular expression ({e}).") from e


def _match(texts: pa.ChunkedArray, query: Query) -> pa.ChunkedArray:
    match = pc.match_substring_regex if query.is_regex else pc.match_substring
    return match(texts, query.text, ignore_case=True)


def list_samples(snapshot: Snapshot, query: Query, offset: int, limit: int) -> dict[str, Any]:
    """How many samples match, and some of them."""
    found = matching(snapshot, query)
    page = found[offset : offset + min(limit, MAX_ROWS)].tolist()
    rows = [describe(*pair, text_length=MAX_TEXT) for pair in snapshot.rows(page)]
    return {"count": len(found), "offset": offset, "rows": rows, "version": snapshot.version}


def describe(
    of_round: Round, row: dict[str, Any], text_length: int | None = None
) -> dict[str, Any]:
    """A row for the page: its round's name, `parts`, and how many media its prompt has."""
    parts = {name: row.pop(name) for name in list(row) if name.startswith("part:")}
    row["parts"] = {name[5:]: value for name, value in parts.items()}
    row["round"] = ".".join(map(str, of_round.name))
    row["seed"] = None if row["seed"] is None else str(row["seed"])  # 63 bits: JavaScript has 53
    row["num_media"] = len(of_round.prompts[row["fingerprint"]][1])
    row["is_cut"] = text_length is not None and len(row["text"]) > text_length
    row["text"] = row["text"][:text_length]
    return row


def list_rounds(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Oldest first."""
    return [r.summary for r in reversed(snapshot.rounds)]


def list_groups(of_round: Round) -> list[dict[str, Any]]:
    """The groups of a round, with the mean and the spread of their rewards."""
    rows = of_round.rows.select(["group", "fingerprint", "reward", "text", "truncated"]).to_pydict()
    groups: dict[int, dict[str, Any]] = {}
    for group, key, reward, text, truncated in zip(*rows.values(), strict=True):
        found = groups.setdefault(
            group, {"group": group, "rewards": [], "texts": set(), "truncated": 0, "key": key}
        )
        found["rewards"].append(reward)
        found["texts"].add(text)
        found["truncated"] += bool(truncated)
    return [_group(of_round, groups[group]) for group in sorted(groups)]


def _group(of_round: Round, found: dict[str, Any]) -> dict[str, Any]:
    prompt, media = of_round.prompts[found["key"]]
    known = [reward for reward in found["rewards"] if reward is not None]
    return {
        "group": found["group"],
        "samples": len(found["rewards"]),
        "rewards": found["rewards"],
        "reward": float(np.mean(known)) if known else None,
        "spread": float(np.std(known)) if known else None,
        "distinct": len(found["texts"]),
        "truncated": found["truncated"],
        "prompt": last_words(prompt)[:160],
        "num_media": len(media),
    }


def last_words(prompt: str) -> str:
    """The last message of a prompt as it was logged."""
    messages = read_messages(prompt)
    return messages[-1]["content"] if messages else ""


def read_messages(prompt: str) -> list[dict[str, str]]:
    """Role and content; a prompt that is no list of messages is one without role."""
    try:
        found = json.loads(prompt)
        return [
            {
                "role": str(message["role"]),
                "content": content
                if isinstance(content := message["content"], str)
                else json.dumps(content, ensure_ascii=False),
            }
            for message in found
        ]
    except (ValueError, TypeError, KeyError):
        return [{"role": "", "content": prompt}]


def most_different(snapshot: Snapshot, query: Query, count: int = 1) -> list[dict[str, Any]]:
    """Groups whose matching samples have rewards that lie furthest apart (standard deviation);
    without rewards, lengths."""
    rows = np.sort(matching(snapshot, query))
    of_round = np.searchsorted(snapshot.starts, rows, side="right") - 1
    values = snapshot.numbers("reward")[rows]
    if not np.isfinite(values).any():
        values = snapshot.numbers("num_tokens")[rows]
    known = np.isfinite(values)
    keys = (of_round * MAX_GROUP + snapshot.numbers("group")[rows].astype(np.int64))[known]
    values = values[known]
    groups, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, values) / counts
    spreads = np.sqrt(np.bincount(inverse, (values - means[inverse]) ** 2) / counts)
    return [
        {
            "round": ".".join(map(str, snapshot.rounds[groups[at] // MAX_GROUP].name)),
            "group": int(groups[at] % MAX_GROUP),
            "spread": float(spreads[at]),
        }
        for at in np.argsort(-spreads, kind="stable")[:count]
    ]


def pick(snapshot: Snapshot, query: Query, count: int) -> Sequence[tuple[RoundName, int]]:
    """Up to `count` groups with matching samples: the most different ones, and others evenly."""
    rows = matching(snapshot, query)
    of_round = np.searchsorted(snapshot.starts, rows, side="right") - 1
    keys = of_round * MAX_GROUP + snapshot.numbers("group")[rows].astype(np.int64)
    _, firsts = np.unique(keys, return_index=True)
    keys = keys[np.sort(firsts)]  # in the query's order
    if query.sort:
        keys = keys[:count]
    elif len(keys) > count:
        best = most_different(snapshot, query, count // 4)
        at = np.linspace(0, len(keys) - 1, count - len(best)).round().astype(int)
        evenly = [(snapshot.rounds[k // MAX_GROUP].name, int(k % MAX_GROUP)) for k in keys[at]]
        return list(dict.fromkeys([(parse_round(b["round"]), b["group"]) for b in best] + evenly))
    return [(snapshot.rounds[k // MAX_GROUP].name, int(k % MAX_GROUP)) for k in keys]
