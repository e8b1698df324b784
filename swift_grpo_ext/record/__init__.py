"""The sample log: every completion of a run, once. Importable without torch, vLLM and ms-swift.

`row` is one completion, `collect` makes it from what a rollout returned, `log` writes, `file` and
`index` find what counts over sessions, `reader` reads, `export` is `swift-grpo-ext samples`.
"""
