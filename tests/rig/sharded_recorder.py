"""A plugin for tests: records the training passes of a run whose weights may be sharded, and lets
DeepSpeed run without an accelerator.

It is loaded after `plugins/grpo_ext.py`, and writes to the folder `RECORD_DIR`, a variable of the
environment. Chunks are short: a pass has several of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from swift.trainers import TrainerFactory

from swift_grpo_ext.logits.shim import LogitsShim
from swift_grpo_ext.training import RolloutGRPOTrainer

LogitsShim.chunk_size = 16


def shard_on_cpu() -> None:
    """Let accelerate 1.15 and DeepSpeed 0.18 run gloo ranks without an accelerator."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # accelerate shards over accelerators alone, and would choose their backend.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        return
    import deepspeed.comm.torch as comm

    # The shared-memory operator would be compiled; gloo serves.
    comm.build_shm_op = lambda: None
    # DeepSpeed waits for the last of several gathers, as CUDA streams allow; gloo runs them side by
    # side, and a large weight would be read before it is there (partition_parameters.py,
    # `_allgather_params_coalesced`: log-probabilities and gradient norms at random).
    # torch 2.13's gloo makes the output's views under autograd: ZeRO-2 then cannot write to them.
    for name in ("all_gather_into_tensor", "_all_gather_base"):
        gather = getattr(torch.distributed, name, None)
        if gather is not None:
            setattr(torch.distributed, name, torch.no_grad()(finished(gather)))


def finished(gather: Any) -> Any:
    """Return the collective, made to wait for its end even if it is asynchronous."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        work = gather(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return wait


class ShardedRecordingTrainer(RolloutGRPOTrainer):
    """Each rank writes a line for each loss and each earlier pass of log-probabilities."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        (batch,) = inputs if isinstance(inputs, list) else [inputs]
        mask = batch["grpo_batch"].completion_mask
        is_on = self.args.logits_shim != "off"
        is_sharded = is_on and bool(self.completion_logps.shim(model).ranks(model).groups)
        counts = mask.sum(1).tolist()
        self._write("loss", value=loss.item(), counts=counts, is_sharded=is_sharded)
        return loss

    def _get_per_token_logps_and_entropies_single(
        self, model: Any, model_inputs: Any, grpo_batch: Any, compute_entropy: bool = False
    ) -> Any:
        logps, entropies = super()._get_per_token_logps_and_entropies_single(
            model, model_inputs, grpo_batch, compute_entropy
        )
        mask = grpo_batch.completion_mask.bool()
        tokens = model_inputs["input_ids"][:, -mask.shape[1] :][mask]
        self._write("logps", value=logps[mask].tolist(), tokens=tokens.tolist())
        return logps, entropies

    def _write(self, kind: str, **record: Any) -> None:
        line = {"kind": kind, "step": self.state.global_step, **record}
        path = Path(os.environ["RECORD_DIR"]) / f"passes{self.accelerator.process_index}.jsonl"
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")


if "ACCELERATE_TORCH_DEVICE" in os.environ:  # sharded trainings have it
    shard_on_cpu()
TrainerFactory.TRAINER_MAPPING["grpo"] = "sharded_recorder.ShardedRecordingTrainer"
