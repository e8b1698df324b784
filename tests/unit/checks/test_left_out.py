"""Rows that ms-swift leaves out as it loads a data set are counted, and the first is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from swift.dataset import DATASET_MAPPING, DatasetMeta, RowPreprocessor, load_dataset

from swift_grpo_ext.checks.finding import Finding, collected
from swift_grpo_ext.checks.left_out import left_out_rows_named

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
    return [f"{each.level}: {each.sentence}" for each in found], num_rows


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([asks(), asks(objects=None), asks(objects=BOXES)], None),
        ([asks(objects=each) for each in (BOXES, {}) * 3], "3 of 6 rows; the first is row 2 of"),
        ([asks(objects={"bbox": [[1, 2]]}), asks(None)], "1 of 2 rows; the first is row 2 of"),
        ([asks(objects={})] * 2, "no row is left of 2; the first is row 1 of"),
    ],
)
def test_rows_that_a_training_leaves_out(
    rows: list[Row], expected: str | None, num_proc: int, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    found, num_rows = loaded(rows, path, num_proc=num_proc)
    assert len(found) == (expected is not None)
    if expected is None:
        assert num_rows == len(rows)
    elif "no row" in expected:
        assert num_rows is None
        assert found[0].startswith(f"error: Data set {path}: {expected} {path} (which")
    else:
        begin = f"warning: Data set {path}: ms-swift leaves out {expected} {path}"
        assert found[0].startswith(begin)
        assert num_rows == len(rows) - int(expected[0])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (asks(objects={}), "KeyError: 'bbox' (objects: {}; expected {"),
        (
            asks(objects=[[1, 2, 3, 4]]),
            "AttributeError: 'list' object has no attribute 'k",
        ),
        (
            asks(objects={"bbox": [1, 2]}),
            "TypeError: object of type 'int' has no len() (objects: {'",
        ),
        (asks(None), "AssertionError: message: {'role': 'user', 'content': None}"),
        ({"messages": []}, "MessagesPreprocessor returns no row for it"),
    ],
)
def test_why_a_row_is_left_out(row: Row, expected: str, tmp_path: Path) -> None:
    [said], _ = loaded([asks(objects=BOXES), row], tmp_path / "rows.jsonl")
    assert f": {expected}" in said
    assert ("expected {" in said) == ("objects" in row)


class Renamed(RowPreprocessor):
    def preprocess(self, row: Row) -> Row:
        return asks(row["question_text"])


class Even(RowPreprocessor):
    """Filters, as ms-swift's documentation shows it."""

    def preprocess(self, row: Row) -> Row | None:
        return asks(row["question"]) if row["solution"] % 2 == 0 else None


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        (
            Renamed,
            "error: Data set {path}: no row is left of 3; the first is row 1 of {path}: KeyError:",
        ),
        (
            Even,
            "note: Data set {path}: ms-swift leaves out 2 of 3 rows; the first is row 1 of {path}:",
        ),
    ],
)
def test_what_a_preprocessor_of_the_users_leaves_out(
    preprocessor: Callable[[], Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "rows.jsonl"
    meta = DatasetMeta(dataset_path=str(path), preprocess_func=preprocessor())
    monkeypatch.setitem(DATASET_MAPPING, "mine", meta)  # as `register_dataset` does
    monkeypatch.setattr("swift.dataset.dataset_syntax._dataset_meta_mapping", None)
    rows: list[Mapping[str, Any]] = [{"question": "?", "solution": n} for n in (1, 2, 3)]
    [said], _ = loaded([dict(row) for row in rows], path)
    assert said.startswith(expected.format(path=path))
