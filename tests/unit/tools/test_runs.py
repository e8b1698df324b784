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


def write(folder: Path, seed: int = 42) -> Path:
    Writer(folder).write([*make_rows(0)])
    (folder / "args.json").write_text(json.dumps({"seed": seed, "tuner_type": "full"}))
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


def test_ms_swift_names_versions_so(tmp_path: Path) -> None:
    for number in range(2):
        version = write(Path(add_version_to_work_dir(str(tmp_path))))
        assert version.name.startswith(f"v{number}-")
        assert find_run(tmp_path) == version


@pytest.mark.parametrize("mark", ["args.json", "logging.jsonl"])
def test_a_run_that_has_just_begun_is_one(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    assert (find_run(tmp_path), run_name(tmp_path)) == (tmp_path, tmp_path.name)


def test_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b" / VERSIONS[0])
    (tmp_path / "data").mkdir()
    assert find_runs(tmp_path) == [one, other]
    with pytest.raises(
        ValueError, match=rf"holds 2 runs, expected one: give one of {one}, {other}"
    ):
        find_run(tmp_path)
    assert [find_run(tmp_path / name) for name in ("a", "b")] == [one, other]


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    for number in range(140):
        (tmp_path / f"data/{number:03d}").mkdir(parents=True)
    for path, message in {
        tmp_path / "data": r"data holds no run .* has 000, .*, \d+, \.\.\.\. Give the --output",
        tmp_path / "rum": rf"rum holds no run .*{tmp_path} has data, run\.",
        run / "args.json": "args.json holds no run .* has args.json, checkpoint-1, rewards",
        run / "checkpoint-1": "checkpoint-1 holds no run .* has args.json",
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
    ]
    for command, status, expected in commands:
        assert main(command) == status
        printed = capsys.readouterr()
        assert printed.out.startswith(expected)
        assert printed.err.startswith(f"loading ...\n{taken}")
    assert "<title>my-run/v9-20261127-093009 – " in Path("page.html").read_text(encoding="utf-8")
    assert main(["replay", one, "--round", "7", "--group", "0"]) == 2
    assert f"{one}/{VERSIONS[1]} holds no group 0 of train round 7.0" in capsys.readouterr().err
    for several in (["diff", "output", one], ["replay", "output", "--round", "0", "--group", "0"]):
        assert main(several) == 2
        assert "output holds 2 runs, expected one: give one of output/my-run" in (
            capsys.readouterr().err
        )
    assert main(["view", "."]) == 2
    assert "swift-grpo-ext view: . holds no run (args.json" in capsys.readouterr().err
