"""The tools know ms-swift's flags without its import, and the reward to start from works in it."""

from __future__ import annotations

from runpy import run_path

import pytest
from swift.arguments import RLHFArguments, RolloutArguments
from swift.rewards import orms

from swift_grpo_ext.command_line import EXTENDED, Parser
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.check.glance import upstream_flags
from swift_grpo_ext.tools.share import SHARE


@pytest.mark.parametrize("upstream", [RLHFArguments, RolloutArguments])
def test_names_of_flags_are_known_without_ms_swift(upstream: type) -> None:
    """They are read from ms-swift's source: its import takes ten seconds."""
    known = {action.dest for action in Parser([EXTENDED[upstream]])._actions} - {"help"}
    assert {*upstream_flags(), *flag_names()} >= known


def test_the_reward_to_start_from() -> None:
    run_path(str(SHARE / "plugins/my_reward.py"))
    completions = ["<think>2 + 1</think> <answer> 3\n</answer>", "<answer>4</answer>", "3"]
    assert orms["my_reward"]()(completions, solution=["3"] * 3) == [1.0, 0.0, 0.0]
