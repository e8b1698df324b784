"""The tool call example: turns end with calls, and training learns from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.record.reader import read_samples
from swift_grpo_ext.record.row import to_rows
from tests.stack.processes import swift

pytestmark = pytest.mark.stack

STOP = "</answer>"


def test_the_preset_trains_on_calls(assets: Path, tmp_path: Path) -> None:
    command = [
        *("rlhf", "examples/tool_call/grpo.yaml", "--model", str(assets / "tiny_vlm")),
        *("--dataset", str(assets / "digits/train.jsonl"), "--max_steps", "2"),
        *("--output_dir", str(tmp_path / "run"), "--add_version", "false"),
    ]
    finished = swift(*command, log=tmp_path / "log")
    assert finished.returncode == 0, finished.cause
    rows = to_rows(read_samples(tmp_path / "run"))
    assert {row.sample_id.step for row in rows} == {0, 1}
    assert {row.sample_id.turn for row in rows} == {0, 1}
    first_turns = [row for row in rows if row.sample_id.turn == 0]
    # The set-up's model is in form in 96% or more; which samples are not differs by processor.
    assert sum(row.stop_reason == STOP for row in first_turns) > 0.75 * len(first_turns)
    stopped = [row for row in rows if row.stop_reason == STOP]
    for row in stopped:
        assert row.text.endswith(STOP)
        assert row.text.count(STOP) == 1
        assert row.finish_reason == "stop"
        assert row.logprobs is not None
        assert len(row.logprobs) == len(row.token_ids)
        assert 151645 not in row.token_ids  # no end of a turn
    assert "NaN" not in (tmp_path / "run/logging.jsonl").read_text(encoding="utf-8")
