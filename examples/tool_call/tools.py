"""A tool for conversations of two turns: the model calls it with a digit, it says yes or no.

The tiny model knows one form, `<answer>7</answer>`: here it is the call. A plugin of its own:
`--external_plugins plugins/grpo_ext.py examples/tool_call/tools.py`.
"""

from __future__ import annotations

import re
from typing import Any

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

STOP = "</answer>"
"""The preset's stop string: a call ends with it, and so does the turn."""

CALL = re.compile(r"<answer>(\d)</answer>\Z")


def called_with(text: str) -> str | None:
    """The digit that the tool is called with at the end of a turn; None without a call."""
    call = CALL.search(text)
    return call[1] if call else None


class DigitChecker(MultiTurnScheduler):
    """Says whether the digit of a call is the row's `solution`; a wrong one may be taken back."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        digit = called_with(response_choice.message.content)
        is_over = digit is None or digit == infer_request.data_dict["solution"]
        return is_over or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        digit = called_with(response_choice.message.content)
        infer_request.messages.append({"role": "tool", "content": f"{digit}: no"})
        return {"infer_request": infer_request}


class DigitCall(ORM):
    """0.2 where the last turn is nothing but a call that its stop string ended, 1 more where the
    call's digit is the row's `solution`."""

    def __call__(
        self,
        completions: list[str],
        solution: list[str],
        rollout_infos: list[dict[str, Any]],
        **_: Any,
    ) -> list[float]:
        rewards = []
        for text, truth, infos in zip(completions, solution, rollout_infos, strict=True):
            is_call = infos["stop_reason"] == STOP and CALL.fullmatch(text) is not None
            rewards.append(0.2 * is_call + (called_with(text) == truth))
        return rewards


multi_turns["digit_checker"] = DigitChecker
orms["digit_call"] = DigitCall
