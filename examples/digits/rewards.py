"""Two reward functions of the digit example: one for the form, one for the right digit.

Load it after our plugin: `--external_plugins plugins/grpo_ext.py examples/digits/rewards.py`.
"""

import re
from typing import Any

from swift.rewards import ORM, orms

ANSWER = re.compile(r"<answer>(\d(?: \d)*)</answer>")


class DigitFormat(ORM):
    """Give 1 if a completion is only `<answer>...</answer>` with digits inside, else 0."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [
            float(ANSWER.fullmatch(completion.strip()) is not None) for completion in completions
        ]


class DigitAccuracy(ORM):
    """Give 1 if the answer is the row's `solution`, else 0."""

    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        answers = (ANSWER.search(completion) for completion in completions)
        return [
            float(answer is not None and answer[1] == truth)
            for answer, truth in zip(answers, solution, strict=True)
        ]


orms["digit_format"] = DigitFormat
orms["digit_accuracy"] = DigitAccuracy
