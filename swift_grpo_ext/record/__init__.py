"""The run's record: every completion once, and how it scored. Imports no torch, vLLM or ms-swift.

`row` is one completion, made from a rollout's output, `rewards` says how it scored,
`log` writes tables, `reader` reads them over all ranks and sessions, `export` is
`swift-grpo-ext samples`.
"""
