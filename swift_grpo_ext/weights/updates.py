"""Weight updates: verified on every engine, and failing on every rank if they fail on one."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.utils import get_current_device

from swift_grpo_ext.rollout.servers import RolloutServers
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import Pin, verify
from swift_grpo_ext.weights.checksums import (
    WeightChecksums,
    WeightUpdateError,
    compare,
    compare_tensors,
    recorded_loads,
    weight_checksums_in_background,
)

PINS = (
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_vllm", ("self",)),
    Pin("swift.rlhf_trainers", "GRPOTrainer._move_model_to_vllm", ("self", "skip_async_check")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._load_state_dict_to_vllm", ("self", "state_dict")),
    Pin("swift.rlhf_trainers.vllm_client", "VLLMClient.init_communicator", ("self", "device")),
)  # fmt: skip
verify(PINS)


class RolloutWeights(GRPOTrainer):
    """The hooks through which ms-swift's trainer gives engines its weights."""

    _servers: Any = None
    _sent: WeightChecksums

    def _prepare_vllm(self) -> None:
        super()._prepare_vllm()
        if self._is_ours and self.vllm_mode == "server" and self.accelerator.is_main_process:
            timeout = self.args.rollout_timeout
            tokens = self.args.new_special_tokens
            self._servers = RolloutServers(self.vllm_client, timeout, _connect, tokens)

    def _move_model_to_vllm(self, *args: Any, **kwargs: Any) -> None:
        failure: Exception | None = None
        self._sent = {}
        try:
            if self._servers is not None:
                self._servers.reconnect()
            super()._move_model_to_vllm(*args, **kwargs)
            self._verify_served_weights()
        except Exception as e:
            failure = e  # not raised yet: the other ranks would wait
        told = gather_object([failure and f"{type(failure).__name__}: {failure}"])
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text:
                raise WeightUpdateError(f"The weight update failed on rank {rank}: {text}")

    def _load_state_dict_to_vllm(self, state_dict: dict[str, torch.Tensor]) -> None:
        if self.vllm_mode == "colocate":
            who = f"The colocated engine of rank {self.accelerator.process_index}"
            compare_tensors(state_dict, self._load_colocated(state_dict), who)
        elif self.accelerator.is_main_process:
            sent = weight_checksums_in_background(list(state_dict.items()))
            super()._load_state_dict_to_vllm(state_dict)
            self._sent.update(sent())
        else:
            super()._load_state_dict_to_vllm(state_dict)

    def _load_colocated(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the engine has taken."""
        if has_accelerator():
            with recorded_loads(self.engine.inner_model) as taken:
                super()._load_state_dict_to_vllm(state_dict)
        else:
            taken = self.engine.reload_weights(state_dict.items())
        return dict(taken)

    def _verify_served_weights(self) -> None:
        """SPEC M4. Adapters that stay apart (`--vllm_enable_lora`) have no names to compare."""
        if self._servers is not None and self._sent:
            for name, loaded in self._servers.loaded_checksums():
                compare(self._sent, loaded, name)


def _connect(client: Any) -> None:
    """Make the communicator of a client that knows one server."""
    client.init_communicator(device=get_current_device())
    if not has_accelerator():
        from swift_grpo_ext.upstream.weight_sync import connect_client

        connect_client(client)
