"""`swift-grpo-ext replay`: generate a recorded group again, and compare token by token.

`run` reads settings, samples and weights of a run, `engine` builds the run's trainer and generates,
`tools.diff` compares tokens, and `command` shows the result.
"""
