"""Logits of chosen positions only, whatever a model's `forward` is called with.

`shim.py` gets a model's logits of chosen positions, `chunked.py` makes log-probabilities of them,
`sharding.py` keeps ranks in step, `packed.py` packs the samples of a group into one row, `proof.py`
shows that this changes nothing but rounding, and `logps.py` is what the trainer calls.
"""
