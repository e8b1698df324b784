"""A plugin for `weight_updates.py`: writes down how long weight updates take, and their checksums.

Loaded after `plugins/grpo_ext.py`, by trainer and server; the folder comes from the environment
variable `TIMES_DIR`. One JSON line for each update, receipt (the checksums of one side) and
comparison.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift.trainers import TrainerFactory

from swift_grpo_ext import engine
from swift_grpo_ext.trainer import RolloutGRPOTrainer
from swift_grpo_ext.trainer import weights as trainer_weights
from swift_grpo_ext.upstream import weight_sync


def timed(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            write(what, time.perf_counter() - start)

    return wrapper


def write(what: str, seconds: float) -> None:
    path = Path(os.environ["TIMES_DIR"]) / f"{os.getpid()}.jsonl"
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps({"what": what, "seconds": seconds}) + "\n")


class TimedTrainer(RolloutGRPOTrainer):
    _move_model_to_vllm = timed("update", RolloutGRPOTrainer._move_model_to_vllm)


for module in (engine, trainer_weights, weight_sync):
    module.receipt = timed("checksums", module.receipt)  # type: ignore[attr-defined]
trainer_weights.compare = timed("checksums", trainer_weights.compare)
TrainerFactory.TRAINER_MAPPING["grpo"] = "timed_updates.TimedTrainer"
