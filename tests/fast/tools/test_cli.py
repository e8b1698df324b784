"""`swift-grpo-ext`: the options of each command, its version, its list of flags, and the plugin
file and presets that it copies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.dev.presets import rendered
from swift_grpo_ext.tools import cli, share
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.version import __version__

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/flags.md"


def test_flags_and_the_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    page = PAGE.read_text(encoding="utf-8")
    for name, values, default, text in cli.flag_rows():
        assert f"--{name} {values}  (default: {default})\n    {text}\n" in output
        escaped = values.replace("|", "\\|")
        assert f"| `--{name}` | {escaped} | {default} | {text} |" in page
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


def test_view_serves_runs_and_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "args.json").touch()
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("swift_grpo_ext.tools.view.server.serve", lambda *a: calls.append(a))
    assert main(["view", "b", "a", "--port", "0", "--host", "::1"]) == 0
    assert main(["view", "new"]) == 0
    assert capsys.readouterr().err.endswith(" of a training. The page waits for it.\n")
    assert calls == [([Path("b"), Path("a")], 0, "::1"), ([Path("new")], 8462, "127.0.0.1")]


@pytest.mark.parametrize("name", ["colocate_1gpu", "cpu_2x6", "server_2x6_lora", "multinode_2x2"])
def test_a_preset_is_copied_with_all_that_it_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--preset", name]) == 0
    *files, _, hint = capsys.readouterr().out.splitlines()
    assert sorted(files) == sorted(str(f) for f in folder.rglob("*") if f.is_file())
    command = hint.removeprefix(f"In {folder}: ")
    assert main(["init", str(folder), "--preset", name]) == 2
    assert "exists already: nothing was copied" in capsys.readouterr().err
    # The folder has all files that its files name.
    texts = [file.read_text(encoding="utf-8") for file in folder.rglob("*.yaml")]
    named = {path for text in texts for path in re.findall(r"[\w./-]+\.(?:py|sh|yaml)\b", text)}
    assert [path for path in named if not (folder / path).is_file()] == []
    if name == "colocate_1gpu":
        assert command == "swift rlhf colocate_1gpu.yaml --dataset train.jsonl"
        return
    argv = [*command.split(), "--dry-run"]
    if "--rollout-nodes" in command:
        argv += ["--hosts", "a,b,c,d", "--node-rank", "2", "--logs", "logs"]
    # A stand-in for the command: its check would take seconds of imports.
    (tmp_path / "swift-grpo-ext").symlink_to("/bin/true")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.check_output(argv, cwd=folder, env={**os.environ, "PATH": path}).decode()
    assert f"swift rlhf {name}.train.yaml" in shown


def test_presets_are_listed_and_what_their_templates_make(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`python scripts/dev/presets.py` writes them again."""
    files = share.PRESETS.iterdir()
    assert {file.name: file.read_text(encoding="utf-8") for file in files} == rendered()
    assert main(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == sorted(share.presets())
    first = "One GPU: Qwen2.5-VL-3B with LoRA, vLLM in the training process."
    assert lines[0] == f"{'colocate_1gpu':20} {first}"
    for argv, expected in (
        ([], "init DIRECTORY; --list shows the presets"),
        (["x", "--preset", "none"], "there is no preset none; choose from colocate_1gpu"),
    ):
        assert main(["init", *argv]) == 2
        assert expected in capsys.readouterr().err
