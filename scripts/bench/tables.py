"""Rows of the rollout benchmarks as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from common import per_unit, ratios

Row = dict[str, Any]
WAYS = ("ms-swift", "bare vLLM", "ours", "ours unseeded")


def as_markdown(rows: Sequence[Row]) -> str:
    """One table for each benchmark that `rows` has."""
    tables = []
    for benchmark, (heading, table) in TABLES.items():
        chosen = [row for row in rows if row["benchmark"] == benchmark]
        if chosen:
            tables.append(f"{heading}\n\n{table(chosen)}")
    return "\n\n".join(tables)


def by_case(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each case, by way, in the order in which they were measured."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row.get("replicas"), row["case"], row["num_prompts"], row["group_size"])
        cases.setdefault(key, {})[row["way"]] = row
    return list(cases.values())


def colocate_table(rows: Sequence[Row]) -> str:
    lines = []
    for ways in by_case(rows):
        theirs, bare, ours = ways["ms-swift"], ways["bare vLLM"], ways["ours"]
        lines.append(
            [
                *_prompts(ours),
                *(f"{median(way['seconds']):.2f}" for way in (theirs, bare, ours)),
                _ratio(ours, theirs),
                _ratio(ours, bare),
                _ratio(ours, ways["ours unseeded"]),
                *(f"{_cpu(way, 'cpu_seconds'):.0f}" for way in (theirs, bare, ours)),
                _tokens(*ways.values()),
            ]
        )
    head = (
        "prompts, G, ms-swift s, bare vLLM s, ours s, ours / ms-swift, ours / bare, "
        "seeded / unseeded, CPU ms a sample: ms-swift, bare, ours, tokens a sample"
    )
    return _table(head, lines)


def server_table(rows: Sequence[Row]) -> str:
    lines = []
    for ways in by_case(rows):
        theirs, ours = ways["ms-swift"], ways["ours"]
        answers = [per_unit(way, "response_bytes", "tokens") for way in (theirs, ours)]
        lines.append(
            [
                str(ours["replicas"]),
                *_prompts(ours),
                *(f"{median(way['seconds']):.2f}" for way in (theirs, ours)),
                _ratio(ours, theirs),
                *(f"{median(way['request_bytes']) / 1e6:.3f}" for way in (theirs, ours)),
                f"{median(ratios(ours, theirs, 'request_bytes')):.3f}",
                *(f"{answer:.1f}" for answer in answers),
                f"{answers[1] / answers[0]:.3f}",
                *(f"{_cpu(way, 'cpu_seconds'):.0f}" for way in (theirs, ours)),
                *(f"{_cpu(way, 'server_cpu_seconds'):.0f}" for way in (theirs, ours)),
                _tokens(*ways.values()),
            ]
        )
    head = (
        "replicas, prompts, G, ms-swift s, ours s, ours / ms-swift, "
        "request MB: ms-swift, ours, ours / ms-swift, "
        "response bytes a token: ms-swift, ours, ours / ms-swift, "
        "client CPU ms a sample: ms-swift, ours, server CPU ms a sample: ms-swift, ours, "
        "tokens a sample"
    )
    return _table(head, lines)


def scaling_table(rows: Sequence[Row]) -> str:
    first = {row["case"]: row for row in reversed(rows)}
    lines = [
        [
            row["case"],
            str(row["num_samples"]),
            f"{median(row['seconds']):.2f}",
            f"{per_sample(row) * 1e3:.1f}",
            f"{per_sample(row) / per_sample(first[row['case']]):.2f}",
            _tokens(row),
        ]
        for row in rows
    ]
    head = "prompts, samples, ours s, ms a sample, relative to the first, tokens a sample"
    return _table(head, lines)


def seeds_table(rows: Sequence[Row]) -> str:
    ways = by_case(rows)[0]
    seeded, unseeded = ways["ours"], ways["ours unseeded"]
    pairs = sorted(ratios(seeded, unseeded, "seconds"))
    quarter = len(pairs) // 4
    middle = f"{pairs[quarter]:.3f} to {pairs[-1 - quarter]:.3f}"
    line = [
        *_prompts(seeded),
        f"{median(seeded['seconds']):.3f}",
        f"{median(unseeded['seconds']):.3f}",
        f"{median(pairs):.3f}",
        middle,
        str(len(pairs)),
    ]
    return _table("prompts, G, seeded s, unseeded s, ratio, middle half, pairs", [line])


def per_sample(row: Row) -> float:
    return median(row["seconds"]) / int(row["num_samples"])


def _prompts(row: Row) -> list[str]:
    return [f"{row['num_prompts']} x {row['case']}", str(row["group_size"])]


def _ratio(ours: Row, theirs: Row) -> str:
    found = ratios(ours, theirs, "seconds")
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def _cpu(row: Row, measure: str) -> float:
    """Milliseconds for each sample."""
    return median(row[measure]) / int(row["num_samples"]) * 1e3


def _tokens(*rows: Row) -> str:
    """Mean number of tokens of a completion: the lowest of the ways' and the highest."""
    means = [sum(r["tokens"]) / len(r["tokens"]) / r["num_samples"] for r in rows]
    low, high = f"{min(means):.1f}", f"{max(means):.1f}"
    return low if low == high else f"{low} to {high}"


def _table(head: str, lines: Sequence[Sequence[str]]) -> str:
    columns = head.split(", ")
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "colocate": ("**In the training process**", colocate_table),
    "server": ("**Through `swift rollout`**", server_table),
    "scaling": ("**Cost against the number of samples (ours, G = 8)**", scaling_table),
    "seeds": ("**Cost of seeds (ours)**", seeds_table),
}
