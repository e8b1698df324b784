"""The diversity monitor: a collapsed policy, or broken randomness?

Rounds in, alarms out. `sample` is one completion as the statistics take it. `metrics` measures how
samples differ, and how the correct ones do; `collision` tests whether each was drawn with its own
noise; `analyzer` makes records of rounds, `alarms` their words, and `record` keeps them in a file.
`monitor` is ms-swift's callback. `tools/view` shows them.
"""
