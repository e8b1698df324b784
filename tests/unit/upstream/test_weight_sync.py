"""Waits for the weights' group are bounded, but for NCCL's, which are logged [F2].
`tests/stack/test_fault_matrix.py` stops real processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from swift_grpo_ext.upstream import weight_sync
from swift_grpo_ext.upstream.weight_sync import run_with_timeout


def test_a_timeout_of_the_work_itself_keeps_its_words() -> None:
    """Rank 0 works in the caller's thread: one that is left would keep the port."""
    assert run_with_timeout(20.0, threading.current_thread, rank=0) is threading.current_thread()

    def fails() -> None:
        raise TimeoutError("its own words")

    with pytest.raises(TimeoutError, match="its own words"):
        run_with_timeout(20.0, fails, rank=1)


def test_a_broadcast_of_nccl_that_waits_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator of NCCL is left alone, since no GPU has run this; gloo's group gets its
    bound."""
    told = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(weight_sync.logger, "error", log)
    of_nccl, of_gloo = SimpleNamespace(disabled=False), SimpleNamespace(group=SimpleNamespace())
    with weight_sync.bounded_broadcasts([of_nccl], 0.05):
        assert told.wait(20)
    [line] = lines
    assert "Weights were not taken within 0.05 s (--rollout_timeout)" in line
    assert vars(of_nccl) == {"disabled": False}
    with weight_sync.bounded_broadcasts([of_gloo, of_nccl], 20.0):
        pass
    with weight_sync.bounded_broadcasts([of_gloo], 0.0):
        pass
    assert (of_gloo.group.timeout, len(lines)) == (0.0, 1)
