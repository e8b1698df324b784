"""A plugin for tests: a reward function that writes down what it is told of each completion."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms


class Stopped(ORM):
    """1 where a stop ended the completion."""

    def __call__(
        self,
        completions: list[str],
        rollout_infos: list[dict[str, Any]],
        response_token_ids: list[Any],
        is_truncated: list[bool],
        **_: Any,
    ) -> list[float]:
        reasons = [infos["stop_reason"] for infos in rollout_infos]
        told = zip(completions, reasons, response_token_ids, is_truncated, strict=True)
        with (Path(os.environ["RECORD_DIR"]) / "rewards.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in told)
        return [float(reason is not None) for reason in reasons]


orms["stopped"] = Stopped
