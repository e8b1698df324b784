"""Batches: two groups for a tiny model of each kind, and one group for models of real widths."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor

from scripts.bench import common  # noqa: F401  (makes `tiny_vlm` importable)
from scripts.tiny_vlm.families import draw, make_config, numbering, sized
from tests.logits.models import IMAGE, build, inputs_of

GROUPS = ((10, (7, 3, 5)), (8, (1, 4)))
"""Each group has so many tokens in its prompt, and in its samples' completions."""

HALF = 0.5
"""The models' weights are made smaller by this. As they are, bfloat16 moves gradients of the plain
pass by 12 to 25% (Qwen2, Qwen2.5-VL, InternVL, on a CPU), which hides much; halved, by 1 to 5%,
where samples that see one another move them by 38 to 76%. Gated delta nets, which norm what they
say, would get worse."""

NEEDS = {"Qwen3.5": "Qwen3_5Config", "Gemma3": "Gemma3Config"}
"""Configurations that not all releases of transformers have."""


def why_missing(name: str) -> str:
    """Return why the installed transformers cannot make a tiny model; '' where it can."""
    if hasattr(transformers, NEEDS.get(name, "Qwen2Config")):
        return ""
    return f"transformers {transformers.__version__} has no {name}"


def made(name: str, device: str, dtype: str, is_exact: bool = False) -> tuple[Any, Batch]:
    """Return a tiny model and its batch; an exact one in float32, with the weights of `dtype`."""
    # Else products in float32 may be rounded to 10 bits, for other sizes of a batch otherwise:
    # cudnn's convolutions are.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    model = build(name)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1 and "linear_attn" not in path:
                weight.mul_(HALF)
    model = model.to(device, getattr(torch, dtype))
    model = model.float() if is_exact else model
    return model, batch_of(name, model)


@dataclass(frozen=True)
class Batch:
    """Samples of groups, padded on the right."""

    inputs: dict[str, Any]
    """The arguments of a model's forward."""

    predicts_BT: Tensor
    """The positions whose logits are wanted."""

    targets_N: Tensor
    """The tokens that they predict."""


def batch_of(name: str, model: Any) -> Batch:
    """Return a batch on the model's device, an image at the start of each prompt where the model
    sees."""
    samples = [(g, prompt, new) for g, (prompt, news) in enumerate(GROUPS) for new in news]
    length = max(prompt + new for _, prompt, new in samples)
    inputs = inputs_of(name, (length,) * len(GROUPS))
    groups = torch.tensor([g for g, _, _ in samples])
    for key, value in inputs.items():  # a group's part of each, for each of its samples
        inputs[key] = value.unflatten(0, (len(GROUPS), -1))[groups].flatten(0, 1)
    ids, attended = inputs["input_ids"], torch.zeros_like(inputs["input_ids"])
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    for row, (_, prompt, new) in enumerate(samples):
        ids[row, prompt : prompt + new] = torch.randint(3, 150, (new,))
        ids[row, prompt + new :] = 0
        attended[row, : prompt + new] = 1
        predicts[row, prompt - 1 : prompt + new - 1] = True
    inputs["attention_mask"] = attended
    if name == "Gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    if "image_grid_thw" in inputs:
        inputs["position_ids"] = positions_of(model, inputs)
    inputs = {key: moved(value, model) for key, value in inputs.items()}
    targets = inputs["input_ids"].roll(-1, 1)[predicts.to(model.device)]
    return Batch(inputs, predicts.to(model.device), targets)


def positions_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the positions that ms-swift's templates give a batch with images."""
    find = model.model.get_rope_index
    # transformers 4 looks for placeholders itself.
    names = ("image_grid_thw", "attention_mask", "mm_token_type_ids")
    taken = {name: inputs[name] for name in names if name in inspect.signature(find).parameters}
    positions: Tensor = find(inputs["input_ids"], **taken)[0]
    return positions


def moved(value: Tensor, model: Any) -> Tensor:
    """Return an input on the model's device, pixels in its precision."""
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


# --- real widths ---

SPREAD = 1.5
"""Standard deviation of what a linear layer makes of normed states. With transformers' weights of
0.02 attention is so even that a wrong mask hardly shows."""


@lru_cache(maxsize=1)
def wide(size: str, layers: int, device: str, attention: str, sees: bool = False) -> Any:
    """Return a Qwen2.5 of a size in bfloat16, with gradient checkpointing on."""
    torch.manual_seed(0)
    family = sized("qwen2_5_vl", size, layers)
    config = make_config(family, numbering())
    text = config.get_text_config()
    more = {"use_cache": False, "initializer_range": SPREAD / text.hidden_size**0.5}
    if sees:
        text.update(more)
    else:
        own = {k: v for k, v in family.config["text_config"].items() if not k.endswith("_token_id")}
        own.pop("rope_scaling")
        config = transformers.Qwen2Config(**{**own, **more})
    kinds = (transformers.Qwen2ForCausalLM, transformers.Qwen2_5_VLForConditionalGeneration)
    model: Any = draw(kinds[sees], config, device, torch.bfloat16).train()
    model.set_attn_implementation(attention)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def group_of(model: Any, prompt_T: Tensor, completions: Sequence[int]) -> Batch:
    """Return a prompt's samples, of random tokens, padded on the right."""
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
    return Batch(inputs, predicts, ids.roll(-1, 1)[predicts])
