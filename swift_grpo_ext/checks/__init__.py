"""What a training or a server refuses before a model is loaded.

`rules.py` holds the table of rules for settings, `preflight.py` the checks that need more than
arguments, `rows.py` those of rows, `rewards.py` those of reward functions. A check yields findings
(`finding.py`); `enforce` raises the first error, and `swift-grpo-ext check` collects them all.
"""
