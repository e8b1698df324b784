"""A training's log has a line of the plugin at its beginning, and one at its end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.training import summary
from swift_grpo_ext.training.summary import RunSummary, active_features
from swift_grpo_ext.version import __version__
from tests.rig.record.rows import ROW, sample_id

ARGS: dict[str, Any] = {
    **{"use_vllm": True, "rollout_seed_mode": "sample", "sample_log": "all"},
    **{"callbacks": ["diversity"], "output_dir": "/runs/my run"},
    **{"async_generate": False, "structured_outputs_regex": None},
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
}
LOG = {"step": 1, "rollout_gap/mean": 1e-4, "rollout_gap/max": 2e-3, "reward": 0.5}


def trainer_of(*, shares: bool = True, needs_old: bool = True, **changes: Any) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(**{**ARGS, **changes}),
        completion_logps=SimpleNamespace(shares_prompts=shares),
        needs_old_logps=lambda: needs_old,
        gap_limit=0.01,
        score_listeners=[],
    )


def on(*, dropouts: int = 0, **changes: Any) -> str:
    return "; ".join(active_features(trainer_of(**changes), dropouts))


def test_active_features() -> None:
    assert on() == (
        "a seed for each sample; training reads prompts once a group where that saves time; the "
        "rollout gap is held to a limit; diversity is watched; samples are recorded"
    )
    rest = {"callbacks": [], "sample_log": "none", "async_generate": True, "needs_old": False}
    assert on(shares=False, use_vllm=False, dropouts=3, **rest) == (
        "ms-swift's own seeds and requests; training reads prompts for each sample; the loss's "
        "pass serves as the old policy's; 3 dropouts are off (--lora_dropout is ignored); the "
        "rollout gap is measured; diversity is not watched (--callbacks diversity); no record"
    )
    assert on(rollout_seed_mode="engine").startswith("ms-swift's own seeds and requests")


def told(
    monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, Any]], *, rank: int = 0, **changes: Any
) -> list[str]:
    """Return the lines of a training that scores two rounds and a batch of an evaluation."""
    lines: list[str] = []
    monkeypatch.setattr(summary.logger, "info", lines.append)
    trainer = trainer_of(**changes)
    trainer.ranks, trainer.state = SimpleNamespace(rank=rank), SimpleNamespace(log_history=logs)
    run = RunSummary(trainer, num_dropouts=0)
    run.begin()
    run.end()  # before any round: nothing was seen
    for name in (sample_id(0), sample_id(0, index=1), sample_id(1), sample_id(1, phase="eval")):
        for listener in trainer.score_listeners:
            listener([replace(ROW, sample_id=name)])
    run.end()
    return lines


def test_the_first_and_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = told(monkeypatch, [LOG, {"step": 1, "train_loss": 0.0}])
    view = "Look at it meanwhile: swift-grpo-ext view '/runs/my run'"
    assert begin == f"swift-grpo-ext {__version__}: {on()}. {view}"
    assert end == (
        "Seen by swift-grpo-ext: 2 rounds of training, 1 of evaluation; a rollout gap of 0.0001 "
        "nats (rounding explains 0.01), 0.002 at most; no alarm of diversity."
    )
    assert told(monkeypatch, [LOG], rank=1) == []
    logs = [{"step": s, "diversity/broken": 0.0, "diversity/collapse": s / 2} for s in range(3)]
    [end] = told(monkeypatch, logs)[1:]
    assert end.endswith("; alarms of diversity at 2 steps, from step 1 on.")
    [end] = told(monkeypatch, [], callbacks=[])[1:]
    assert end.endswith("1 of evaluation.")
