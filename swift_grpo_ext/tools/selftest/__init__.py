"""`swift-grpo-ext selftest`: each promise, checked with the user's settings, model, rows, devices.

`command.py` reads the settings and starts a process for each topology that the devices allow
(`plan.py`). `worker.py` builds the real trainer there, as `swift rlhf` does, and checks instead of
training. A check is a function of a `Rig` (`rig.py`: trainer, rows, ways to draw) that gives a
`Result` (`result.py`):

- `seeds.py`: seeds, batch invariance, the same tokens on another topology. `flips.py` has the rule
  that tells rounding from other noise.
- `training.py`: prompts, stops, agreement: what the rollout drew is what training sees.
- `costs.py`: weights, logits, speed: what they take, and that they change nothing.

`page.py` shows results as a table, JSON, and a page for a bug report, without secrets.
"""
