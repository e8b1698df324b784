"""All that rests on the inside of ms-swift and vLLM. A leaf: it imports nothing else of ours.

Each module says the symptom, the upstream file and version, and when it can go. Each pins the
signatures that it builds on (`contract.Pin`) and refuses an upstream that does not match.
"""
