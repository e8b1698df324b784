"""Run all parts on this machine's GPU, or in small on its CPUs; write `gpu.json` and `gpu.md`.

    bash scripts/gpu.sh --output output/gpu

The exit status is 1 where a case failed, or where a part has nothing that passed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("output/gpu"), help="folder of gpu.json and gpu.md")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--minutes", type=float, default=7.5, help="cases that do not fit are left out, by name")
    options = parser.parse_args()
    started = time.monotonic()
    if options.device == "cpu":  # before torch looks
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch

    from scripts.gpu.page import page
    from scripts.gpu.plan import plan
    from scripts.gpu.run import outcomes

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = plan(device)
    result: dict[str, Any] = {"device": device, "sizes": "real" if device == "cuda" else "small"}
    result["parts"] = [
        {"name": p.name, "says": p.says, "seconds": p.seconds, "cases": []} for p in parts
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    for part, outcome in outcomes(parts, options.minutes * 60):
        print(f"{part.name}: {outcome['name']}: {outcome['status']}, {outcome['seconds']} s",
              file=sys.stderr, flush=True)  # fmt: skip
        result["parts"][parts.index(part)]["cases"].append(outcome)
        result["seconds"] = round(time.monotonic() - started, 1)
        result["is_ok"] = is_ok(result)
        # After each case, so that none is lost.
        text = json.dumps(plain(result), indent=1, allow_nan=False) + "\n"
        (options.output / "gpu.json").write_text(text, encoding="utf-8")
        (options.output / "gpu.md").write_text(page(json.loads(text)), encoding="utf-8")
    print(f"{options.output}/gpu.md: {'all passed' if result['is_ok'] else 'FAILED'}")
    return 0 if result["is_ok"] else 1


def is_ok(result: dict[str, Any]) -> bool:
    """Return whether no case failed, and each part has one that passed."""
    for part in result["parts"]:
        statuses = {case["status"] for case in part["cases"]}
        if "passed" not in statuses or statuses & {"failed", "error"}:
            return False
    return True


def plain(value: Any) -> Any:
    """Return JSON's own values: None for what is no number."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
