"""The diversity monitor: a collapsed policy, or broken randomness?

Rounds in, alarms out. The statistics take rows of the record. `metrics` measures how samples
differ, and how the correct ones do; `collision` tests whether each was drawn with its own noise;
`analyzer` judges rounds, and `alarms` puts that into words. A training's callback (`monitor.py`
beside this room) gives their rows to the run's record. `tools/view` shows them.
"""
