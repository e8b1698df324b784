"""A training's log has a line of the plugin at its begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.training import summary
from swift_grpo_ext.training.summary import log_what_is_on
from swift_grpo_ext.version import __version__

ARGS: dict[str, Any] = {
    **{"use_vllm": True, "rollout_seed_mode": "sample", "sample_log": "all"},
    **{"callbacks": ["diversity"], "output_dir": "/runs/my run"},
    **{"async_generate": False, "structured_outputs_regex": None},
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
}


def test_what_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(summary.logger, "info", lines.append)

    def log(dropouts: int = 0, shares: bool = True, rank: int = 0, **changes: Any) -> None:
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(**{**ARGS, **changes}),
            completion_logps=SimpleNamespace(shares_prompts=shares),
            ranks=SimpleNamespace(rank=rank),
        )
        log_what_is_on(trainer, dropouts)

    log()
    assert lines.pop() == (
        f"swift-grpo-ext {__version__}: a seed for each sample; training reads prompts once a "
        "group where that saves time; the rollout gap is held to a limit; diversity is watched; "
        "samples are recorded. Look at it meanwhile: swift-grpo-ext view '/runs/my run'"
    )
    rest = {"use_vllm": False, "callbacks": [], "sample_log": "none"}
    log(shares=False, async_generate=True, **rest)
    assert (
        ": ms-swift's own seeds and requests; training reads prompts for each sample; the rollout "
        "gap is measured; diversity is not watched (--callbacks diversity); no record. "
    ) in lines.pop()
    log(dropouts=3, rollout_seed_mode="engine")
    assert ": ms-swift's own seeds and requests; " in lines[-1]
    assert "; 3 dropouts are off (--lora_dropout is ignored); " in lines.pop()
    log(rank=1)
    assert lines == []
