"""Training passes over groups, plain and with each prompt read once, and models to run them.

The benchmarks time these passes; `tests/unit/logits/test_passes.py` compares the values and
gradients of such passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from swift_grpo_ext.logits.packed import Form, GroupRows, SharedPromptInputs, pack
from swift_grpo_ext.logits.shim import LogitsShim

FLASH = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""The distribution of each attention. Without it, transformers would ask its hub for kernels."""

SPREAD = 1.5
"""Standard deviation of a linear layer's outputs for normed inputs. With transformers' 0.02 for
weights, attention is so even that a wrong mask hardly changes the results."""


@dataclass(frozen=True)
class Batch:
    """Samples of groups, padded on the right."""

    inputs: dict[str, Any]  # arguments of the model's forward
    predicts_BT: Tensor  # True at positions that predict a completion token
    targets_N: Tensor  # the predicted tokens
    sizes: Sequence[tuple[int, int]]  # tokens of the prompt and number of samples, by group


def why_not_installed(attention: str) -> str:
    """Return the reason why an attention cannot run; "" if it can."""
    package = FLASH.get(attention, "torch")
    try:
        version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"
    return ""


@lru_cache(maxsize=1)
def make_model(
    family: str, size: str, layers: int | None, device: str, dtype: torch.dtype, attention: str
) -> Any:
    """Return a random model in training mode."""
    from tiny_vlm.families import draw, make_config, numbering, sized

    torch.manual_seed(0)
    config = make_config(sized(family, size, layers), numbering())
    text = config.get_text_config()
    text.update({"use_cache": False, "initializer_range": SPREAD / text.hidden_size**0.5})
    config._attn_implementation = attention
    model: Any = draw(AutoModelForImageTextToText, config, device, dtype).train()
    if device == "cuda":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def group_of(model: Any, prompt_T: Tensor, completions: Sequence[int]) -> Batch:
    """Return a group with random completions of these lengths, padded on the right."""
    prompt, length = len(prompt_T), len(prompt_T) + max(completions)
    text = model.config.get_text_config()
    shape = (len(completions), max(completions))
    news = torch.randint(200, text.vocab_size, shape, device=model.device)
    ids = torch.cat([prompt_T.to(model.device).expand(len(completions), -1), news], dim=1)
    ends = prompt + torch.tensor(completions, device=model.device)[:, None]
    columns = torch.arange(length, device=model.device)[None]
    predicts = (columns >= prompt - 1) & (columns < ends - 1)
    inputs = {"input_ids": ids, "attention_mask": (columns < ends).long()}
    if "mrope_section" in (getattr(text, "rope_parameters", None) or text.rope_scaling or {}):
        inputs["position_ids"] = columns.expand(3, *ids.shape)
    if model.config.model_type == "gemma3":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return Batch(inputs, predicts, ids.roll(-1, 1)[predicts], [(prompt, len(completions))])


def positions_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the position ids of ms-swift's templates for a batch with images."""
    find = model.model.get_rope_index
    # Not all releases of transformers take `mm_token_type_ids`.
    names = ("image_grid_thw", "attention_mask", "mm_token_type_ids")
    taken = {name: inputs[name] for name in names if name in inspect.signature(find).parameters}
    positions: Tensor = find(inputs["input_ids"], **taken)[0]
    return positions


def plain(model: Any, batch: Batch, chunk_size: int = LogitsShim.chunk_size) -> Tensor:
    """Return log-probabilities [N] from a pass over all rows."""
    return _logps(model, batch, (batch.inputs, batch.predicts_BT), chunk_size)


def once(model: Any, batch: Batch, chunk_size: int = LogitsShim.chunk_size) -> Tensor:
    """Return log-probabilities [N] from a pass that reads each prompt once."""
    return _logps(model, batch, packed(model, batch), chunk_size)


def packed(model: Any, batch: Batch) -> Form:
    return pack(shared(batch), model)


def shared(batch: Batch) -> SharedPromptInputs:
    """Return the input of `pack`: the batch, its groups, and each group's longest row."""
    ids_BT, attended_BT = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
    labels_BT = ids_BT.masked_fill(~batch.predicts_BT.roll(1, 1), -100)
    kind = "image" if "pixel_values" in batch.inputs else "text"
    groups, heads, first = list[GroupRows](), list[int](), 0
    for prompt, size in batch.sizes:
        rows = range(first, first + size)
        first += size
        ids, labels = (
            [values_BT[row][attended_BT[row]].tolist() for row in rows]
            for values_BT in (ids_BT, labels_BT)
        )
        groups.append(GroupRows(prompt, ids, labels, kind))
        heads.append(max(rows, key=lambda row: int(attended_BT[row].sum())))
    of_heads = {
        name: value[..., heads, :]
        if value.shape[-2:] == attended_BT.shape
        else value.unflatten(0, (len(ids_BT), -1))[heads].flatten(0, 1)  # as many media in each row
        for name, value in batch.inputs.items()
    }
    return SharedPromptInputs(batch.inputs, groups, of_heads, lambda: batch.inputs)


def _logps(model: Any, batch: Batch, packed_batch: Form, chunk_size: int) -> Tensor:
    shim = _shim_of(model)
    shim.chunk_size = chunk_size
    return shim.logps(model, *packed_batch, batch.targets_N).logps_N


@lru_cache(maxsize=1)
def _shim_of(model: Any) -> LogitsShim:
    return LogitsShim(model, strict=True)
