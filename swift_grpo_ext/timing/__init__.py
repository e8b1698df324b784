"""The parts of a training step, by which its time is logged (promise V5)."""

PARTS = ("rollout", "rewards", "batch", "logps", "loss", "optimizer", "rest")
"""Their sum is the step. `batch` encodes and collates samples, `logps` are the passes without
gradients, `loss` is forward and backward, `rest` are rows, advantages, logs, checkpoints and
evaluations."""

ROLLOUT_PARTS = ("wake", "send", "generate", "sleep")
"""Parts of `rollout`: a colocated engine wakes and sleeps; weights are sent to any engine."""
