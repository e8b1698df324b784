"""What a training or a server refuses before a model is loaded.

`preflight.py` holds the checks that `swift rlhf` and `swift rollout` run, `rows.py` those of data
sets, `rewards.py` those of reward functions, `resume.py` those of checkpoints. A check takes
settings and yields findings (`finding.py`); `enforce` raises the first error. `swift-grpo-ext
check` asks more, in `tools/check`.
"""
