"""Two ranks on CPU (gloo) with their own rows: our passes of replicated or sharded models, and
passes with full logits of unsharded copies.

    python -m tests.rig.logits.two_ranks FOLDER [zero3]

Writes the results of `compare` and `share_prompts` to `FOLDER/rankR.pt`, by case; with `zero3`
those of `ZERO3` alone, since DeepSpeed makes its own process group. If a rank calls a sharded
module more often than the other one, it fails after `WAIT`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from swift.utils import get_logger
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext.logits import proof
from swift_grpo_ext.logits.shim import LogitsShim, base_model, output_embedding
from tests.rig.logits import models
from tests.rig.logits.groups import ROWS, Group, make_pass, positions_of, sharing
from tests.rig.logits.models import RemoteCode
from tests.rig.ranks import start_processes
from tests.unit.logits.test_logps import Upstream, config_of

STEPS = 2
LENGTHS = (12, 9)
"""Positions of rank 0's two rows; rank 1's second has one more."""

WAIT = timedelta(seconds=120)
"""Bound on a collective that only one rank enters; long enough for a busy machine."""


class Case(NamedTuple):
    kind: str
    """DDP, FSDP1, FSDP2 or ZeRO-3."""

    name: str
    """One of `MODELS`."""

    counts: tuple[int, int]
    """Completion tokens of each rank."""

    chunk_size: int = 2


CASES = [
    Case("FSDP1", "untied", (7, 2)),
    Case("FSDP1", "untied", (0, 0)),
    Case("FSDP2", "untied", (7, 2)),
    Case("FSDP2", "untied", (0, 0)),
    Case("FSDP2", "untied", (7, 2), chunk_size=1024),
    Case("FSDP2", "tied", (0, 7)),
    Case("FSDP2", "LoRA", (7, 0)),
    Case("FSDP2", "capped", (7, 2)),
    Case("FSDP2", "refuses on rank 0", (7, 2)),
    Case("FSDP2, head with norm", "untied", (7, 2)),
    Case("DDP", "untied", (7, 2), chunk_size=1024),
    Case("DDP", "LoRA", (3, 0)),
    Case("DDP", "capped", (3, 0)),
    Case("DDP, find unused", "untied", (7, 2)),
]
ZERO3 = [
    Case("ZeRO-3", "untied", (7, 2)),
    Case("ZeRO-3", "untied", (0, 0)),
    Case("ZeRO-3", "tied", (0, 7)),
    Case("ZeRO-3", "LoRA", (7, 0)),
    Case("ZeRO-3", "capped", (2, 7)),
]

SHARED_PROMPTS = [
    "DDP, a pass more on rank 0",
    "DDP, the loss alone",
    "FSDP2",
    "FSDP2, gated delta nets, recomputed",
]
SHARED_PROMPTS_ZERO3 = ["ZeRO-3", "ZeRO-3, gated delta nets, recomputed"]


class RefusingOnRank0(RemoteCode):
    """Fails on rank 0 if it computes fewer positions than it gets."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        if dist.get_rank() == 0 and logits.shape[1] < max(LENGTHS):
            raise RuntimeError(f"{logits.shape[1]} positions")
        return logits


MODELS: dict[str, Callable[[], Any]] = {
    "untied": lambda: models.build("Qwen2"),
    "tied": lambda: models.build("Qwen2, tied"),
    "LoRA": lambda: models.build("Qwen2", lora=True),
    "capped": lambda: models.build("soft-capped (Gemma2)"),
    "refuses on rank 0": models.remote(RefusingOnRank0),
}


def built(case: Case) -> Any:
    torch.manual_seed(0)
    return MODELS[case.name]().train()


# --- training ---


