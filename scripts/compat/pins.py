"""Which pins hold in the running environment, as one line of JSON: `python -m compat.pins`."""

from __future__ import annotations

import json
from typing import Any

from swift_grpo_ext.upstream import contract, pins


def look() -> dict[str, Any]:
    """`held`: how many pins hold; `wrong`: what is wrong with those that are needed, in words;
    `missing`: what a release goes without."""
    held = sum(contract.mismatch(pin) is None for pin in pins.ALL)
    wrong = [text for pin in pins.NEEDED if (text := contract.mismatch(pin))]
    missing = [name for name, table in pins.OPTIONAL.items() if any(map(contract.mismatch, table))]
    return {"held": held, "wrong": wrong, "missing": missing}


if __name__ == "__main__":
    print(json.dumps(look()))
