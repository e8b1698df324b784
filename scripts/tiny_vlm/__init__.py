"""Helpers of `make_digits.py` and `make_tiny_vlm.py`."""
