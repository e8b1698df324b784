"""Two reward functions for the digit example: is the form right, is the digit right?

A plugin of its own: `--external_plugins plugins/grpo_ext.py examples/digits/rewards.py`.
"""

import re
from typing import Any

from swift.rewards import ORM, orms

ANSWER = re.compile(r"<answer>(\d(?: \d)*)</answer>")


class DigitFormat(ORM):
    """1 where a completion is nothing but `<answer>...</answer>` with digits inside, else 0."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [
            float(ANSWER.fullmatch(completion.strip()) is not None) for completion in completions
        ]


class DigitAccuracy(ORM):
    """1 where the answer is the row's `solution`, else 0."""

    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        answers = (ANSWER.search(completion) for completion in completions)
        return [
            float(answer is not None and answer[1] == truth)
            for answer, truth in zip(answers, solution, strict=True)
        ]


orms["digit_format"] = DigitFormat
orms["digit_accuracy"] = DigitAccuracy
