"""Checks before a model is loaded. A check yields findings (`finding.py`); `enforce` raises the
first error, and `swift-grpo-ext check` collects them all.
"""
