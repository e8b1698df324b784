"""The trainer: ms-swift's GRPO trainer with our engine, and weight updates that work on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from swift.rlhf_trainers import GRPOConfig, GRPOTrainer

from swift_grpo_ext.arguments import ExtFlags
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import Pin, verify

PINS = (
    Pin("swift.rlhf_trainers", "GRPOConfig"),
    Pin("swift.rlhf_trainers", "GRPOTrainer",
        ("model", "ref_model", "reward_model", "reward_funcs", "_args", "kwargs")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_vllm_engine", ("self",)),
    Pin("swift.rlhf_trainers", "GRPOTrainer._load_state_dict_to_vllm", ("self", "state_dict")),
)  # fmt: skip


@dataclass
class RolloutGRPOConfig(ExtFlags, GRPOConfig):
    """ms-swift's training arguments for GRPO with our flags."""


class RolloutGRPOTrainer(GRPOTrainer):
    """GRPO with the rollouts of `swift_grpo_ext`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        client = kwargs.get("vllm_client")
        if client is not None and not has_accelerator():
            from swift_grpo_ext.upstream.weight_sync import connect_client

            connect_client(client)
        super().__init__(*args, **kwargs)

    def _prepare_vllm_engine(self) -> Any:
        from swift_grpo_ext import engine

        engine.install()
        return super()._prepare_vllm_engine()

    def _load_state_dict_to_vllm(self, state_dict: dict[str, torch.Tensor]) -> None:
        if self.vllm_mode == "colocate" and not has_accelerator():
            self.engine.reload_weights(state_dict.items())
        else:
            super()._load_state_dict_to_vllm(state_dict)


verify(PINS)
