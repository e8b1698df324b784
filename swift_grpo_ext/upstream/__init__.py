"""What we know of ms-swift and vLLM, and the few places where they leave no hook.

Each module says the symptom, the upstream file and version, and when it can go. Each pins the
signatures that it builds on (`contract.Pin`) and refuses an upstream that does not match.
"""
