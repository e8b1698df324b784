"""What a training or a server refuses before a model is loaded: `preflight.py` in `swift` itself,
with `rows.py` (the data set) and `resume.py` (checkpoints). A check takes settings and yields
findings (`finding.py`); `enforce` turns the first error into a `ValueError`.

The command line asks more, in `tools/check`.
"""
