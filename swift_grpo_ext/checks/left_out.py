"""Rows that ms-swift leaves out as it loads a data set: how many, which is the first, and why.

A preprocessor of ms-swift's (4.6, dataset/preprocessor/core.py, `batched_preprocess`) drops each
row that it fails on, or makes nothing of. The log says why, at the level INFO and without the row.
A data set with no row left ends in a `ZeroDivisionError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Findings, error, note, warning
from swift_grpo_ext.checks.rows import name_of, reason_of
from swift_grpo_ext.upstream.patches import replaced, wrapped
from swift_grpo_ext.upstream.rows import short

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.dataset import RowPreprocessor

Row = Mapping[str, Any]

MAX_SEARCHED = 20_000  # rows that are searched for the first that is left out: some seconds
OBJECTS = '{"ref": ["..."], "bbox": [[x1, y1, x2, y2], ...]}, or null'


@dataclass(frozen=True)
class Preprocessed:
    """A preprocessor was given the rows of a data set, and kept some of them."""

    name: str  # of the data set
    preprocessor: RowPreprocessor
    rows: Dataset
    num_kept: int


@contextmanager
def watched(tell: Callable[[Preprocessed], None]) -> Iterator[None]:
    """Call `tell` with each data set that ms-swift loads within the block, while no rank waits for
    another. Streams, which trainings refuse, are not watched."""
    from datasets import Dataset
    from swift.dataset import DatasetLoader

    def load(upstream: Callable[..., Any], loader: Any, syntax: Any, *args: Any, **kw: Any) -> Any:
        found: list[Preprocessed] = []

        def noted(map_: Callable[..., Any], rows: Any, function: Any = None, **kw: Any) -> Any:
            made = map_(rows, function, **kw)
            if getattr(function, "__name__", "") == "batched_preprocess":
                found.append(Preprocessed(syntax.dataset, function.__self__, rows, len(made)))
            return made

        with wrapped(Dataset, "map", noted):
            made = upstream(loader, syntax, *args, **kw)
        for each in found:
            tell(each)
        return made

    with wrapped(DatasetLoader, "load", load):
        yield


def check_left_out(given: Preprocessed, setting: str) -> Findings:
    """Say how many rows were left out, which is the first, and why; refuse an empty rest."""
    num_rows, first, is_filter = len(given.rows), "", False
    num_left_out = num_rows - given.num_kept
    if num_left_out > 0 and (found := first_left_out(given)):
        row, raised = found
        kind = type(given.preprocessor)
        # A preprocessor of the user's own may filter rows.
        is_filter = raised is None and not kind.__module__.startswith("swift.")
        reason = reason_of(raised) if raised else f"{kind.__name__} makes nothing of it"
        row_name = name_of({**row, "dataset": given.name})
        first = f"; the first is {row_name}: {reason}"
        if (objects := row.get("objects")) is not None:
            first += f" (objects: {short(objects)}; expected {OBJECTS})"
    if given.num_kept == 0:
        remedy = (
            'Expected {"messages": [...], "images": ["1.png"], ...}; --columns renames columns.'
        )
        yield error(setting, f"no row is left of {num_rows}{first}.", remedy)
    elif num_left_out > 0:
        say = note if is_filter else warning
        yield say(setting, f"ms-swift leaves out {num_left_out} of {num_rows} rows{first}.")


def first_left_out(given: Preprocessed) -> tuple[Row, Exception | None] | None:
    """Return the first row that the preprocessor leaves out, with what it raises; None where that
    is not among the first `MAX_SEARCHED`."""
    from swift.dataset.preprocessor import core

    for row in islice(given.rows, MAX_SEARCHED):
        batch = {name: [value] for name, value in row.items()}
        try:
            # It would recommend `strict=False`, as it is in the training.
            with replaced(core.logger, "warning", lambda *_: None):
                made = given.preprocessor.batched_preprocess(
                    batch, strict=True, ignore_max_length_error=True
                )
        except Exception as e:  # a user's code raises anything
            return row, e
        if not any(map(len, made.values())):
            return row, None
    return None
