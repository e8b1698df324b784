"""The page of a result: one file, without scripts or anything from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page(result: dict[str, Any]) -> str:
    """Return the page as HTML."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"figure": figure, "nearest": nearest}
    machines = [case["rows"][0] for case in result["parts"][0]["cases"] if case["rows"]]
    return made.get_template("page.html").render(
        result=result,
        machine={"device": result["device"], **(machines or [{}])[0]},
        parts=[(part, tables(part)) for part in result["parts"] if part["name"] != "machine"],
    )


def tables(part: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the rows of a part's cases, a table for each set of columns."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for case in part["cases"]:
        for row in case["rows"]:
            found.setdefault(tuple(case["rows"][0]), []).append(row)
    return list(found.values())


def figure(value: object) -> str:
    """Return a number with three digits that count; what is missing as a dash."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)


def nearest(comparisons: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison that is nearest to its bound, or furthest beyond it."""

    def share(comparison: dict[str, Any]) -> float:
        error, bound = comparison["error"], comparison["bound"]
        if comparison["passed"] and error is not None:
            return float(error / bound) if bound else 0.0
        return float("inf")

    return max(comparisons, key=share)
