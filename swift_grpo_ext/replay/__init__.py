"""`swift-grpo-ext replay`: draw a logged group again, and compare token by token.

The sample log says which seeds and weights a group was drawn with, and the run's `args.json` which
settings. `run` finds settings and checkpoint, `prompts` the prompt, `draw` asks the engine as the
training asked it, `compare` holds the tokens against each other, and `command` shows the result.
"""
