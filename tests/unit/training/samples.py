"""Small samples and batches in ms-swift's form."""

from types import SimpleNamespace
from typing import Any

import torch

from swift_grpo_ext.config import RolloutGRPOConfig
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.arguments import training_arguments


def arguments(**changes: Any) -> RolloutGRPOConfig:
    return training_arguments(**{"vllm_mode": "server", "temperature": 1.0, **changes})


def prompts(*of_turns: list[int] | None, positions: Any = None) -> list[Prompt]:
    """Return the prompt of each turn that has one."""
    return [Prompt(ids, positions) for ids in of_turns if ids]


def sample(
    turns: Any = ((5, 6),), logprobs: Any = ((-0.5, -1.0),), mask: Any = (), **fields: Any
) -> Any:
    """Return a sample in ms-swift's form, with a list for each turn."""
    values: dict[str, Any] = {
        "sample_id": SampleId(phase="train", step=3, number=0, group=2, index=1),
        "response_token_ids": [list(turn) for turn in turns],
        "rollout_logprobs": [list(turn) for turn in logprobs],
        "response_loss_mask": [list(turn) for turn in mask],
        "rollout_prompts": prompts([1, 2, 3]),
        "encoded": {"input_ids": torch.tensor([[1, 2, 3, 5, 6]])},
    }
    return SimpleNamespace(**(values | fields))


def batch(
    rollout: Any = ((-0.5, -1.0),), training: Any = ((-0.5, -1.0),), mask: Any = ((1, 1),)
) -> Any:
    def tensor(rows: Any) -> Any:
        return None if rows is None else torch.tensor(rows)

    return SimpleNamespace(
        rollout_per_token_logps=tensor(rollout),
        old_per_token_logps=tensor(training),
        completion_mask=torch.tensor(mask),
    )
