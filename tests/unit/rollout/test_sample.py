"""The trainer's samples have our fields beside ms-swift's, and every column of the data set."""

from __future__ import annotations

from copy import deepcopy

import pytest
from swift.rl_core.data import GRPOSample

from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

ROW = {
    "messages": [{"role": "user", "content": "Which digit?"}],
    "images": ["7.png"],
    "solution": "7",
    **{"sample_id": 12, "prompt_hash": "a", "rollout_prompts": ["b"]},
}


def test_columns_stay_columns_whatever_they_are_called() -> None:
    sample, upstream = RolloutSample.from_row(ROW), GRPOSample.from_row(ROW)
    assert sample.to_reward_row() == upstream.to_reward_row()
    assert sample.to_reward_row()["sample_id"] == 12
    assert not sample.rollout_prompts
    with pytest.raises(AttributeError):
        _ = sample.sample_id
    sample.messages[0]["content"] = "changed"
    assert ROW["messages"] == upstream.messages


def test_ms_swift_makes_them_and_copies_them_whole() -> None:
    [sample] = RolloutGRPOTrainer.to_samples(RolloutGRPOTrainer, [ROW])
    assert type(sample) is RolloutSample
    sample.sample_id = SampleId(phase="train", step=3, number=0, group=2, index=1)
    sample.prompt_hash, sample.rollout_prompts = "hash", [Prompt([1, 2], None)]
    assert vars(deepcopy(sample)) == vars(sample)
