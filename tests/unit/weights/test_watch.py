"""The watch over weights names wrong updates of layers that no CPU engine has, and no sound one
(C2). In tests/stack/test_weights.py real engines get faults and sound updates."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.linear import LinearBase

from swift_grpo_ext.weights.watch import (
    WeightWatch,
    checkpoint_names,
    describe_change,
    left_out,
    sketch_of,
)

CONFIG: Any = SimpleNamespace(dtype=torch.float32, model="/nowhere", quantization=None)
NAN = float("nan")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OLD, OTHER = drawn(1, 1, 512), drawn(2, 1, 512)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (OLD + 2 * OTHER, ""),  # an update twice as large as the matrix itself
        (OLD * 5, ""),
        (OTHER, "moved by 1"),
        (-OLD, "moved by 200% of its norm"),
        (OLD * 10, "moved by 900% of its norm"),
        (OLD / 10, "moved by 90% of its norm"),
        (OLD * 0, "is all zeros"),
        (OLD.index_fill(1, torch.tensor([7]), NAN), "holds NaN or infinity"),
    ],
)
def test_what_no_update_makes_of_a_matrix(after: torch.Tensor, told: str) -> None:
    assert describe_change(OLD, after).startswith(told)
    assert bool(describe_change(OLD, after)) == bool(told)
    blocks = describe_change(torch.cat([OLD, OTHER, OLD]), torch.cat([OLD, OTHER, after]))
    assert blocks.startswith(told)
    assert blocks.endswith(" (1 of 3 blocks)") == ("moved" in told or "zeros" in told)


def test_what_a_sketch_cannot_judge() -> None:
    """A matrix may become anything if it was zero, is too small, or was not filled. Infinity
    anywhere is in the sketch."""
    assert describe_change(OLD * 0, OTHER) == ""
    assert describe_change(OLD[:, :100], OTHER[:, :100]) == ""
    assert describe_change(OLD * NAN, OTHER) == ""
    product = drawn(3, 2, 4, 100_000)  # of two experts
    assert sketch_of(product).isfinite().all()
    product[1, 2, 77] = float("inf")  # between two entries that are kept
    assert sketch_of(product).isnan().sum(1).tolist() == [0, 1]


def test_weights_that_did_not_arrive_are_named(tmp_path: Path) -> None:
    """Tensors of a part that the training lacks, or of a tied head, never arrive."""
    names = [
        *(f"m.0.attn.{part}.weight" for part in "qkv"),
        *("m.0.attn.rotary.inv_freq", "m.0.attn.q.bias", "lm_head.weight"),
        *(f"m.0.mlp.experts.{i}.{part}.weight" for i in range(3) for part in "ab"),
        *("mtp.0.attn.q.weight", "mtp.0.attn.k.weight"),
    ]
    assert checkpoint_names(tmp_path) == frozenset()
    for shard, part in enumerate((names[:9], names[9:])):
        tensors = {name: torch.zeros(1) for name in part}
        save_file(tensors, tmp_path / f"model-0000{shard}-of-00002.safetensors")
    assert checkpoint_names(tmp_path) == {*names}

    sent = dict.fromkeys(name for name in names if name[0] == "m" and name[:3] != "mtp")
    assert left_out(names, sent) == []
    for name in ("m.0.attn.k.weight", "m.0.mlp.experts.2.b.weight"):
        assert left_out(names, {n: None for n in sent if n != name}) == [name]
    without_expert = {n: None for n in sent if ".experts.1." not in n}
    assert left_out(names, without_expert) == [f"m.0.mlp.experts.1.{x}.weight" for x in "ab"]
    # A layer's experts in one tensor of another name, as in transformers 5.
    fused = {n: None for n in sent if ".experts." not in n} | {"m.0.mlp.experts.ab": None}
    assert left_out(names, fused) == []


class Packed(LinearBase):
    """A layer whose kernel multiplies bytes, and scales the result."""

    def __init__(self, weight: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.input_size, self.output_partition_sizes = weight.shape[1], [len(weight)]
        self.quant_method = self
        self.load(weight)

    def load(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().max() / 127
        self.packed = torch.nn.Parameter((weight / self.scale).round().char(), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.packed.float()) * self.scale


def test_a_quantized_layer_that_is_given_raw_weights() -> None:
    weight = drawn(4, 64, 64) / 8
    model = torch.nn.ModuleDict({"layer": Packed(weight)})
    watch = WeightWatch(model, SimpleNamespace(**{**vars(CONFIG), "quantization": "int8"}))
    for seed in range(3):
        model.layer.load(weight + 1e-3 * drawn(seed, 64, 64))
        assert watch.check_weights(model, ()) == ()
    model.layer.packed.data = weight.char()  # raw numbers
    [fault] = watch.check_weights(model, ())
    assert fault == "weights changed implausibly: layer is all zeros"
    model.layer.load(weight)
    model.layer.scale = torch.tensor(1.0)  # not quantized again
    [fault] = watch.check_weights(model, ())
    assert "layer moved by 2" in fault
    model.layer.load(weight)
    assert watch.check_weights(model, ()) == ()


class Watched:
    """A model of one matrix, and the watch over it."""

    def __init__(self, **settings: Any) -> None:
        self.model = torch.nn.Linear(64, 64, bias=False)
        self.watch = WeightWatch(self.model, CONFIG, **settings)

    def update(self, arrived: torch.Tensor, held: torch.Tensor | None = None) -> str:
        """Return the findings after an update of which the engine holds `held`."""
        self.watch.record_arrived([("weight", arrived)])
        self.model.weight.data = (arrived if held is None else held).clone()
        return "; ".join(self.watch.check_weights(self.model, ()))


def test_weights_that_stay_though_others_arrive() -> None:
    """An update is compared with the last sound one: a client may repeat an update that had no
    effect, or undo one."""
    watched = Watched()
    weight = watched.model.weight.detach().clone()
    moved = weight + 1e-3 * drawn(5, 64, 64)
    assert watched.update(weight) == ""
    for _ in range(2):
        stale = "no weight changed, though 1 changed tensors arrived (stale): weight"
        assert watched.update(moved, weight) == stale
    assert watched.update(weight) == ""
    assert watched.update(moved) == ""
    # Learning rates of 1e-6 change few numbers in 16 bits: an engine's rounding may hide that.
    nearly = moved.clone()
    nearly[0, 0] += 1e-3
    assert watched.update(nearly, moved) == ""


def test_random_weights_are_no_base_to_judge_by() -> None:
    """`--vllm_engine_kwargs '{"load_format": "dummy"}'`: the first sound update is the base."""
    watched = Watched(is_random=True)
    weight = drawn(6, 64, 64)
    assert "holds NaN" in watched.update(weight * NAN)
    assert watched.update(weight) == ""
    assert watched.update(weight + 1e-3 * drawn(7, 64, 64)) == ""
    assert "moved by 1" in watched.update(drawn(8, 64, 64))
    assert watched.update(weight) == ""
    assert "moved by" in Watched().update(weight)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 8), (8, 0), (2, 0, 8), (5000,), (3, 4, 5)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_tensors_of_all_shapes_are_looked_at(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Gemma 4 has clipping buffers, and fp8 scales. A watch that raises would be off for the rest
    of the run."""
    model = torch.nn.Linear(64, 64, bias=False)
    tensor = torch.ones(shape).to(dtype)
    model.extra = torch.nn.Parameter(tensor, requires_grad=False)
    watch = WeightWatch(model, CONFIG)
    for value in (1.0, NAN):
        model.extra.data = torch.full(shape, value).to(dtype)
        watch.record_arrived([("weight", model.weight), ("extra", tensor), ("model.extra", tensor)])
        is_seen = value != 1 and tensor.numel() and dtype in (torch.float32, torch.bfloat16)
        told = "weights changed implausibly: extra holds NaN or infinity"
        assert watch.check_weights(model, ()) == ((told,) if is_seen else ())
