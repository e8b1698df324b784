"""All that rests on the inside of ms-swift and vLLM. A leaf: it imports nothing else of ours.

`patches.py` makes each lasting change; its symptom, its place upstream and its end stand beside its
function. An upstream without the hooks that we build on is refused (`contract.py`).
"""
