"""Which pins hold in the running environment, as one line of JSON: `python -m compat.pins`.

Pins are read without importing the modules that hold them, which refuse a ms-swift that they do not
know: so they can be looked at one by one, and without vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import swift_grpo_ext
from swift_grpo_ext.upstream import contract
from swift_grpo_ext.upstream.contract import Pin

PACKAGE = Path(swift_grpo_ext.__file__).parent


def pins_by_module() -> dict[str, tuple[Pin, ...]]:
    """The `PINS` of every module of the package that has some, without the package's own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PINS":
                name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
                expression = ast.unparse(statement.value)  # our own, and made of nothing but pins
                found[name] = tuple(eval(expression, {"Pin": Pin}))
    return found


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
    for pin in sorted({pin for pins in pins_by_module().values() for pin in pins}, key=str):
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
