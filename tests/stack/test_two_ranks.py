"""Two real ranks: chosen positions, chunks and shared prompts do not change values and gradients,
and no rank waits for another [L1, L6, R2].

    python -m tests.stack.test_two_ranks FOLDER

runs two ranks on CPU (gloo) with their own rows: passes of our trainer with replicated or sharded
models, and transformers' own passes of unsharded copies. It writes the results of `train` to
`FOLDER/rankR.pt`, by case. A rank that calls a sharded module more often than the other one fails.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from swift.utils import get_logger
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext.logits import proof
from swift_grpo_ext.logits.shim import LogitsShim, base_model
from tests.rig.arguments import training_arguments
from tests.rig.logits import models
from tests.rig.logits.batch import (
    ROWS,
    Batch,
    Ours,
    Rows,
    Run,
    assert_close,
    loss_pass,
    plain,
    seen_positions,
)
from tests.rig.processes import run_module
from tests.rig.ranks import start_processes


class Case(NamedTuple):
    """A training of some steps."""

    kind: str
    """DDP, FSDP1 or FSDP2."""

    name: str
    """One of `MODELS`."""

    steps: Sequence[Sequence[Rows]]
    """The rows of each rank, by step."""

    chunk_size: int = 1024
    num_before: tuple[int, int] = (1, 1)
    """Passes of each rank before the loss, as for old log-probabilities."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.name}, {self.steps[0]}, {self.num_before}"


