"""Pairs of runs whose updates were made to differ in one value each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import diff
from swift_grpo_ext.tools.updates import compare_updates
from tests.tools.test_diff import write


def log(folder: Path, *steps: int, **changes: Any) -> Path:
    """Log these steps as ms-swift does, and save the weights of each; changes are the last's."""
    folder.mkdir(exist_ok=True)
    with (folder / "logging.jsonl").open("a", encoding="utf-8") as f:
        for step in steps:
            values = {"loss": 0.1 * step, "grad_norm": 1.0, "learning_rate": 1e-6}
            values |= changes if step == steps[-1] else {}
            of_time = {"step_time": 0.5, "global_step/max_steps": f"{step}/3"}
            f.write(json.dumps(values | of_time) + "\n")
            f.write(json.dumps({"eval_loss": 1.0, **of_time}) + "\n")
            checkpoint = folder / f"checkpoint-{step}"
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / "model.safetensors").write_bytes(bytes([step]))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"grad_norm": 1.0000001}, "step 2: grad_norm is 1.0 in A and 1.0000001 in B"),
        ({"loss": 0.3, "grad_norm": 2.0}, "step 2: loss is 0.2 in A and 0.3 in B"),
        ({"kl": 0.5}, "step 2: kl is not logged in A and 0.5 in B"),
        ({"grad_norm": math.nan}, "step 2: grad_norm is 1.0 in A and nan in B"),
        ({"step_time": 9.0}, "None"),
    ],
)
def test_the_first_value_that_differs(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    found = compare_updates(log(tmp_path / "a", 1, 2, 3), log(tmp_path / "b", 1, 2, **changes))
    assert str(found.difference) == expected
    same = log(tmp_path / "c", 1, 2, **changes)
    assert compare_updates(tmp_path / "b", same).difference is None


def test_weights_that_no_log_tells_of(tmp_path: Path) -> None:
    one, other = log(tmp_path / "a", 1, 2), log(tmp_path / "b", 1, 2, 3)
    assert compare_updates(one, other).checkpoint == "checkpoint-2"
    (other / "checkpoint-2/model.safetensors").write_bytes(b"\0")
    found = compare_updates(one, other)
    expected = "step 2: the weights differ, checkpoint-2"
    assert str(found.difference) == f"{expected}/model.safetensors"
    (other / "checkpoint-2/model.safetensors").unlink()
    assert str(compare_updates(one, other).difference) == f"{expected}/model.safetensors"


def test_a_resumed_run_is_equal_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has logged a step twice, the first time with a line cut short."""
    one, other = (log(write(tmp_path / name), 1, 2) for name in "ab")
    with (other / "logging.jsonl").open("a", encoding="utf-8") as f:
        f.write('{"loss": 0.7, "global_step/ma\n')
    log(other, 3)
    log(one, 3)
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.splitlines()[3] == (
        "Equal to the end: prompts, media, seeds, tokens, log-probabilities, rewards and "
        "advantages; learning_rate, loss, grad_norm of 3 steps in logging.jsonl; the weights of "
        "checkpoint-3."
    )


def test_what_was_not_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.endswith(
        "rewards and advantages; no step is in both logs; no checkpoint of weights is in both "
        "runs.\n"
    )
    log(one, 1, 2)
    log(other, 1, 2, loss=0.5)
    assert diff(one, other).difference is None
    assert main(["diff", str(one), str(other)]) == 1
    assert (
        "First update that differs: step 2: loss is 0.2 in A and 0.5 in B.\n"
        in capsys.readouterr().out
    )
