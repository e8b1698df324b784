"""Code that depends on internals of ms-swift and vLLM. A leaf: it imports no other room of ours.

`patches.py` applies each lasting change. Beside its function are the symptom, the cause upstream
and when it can go. `contract.py` rejects an upstream without the hooks that we build on.
"""