def apart(kind: str, name: str, *counts: int, chunk_size: int = 2) -> Case:
    """Return a case of two steps, in which each rank has two prompts and this number of tokens."""
    rows = [((8, count - count // 2), (6 + rank, count // 2)) for rank, count in enumerate(counts)]
    return Case(kind, name, [rows] * 2, chunk_size)


CASES = [
    apart("FSDP1", "untied", 7, 2),
    apart("FSDP2", "untied", 7, 2),
    apart("FSDP2", "untied", 0, 0),
    apart("FSDP2", "tied", 0, 7),
    apart("FSDP2", "LoRA", 7, 0),
    apart("FSDP2", "capped", 7, 2),
    apart("FSDP2", "refuses on rank 0", 7, 2),
    apart("DDP", "untied", 7, 2, chunk_size=1024),
    apart("DDP", "LoRA", 3, 0),
    apart("DDP", "capped", 3, 0),
    apart("DDP, find unused", "untied", 7, 2),
]

APART = ((9, 4), (12, 3))
"""Rows of two prompts, with nothing to pack."""

STEPS = ((ROWS, APART), (ROWS, ROWS), (APART, ROWS))
"""The ranks' batches can be packed at different times."""

SHARED = [
    Case("DDP", "untied", STEPS, num_before=(2, 1)),
    Case("DDP", "untied", STEPS, num_before=(0, 0)),
    Case("FSDP2", "untied", STEPS),
    Case("FSDP2", "delta nets, recomputed", STEPS),
]


class RefusingOnRank0(models.FixedLength):
    """Fails on rank 0 without logits of every position."""

    def output(self, *args: Any) -> Any:
        kind = models.RemoteCode if dist.get_rank() else models.FixedLength
        return kind.output(self, *args)


MODELS: dict[str, Callable[[], Any]] = {
    "untied": partial(models.build, "Qwen2"),
    "tied": partial(models.build, "Qwen2, tied"),
    "LoRA": partial(models.build, "Qwen2", lora=True),
    "capped": partial(models.build, "soft-capped (Gemma2)"),
    "refuses on rank 0": lambda: RefusingOnRank0(models.Qwen2Config(**models.TEXT)),
    "delta nets, recomputed": lambda: models.recomputed(
        models.build("Qwen3-Next"), use_reentrant=False
    ),
}


def wrapped(model: Any, kind: str) -> Any:
    if kind.startswith("DDP"):
        return DistributedDataParallel(model, find_unused_parameters=kind.endswith("unused"))
    if kind == "FSDP1":
        # The head is a unit of its own, as transformers' policies wrap large ones.
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
        return FullyShardedDataParallel(model, **options)
    base = base_model(model)
    if base.lm_head.weight is not base.model.embed_tokens.weight:
        fully_shard(base.lm_head)
    for unit in (*base.model.layers, model):
        fully_shard(unit)
    return model


def step(model: Any, values_of: Callable[[Any], Tensor], num_before: int) -> Run:
    """Return the values and gradients of a step, after passes as for old log-probabilities."""
    # First: after a pass, FSDP2's root has whole weights, which have no such gradients.
    model.zero_grad()
    # As in ms-swift, passes without gradients see the model without DDP.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with torch.no_grad():
        before = [values_of(inner) for _ in range(num_before)]
    values = values_of(model)
    for each in before:
        torch.testing.assert_close(values.detach(), each)
    values.sum().backward()
    dist.all_reduce(torch.zeros(1))  # must pair with the other rank's, as at a round's end
    gradients, whole = {}, nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = model.summon_full_params(model, with_grads=True, writeback=False)
    with whole:
        for name, parameter in base_model(model).named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
                gradients[name.replace("_fsdp_wrapped_module.", "")] = grad
    return values.detach(), gradients


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


def train(rank: int, case: Case) -> dict[str, Any]:
    """Return values and gradients of the steps of our training (`found`) and of an unsharded one
    (`expected`), the positions in each pass of the decoder (`positions`) on this rank, and warnings
    (`warned`)."""

    def make() -> Any:
        torch.manual_seed(0)
        return MODELS[case.name]().train()

    LogitsShim.chunk_size, proof.WORTH = case.chunk_size, 0.0
    warned = dict[str, str]()
    get_logger().warning_once = lambda text, hash_id: warned.setdefault(hash_id, text)
    ours, model = Ours(logits_shim="auto"), wrapped(make(), case.kind)
    seen = seen_positions(model) if case.steps is STEPS else []  # remote code has no decoder
    found = []
    for rows in case.steps:
        batch = Batch(rows[rank]).shared()
        own = partial(loss_pass, ours, batch=batch, entropy=True)
        found.append(step(model, own, case.num_before[rank]))
    return {
        "found": found,
        "expected": [unsharded(make, [Batch(each) for each in rows])[rank] for rows in case.steps],
        "positions": seen,
        "warned": [*warned.values()],
    }


def run(rank: int, folder: str) -> None:
    results: dict[str, Any] = {}
    for case in [*SHARED, *CASES]:
        get_logger().info(case)  # names the case of an error
        results[str(case)] = train(rank, case)
    torch.save(results, f"{folder}/rank{rank}.pt")


# --- tests ---

Results = Callable[[Case], list[dict[str, Any]]]
"""Returns each rank's results of a case, after a comparison of values and gradients."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    run_module(__name__, str(folder), log=folder / "log")
    of_ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    def results_of_case(case: Case) -> list[dict[str, Any]]:
        for of_rank in of_ranks:
            result = of_rank[str(case)]
            for step, expected in zip(result["found"], result["expected"], strict=True):
                assert_close(step, expected)
        return [of_rank[str(case)] for of_rank in of_ranks]

    return results_of_case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_positions(results: Results, case: Case) -> None:
    """Logits in chunks are given up by both ranks, or by none."""
    for rank, result in enumerate(results(case)):
        reason = ""
        if case.name == "refuses on rank 0":
            reason = "on another rank" if rank else "RuntimeError"
        assert [reason in text for text in result["warned"]] == ([True] if reason else [])


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shared_prompts(results: Results, case: Case) -> None:
    """Only rank 0's batches can be packed in the first step, both ranks' in the second one, and
    rank 1's in the third."""
    of_rank_0, of_rank_1 = (result["positions"] for result in results(case))
    apart, packed, whole = sorted(set(of_rank_0))
    if case.kind != "DDP":  # neither packs, nor makes a further pass, where one cannot
        both = [packed, whole, whole, packed, packed]
        assert of_rank_0 == [whole, whole, *both, apart, apart]
        assert of_rank_1 == [apart, apart, *both, whole, whole]
    elif case.num_before == (0, 0):
        assert of_rank_0 == [packed, whole, whole, packed, packed, apart]
        assert of_rank_1 == [apart, packed, whole, whole, packed, packed]
    else:  # rank 0 makes a pass more in each step
        assert of_rank_0 == [packed, whole, whole, *[packed] * 6, *[apart] * 3]
        assert of_rank_1 == [apart, apart, packed, whole, whole, *[packed] * 4]


if __name__ == "__main__":
    training_arguments()  # parsed once for both ranks
    start_processes(run)
