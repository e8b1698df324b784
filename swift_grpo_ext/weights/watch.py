"""Detects failed weight updates inside an engine, without the client's help (C2).

Every layer multiplies four fixed random vectors with its own kernel, so that packed, quantized and
sharded weights are checked in the form that is used. Entries of the products form a sketch of the
matrix: the cosine of two sketches approximates that of their matrices within 1/sqrt(n).

Symptom: rollouts are garbage after a weight update ("!!!"), but neither client nor server fails
(ms-swift's issues 9787, 9835, 9656, 9619, 9697, 9226; 8233: an adapter counts twice).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from swift_grpo_ext.weights.update import plain_name, shorten

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Sketches = dict[str, torch.Tensor]
"""Maps a name to float32 [B, N]: N entries of each of B blocks (experts; else 1)."""

NUM_VECTORS = 4
MOST_ENTRIES = 4096  # of a sketch; sketches of a model with 28 layers take 20 MB
MOST_OF_EXPERT = 256
FEWEST_ENTRIES = 128  # the cosine of two random sketches has a standard deviation of 0.09
EXPERTS = ".experts."
# An update as large as the matrix gives a cosine of 0.71 with the old matrix, and an update three
# times as large gives 0.32. A transposed, random or wrong matrix gives a cosine of 0.
LEAST_COSINE = 0.3
MOST_SCALE = 8.0  # maximum norm ratio (either way) of a plausible update
MIN_CHANGED = 64  # fewer changed entries may vanish in rounding; quantization may hide more
SAME_DIRECTION = 0.5  # least cosine of a base's change with a merged adapter; chance gives 0.01


class WeightWatch:
    """Checks the updates of one worker's model, from its loaded weights on. `is_random`: these
    come from `load_format` "dummy"."""

    def __init__(
        self, model: torch.nn.Module, config: ModelConfig, *, is_random: bool = False
    ) -> None:
        self._dtype, self._names = config.dtype, checkpoint_names(Path(config.model))
        self._packed: dict[str, Sequence[str]] = {}
        for module in model.modules():  # a model within another has its own (InternVL)
            self._packed |= getattr(module, "packed_modules_mapping", None) or {}
        self._min_changed = MOST_ENTRIES if config.quantization else MIN_CHANGED
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._engine_name: Callable[[str], object] = mapper._map_name if mapper else str
        self._layers: set[str] = set()
        # Updates are compared with the last sound one.
        start = self._sketch(model)
        # The first update of random weights may have any direction, as any change of zeros may.
        if is_random:
            start = {name: torch.zeros_like(sketch) for name, sketch in start.items()}
        self._at_start = self._sound = self._now = start
        self._arrived: Sketches = {}
        self._arrived_sound: Sketches = {}

    @torch.no_grad()
    def record_arrived(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sketch some rows of each matrix that arrives, and fewer rows of an expert."""
        for name, tensor in weights:
            if not tensor.numel():
                continue
            rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else tensor.numel())
            most = MOST_OF_EXPERT if EXPERTS in name and tensor.ndim == 2 else MOST_ENTRIES
            some = rows[:: ceil(len(rows) * NUM_VECTORS / most)].to(self._dtype)
            self._arrived[plain_name(name)] = sketch_of(linear(probe_vectors_like(some), some))

    def check_weights(self, model: torch.nn.Module, unfilled: Iterable[str]) -> tuple[str, ...]:
        """Return the faults of the model after an update; `unfilled` names unloaded parameters."""
        now = self._sketch(model)
        arrived, self._arrived = {n: each.cpu() for n, each in self._arrived.items()}, {}
        changes = {name: describe_change(self._sound[name], after) for name, after in now.items()}
        wrong = [f"{name} {change}" for name, change in changes.items() if change]
        faults = []
        if wrong:
            faults.append(f"weights changed implausibly: {shorten(wrong)}")
        if stale := self._stale(arrived, now):
            faults.append(
                f"no weight changed, though {len(stale)} changed tensors arrived (stale): "
                f"{shorten(stale)}"
            )
        # Not a fault for biases and norms: a client need not send them if it does not train them.
        matrices = {name for name, sketch in now.items() if sketch.shape[1] >= FEWEST_ENTRIES}
        left = [n for n in unfilled if n.removesuffix(".weight") in self._layers or n in matrices]
        if left:
            faults.append(f"{len(left)} matrices were not updated ({shorten(left)})")
        # Only weights that vLLM has: published checkpoints also contain unused ones.
        missing = [
            name
            for name in left_out(self._names, arrived)
            if EXPERTS in name or str(self._engine_name(name)).removesuffix(".weight") in matrices
        ]
        if missing:
            faults.append(f"{len(missing)} tensors did not arrive ({shorten(missing)})")
        self._now = now
        if not faults:
            self._sound, self._arrived_sound = now, arrived
        return tuple(faults)

    def _stale(self, arrived: Sketches, now: Sketches) -> list[str]:
        """Return the tensors that arrived changed although no weight of the model changed."""
        if any(not torch.equal(now[name], self._sound[name]) for name in now):
            return []
        before = self._arrived_sound
        changed = {
            name: int((sketch != before[name]).sum())
            for name, sketch in arrived.items()
            if name in before and sketch.shape == before[name].shape
        }
        if sum(changed.values()) < self._min_changed:
            return []
        return [name for name, count in changed.items() if count]

    @torch.no_grad()
    def check_adapter(self, loras: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the faults of an adapter's base. `loras` maps modules to `LoRALayerWeights`."""
        both = changed = effect = 0.0
        for path, lora in loras.items():
            parts = [  # lists for a layer that packs several matrices
                each if isinstance(each, list) else [each]
                for each in (lora.lora_a, lora.lora_b, lora.scaling)
            ]
            names = self._shards(path.removesuffix(".base_layer"), len(parts[0]))
            for name, a_RH, b_OR, scaling in zip(names, *parts, strict=True):
                now, at_start = self._now.get(name), self._at_start.get(name)
                if a_RH is None or b_OR is None or now is None or at_start is None:
                    continue
                product_VO = linear(linear(probe_vectors_like(a_RH), a_RH), b_OR)
                moved, made = now - at_start, sketch_of(product_VO).cpu() * scaling
                if moved.shape == made.shape:  # they differ if the layer is sharded
                    both += float((moved * made).sum())
                    changed += float(moved.square().sum())
                    effect += float(made.square().sum())
        if both <= SAME_DIRECTION * sqrt(changed * effect):
            return ()
        return (
            "the adapter counts twice: the base weights already include it (merged). Send the "
            "unmerged base with --vllm_enable_lora, or leave that flag out on both sides",
        )

    def _shards(self, path: str, count: int) -> list[str]:
        """Return the checkpoint names of the matrices that one layer packs."""
        if count == 1:
            return [path]
        parent, _, leaf = path.rpartition(".")
        parts = self._packed.get(leaf, ())
        if len(parts) != count:
            return [f"{path}[{i}]" for i in range(count)]
        return [f"{parent}.{part}".lstrip(".") for part in parts]

    @torch.no_grad()
    def _sketch(self, model: torch.nn.Module) -> Sketches:
        sketches: Sketches = {}
        for path, module in model.named_modules():
            if not isinstance(module, LinearBase | VocabParallelEmbedding):
                continue
            is_linear = isinstance(module, LinearBase)
            width = module.input_size if is_linear else module.embedding_dim
            width = getattr(module, "input_size_per_partition", width)
            device = next((p.device for p in module.parameters()), "cpu")
            x_VH = probe_vectors(width, self._dtype, device)
            try:
                y_VO = module.quant_method.apply(module, x_VH, None)
            except Exception:  # Qwen3.5 keeps a convolution in a linear layer: sketched below
                continue
            self._layers.add(path := path.removesuffix(".base_layer"))
            sizes = module.output_partition_sizes if is_linear else []
            sizes = sizes if sum(sizes) == y_VO.shape[-1] else [y_VO.shape[-1]]
            names = self._shards(path, len(sizes))
            for name, part_VO in zip(names, y_VO.split(sizes, -1), strict=True):
                sketches[name] = sketch_of(part_VO)
        for name, weight in model.named_parameters():
            path, _, leaf = name.rpartition(".")
            is_sketched = leaf == "weight" and path.removesuffix(".base_layer") in self._layers
            is_number = weight.is_floating_point() and weight.element_size() > 1
            if is_sketched or not is_number or not weight.numel():
                continue
            if weight.ndim == 3 and min(weight.shape[1:]) >= FEWEST_ENTRIES // NUM_VECTORS:
                if leaf.startswith("w13"):  # each expert's gate and up projections
                    weight = weight.unflatten(1, (2, -1)).flatten(0, 1)
                # [V, H] x [E, O, H]: one product for each expert.
                sketches[name] = sketch_of(probe_vectors_like(weight) @ weight.mT, MOST_OF_EXPERT)
            elif weight.ndim > 1:
                matrix_OH = weight.flatten(1)
                sketches[name] = sketch_of(linear(probe_vectors_like(matrix_OH), matrix_OH))
            else:  # too small for a cosine, but shows NaN and stale weights
                sketches[name] = sketch_of(weight.reshape(1, -1), most=FEWEST_ENTRIES - 1)
        return {name: sketch.cpu() for name, sketch in sketches.items()}


@lru_cache(maxsize=256)
def probe_vectors(width: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return the fixed random vectors [V, H] for matrices of this width."""
    drawn = torch.randn(NUM_VECTORS, width, generator=torch.Generator().manual_seed(width))
    return drawn.to(device, dtype)


def probe_vectors_like(matrix: torch.Tensor) -> torch.Tensor:
    return probe_vectors(matrix.shape[-1], matrix.dtype, matrix.device)


def sketch_of(product: torch.Tensor, most: int = MOST_ENTRIES) -> torch.Tensor:
    """Return evenly spaced entries [B, N] of a product's blocks [(B,) V, O]."""
    blocks = product.float().reshape(-1, *product.shape[-2:])
    some = blocks[..., :: ceil(blocks[0].numel() / most)].flatten(1).clone()
    # 0 times NaN or infinity is NaN: one such number of a block makes the block's first entry NaN.
    some[:, 0] += 0 * blocks.sum((1, 2))
    return some


def describe_change(before_BN: torch.Tensor, after_BN: torch.Tensor) -> str:
    """Describe a tensor's change if no update could cause it; "" otherwise."""
    # A tensor that was never loaded may hold anything.
    if not before_BN.isfinite().all():
        return ""
    if not after_BN.isfinite().all():
        return "holds NaN or infinity"
    old_B, new_B = before_BN.norm(dim=1), after_BN.norm(dim=1)
    cosine_B, scale_B = torch.cosine_similarity(before_BN, after_BN), new_B / old_B
    is_usual_B = (cosine_B >= LEAST_COSINE) & (scale_B < MOST_SCALE) & (scale_B > 1 / MOST_SCALE)
    # A zero matrix has no direction; some are zero at the start of a training.
    wrong_B = ~is_usual_B & (old_B > 0)
    if before_BN.shape[1] < FEWEST_ENTRIES or not wrong_B.any():
        return ""
    share = ((after_BN - before_BN)[wrong_B].norm() / old_B[wrong_B].norm()).item()
    text = f"moved by {share:.0%} of its norm" if new_B[wrong_B].any() else "is all zeros"
    return text + (f" ({int(wrong_B.sum())} of {len(wrong_B)} blocks)" if len(wrong_B) > 1 else "")


def checkpoint_names(folder: Path) -> frozenset[str]:
    """Return the tensor names of a checkpoint's safetensors files."""
    names = frozenset[str]()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {*file.keys()}
    return names


def left_out(names: Iterable[str], arrived: Mapping[str, object]) -> list[str]:
    """Return the checkpoint's weights that did not arrive, although others of their block did."""

    def block(name: str) -> str:
        path, found, _ = name.partition(EXPERTS)
        return path + found if found else ".".join(name.split(".")[:-2])

    weights = [name for name in names if name.endswith(".weight")]
    begun = {block(name) for name in weights if name in arrived}
    return sorted(n for n in weights if n not in arrived and block(n) in begun)
