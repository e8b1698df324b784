"""Logits of chosen positions only, whatever a model's `forward` is called with.

The trainer calls `logps.py`. `shim.py` gets the logits, `chunked.py` makes log-probabilities of
them, `sharding.py` keeps ranks in step, `packed.py` packs the samples of a group into one row, and
`proof.py` shows that packing changes nothing but rounding.
"""
