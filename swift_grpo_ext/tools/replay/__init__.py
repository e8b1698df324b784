"""`swift-grpo-ext replay`: draw a logged group again, and compare token by token.

`run` reads settings, samples and weights of a run, `prompts` finds the prompt, `draw` builds the
trainer's engine and draws, `compare` compares tokens, and `command` shows the result.
"""
