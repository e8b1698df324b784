"""Try the training passes on a machine with a GPU, torch and transformers alone (`scripts/gpu.sh`).

`plan.py` says what runs, `run.py` runs it case by case in a process that may die, and `page.py`
writes down what was found. The cases are functions of `machine.py`, `logits.py`, `prompt_once.py`,
`media.py`, `checksums.py` and `widths.py`. They return a `Found`; `compare.py` holds passes against
each other, `models.py` makes what they run. `scripts/bench/measure.py` measures them.
"""
