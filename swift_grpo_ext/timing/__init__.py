"""The time of a training step, part by part (promise V5)."""