@dataclass(frozen=True)
class Trained:
    """A model, wrapped or not, and how it is trained."""

    model: Any
    backward: Callable[[Tensor], None] = Tensor.backward
    gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad
    """Returns the whole gradient of a parameter, after `backward`."""

    finish: Callable[[], None] = lambda: None
    """Ends a step."""

    def step(self, values_of: Callable[[Any], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values and gradients of a step, after a pass as for old log-probabilities."""
        # First: after a pass, FSDP2's root has whole weights, which have no such gradients.
        self.model.zero_grad()
        with torch.no_grad():
            without = values_of(self.model)
        values = values_of(self.model)
        torch.testing.assert_close(values.detach(), without)
        self.backward(values.sum())
        parameters = base_model(self.model).named_parameters()
        named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in parameters}
        gradients = {n: self.gradient(p) for n, p in named.items() if p.requires_grad}
        self.finish()
        return values.detach(), {
            n: g.detach().clone() for n, g in gradients.items() if g is not None
        }


def compare(rank: int, case: Case) -> dict[str, Any]:
    """Return values and gradients of our training (`found`) and of an unsharded one with full
    logits (`expected`), each rank's number of calls of the head (`calls`), and warnings
    (`warned`)."""
    batches = [batch(r, count) for r, count in enumerate(case.counts)]
    plain = [Trained(built(case)).step(lambda model, b=b: plain_logps(model, *b)) for b in batches]
    mean = {n: torch.stack([gradients[n] for _, gradients in plain]).mean(0) for n in plain[0][1]}
    trained, calls, warned = wrap(built(case), case), [0], dict[str, str]()
    head = output_embedding(base_model(trained.model))
    head.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    get_logger().warning_once = lambda text, hash_id: warned.setdefault(hash_id, text)
    shim = LogitsShim(trained.model)
    shim.chunk_size = case.chunk_size
    for _ in range(STEPS):
        found = trained.step(lambda model: shim.logps(model, *batches[rank]).logps_N)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counts, torch.tensor(calls))
    return {
        "found": found,
        "expected": (plain[rank][0], mean),
        "calls": [int(count) for count in counts],
        "warned": [*warned.values()],
    }


def batch(rank: int, count: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Make inputs, the mask of `count` positions scattered over both rows, and the tokens there."""
    torch.manual_seed(rank)
    longest, shorter = LENGTHS
    attention_mask = torch.ones(2, longest, dtype=torch.int64)
    attention_mask[1, shorter + rank :] = 0
    input_ids = torch.randint(3, 150, (2, longest)) * attention_mask
    mask = torch.zeros(2 * longest, dtype=torch.bool)
    mask[3 * torch.arange(count) + 2] = True
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return inputs, mask.view(2, longest), input_ids.flatten()[mask]


def plain_logps(model: Any, inputs: dict[str, Tensor], mask: Tensor, targets: Tensor) -> Tensor:
    log_p = model(**inputs).logits[mask].log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0]


def wrap(model: Any, case: Case) -> Trained:
    if case.kind.startswith("DDP"):
        find_unused = case.kind.endswith("unused")
        return Trained(DistributedDataParallel(model, find_unused_parameters=find_unused))
    if case.kind == "FSDP1":
        return fsdp1(model)
    if case.kind == "ZeRO-3":
        return zero3(model)
    base = base_model(model)
    is_tied = base.lm_head.weight is base.model.embed_tokens.weight
    if case.kind.endswith("head with norm"):
        fully_shard([base.model.norm, base.lm_head])
    elif not is_tied:
        fully_shard(base.lm_head)
    for unit in (*base.model.layers, model):
        fully_shard(unit)
    return Trained(model, gradient=lambda p: None if p.grad is None else p.grad.full_tensor())


def fsdp1(model: Any) -> Trained:
    """Wrap the head as a unit of its own, as transformers' policies wrap large ones."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
    whole = FullyShardedDataParallel(model, **options)

    def gradient(parameter: nn.Parameter) -> Tensor | None:
        with FullyShardedDataParallel.summon_full_params(whole, with_grads=True, writeback=False):
            return None if parameter.grad is None else parameter.grad.clone()

    return Trained(whole, gradient=gradient)


def zero3(model: Any) -> Trained:
    import deepspeed.comm.torch
    from deepspeed.utils import safe_get_full_grad

    # The shared-memory operator would be compiled; gloo serves.
    deepspeed.comm.torch.build_shm_op = lambda: None
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        # 0: small weights travel too, as large ones do.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return Trained(engine, engine.backward, safe_get_full_grad, engine.step)


# --- shared prompts ---


APART = ((9, 4, 0, 0), (12, 3, 0, 0))
"""Rows of two prompts, with nothing to pack."""

BATCHES = ((ROWS, APART), (ROWS, ROWS), (APART, ROWS))
"""The rows of each rank, by step."""


def share_prompts(rank: int, case: str) -> dict[str, Any]:
    """Return the results of steps in which the ranks' batches can be packed at different times
    (`found`), those of ms-swift's passes of whole models (`expected`), and the number of positions
    in each of this rank's passes of the decoder (`positions`)."""
    name = "Qwen3-Next" if "delta nets" in case else "Qwen2"
    model = models.build(name)
    if case.endswith("recomputed"):
        model.gradient_checkpointing_enable({"use_reentrant": "ZeRO-3" in case})
        model.enable_input_require_grads()
    seen = positions_of(model)
    if case.startswith("ZeRO-3"):
        trained = zero3(model)
    elif case.startswith("FSDP2"):
        for unit in (*model.model.layers, model.lm_head, model):
            fully_shard(unit)
        trained = Trained(model, gradient=lambda p: None if p.grad is None else whole(p.grad))
    else:
        trained = Trained(DistributedDataParallel(model))
    proof.WORTH = 0.0
    ours, found, expected = sharing(), [], []
    for batches in BATCHES:
        batch = Group(batches[rank]).shared()
        trained.model.zero_grad()  # first: after a pass, FSDP2's root holds whole weights
        # As in ms-swift, passes without gradients see the model without DDP.
        plain = model if case.startswith("DDP") else trained.model
        for _ in range(1 + (case.endswith("rank 0") and rank == 0)):
            if not case.endswith("alone"):
                make_pass(ours, plain, batch)
        num_before = len(seen)
        values = loss_pass(ours, trained.model, batch)
        trained.backward(values.sum())
        if case.endswith("recomputed"):
            del seen[num_before + len(seen[num_before:]) // 2 :]
        dist.all_reduce(torch.zeros(1))  # must pair with the other rank's, as at a round's end
        gradients = {n: trained.gradient(p) for n, p in model.named_parameters()}
        found.append(
            (values.detach(), {n: g.clone() for n, g in gradients.items() if g is not None})
        )
        trained.finish()
    upstream = Upstream(config_of(), keys={"logits_to_keep"}, padding_free=False)
    for batches in BATCHES:
        values_of, gradients_of = [], []
        for rows in batches:
            unsharded = models.build(name)
            values = loss_pass(upstream, unsharded, Group(rows))
            values.sum().backward()
            values_of.append(values.detach())
            gradients_of.append({n: p.grad for n, p in unsharded.named_parameters()})
        mean = {
            n: torch.stack([gradients[n] for gradients in gradients_of]).mean(0)
            for n, g in gradients_of[0].items()
            if g is not None
        }
        expected.append((values_of[rank], mean))
    return {"found": found, "expected": expected, "positions": seen}


def loss_pass(trainer: Any, model: Any, batch: Group) -> Tensor:
    """Return log-probabilities of completion tokens."""
    grpo_batch = batch.grpo_batch()
    logps_BK, _ = trainer._get_per_token_logps_and_entropies_single(
        model, copy(batch.inputs), grpo_batch
    )
    values: Tensor = logps_BK[grpo_batch.completion_mask]
    return values


def whole(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.clone()


# --- the processes ---


def run(rank: int, folder: str) -> None:
    is_zero3 = sys.argv[2:] == ["zero3"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    torch.set_num_threads(1)
    shared = SHARED_PROMPTS_ZERO3 if is_zero3 else SHARED_PROMPTS
    results: dict[Any, Any] = {case: share_prompts(rank, case) for case in shared}
    for case in ZERO3 if is_zero3 else CASES:
        try:
            results[tuple(case)] = compare(rank, case)
        except RuntimeError as e:  # the group is lost: each further case would wait
            results[tuple(case)] = {"error": f"{type(e).__name__}: {e}"}
            break
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2:] == ["zero3"]:
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    start_processes(run)
