"""Reports rows that ms-swift leaves out of a data set: their number, the first one, and the cause.

A preprocessor of ms-swift's (4.6, dataset/preprocessor/core.py, `batched_preprocess`) drops each
row that makes it fail or gives no result. ms-swift logs the cause at the level INFO, without the
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Findings, enforce, error, note, warning
from swift_grpo_ext.checks.rows import name_of, reason_of
from swift_grpo_ext.upstream.patches import replaced, wrapped
from swift_grpo_ext.upstream.rows import short

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.dataset import RowPreprocessor

Row = Mapping[str, Any]

MAX_SEARCHED = 20_000  # rows that are searched for the first left-out one: some seconds
OBJECTS = '{"ref": ["..."], "bbox": [[x1, y1, x2, y2], ...]}, or null'


@contextmanager
def left_out_rows_named() -> Iterator[None]:
    """Check which rows ms-swift leaves out of each data set that it loads within the block."""
    from datasets import Dataset
    from swift.dataset import DatasetLoader

    def load(upstream: Callable[..., Any], loader: Any, syntax: Any, *args: Any, **kw: Any) -> Any:
        found: list[Findings] = []

        def check(map_: Callable[..., Any], rows: Any, function: Any = None, **kw: Any) -> Any:
            mapped = map_(rows, function, **kw)
            if getattr(function, "__name__", "") == "batched_preprocess":
                preprocessor, num_kept = function.__self__, len(mapped)
                found.append(check_left_out(syntax.dataset, preprocessor, rows, num_kept))
            return mapped

        # Streams are another class: trainings refuse them.
        with wrapped(Dataset, "map", check):
            loaded = upstream(loader, syntax, *args, **kw)
        # Only after `map`: an error within it would leave other ranks waiting.
        for findings in found:
            enforce(findings)
        return loaded

    with wrapped(DatasetLoader, "load", load):
        yield


def check_left_out(
    name: str, preprocessor: RowPreprocessor, rows: Dataset, num_kept: int
) -> Findings:
    """Warn of left-out rows, with the first one and the cause; refuse a data set with no other."""
    setting, num_rows, first, is_filter = f"Data set {name}", len(rows), "", False
    num_left_out = num_rows - num_kept
    if num_left_out > 0 and (found := first_left_out(preprocessor, rows)):
        row, raised = found
        kind = type(preprocessor)
        # A preprocessor of the user's own may filter rows.
        is_filter = raised is None and not kind.__module__.startswith("swift.")
        reason = reason_of(raised) if raised else f"{kind.__name__} returns no row for it"
        first = f"; the first is {name_of({**row, 'dataset': name})}: {reason}"
        if (objects := row.get("objects")) is not None:
            first += f" (objects: {short(objects)}; expected {OBJECTS})"
    # ms-swift would end in a `ZeroDivisionError`.
    if num_kept == 0:
        remedy = (
            'Expected {"messages": [...], "images": ["1.png"], ...}; --columns renames columns.'
        )
        yield error(setting, f"no row is left of {num_rows}{first}.", remedy)
    elif num_left_out > 0:
        level = note if is_filter else warning
        yield level(setting, f"ms-swift leaves out {num_left_out} of {num_rows} rows{first}.")


def first_left_out(
    preprocessor: RowPreprocessor, rows: Dataset
) -> tuple[Row, Exception | None] | None:
    """Return the first row that the preprocessor leaves out, with the error that it raises; None
    if it leaves out none of the first `MAX_SEARCHED` rows."""
    from swift.dataset.preprocessor import core

    for row in islice(rows, MAX_SEARCHED):
        batch = {name: [value] for name, value in row.items()}
        try:
            # Its warning recommends `strict=False`, which trainings use already.
            with replaced(core.logger, "warning", lambda *_: None):
                made = preprocessor.batched_preprocess(
                    batch, strict=True, ignore_max_length_error=True
                )
        except Exception as e:  # a user's code raises anything
            return row, e
        if not any(map(len, made.values())):
            return row, None
    return None
