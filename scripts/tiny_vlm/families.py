"""Random models of families that ms-swift trains with GRPO, with Qwen's byte pairs: tiny ones, and
larger ones for benchmarks.

`families.yaml` lists them. Only a tokenizer's special tokens differ by family: the vocabulary is
the one that a package index has (`tokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2TokenizerFast,
)

from swift_grpo_ext.weights.layout import checkpoint_layout
from tiny_vlm.tokenizer import NUM_RANKS, SPECIAL_TOKENS, build_tokenizer, read_ranks

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
"""Writes what ms-swift's template `qwen2_5_vl` writes for text, images and videos."""

EMBEDDING_STD = 0.1
"""Five times transformers' default: token identities stay visible beside the image features, and
the tied head learns the answer's form in some 40 steps."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family is an entry of `families.yaml`: how its tiny model is made, what ms-swift calls it,
    and what tests have to know of it."""

    # What the model is.
    name: str
    template: str  # of ms-swift
    config: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)  # empty: it takes words alone
    model_type: str = ""  # of ms-swift, where it differs from the family's name
    model_class: str = "AutoModelForImageTextToText"
    thinker: str = ""  # the attribute with the part that is trained, where there are others
    renamed: tuple[str, str] = ("", "")  # how names begin in transformers' and published files
    sizes: Mapping[str, Any] = field(default_factory=dict)  # what larger models have, by size
    # Its tokenizer.
    tokens: Mapping[int, str] | tuple[str, ...] = SPECIAL_TOKENS  # behind byte pairs, or by id
    first_pair: int = 0  # id of the first byte pair; special tokens may stand before (Tekken)
    plain: Mapping[int, str] = field(default_factory=dict)  # added tokens, not special, by id
    eos: str = "<|im_end|>"
    names: Mapping[str, str] = field(default_factory=dict)  # tokens that the processor asks for
    # How it is trained.
    images: bool = True
    videos: bool = False
    audio: bool = False
    dtype: str = "float32"
    needs: tuple[str, ...] = ()  # packages that ms-swift asks for, beyond the set-up's
    argv: tuple[str, ...] = ()  # for `swift rlhf` and `swift rollout`
    lora: tuple[str, ...] = ()  # for LoRA
    # Upstream's faults, and ours.
    videos_fail: str = ""  # how upstream ends a training with videos
    shapes_fail: tuple[str, ...] = ()  # prompts that fail (`SHAPES` of test_families.py)
    without: tuple[str, str] = ("", "")  # words that fail in a prompt, and others for them
    reads_prompts_again: bool = False  # `--logps_shared_prompt` has no effect

    @property
    def swift_argv(self) -> list[str]:
        """Return what `swift rlhf` and `swift rollout` have to be told."""
        model_type = self.model_type or self.name
        dtype = ("--torch_dtype", self.dtype)
        return ["--model_type", model_type, "--template", self.template, *dtype, *self.argv]

    @property
    def bits(self) -> int:
        """Return the size of a number in memory."""
        return int(torch.finfo(getattr(torch, self.dtype)).bits)


FAMILIES = {
    name: Family(name=name, **entry)
    for name, entry in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
    if not name.startswith(".")
}


