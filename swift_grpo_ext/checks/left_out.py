"""Rows that ms-swift leaves out as it loads a data set: how many, which is the first, and why.

A preprocessor of ms-swift's (4.6, dataset/preprocessor/core.py, `batched_preprocess`) drops each
row that it fails on, or makes nothing of. The log says why, at the level INFO and without the row.
A data set with no row left ends in a `ZeroDivisionError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Findings, error, note, warning
from swift_grpo_ext.checks.rows import name_of, reason_of
from swift_grpo_ext.upstream.patches import replaced, wrapped
from swift_grpo_ext.upstream.rows import short

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from swift.dataset import RowPreprocessor

Row = Mapping[str, Any]

NUM_STREAMED = 512  # first rows of a stream
MAX_SEARCHED = 20_000  # rows that are searched for the first that is left out: some seconds
BOXES = "[[x1, y1, x2, y2], ...] or [[x, y], ...]"
OBJECTS = '{"ref": ["..."], "bbox": [[x1, y1, x2, y2], ...]}, or null'


@dataclass(frozen=True)
class Preprocessed:
    """A preprocessor was given some rows, and made others of them."""

    name: str  # of the data set
    num_kept: int | None  # None of a stream, which is not read yet
    preprocessor: RowPreprocessor | None = None  # None of a function of the user's own
    rows: Dataset | IterableDataset | tuple[()] = ()  # that it was given


@contextmanager
def watched(tell: Callable[[Preprocessed], None]) -> Iterator[None]:
    """Have `tell` know of each data set that ms-swift loads within the block, while no rank waits
    for another."""
    from datasets import Dataset, IterableDataset
    from swift.dataset import DatasetLoader

    def num_rows(data: object) -> int | None:
        return len(data) if isinstance(data, Dataset) else None

    def load(upstream: Callable[..., Any], loader: Any, syntax: Any, *args: Any, **kw: Any) -> Any:
        found: list[Preprocessed] = []

        def noted(map_: Callable[..., Any], rows: Any, function: Any = None, **kw: Any) -> Any:
            made = map_(rows, function, **kw)
            if getattr(function, "__name__", "") == "batched_preprocess":
                given = function.__self__, rows
                found.append(Preprocessed(syntax.dataset, num_rows(made), *given))
            return made

        with wrapped(Dataset, "map", noted), wrapped(IterableDataset, "map", noted):
            made = upstream(loader, syntax, *args, **kw)
        for each in found or [Preprocessed(syntax.dataset, num_rows(made))]:
            tell(each)
        return made

    with wrapped(DatasetLoader, "load", load):
        yield


def check_left_out(given: Preprocessed, setting: str, *, is_empty: bool = False) -> Findings:
    """Say how many rows were left out, which is the first, and why; refuse an empty rest.

    Args:
        is_empty: no row of a stream is left.
    """
    if given.num_kept is None:
        looked_at = list(islice(given.rows, NUM_STREAMED))
        found = list(left_out(given, looked_at))
        num_rows, num_left_out, range_name = len(looked_at), len(found), "the first "
    else:
        num_rows, range_name = len(given.rows), ""
        num_left_out, is_empty = num_rows - given.num_kept, given.num_kept == 0
        searched = islice(given.rows, MAX_SEARCHED if num_left_out > 0 else 0)
        found = list(islice(left_out(given, searched), 1))
    first, is_filter = "", False
    if found:
        row, raised = found[0]
        kind = type(given.preprocessor)
        is_filter = raised is None and not kind.__module__.startswith("swift.")
        reason = reason_of(raised) if raised else f"{kind.__name__} makes nothing of it"
        row_name = name_of({**row, "dataset": given.name})
        first = f"; the first is {row_name}: {objects_fault(row) or reason}"
    if is_empty:
        yield error(
            setting,
            f"no row is left of {range_name}{num_rows}{first}." if num_rows else "holds no rows.",
            'Expected rows such as {"messages": [...], "images": ["1.png"], ...}; --columns maps '
            "columns of other names.",
        )
    elif num_left_out > 0:
        # A preprocessor of the user's own may filter rows.
        say = note if is_filter else warning
        yield say(
            setting, f"ms-swift leaves out {num_left_out} of {range_name}{num_rows} rows{first}."
        )


def left_out(given: Preprocessed, rows: Iterable[Row]) -> Iterator[tuple[Row, Exception | None]]:
    """Yield each of some rows that the preprocessor leaves out, with what it raises."""
    from swift.dataset.preprocessor import core

    for row in rows if given.preprocessor else ():
        batch, raised = {name: [value] for name, value in row.items()}, None
        try:
            # It would recommend `strict=False`, as it is in the training.
            with replaced(core.logger, "warning", lambda *_: None):
                made = given.preprocessor.batched_preprocess(  # type: ignore[union-attr]
                    batch, strict=True, ignore_max_length_error=True
                )
            if any(map(len, made.values())):
                continue
        except Exception as e:  # a user's code raises anything
            raised = e
        # A stream's columns have a prefix meanwhile (`RowPreprocessor.__call__`).
        yield {name.removeprefix("__@"): value for name, value in row.items()}, raised


def objects_fault(row: Row) -> str | None:
    """Say what is wrong with a row's column `objects`, where ms-swift raises a KeyError or so."""
    objects = row.get("objects")
    if objects is None:
        return None
    boxes = objects.get("bbox") if isinstance(objects, Mapping) else None
    if boxes is None:
        if isinstance(objects, Mapping):  # without what Arrow adds
            objects = {name: value for name, value in objects.items() if value is not None}
        return f"objects: is {short(objects)}; expected {OBJECTS}"
    if isinstance(boxes, list) and all(isinstance(b, list) and len(b) in (2, 4) for b in boxes):
        return None
    return f"objects.bbox: is {short(boxes)}; expected a list of boxes, {BOXES}"
