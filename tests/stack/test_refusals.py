"""The real `swift` prints a refusal alone, without a traceback, before it loads weights.

A case for each place of a start: flags, loading of rows, checks. `test_check.py` has all refusals.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.rig.processes import PLUGIN, swift
from tests.rig.rounds import PRESET, server_argv, write_lines

CASES = {
    "missing image": (
        ("--dataset", "{folder}/rows.jsonl"),
        r"--dataset: row 1 of .*rows\.jsonl \(which asks '<image>Which digit is this\?'\): "
        r"images\[0\]: '.*none\.png' does not exist\. Correct",
    ),
    "boxes without a list": (
        ("--dataset", "{folder}/boxes.jsonl"),
        r"Data set .*boxes\.jsonl: no row is left of 8; the first is row 1 of .*boxes\.jsonl "
        r"\(which asks '<image>Which .*'\): .* \(objects: .*\[1, 2, 3, 4\].*; expected \{",
    ),
    "unknown flag": (
        ("--logit_shim", "off"),
        r"Unknown argument --logit_shim .*did you mean --logits_shim\?",
    ),
}
"""Arguments, and a regular expression of the error."""


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_refused(case: str, assets: Path, tmp_path: Path) -> None:
    argv, expected = CASES[case]
    question = [{"role": "user", "content": "<image>Which digit is this?"}]
    row = {"messages": question, "solution": "7", "images": [str(tmp_path / "none.png")]}
    write_lines(tmp_path / "rows.jsonl", [row] * 8)
    boxes = {"ref": ["digit"], "bbox": [1, 2, 3, 4]}
    write_lines(tmp_path / "boxes.jsonl", [{**row, "objects": boxes}] * 8)
    finished = swift(
        *("rlhf", str(PRESET), "--external_plugins", PLUGIN, "examples/digits/rewards.py"),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(assets / "digits/train.jsonl")),
        *("--output_dir", str(tmp_path / "run")),
        *(word.format(folder=tmp_path) for word in argv),
        log=tmp_path / "log",
    )
    assert finished.returncode == 1
    assert re.search(f"^error: {expected}", finished.output, re.MULTILINE), finished.cause
    # At the beginning of a line: ms-swift logs tracebacks of rows that it leaves out.
    assert not re.search(r"^(\[rank0\]: )?Traceback", finished.output, re.MULTILINE)
    assert "Loading weights" not in finished.output


def test_a_server_whose_port_is_taken_is_refused(assets: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ("rollout", *server_argv(assets), "--port", str(port))
        finished = swift(*argv, log=tmp_path / "log")
    assert finished.returncode == 1
    expected = rf"--port {port}: is in use.*--vllm_server_port"
    assert re.search(f"^error: {expected}", finished.output, re.MULTILINE), finished.cause
