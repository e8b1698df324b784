"""Two ranks on CPU (gloo) with their own rows: passes of our trainer with replicated or sharded
models, and transformers' own passes of unsharded copies.

    python -m tests.rig.logits.two_ranks FOLDER [zero3]

Writes the results of `train` to `FOLDER/rankR.pt`, by case; with `zero3` those of ZeRO-3 alone,
since DeepSpeed makes its own process group. If a rank calls a sharded module more often than the
other one, it fails after `WAIT`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from swift.utils import get_logger
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutputWithPast

from swift_grpo_ext.logits import proof
from swift_grpo_ext.logits.shim import LogitsShim, base_model, output_embedding
from tests.rig.logits import models
from tests.rig.logits.batch import ROWS, Batch, Rows, plain
from tests.rig.logits.compare import Run
from tests.rig.logits.trainers import Ours, loss_pass, seen_positions
from tests.rig.ranks import start_processes

Steps = Sequence[Sequence[Rows]]
WAIT = timedelta(seconds=120)
"""Bound on a collective that only one rank enters; long enough for a busy machine."""


class Case(NamedTuple):
    """Two steps of training without shared prompts."""

    kind: str
    """DDP, FSDP1, FSDP2 or ZeRO-3."""

    name: str
    """One of `MODELS`."""

    counts: tuple[int, int]
    """Completion tokens of each rank."""

    chunk_size: int = 2

    def __str__(self) -> str:
        return f"{self.kind}, {self.name}, {self.counts} in chunks of {self.chunk_size}"

    @property
    def steps(self) -> Steps:
        """The rows of each rank, by step."""
        rows = [
            ((8, count - count // 2), (6 + rank, count // 2))
            for rank, count in enumerate(self.counts)
        ]
        return [rows] * 2


APART = ((9, 4), (12, 3))
"""Rows of two prompts, with nothing to pack."""


class Shared(NamedTuple):
    """Three steps in which the ranks' batches can be packed at different times."""

    kind: str
    name: str
    num_before: tuple[int, int] = (1, 1)
    """Passes of each rank before the loss, as for old log-probabilities."""

    chunk_size: int = 1024
    steps: Steps = ((ROWS, APART), (ROWS, ROWS), (APART, ROWS))

    def __str__(self) -> str:
        return f"{self.kind}, {self.name}, after {self.num_before} passes"


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
    Case("ZeRO-3", "untied", (7, 2)),
    Case("ZeRO-3", "untied", (0, 0)),
    Case("ZeRO-3", "tied", (0, 7)),
    Case("ZeRO-3", "LoRA", (7, 0)),
    Case("ZeRO-3", "capped", (2, 7)),
]

SHARED = [
    Shared("DDP", "untied", (2, 1)),
    Shared("DDP", "untied", (0, 0)),
    Shared("FSDP2", "untied"),
    Shared("FSDP2", "delta nets, recomputed"),
    Shared("ZeRO-3", "untied"),
    Shared("ZeRO-3", "delta nets, recomputed, reentrant"),
]


class RefusingOnRank0(models.FixedLength):
    """Fails on rank 0 without logits of every position."""

    def output(self, *args: Any) -> CausalLMOutputWithPast:
        kind = models.RemoteCode if dist.get_rank() else models.FixedLength
        return kind.output(self, *args)


MODELS: dict[str, Callable[[], Any]] = {
    "untied": lambda: models.build("Qwen2"),
    "tied": lambda: models.build("Qwen2, tied"),
    "LoRA": lambda: models.build("Qwen2", lora=True),
    "capped": lambda: models.build("soft-capped (Gemma2)"),
    "refuses on rank 0": models.remote(RefusingOnRank0),
    "delta nets, recomputed": lambda: recomputed_delta_nets(use_reentrant=False),
    "delta nets, recomputed, reentrant": lambda: recomputed_delta_nets(use_reentrant=True),
}


