"""Which pins hold in the running environment, as one line of JSON: `python -m compat.pins`."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from swift_grpo_ext.upstream import contract, pins


def look() -> dict[str, Any]:
    """`held`: how many pins hold; `wrong`: what is wrong with others, in words; `unseen`: how many
    cannot be looked at without vLLM; `refusal`: the plugin's own words, or None."""
    try:
        contract.check_swift_version(contract.swift_version())
        refusal = None
    except contract.UnsupportedUpstreamError as e:
        refusal = str(e)
    has_vllm = importlib.util.find_spec("vllm") is not None
    held, wrong, unseen = 0, [], 0
    for pin in sorted(set(pins.ALL), key=str):
        text = contract.mismatch(pin)
        if text is None:
            held += 1
        elif not has_vllm and "No module named 'vllm" in text:
            unseen += 1
        else:
            wrong.append(text)
    return {"held": held, "wrong": wrong, "unseen": unseen, "refusal": refusal}


if __name__ == "__main__":
    print(json.dumps(look()))
