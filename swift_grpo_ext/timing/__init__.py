"""The time of a training step, part by part (promise V5)."""

PARTS = ("rollout", "rewards", "batch", "logps", "loss", "optimizer", "rest")
"""Their sum is the step. `batch` encodes samples and collates them, `logps` are the passes without
gradients, `loss` is forward and backward, `rest` are rows, advantages, logs, checkpoints and
evaluations."""

ROLLOUT_PARTS = ("wake", "send", "generate", "sleep")
"""They are of `rollout`: a colocated engine wakes (with what is offloaded for it) and sleeps, and
any engine is sent the weights."""
