"""A reward function to adapt. The presets name this file and the function `my_reward`.

`swift-grpo-ext check` calls it with the first rows of your data and three made-up completions.
"""

import re
from typing import Any

from swift.rewards import ORM, orms

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class MyReward(ORM):
    """Give 1 if the text between <answer> and </answer> is the row's `solution`, else 0."""

    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        # Each list has one entry for each completion. A parameter with the name of a column of your
        # data (here `solution`) gets that column; `**_` gets the others, such as `messages`.
        rewards = []
        for completion, truth in zip(completions, solution, strict=True):
            answer = ANSWER.search(completion)
            rewards.append(float(answer is not None and answer[1].strip() == truth.strip()))
        return rewards


orms["my_reward"] = MyReward  # the name for `reward_funcs`; `reward_weights` has its weight