def sized(name: str, size: str, num_layers: int | None = None) -> Family:
    """Return a family with one of its other sizes, and so many layers where they are given.

    Raises:
        ValueError: the family has no such size, or its layers do not fit its pattern.
    """
    family = FAMILIES[name]
    if size not in family.sizes:
        known = ", ".join(family.sizes) or "none"
        raise ValueError(f"size {size} of {name}: expected one that families.yaml has ({known})")
    config = merged(family.config, family.sizes[size])
    text = config["text_config"]
    num_layers = num_layers or text["num_hidden_layers"]
    pattern = text.get("layer_types", ["full_attention"])
    if num_layers % len(pattern):
        raise ValueError(f"{num_layers} layers of {name}: expected a multiple of {len(pattern)}")
    text["num_hidden_layers"] = num_layers
    text["layer_types"] = pattern * (num_layers // len(pattern))
    if rope := text.pop("rope_parameters", None):
        text["rope_scaling"] = rope  # the spelling that transformers 4 and 5 read
    return replace(family, config=config)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of both; mappings within them are merged too."""
    result = {**base, **changes}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            result[key] = merged(base.get(key, {}), value)
    return result


def numbering() -> Any:
    """Return what takes a tokenizer's place in `make_config`: it numbers tokens as they come."""
    ids: dict[str, int] = {}
    return SimpleNamespace(encode=lambda token: [ids.setdefault(token, len(ids))])


def make_tokenizer(family: Family) -> Qwen2TokenizerFast:
    """Return Qwen's byte pairs with the family's special tokens behind them, or before."""
    tokens = family.tokens
    if not isinstance(tokens, Mapping):
        tokens = dict(enumerate(tokens, NUM_RANKS))
    known = {**tokens, **family.plain}
    begin = family.first_pair
    end = min([begin + NUM_RANKS, *(i for i in known if i >= begin)])  # no pair is made of later
    ranks = {token: begin + rank for token, rank in read_ranks().items() if begin + rank < end}
    others = (*range(begin), *range(end, max(known) + 1))
    places = {known.get(i, f"<unused{i}>"): i for i in others}
    special, plain = tuple(tokens.values()), tuple(family.plain.values())
    tokenizer = build_tokenizer(ranks, special, plain, places, family.eos, **family.names)
    for i, token in known.items():
        assert tokenizer.encode(token) == [i], f"{token}: {tokenizer.encode(token)}, not {i}"
    return tokenizer


def make_config(family: Family, tokenizer: Qwen2TokenizerFast) -> PretrainedConfig:
    """Return the configuration, with the ids that `tokenizer` gives."""
    config: PretrainedConfig = _made(family.config, tokenizer)
    return config


def make_processor(
    family: Family, tokenizer: Qwen2TokenizerFast
) -> ProcessorMixin | Qwen2TokenizerFast:
    """Return the processor; the tokenizer itself where words are all that the family takes."""
    if not family.processor:
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer
    parts = {"tokenizer": tokenizer, "chat_template": CHAT_TEMPLATE}
    processor: ProcessorMixin = _made({**family.processor, **parts}, tokenizer)
    return processor


def _made(entry: Any, tokenizer: Qwen2TokenizerFast) -> Any:
    """Replace `id:TOKEN` by the token's id, and an entry with `class` by an object of it."""
    if isinstance(entry, Mapping):
        values = {key: _made(value, tokenizer) for key, value in entry.items()}
        name = values.pop("class", None)
        return getattr(transformers, name)(**values) if name else values
    if isinstance(entry, list):
        return [_made(item, tokenizer) for item in entry]
    if isinstance(entry, str) and entry.startswith("id:"):
        [i] = tokenizer.encode(entry.removeprefix("id:"))
        return i
    return entry


def draw(model_class: Any, config: PretrainedConfig, device: str, dtype: torch.dtype) -> Any:
    """Return a model whose weights transformers draws, on the device and in the precision."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            is_auto = model_class.__name__.startswith("Auto")
            return model_class.from_config(config) if is_auto else model_class(config)
    finally:
        torch.set_default_dtype(default)


def make_model(
    family: Family, tokenizer: Qwen2TokenizerFast, seed: int, device: str = ""
) -> PreTrainedModel:
    """Draw a model in float32, as small widths need, or in bfloat16 on a device, as large ones do.

    transformers draws every weight with a standard deviation of 0.02, which suits widths of
    thousands. At widths of 64 and 128 it all but silences the vision tower.
    """
    config = make_config(family, tokenizer)
    torch.manual_seed(seed)
    model_class = getattr(transformers, family.model_class)
    dtype = torch.bfloat16 if device else torch.float32
    model: PreTrainedModel = draw(model_class, config, device or "cpu", dtype)
    if not device:
        spread(model, family)
    text = config.get_text_config()
    model.generation_config = GenerationConfig(
        do_sample=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=text.eos_token_id,
    )
    return model


def spread(model: PreTrainedModel, family: Family) -> None:
    """Draw weights again, as small widths need them."""
    drawn = getattr(model, family.thinker) if family.thinker else model
    for module in drawn.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    nn.init.normal_(drawn.get_input_embeddings().weight, std=EMBEDDING_STD)
    drawn.tie_weights()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not weight.any():  # Gemma3's projection: no image would be seen
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        if ".experts." in name or name.endswith(".mlp.gate.weight"):  # no linear layers of torch
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def make_family(family: Family, output: Path, seed: int, device: str = "") -> int:
    """Write a random model of the family as a Hugging Face folder; return its size.

    Args:
        device: draws weights in bfloat16, as widths of thousands need them.
    """
    tokenizer = make_tokenizer(family)
    model = make_model(family, tokenizer, seed, device)
    processor = make_processor(family, tokenizer)
    model.save_pretrained(output, max_shard_size="100GB")
    # Make the file what published ones are: transformers 5.19 loads experts transposed, and saves
    # them as it holds them; SigLIP's parameters have lost a level of their names there.
    path = output / "model.safetensors"
    old, new = family.renamed
    saved = load_file(path)
    tensors = {
        new + name.removeprefix(old) if old and name.startswith(old) else name: tensor.contiguous()
        for name, tensor in checkpoint_layout(model, saved).items()
    }
    if any(saved.get(name) is not tensor for name, tensor in tensors.items()):
        save_file(tensors, path, metadata={"format": "pt"})
    processor.save_pretrained(output)
    if family.thinker:
        torch.save({}, output / "spk_dict.pt")  # voices, which transformers asks for
    return int(model.num_parameters())
