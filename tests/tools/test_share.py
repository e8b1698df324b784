"""The installed package has the plugin file and the presets, and the launch script runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_grpo_ext.tools import share
from swift_grpo_ext.tools.check.settings import read_run
from swift_grpo_ext.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
NAMES = share.preset_names()


def test_what_the_package_shares_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    shared = [path for path in share.SHARE.rglob("*") if not path.is_dir()]
    assert all(path.is_file() for path in shared), "a link leads nowhere"
    assert share.LAUNCH_SCRIPT.read_text() == (ROOT / "scripts/launch.sh").read_text()
    assert main(["plugin-path"]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file.is_absolute()
    assert file.read_text() == (ROOT / "plugins/grpo_ext.py").read_text()


@pytest.mark.parametrize("name", ["colocate_1gpu", "cpu_2x6", "multinode_2x2"])
def test_a_preset_is_copied_with_all_that_it_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--preset", name]) == 0
    output = capsys.readouterr().out
    is_served = (folder / f"{name}.rollout.yaml").is_file()
    run = read_run(folder / (name if is_served else f"{name}.yaml"))
    for _, settings in run.sides:
        assert all((folder / plugin).is_file() for plugin in settings["external_plugins"])
    if is_served:
        command = [*output.strip().splitlines()[-1].partition(": ")[2].split(), "--dry-run"]
        assert ("--cpu" in command) == (name == "cpu_2x6")
        if "--rollout-nodes" in command:
            command += ["--hosts", "a,b,c,d", "--node-rank", "2", "--logs", "logs"]
        # A stand-in for the command, whose check would take seconds of imports.
        (tmp_path / "swift-grpo-ext").write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / "swift-grpo-ext").chmod(0o755)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path}
        shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
        assert shown.returncode == 0, shown.stderr
        assert f"swift rlhf {name}.train.yaml" in shown.stdout
    assert main(["init", str(folder), "--preset", name]) == 1
    assert "is there already: nothing was copied" in capsys.readouterr().err


def test_init_lists_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in NAMES)
    assert {"colocate_1gpu", "server_2x6_lora", "server_2x6_full", "multinode_2x2"} <= set(NAMES)
    assert main(["init"]) == 1
    assert "init DIRECTORY; --list shows the presets" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "x"), "--preset", "none"]) == 1
    assert "there is no preset none; choose from colocate_1gpu" in capsys.readouterr().err
