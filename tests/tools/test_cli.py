"""`swift-grpo-ext flags`, the documentation's table that it makes, and `swift-grpo-ext samples`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.record.reader import read_samples
from swift_grpo_ext.tools import export
from swift_grpo_ext.tools.cli import flag_table, main, steps
from swift_grpo_ext.version import __version__
from tests.record.rows import ROW, sample_id, write_session

PAGE = Path(__file__).resolve().parents[2] / "docs/flags.md"


def test_flags_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    for name in flag_names():
        assert f"--{name} " in output


def test_the_page_holds_the_table_of_this_version() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert flag_table() in text, "paste the output of `swift-grpo-ext flags --markdown`"


def test_steps_count_both_ends() -> None:
    assert steps("3:5") == range(3, 6)


def test_an_error_of_a_command_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err.startswith("swift-grpo-ext audit: ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two sessions: rounds 0 and 1, of 2 groups of 2, and an evaluation of 1; round 1 anew."""
    folder = tmp_path / "run"
    rows = [
        replace(
            ROW,
            sample_id=sample_id(step, group=group, index=index),
            seed=4 * step + 2 * group + index,
        )
        for step in (0, 1)
        for group in (0, 1)
        for index in (0, 1)
    ]
    rows[0] = replace(rows[0], text="七 👍", logprobs=[-float("inf"), float("nan"), -0.5])
    rows[1] = replace(rows[1], finish_reason=None, token_ids=[], logprobs=None)
    greedy = replace(ROW, sample_id=sample_id(1, "eval"), seed=None, finish_reason="length")
    write_session(folder, [*rows, greedy])
    write_session(folder, rows[4:], session=1, start_step=1)
    return folder


def test_samples_sums_up(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["phase", "rounds", "groups", "samples", "turns", "tokens", "ended", "by"],
        ["eval", "1", "1", "1", "1", "3", "length", "100.0%"],
        ["train", "2", "4", "8", "8", "21", "stop", "87.5%,", "unknown", "12.5%"],
        [],
        ["session", "from", "step", "files", "turns", "superseded", "unread", "bytes"],
        ["0", "0", "1", "9", "4", "0"],
        ["1", "1", "1", "4", "0", "0"],
        [],
        ["seeds:", "8", "recorded,", "0", "repeated"],
    ]
    assert lines[1].startswith(" eval       1 ")


def test_samples_counts_repeated_seeds_and_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_session(
        tmp_path, [replace(ROW, sample_id=sample_id(index=i // 2, turn=i % 2)) for i in range(4)]
    )
    assert main(["samples", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[1].split()[:6] == ["train", "1", "1", "2", "4", "12"]
    assert "seeds: 4 recorded, 3 repeated" in output


def test_samples_of_an_empty_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples").mkdir()
    assert main(["samples", str(tmp_path)]) == 0
    assert "seeds: 0 recorded, 0 repeated" in capsys.readouterr().out


def test_samples_to_jsonl(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "样本.jsonl"
    assert main(["samples", str(run_dir), "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert [row.pop(column.name) for column in export.SCORE_COLUMNS] == [None] * 8
    assert "七 👍" in output.read_text(encoding="utf-8")
    assert rows[1].pop("logprobs") == [None, None, -0.5]
    expected = read_samples(run_dir).to_pylist()
    del expected[1]["logprobs"]
    assert rows == expected


def test_samples_to_parquet(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "ROWS_PER_ROW_GROUP", 5)
    output = tmp_path / "samples.parquet"
    assert main(["samples", str(run_dir), "--output", str(output)]) == 0
    written = pq.ParquetFile(output)
    assert [written.metadata.row_group(i).num_rows for i in range(2)] == [5, 4]
    rows = written.read().select(read_samples(run_dir).schema.names).to_pylist()
    assert repr(rows) == repr(read_samples(run_dir).to_pylist())  # with NaN


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("samples.csv", "expected a name that ends with .parquet or .jsonl"),
        ("missing/samples.jsonl", "No such file or directory"),
        ("missing/samples.parquet", "No such file or directory"),
    ],
)
def test_samples_to_a_wrong_place(
    run_dir: Path, tmp_path: Path, output: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(run_dir), "--output", str(tmp_path / output)]) == 1
    message = capsys.readouterr().err
    assert error in message
    assert output in message


def test_an_export_that_fails_leaves_the_file_before(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "samples.jsonl"
    output.write_text("before")
    monkeypatch.setattr(export, "_json_value", lambda value: {object()})
    with pytest.raises(TypeError):
        main(["samples", str(run_dir), "--output", str(output)])
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "samples.jsonl"]


def test_samples_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(tmp_path)]) == 1
    assert "no output folder of a run that logged samples" in capsys.readouterr().err
