"""Helpers of `make_digits.py` and `make_tiny_vlm.py`: a picture task and a model small enough
for a CPU."""
