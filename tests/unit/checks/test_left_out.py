"""Rows that ms-swift leaves out as it loads a data set are counted, and the first is named (M1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swift.dataset import DATASET_MAPPING, DatasetMeta, RowPreprocessor, load_dataset

from swift_grpo_ext.checks.finding import Finding, collected
from swift_grpo_ext.checks.left_out import left_out_rows_named
from tests.rig.checks import said

BOXES = {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}
Row = dict[str, Any]


def asks(text: str | None = "Which?", **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": text}], **columns}


def loaded(rows: list[Row], path: Path, **options: Any) -> tuple[list[str], int | None]:
    """Load a file as a training does; return the findings and the number of rows, None if ms-swift
    fails."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found: list[Finding] = []
    num_rows = None
    with collected(found.append), left_out_rows_named():
        try:
            data, _ = load_dataset(
                [str(path)], remove_unused_columns=False, shuffle=True, **options
            )
            num_rows = len(data)
        except ZeroDivisionError:
            pass
    return said(found), num_rows


@pytest.mark.parametrize(
    ("rows", "num_proc", "num_kept", "expected"),
    [
        ([asks(), asks(objects=None), asks(objects=BOXES)], 1, 3, None),
        ([asks(objects=each) for each in (BOXES, {}) * 3], 1, 3, "3 of 6 rows; the first is row 2"),
        ([asks(objects=each) for each in (BOXES, {}) * 3], 2, 3, "3 of 6 rows; the first is row 2"),
        ([asks(objects={})] * 2, 1, None, "no row is left of 2; the first is row 1"),
    ],
)
def test_rows_that_a_training_leaves_out(
    rows: list[Row], num_proc: int, num_kept: int | None, expected: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    found, num_rows = loaded(rows, path, num_proc=num_proc)
    assert num_rows == num_kept
    assert len(found) == (expected is not None)
    if expected is not None:
        begin = "warning: Data set {}: ms-swift leaves out" if num_kept else "error: Data set {}:"
        assert found[0].startswith(f"{begin.format(path)} {expected} of {path}")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (asks(objects={}), "KeyError: 'bbox' (objects: {}; expected {"),
        (asks(objects={"bbox": [1, 2]}), "TypeError: object of type 'int' has no len() (objects: "),
        (asks(None), "AssertionError: message: {'role': 'user', 'content': None}"),
        ({"messages": []}, "MessagesPreprocessor returns no row for it"),
    ],
)
def test_why_a_row_is_left_out(row: Row, expected: str, tmp_path: Path) -> None:
    [told], _ = loaded([asks(objects=BOXES), row], tmp_path / "rows.jsonl")
    assert f": {expected}" in told
    assert ("expected {" in told) == ("objects" in row)


class Renamed(RowPreprocessor):
    def preprocess(self, row: Row) -> Row:
        return asks(row["question_text"])


class Even(RowPreprocessor):
    """Filters, as ms-swift's documentation shows it."""

    def preprocess(self, row: Row) -> Row | None:
        return asks(row["question"]) if row["solution"] % 2 == 0 else None


@pytest.mark.parametrize(
    ("preprocessor", "level", "expected"),
    [
        (Renamed, "error", "no row is left of 3; the first is row 1 of {}: KeyError:"),
        (Even, "note", "ms-swift leaves out 2 of 3 rows; the first is row 1 of {}:"),
    ],
)
def test_what_a_preprocessor_of_the_users_leaves_out(
    preprocessor: type[RowPreprocessor],
    level: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "rows.jsonl"
    meta = DatasetMeta(dataset_path=str(path), preprocess_func=preprocessor())
    monkeypatch.setitem(DATASET_MAPPING, "mine", meta)  # as `register_dataset` does
    monkeypatch.setattr("swift.dataset.dataset_syntax._dataset_meta_mapping", None)
    [told], _ = loaded([{"question": "?", "solution": n} for n in (1, 2, 3)], path)
    assert told.startswith(f"{level}: Data set {path}: {expected.format(path)}")
