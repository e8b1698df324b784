"""The requests of Megatron's trainers (`megatron rlhf --rlhf_type grpo|gkd`) to a `swift rollout`,
in their order and without Megatron. In Megatron the last rank sends them for all ranks.

Comments name the places in ms-swift 4.6, below swift/megatron/ unless another folder is named.
"""

import atexit
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers import vllm_client
from swift.rlhf_trainers.utils import (
    FlattenedTensorBucket,
    add_base_layer_suffix_by_param_names,
    check_vllm_version_ge,
    expand_vllm_param_name_aliases,
)

from swift_grpo_ext import cpu
from swift_grpo_ext.upstream.patches import PatchPhase, apply

Weights = dict[str, torch.Tensor]
"""Tensors by their names in the checkpoint, as `bridge.export_weights` yields them."""


class MegatronClient:
    """Connects as a training does before its first step."""

    def __init__(self, port: int, group_port: int) -> None:
        # pipelines/train/rlhf.py, `_prepare_vllm_client`
        self._client = vllm_client.VLLMClient(
            base_urls=None,
            hosts=["127.0.0.1"],
            server_ports=[port],
            group_ports=[group_port],
            connection_timeout=60.0,
        )
        self._client.close_communicator()
        # On CPU the plugin broadcasts weights over gloo; Megatron with NCCL needs no plugin.
        cpu.register()
        apply(PatchPhase.TRAINER)
        self._client.init_communicator(device="cpu")
        atexit.unregister(self._client.close_communicator)
        # trainers/rollout_mixin.py, `_init_rollout_engine`
        self._client.get_engine_type()
        self._client.reset_mm_cache()
        self._enables_lora = self._client.enable_lora
        # trainers/rollout_mixin.py, `_init_rollout_params`
        self._config = RequestConfig(
            n=1,
            max_tokens=16,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
            stop=None,
            return_details=True,
            logprobs=True,
        )

    def send(self, weights: Weights, adapter: Weights | None, config: LoraConfig) -> None:
        """Send whole weights, and the adapter to a server with `--vllm_enable_lora`."""
        # trainers/rollout_mixin.py, `_move_full_model_to_vllm`; other servers get merged weights.
        named = iter(weights.items())
        if self._enables_lora:  # `_get_vllm_param_names_for_mapping`
            names = expand_vllm_param_name_aliases({*self._client.get_model_state_keys()})
            named = iter(add_base_layer_suffix_by_param_names(named, names))
        parts = list(named)
        for part in (parts[:30], parts[30:]):  # `_load_weights_to_server_in_buckets`
            bucket = FlattenedTensorBucket(named_tensors=part)
            flat = bucket.get_flattened_tensor()
            self._client.update_flattened_params(bucket.get_metadata(), flat)
        self._client.process_weights_after_loading()
        if self._enables_lora and adapter is not None:
            self.send_adapter(adapter, config)
        self._reset_caches()

    def send_adapter(self, adapter: Weights, config: LoraConfig) -> None:
        # trainers/rollout_mixin.py, `_move_adapter_to_vllm`; names are PEFT's before the HF path.
        params = OrderedDict((f"base_model.model.{name}", t) for name, t in adapter.items())
        bucket = FlattenedTensorBucket(named_tensors=list(params.items()))
        metadata, flat = bucket.get_metadata(), bucket.get_flattened_tensor()
        self._client.update_adapter_flattened_param(config, metadata, flat)
        self._reset_caches()

    def _reset_caches(self) -> None:
        # trainers/rollout_mixin.py, `_reset_vllm_cache`
        self._client.reset_prefix_cache()
        if check_vllm_version_ge("0.16"):
            self._client.reset_encoder_cache()

    def draw(self, rows: Sequence[dict[str, Any]], **config: Any) -> list[RolloutOutput]:
        """Return an output for each row. A group is a sequence of equal rows."""
        # trainers/rollout_mixin.py, `_preprocess_inputs`, `samples2requests`, `_server_rollout`
        samples = [OnPolicySample.from_row({**row}) for row in rows]
        for number, sample in enumerate(samples):
            sample.request_id = sample.request_id or f"chatcmpl-{number}"
        requests = [sample.to_infer_request(include_extra=False) for sample in samples]
        own_config = RequestConfig(**{**vars(self._config), **config})
        return list(self._client.infer(infer_requests=requests, request_config=own_config))

    def close(self) -> None:
        self._client.close_communicator()
        self._client.pynccl_comms = []
