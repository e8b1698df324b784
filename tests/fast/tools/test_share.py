"""The package has the plugin file and the presets, and the launch script runs copies of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.dev.presets import rendered
from swift_grpo_ext.tools import share
from swift_grpo_ext.tools.cli import main

ROOT = Path(__file__).resolve().parents[3]


def test_what_the_package_shares_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    shared = [path for path in share.SHARE.rglob("*") if not path.is_dir()]
    assert all(path.is_file() for path in shared), "a link leads nowhere"
    assert share.LAUNCH_SCRIPT.read_text() == (ROOT / "scripts/launch.sh").read_text()
    assert main(["plugin-path"]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file.is_absolute()
    assert file.read_text() == (ROOT / "plugins/grpo_ext.py").read_text()


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
