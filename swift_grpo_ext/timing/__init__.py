"""Defines the parts of a training step for the log of its time (promise V5) and memory."""

PARTS = ("rollout", "rewards", "batch", "logps", "loss", "optimizer", "rest")
"""Their sum is the step's time. `batch` encodes and collates samples, `logps` has passes without
gradients, `loss` has forward and backward, and `rest` has rows, advantages, logs, checkpoints and
evaluations."""

ROLLOUT_PARTS = ("wake", "send", "generate", "sleep")
"""The parts of `rollout`. Only a colocated engine wakes and sleeps; weights go to any engine."""

MEMORY_PARTS = (*ROLLOUT_PARTS, *PARTS[1:-1])
"""The parts after which memory is read: those of `rollout` instead of it, and no `rest`."""
