"""Every command finds a run by its training's --output_dir."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swift.utils import add_version_to_work_dir

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.runs import find_run, find_runs, run_name
from tests.rig.view.runs import Writer, make_rows

VERSIONS = [f"v{number}-20261127-0930{number:02d}" for number in (0, 9, 10)]


def write(folder: Path) -> Path:
    Writer(folder).write([*make_rows(0)])
    (folder / "args.json").write_text(json.dumps({"seed": 42, "tuner_type": "full"}))
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1/args.json").touch()
    return folder


def test_output_dir_names_its_newest_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 10 is newer than 9. A folder that no training wrote to is no version."""
    *others, newest = [write(tmp_path / "my-run" / name) for name in VERSIONS]
    (tmp_path / "my-run/v11-20261127-093011").mkdir()
    (tmp_path / "my-run/runs").mkdir()
    assert find_runs(tmp_path / "my-run") == [newest]
    assert capsys.readouterr().err == f"{tmp_path}/my-run: using its newest run, {newest.name}.\n"
    assert [find_run(run) for run in others] == others
    assert run_name(newest) == f"my-run/{newest.name}"
    assert capsys.readouterr().err == ""
    for mark in ("args.json", "logging.jsonl"):  # a run that has just begun
        begun = tmp_path / mark.partition(".")[0]
        begun.mkdir()
        (begun / mark).touch()
        assert (find_run(begun), run_name(begun)) == (begun, begun.name)
    for number in range(2):  # as ms-swift names them
        version = write(Path(add_version_to_work_dir(str(tmp_path / "other"))))
        assert version.name.startswith(f"v{number}-")
        assert find_run(tmp_path / "other") == version


def test_a_folder_without_a_run_or_with_several(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b" / VERSIONS[0])
    for number in range(140):
        (tmp_path / f"data/{number:03d}").mkdir(parents=True)
    assert find_runs(tmp_path) == [one, other]
    assert [find_run(tmp_path / name) for name in ("a", "b")] == [one, other]
    several = rf"holds 2 runs, expected one: give one of {one}, {other}"
    with pytest.raises(ValueError, match=several):
        find_run(tmp_path)
    for path, message in {
        tmp_path / "data": r"data holds no run .* has 000, .*, \d+, \.\.\.\. Give the --output",
        tmp_path / "c": rf"c holds no run .*{tmp_path} has a, b, data\.",
        one / "args.json": "args.json holds no run .* has args.json, checkpoint-1, rewards",
        one / "checkpoint-1": "checkpoint-1 holds no run .* has args.json",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            find_runs(path)


def test_every_command_finds_a_default_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are in ms-swift's versions of output/my-run. A folder without a run, or with several, is
    refused."""
    for name in ("my-run", "other"):
        write(tmp_path / "output" / name / VERSIONS[0])
    write(tmp_path / "output/my-run" / VERSIONS[1])
    monkeypatch.chdir(tmp_path)
    one, other = "output/my-run", "output/other"
    taken = f"{one}: using its newest run, {VERSIONS[1]}.\n"
    commands = [
        (["view", one, "--output", "page.html"], 0, "page.html\n"),
        (["diff", one, other], 0, f"A: {one}/{VERSIONS[1]}\nB: {other}/{VERSIONS[0]}\nEqual to"),
        (["compare", "--baseline", one, "--candidate", other], 0, "1 pair(s) of runs, 2 prompts"),
        (["replay", one, "--round", "7", "--group", "0", "--phase", "eval"], 2, ""),
    ]
    for command, status, expected in commands:
        assert main(command) == status
        printed = capsys.readouterr()
        assert printed.out.startswith(expected)
        assert printed.err.startswith(f"loading ...\n{taken}")
    assert f"{one}/{VERSIONS[1]} holds no group 0 of eval round 7.0" in printed.err
    assert "<title>my-run/v9-20261127-093009 – " in Path("page.html").read_text(encoding="utf-8")
    for several in (["diff", "output", one], ["replay", "output", "--round", "0", "--group", "0"]):
        assert main(several) == 2
        assert "output holds 2 runs, expected one: give one of output/my-run" in (
            capsys.readouterr().err
        )
    assert main(["view", "."]) == 2
    assert "swift-grpo-ext view: . holds no run (args.json" in capsys.readouterr().err
