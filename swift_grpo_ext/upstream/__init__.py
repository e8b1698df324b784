"""All that rests on the inside of ms-swift and vLLM. A leaf: it imports nothing else of ours.

`patches.py` lists each lasting change with its symptom, its place upstream and its end. `pins.py`
lists the names and signatures that we build on; an upstream that does not match is refused
(`contract.py`).
"""
