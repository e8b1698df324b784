"""ms-swift's trainer and ours with the attributes that their log-probabilities use."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import Tensor

from swift_grpo_ext.config import RolloutGRPOConfig
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.training import RolloutGRPOTrainer
from tests.rig.arguments import training_arguments
from tests.rig.logits.batch import TEMPERATURE, Batch


def config_of(**flags: Any) -> RolloutGRPOConfig:
    return training_arguments(**{"logits_shim": "strict", **flags})


def template_of(*, padding_free: bool = False, parallel: int = 1) -> Any:
    return SimpleNamespace(padding_free=padding_free, sequence_parallel_size=parallel)


class Upstream(GRPOTrainer):
    """ms-swift's trainer."""

    def __init__(self, *, padding_free: bool = False, **flags: Any) -> None:
        self.args = config_of(**flags)
        self.model_kwarg_keys = {"logits_to_keep"}
        self.temperature = TEMPERATURE
        self.template = template_of(padding_free=padding_free)


class Ours(RolloutGRPOTrainer):
    """Our trainer; it packs prompts where it can."""

    def __init__(self, *, padding_free: bool = False, **flags: Any) -> None:
        Upstream.__init__(self, padding_free=padding_free, **flags)
        self.completion_logps = CompletionLogps(self.args, self.template)


def loss_pass(trainer: Any, model: Any, batch: Batch, *, entropy: bool = False) -> Tensor:
    """Return the log-probabilities (and entropies) of completion tokens. Those of other positions
    are finite: they are masked by multiplication."""
    grpo_batch = batch.grpo_batch()
    logps_BK, entropies_BK = trainer._get_per_token_logps_and_entropies_single(
        model, copy(batch.inputs), grpo_batch, compute_entropy=entropy
    )
    mask = grpo_batch.completion_mask
    assert logps_BK.shape == mask.shape
    assert logps_BK.isfinite().all()
    if entropies_BK is None:
        return logps_BK[mask]
    return torch.stack([logps_BK[mask], entropies_BK[mask]])


def make_pass(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Return log-probabilities without gradients, as of the old policy."""
    with torch.no_grad():
        return loss_pass(trainer, model, batch)


def seen_positions(model: Any) -> list[int]:
    """Return a list that gets the number of positions of each later pass of the decoder."""
    seen: list[int] = []
    # The last norm: no backward computes it again.
    base_model(model).get_decoder().norm.register_forward_pre_hook(
        lambda _, args: seen.append(args[0][..., 0].numel())
    )
    return seen
