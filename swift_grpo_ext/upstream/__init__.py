"""Code that depends on internals of ms-swift and vLLM. It imports no other package of ours.

`patches.py` applies each lasting change. The docstring of its function names the symptom, the cause
upstream and when it can go. `contract.py` rejects an upstream without the APIs that we extend.
"""
