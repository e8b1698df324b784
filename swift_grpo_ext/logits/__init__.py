"""Computes logits and log-probabilities at chosen positions only.

The trainer calls `logps.py`. `shim.py` gets the logits, `chunked.py` computes log-probabilities,
`sharding.py` keeps ranks in step, `packed.py` packs the samples of a group into one row, and
`proof.py` verifies that packing changes nothing but rounding.
"""
