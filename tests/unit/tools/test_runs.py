"""Every command finds a run by its training's --output_dir."""

import json
from pathlib import Path

import pytest
from swift.utils import add_version_to_work_dir

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.runs import find_run, find_runs, run_name
from tests.rig.record.rows import open_log
from tests.rig.view.runs import make_rows, write

VERSIONS = [f"v{number}-20261127-0930{number:02d}" for number in (0, 9, 10)]


def make(folder: Path) -> Path:
    write(open_log(folder), [*make_rows(0)])
    (folder / "args.json").write_text(json.dumps({"seed": 42, "tuner_type": "full"}))
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1/args.json").touch()
    return folder


def test_output_dir_names_its_newest_version(tmp_path: Path) -> None:
    """Version 10 is newer than 9. A folder that no training wrote to is no version."""
    *others, newest = [make(tmp_path / "my-run" / name) for name in VERSIONS]
    (tmp_path / "my-run/v11-20261127-093011").mkdir()
    (tmp_path / "my-run/runs").mkdir()
    assert find_runs(tmp_path / "my-run") == [newest]
    assert [find_run(run) for run in others] == others
    assert run_name(newest) == f"my-run/{newest.name}"
    for mark in ("args.json", "logging.jsonl"):  # a run that has just begun
        begun = tmp_path / mark.partition(".")[0]
        begun.mkdir()
        (begun / mark).touch()
        assert (find_run(begun), run_name(begun)) == (begun, begun.name)
    version = make(Path(add_version_to_work_dir(str(tmp_path / "other"))))  # ms-swift's name
    assert find_run(tmp_path / "other") == version


def test_a_folder_without_a_run_or_with_several(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "b" / VERSIONS[0])
    for number in range(140):
        (tmp_path / f"data/{number:03d}").mkdir(parents=True)
    assert find_runs(tmp_path) == [one, other]
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
    """A folder without a run, or with several, is refused."""
    for place in (f"my-run/{VERSIONS[0]}", f"my-run/{VERSIONS[1]}", f"other/{VERSIONS[0]}"):
        make(tmp_path / "output" / place)
    monkeypatch.chdir(tmp_path)
    one, other = "output/my-run", "output/other"
    taken = f"{one}: using its newest run, {VERSIONS[1]}.\n"
    group = ["--round", "7", "--group", "0"]
    no_group = f"swift-grpo-ext replay: {one}/{VERSIONS[1]} holds no group 0 of eval round 7.0"
    for command, status, out, err in (
        (["view", one, "--output", "page.html"], 0, "page.html\n", taken),
        (["diff", one, other], 0, f"A: {one}/{VERSIONS[1]}\nB: {other}/{VERSIONS[0]}\n", taken),
        (["compare", "--baseline", one, "--candidate", other], 0, "1 pair(s) of runs", taken),
        (["replay", one, *group, "--phase", "eval"], 2, "", no_group),
        (["diff", "output", one], 2, "", "swift-grpo-ext diff: output holds 2 runs"),
    ):
        assert main(command) == status
        printed = capsys.readouterr()
        assert printed.out.startswith(out)
        assert printed.err.startswith("loading ...\n")
        assert err in printed.err
    assert "<title>my-run/v9-20261127-093009 – " in Path("page.html").read_text(encoding="utf-8")
