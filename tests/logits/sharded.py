"""Training on two ranks that share the weights, against unsharded copies of the same model.

A rank that calls a sharded module more often than the other waits for ever; here it fails after
`two_ranks.WAIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from swift_grpo_ext.logits.shim import LogitsShim, base_model, output_embedding
from tests.logits import models
from tests.logits.models import RemoteCode

STEPS = 2
LENGTH = 12
"""Positions of each of a rank's two rows."""


class Case(NamedTuple):
    name: str
    """Of one of `MODELS`."""

    counts: tuple[int, int]
    """Completion tokens of each rank."""

    chunk_size: int = 2


COUNTS = [(7, 2), (3, 0), (0, 0)]
CASES = [
    *(Case(name, counts) for name in ("gathered head", "untied") for counts in COUNTS),
    *(Case(name, (7, 2), chunk_size=0) for name in ("gathered head", "untied")),
    *(Case("FSDP1", counts) for counts in COUNTS),
    Case("tied", (0, 7)),
    Case("LoRA", (7, 0)),
    Case("capped", (7, 2)),
    Case("swallows the keyword", (2, 7), chunk_size=0),
    Case("refuses odd numbers", (7, 2), chunk_size=0),
    Case("insists on all positions", (7, 2)),
]


class RefusingOddNumbers(RemoteCode):
    """Fails on one rank alone, where that rank chooses an odd number of positions."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        if logits.shape[1] % 2:
            raise RuntimeError(f"{logits.shape[1]} positions")
        return logits


MODELS: dict[str, Callable[[], Any]] = {
    "gathered head": lambda: models.build("remote code"),
    "untied": lambda: models.build("Qwen2"),
    "FSDP1": lambda: models.build("Qwen2"),
    "tied": lambda: models.build("Qwen2, tied"),
    "LoRA": lambda: models.build("Qwen2", lora=True),
    "capped": lambda: models.build("soft-capped (Gemma2)"),
    "swallows the keyword": lambda: models.build("names the keyword only"),
    "refuses odd numbers": models.remote(RefusingOddNumbers),
    "insists on all positions": lambda: models.build("insists on all positions"),
}


@dataclass(frozen=True)
class Trained:
    """A model, wrapped or not, and how it is trained."""

    model: Any
    backward: Callable[[Tensor], None] = Tensor.backward
    gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad
    """The whole gradient of a parameter, after `backward`."""

    finish: Callable[[], None] = lambda: None
    """Ends a step."""

    def step(self, values_of: Callable[[Any], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The values and gradients of a step, after a pass as for old log-probabilities."""
        # First: after a pass, FSDP2's root holds whole weights, whose gradients these are not.
        self.model.zero_grad()
        with torch.no_grad():
            without = values_of(self.model)
        values = values_of(self.model)
        torch.testing.assert_close(values.detach(), without)
        self.backward(values.sum())
        parameters = base_model(self.model).named_parameters()
        named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in parameters}
        found = {n: self.gradient(p) for n, p in named.items() if p.requires_grad}
        self.finish()
        return values.detach(), {n: g.detach().clone() for n, g in found.items() if g is not None}


def compare(rank: int, case: Case, shard: Callable[[Any, Case], Trained]) -> dict[str, Any]:
    """This rank's values, and gradients, sharded and by ours (`found`), whole and by full logits
    (`expected`); how often each rank called the head (`calls`), and what was `warned` of."""
    batches = [batch(r, count) for r, count in enumerate(case.counts)]
    plain = [Trained(built(case)).step(lambda model, b=b: plain_logps(model, *b)) for b in batches]
    mean = {n: torch.stack([gradients[n] for _, gradients in plain]).mean(0) for n in plain[0][1]}
    trained, calls, warned = shard(built(case), case), [0], []
    head = output_embedding(base_model(trained.model))
    head.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    shim = LogitsShim(trained.model, warn=warned.append)
    for _ in range(STEPS):
        found = trained.step(lambda model: ours(shim, model, *batches[rank], case.chunk_size))
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counts, torch.tensor(calls))
    return {
        "found": found,
        "expected": (plain[rank][0], mean),
        "calls": [int(count) for count in counts],
        "warned": warned,
    }


def built(case: Case) -> Any:
    torch.manual_seed(0)
    return MODELS[case.name]().train()


def batch(rank: int, count: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs, the mask of `count` positions scattered over both rows, and the tokens there."""
    torch.manual_seed(rank)
    input_ids = torch.randint(3, 150, (2, LENGTH))
    mask = torch.zeros(2 * LENGTH, dtype=torch.bool)
    mask[3 * torch.arange(count) + 2] = True
    return {"input_ids": input_ids}, mask.view(2, LENGTH), input_ids.flatten()[mask]


def plain_logps(model: Any, inputs: dict[str, Tensor], mask: Tensor, targets: Tensor) -> Tensor:
    log_p = model(**inputs).logits[mask].log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0]


def ours(
    shim: LogitsShim, model: Any, inputs: Any, mask: Tensor, targets: Tensor, chunk_size: int
) -> Tensor:
    return shim.logps(model, inputs, mask, targets, chunk_size=chunk_size).logps_N


def gathered_or_fsdp2(model: Any, case: Case) -> Trained:
    if case.name == "gathered head":
        model.lm_head = GatheredHead(model.lm_head)
        return Trained(model, gradient=mean_over_ranks)
    if case.name == "FSDP1":
        return fsdp1(model)
    base = base_model(model)
    is_tied = base.lm_head.weight is base.model.embed_tokens.weight
    assert is_tied == (case.name in ("tied", "capped"))
    for unit in (*base.model.layers, *([] if is_tied else [base.lm_head]), model):
        fully_shard(unit)
    return Trained(model, gradient=lambda p: None if p.grad is None else p.grad.full_tensor())


def fsdp1(model: Any) -> Trained:
    """With the head as a unit of its own, as transformers' policies wrap large ones."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
    whole = FullyShardedDataParallel(model, **options)

    def gradient(parameter: nn.Parameter) -> Tensor | None:
        with FullyShardedDataParallel.summon_full_params(whole, with_grads=True, writeback=False):
            return None if parameter.grad is None else parameter.grad.clone()

    return Trained(whole, gradient=gradient)


class GatheredHead(nn.Module):
    """A head whose weight each rank holds a half of, marked as DeepSpeed marks one."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().chunk(2)[dist.get_rank()].clone())
        self.bias = nn.Parameter(head.bias.detach().clone())
        self.weight.ds_id, self.weight.ds_process_group = 0, dist.group.WORLD

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, _Gathered.apply(self.weight), self.bias)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        shards = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(shards, shard)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient.chunk(2)[dist.get_rank()]


def mean_over_ranks(parameter: nn.Parameter) -> Tensor:
    if hasattr(parameter, "ds_id"):  # summed already, in shards
        shards = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(shards, parameter.grad)
        return torch.cat(shards) / 2
    dist.all_reduce(parameter.grad)
    return parameter.grad / 2
