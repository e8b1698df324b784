"""The watch over an engine's weights, which needs no help of the client (C2).

    watch = WeightWatch(model, config)          before the first update
        watch.note_arrived(weights)             all that an update brings, in parts
        watch.check_weights(model, unfilled)    what is wrong with the model now, in words
        watch.check_adapter(loras)              what is wrong with the base below an adapter

Every layer multiplies four fixed random vectors with its own kernel, so that packed, quantized and
sharded weights are judged as they are used. The products' entries are a sketch of the matrix: the
cosine of two sketches is that of two matrices, within 1/sqrt(n). An update as large as the matrix
gives a cosine of 0.71 with the matrix before, three times as large 0.32; a transposed, random or
wrong matrix has a cosine of 0 with it.

Symptom: rollouts are garbage after a weight update ("!!!"), and neither client nor server fails
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

from swift_grpo_ext.weights.update import first_names, plain_name

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Sketches = dict[str, torch.Tensor]
"""By name, float32 [B, N]: B blocks (experts; else 1) with N entries each."""

NUM_VECTORS = 4
MOST_ENTRIES = 4096  # of a sketch: 20 MB for a model with 28 layers
MOST_OF_EXPERT = 256
FEWEST_ENTRIES = 128  # two random sketches of this size have a cosine of 0.09 (standard deviation)
EXPERTS = ".experts."
LEAST_COSINE = 0.3
MOST_SCALE = 8.0  # maximum norm ratio (either way) of a plausible update
ENTRIES_THAT_TELL = 64  # rounding does not hide the changes of this many; quantization may
SAME_DIRECTION = 0.5  # least cosine of a base's change and the adapter in it; chance gives 0.01


class WeightWatch:
    """Judges the updates of one worker's model, from the weights that it was loaded with. Where
    those `is_random` (`load_format` "dummy"), any direction is right for the first update."""

    def __init__(
        self, model: torch.nn.Module, config: ModelConfig, *, is_random: bool = False
    ) -> None:
        self._dtype, self._names = config.dtype, checkpoint_names(Path(config.model))
        self._packed: dict[str, Sequence[str]] = {}
        for module in model.modules():  # a model within another has its own (InternVL)
            self._packed |= getattr(module, "packed_modules_mapping", None) or {}
        self._telling = MOST_ENTRIES if config.quantization else ENTRIES_THAT_TELL
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._engine_name: Callable[[str], object] = mapper._map_name if mapper else str
        self._layers: set[str] = set()
        # What comes after a faulty update is held against the last sound one.
        start = self._sketch(model)
        if is_random:  # zeros have no direction (`describe_change`)
            start = {name: torch.zeros_like(sketch) for name, sketch in start.items()}
        self._at_start = self._sound = self._now = start
        self._arrived: Sketches = {}
        self._arrived_sound: Sketches = {}

    @torch.no_grad()
    def note_arrived(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sketch some rows of each matrix that an update brings, fewer of an expert's."""
        for name, tensor in weights:
            if not tensor.numel():
                continue
            rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else tensor.numel())
            most = MOST_OF_EXPERT if EXPERTS in name and tensor.ndim == 2 else MOST_ENTRIES
            some = rows[:: ceil(len(rows) * NUM_VECTORS / most)].to(self._dtype)
            self._arrived[plain_name(name)] = sketch_of(linear(probe_vectors_like(some), some))

    def check_weights(self, model: torch.nn.Module, unfilled: Iterable[str]) -> tuple[str, ...]:
        """Return what is wrong with the model after an update that left `unfilled` parameters."""
        now = self._sketch(model)
        arrived, self._arrived = {n: each.cpu() for n, each in self._arrived.items()}, {}
        changes = {name: describe_change(self._sound[name], after) for name, after in now.items()}
        wrong = [f"{name} {change}" for name, change in changes.items() if change]
        faults = []
        if wrong:
            faults.append(f"weights are not what an update makes of them: {first_names(wrong)}")
        if stale := self._stale(arrived, now):
            faults.append(
                f"all weights are those of before, though {len(stale)} others arrived (stale): "
                f"{first_names(stale)}"
            )
        # A bias or a norm that a client does not send stays as it was loaded, as in the trainer.
        matrices = {name for name, sketch in now.items() if sketch.shape[1] >= FEWEST_ENTRIES}
        left = [n for n in unfilled if n.removesuffix(".weight") in self._layers or n in matrices]
        if left:
            faults.append(f"{len(left)} matrices were left as they were ({first_names(left)})")
        # Published checkpoints have weights without a use: those that vLLM has count.
        missing = [
            name
            for name in left_out(self._names, arrived)
            if EXPERTS in name or str(self._engine_name(name)).removesuffix(".weight") in matrices
        ]
        if missing:
            faults.append(f"{len(missing)} tensors did not arrive ({first_names(missing)})")
        self._now = now
        if not faults:
            self._sound, self._arrived_sound = now, arrived
        return tuple(faults)

    def _stale(self, arrived: Sketches, now: Sketches) -> list[str]:
        """Return the tensors that arrived with a change, where no weight of the model changed."""
        if any(not torch.equal(now[name], self._sound[name]) for name in now):
            return []
        before = self._arrived_sound
        changed = {
            name: int((sketch != before[name]).sum())
            for name, sketch in arrived.items()
            if name in before and sketch.shape == before[name].shape
        }
        if sum(changed.values()) < self._telling:
            return []
        return [name for name, count in changed.items() if count]

    @torch.no_grad()
    def check_adapter(self, loras: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what is wrong with the base below an adapter: vLLM's `LoRALayerWeights` by their
        modules' names."""
        both = changed = effect = 0.0
        for path, lora in loras.items():
            parts = [  # lists where several matrices lie together in one layer
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
                if moved.shape == made.shape:  # not where ranks have parts of the layer
                    both += float((moved * made).sum())
                    changed += float(moved.square().sum())
                    effect += float(made.square().sum())
        if both <= SAME_DIRECTION * sqrt(changed * effect):
            return ()
        return (
            "the adapter counts twice: the weights below it hold it already (merged). Send the "
            "base as it is with --vllm_enable_lora, or leave that out on both sides",
        )

    def _shards(self, path: str, count: int) -> list[str]:
        """Return the names of what lies together in one layer, as a checkpoint has them."""
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
            except Exception:  # a convolution in a linear layer (Qwen3.5): sketched below
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
            else:  # too few numbers for a cosine; they show NaN and stale weights
                sketches[name] = sketch_of(weight.reshape(1, -1), most=FEWEST_ENTRIES - 1)
        return {name: sketch.cpu() for name, sketch in sketches.items()}


@lru_cache(maxsize=256)
def probe_vectors(width: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return the vectors that every matrix of this width multiplies, [V, H]."""
    drawn = torch.randn(NUM_VECTORS, width, generator=torch.Generator().manual_seed(width))
    return drawn.to(device, dtype)


def probe_vectors_like(matrix: torch.Tensor) -> torch.Tensor:
    return probe_vectors(matrix.shape[-1], matrix.dtype, matrix.device)


def sketch_of(product: torch.Tensor, most: int = MOST_ENTRIES) -> torch.Tensor:
    """Return evenly spaced entries [B, N] of the blocks [(B,) V, O]. NaN or infinity anywhere in a
    block makes its first entry NaN."""
    blocks = product.float().reshape(-1, *product.shape[-2:])
    some = blocks[..., :: ceil(blocks[0].numel() / most)].flatten(1).clone()
    some[:, 0] += 0 * blocks.sum((1, 2))
    return some


def describe_change(before_BN: torch.Tensor, after_BN: torch.Tensor) -> str:
    """Return how a tensor has changed, where no update changes it so; "" otherwise."""
    # A tensor that was never filled may hold anything.
    if not before_BN.isfinite().all():
        return ""
    if not after_BN.isfinite().all():
        return "holds NaN or infinity"
    old_B, new_B = before_BN.norm(dim=1), after_BN.norm(dim=1)
    cosine_B, scale_B = torch.cosine_similarity(before_BN, after_BN), new_B / old_B
    is_usual_B = (cosine_B >= LEAST_COSINE) & (scale_B < MOST_SCALE) & (scale_B > 1 / MOST_SCALE)
    # A matrix of zeros, as some are at the start of a training, has no direction.
    wrong_B = ~is_usual_B & (old_B > 0)
    if before_BN.shape[1] < FEWEST_ENTRIES or not wrong_B.any():
        return ""
    way = ((after_BN - before_BN)[wrong_B].norm() / old_B[wrong_B].norm()).item()
    what = f"moved by {way:.0%} of its norm" if new_B[wrong_B].any() else "is all zeros"
    return what + (f" ({int(wrong_B.sum())} of {len(wrong_B)} blocks)" if len(wrong_B) > 1 else "")


def checkpoint_names(folder: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors; none where it has other files."""
    names = frozenset[str]()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {*file.keys()}
    return names


def left_out(names: Iterable[str], arrived: Mapping[str, object]) -> list[str]:
    """Return the weights of the checkpoint that did not arrive while others of their block did."""

    def block(name: str) -> str:
        path, found, _ = name.partition(EXPERTS)
        return path + found if found else ".".join(name.split(".")[:-2])

    weights = [name for name in names if name.endswith(".weight")]
    begun = {block(name) for name in weights if name in arrived}
    return sorted(n for n in weights if n not in arrived and block(n) in begun)