def recomputed_delta_nets(*, use_reentrant: bool) -> Any:
    model = models.build("Qwen3-Next")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model


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

    def step(self, values_of: Callable[[Any], Tensor], num_before: int) -> Run:
        """Return the values and gradients of a step, after passes as for old log-probabilities."""
        # First: after a pass, FSDP2's root has whole weights, which have no such gradients.
        self.model.zero_grad()
        # As in ms-swift, passes without gradients see the model without DDP.
        is_ddp = isinstance(self.model, DistributedDataParallel)
        with torch.no_grad():
            before = [
                values_of(self.model.module if is_ddp else self.model) for _ in range(num_before)
            ]
        values = values_of(self.model)
        for each in before:
            torch.testing.assert_close(values.detach(), each)
        self.backward(values.sum())
        dist.all_reduce(torch.zeros(1))  # must pair with the other rank's, as at a round's end
        gradients = {}
        # A list: FSDP1 changes its modules to get a whole gradient.
        for name, parameter in [*base_model(self.model).named_parameters()]:
            gradient = self.gradient(parameter) if parameter.requires_grad else None
            if gradient is not None:
                gradients[name.replace("_fsdp_wrapped_module.", "")] = gradient.detach().clone()
        self.finish()
        return values.detach(), gradients


def wrapped(model: Any, kind: str) -> Trained:
    if kind.startswith("DDP"):
        find_unused = kind.endswith("unused")
        return Trained(DistributedDataParallel(model, find_unused_parameters=find_unused))
    if kind == "FSDP1":
        return fsdp1(model)
    if kind == "ZeRO-3":
        return zero3(model)
    base = base_model(model)
    is_tied = base.lm_head.weight is base.model.embed_tokens.weight
    if kind.endswith("head with norm"):
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


def unsharded(make: Callable[[], Any], batches: Sequence[Batch]) -> list[Run]:
    """Return each rank's values, with the mean of all ranks' gradients."""
    values, gradients = [], []
    for batch in batches:
        model = make()
        values.append(plain(model, batch))
        values[-1].sum().backward()
        named = base_model(model).named_parameters()
        gradients.append({name: p.grad for name, p in named if p.grad is not None})
    mean = {name: torch.stack([g[name] for g in gradients]).mean(0) for name in gradients[0]}
    return [(each.detach(), mean) for each in values]


def train(rank: int, case: Case | Shared) -> dict[str, Any]:
    """Return values and gradients of the steps of our training (`found`) and of an unsharded one
    (`expected`), the calls of the head (`calls`) and the positions in each pass of the decoder
    (`positions`) on this rank, and warnings (`warned`)."""

    def make() -> Any:
        torch.manual_seed(0)
        return MODELS[case.name]().train()

    LogitsShim.chunk_size, proof.WORTH = case.chunk_size, 0.0
    warned = dict[str, str]()
    get_logger().warning_once = lambda text, hash_id: warned.setdefault(hash_id, text)
    ours = Ours(logits_shim="auto")
    trained = wrapped(make(), case.kind)
    seen, calls = seen_positions(trained.model) if isinstance(case, Shared) else [], [0]
    head = output_embedding(base_model(trained.model))
    head.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    num_before = case.num_before[rank] if isinstance(case, Shared) else 1
    found, expected = [], []
    for rows in case.steps:
        batch = Batch(rows[rank]).shared()
        step = trained.step(
            lambda model, batch=batch: loss_pass(ours, model, batch, entropy=True), num_before
        )
        found.append(step)
    for rows in case.steps:
        expected.append(unsharded(make, [Batch(each) for each in rows])[rank])
    return {
        "found": found,
        "expected": expected,
        "calls": calls[0],
        "positions": seen,
        "warned": [*warned.values()],
    }


# --- the processes ---


def run(rank: int, folder: str) -> None:
    is_zero3 = sys.argv[2:] == ["zero3"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    torch.set_num_threads(1)
    results: dict[Any, Any] = {}
    for case in [*SHARED, *CASES]:
        if (case.kind == "ZeRO-3") != is_zero3:
            continue
        try:
            results[str(case)] = train(rank, case)
        except RuntimeError as e:  # the group is lost: each further case would wait
            results["error"] = f"{case}: {type(e).__name__}: {e}"
            break
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2:] == ["zero3"]:
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    start_processes(run)
