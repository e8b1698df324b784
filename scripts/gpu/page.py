"""The page of a result, in Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from scripts.gpu.run import NOT_TRIED, PASSED
from scripts.pages import markdown

Case = dict[str, Any]


def page(result: dict[str, Any]) -> str:
    """Return the page: the machine, and of each part its cases and its figures."""
    machine, *parts = result["parts"]
    named = {k: v for case in machine["cases"] for row in case["rows"] for k, v in row.items()}
    device = named.pop("device", result["device"])
    text = [
        f"# {device}: {'passed' if result['is_ok'] else 'FAILED'}",
        ", ".join(f"{k} {figure(v)}" for k, v in named.items() if v is not None) + ".",
    ]
    if result["sizes"] == "small":
        text.append(
            "**Without a GPU, in small sizes**: this run shows that each part works, and says "
            "nothing of a GPU's times or memory."
        )
    text += errors(machine["cases"])
    for part in parts:
        cases = part["cases"]
        tried = [case for case in cases if case["status"] != NOT_TRIED]
        text += [f"## {part['name']}", part["says"]]
        head = ("case", "", "nearest to its bound", "error", "bound", "s")
        text.append(markdown(head, map(row_of, tried)))
        text += errors(cases)
        reasons = Counter(
            case["reason"].split(". ")[0] for case in cases if case["status"] == NOT_TRIED
        )
        text += (f"Not tried: {n} cases, {reason}." for reason, n in reasons.items())
        rows = [row for case in cases for row in case["rows"]]
        for names, of_table in groupby(rows, key=tuple):
            text.append(markdown(names, ([figure(v) for v in row.values()] for row in of_table)))
    return "\n\n".join(filter(None, text)) + "\n"


def row_of(case: Case) -> list[str]:
    """Return a case with the comparison that is nearest to its bound, or furthest beyond it."""

    def share(comparison: dict[str, Any]) -> float:
        if not comparison["passed"]:
            return math.inf
        return float(comparison["error"] / comparison["bound"]) if comparison["bound"] else 0.0

    nearest: dict[str, Any] = max(case["comparisons"], key=share, default={})
    cells = (nearest.get(name) for name in ("what", "error", "bound"))
    return [case["name"], case["status"], *map(figure, cells), figure(case["seconds"])]


def errors(cases: Iterable[Case]) -> list[str]:
    """Return why cases failed that compared nothing."""
    return [
        f"{case['name']}:\n\n```\n{case['reason'].strip()}\n```"
        for case in cases
        if case["reason"] and case["status"] not in (PASSED, NOT_TRIED)
    ]


def figure(value: object) -> str:
    """Return a number with three digits that count; what is missing as a dash."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)
