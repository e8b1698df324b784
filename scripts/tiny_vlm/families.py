"""Make random models of families that ms-swift trains with GRPO: tiny ones, and larger ones for
benchmarks.

`families.yaml` lists them. All use Qwen's byte pairs, the only vocabulary that a package on the
index contains (`tokenizer.py`); special tokens differ by family.
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
"""Writes text, images and videos as ms-swift's template `qwen2_5_vl` does."""

EMBEDDING_STD = 0.1
"""Five times transformers' default: image features do not drown out the tokens, and the tied head
learns the answer's form in some 40 steps."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """An entry of `families.yaml`."""

    # the model
    name: str
    template: str  # ms-swift's template
    config: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)  # empty for a text model
    model_type: str = ""  # ms-swift's model type, if it differs from `name`
    model_class: str = "AutoModelForImageTextToText"
    thinker: str = ""  # attribute of the trained part, if the model has other parts
    renamed: tuple[str, str] = ("", "")  # prefix of names in transformers' and in published files
    sizes: Mapping[str, Any] = field(default_factory=dict)  # changes of `config`, by size
    # the tokenizer
    tokens: Mapping[int, str] | tuple[str, ...] = SPECIAL_TOKENS  # by id, or after the byte pairs
    first_pair: int = 0  # id of the first byte pair; Tekken's special tokens come before it
    plain: Mapping[int, str] = field(default_factory=dict)  # added tokens, not special, by id
    eos: str = "<|im_end|>"
    names: Mapping[str, str] = field(default_factory=dict)  # tokens that the processor requires
    # training
    images: bool = True
    videos: bool = False
    audio: bool = False
    dtype: str = "float32"
    needs: tuple[str, ...] = ()  # packages that ms-swift requires and the set-up does not install
    argv: tuple[str, ...] = ()  # arguments for `swift rlhf` and `swift rollout`
    lora: tuple[str, ...] = ()  # arguments for LoRA
    # known failures
    videos_fail: str = ""  # upstream's error for a prompt with a video
    shapes_fail: tuple[str, ...] = ()  # prompts that fail (`SHAPES` of test_families.py)
    without: tuple[str, str] = ("", "")  # text that fails in a prompt, and its replacement
    reads_prompts_again: bool = False  # `--logps_shared_prompt` has no effect

    @property
    def swift_argv(self) -> list[str]:
        """Return the arguments for `swift rlhf` and `swift rollout`."""
        model_type = self.model_type or self.name
        dtype = ("--torch_dtype", self.dtype)
        return ["--model_type", model_type, "--template", self.template, *dtype, *self.argv]

    @property
    def bits(self) -> int:
        return int(torch.finfo(getattr(torch, self.dtype)).bits)


FAMILIES = {
    name: Family(name=name, **entry)
    for name, entry in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
    if not name.startswith(".")
}


def sized(name: str, size: str, num_layers: int | None = None) -> Family:
    """Return a family with another size, and with `num_layers` layers if given.

    Raises:
        ValueError: the size is unknown, or the number of layers does not fit the layers' pattern.
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
        text["rope_scaling"] = rope  # transformers 4 and 5 read this name
    return replace(family, config=config)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of both, merged recursively."""
    result = {**base, **changes}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            result[key] = merged(base.get(key, {}), value)
    return result


def numbering() -> Any:
    """Return a stand-in for `make_config`'s tokenizer; it numbers tokens in order of use."""
    ids: dict[str, int] = {}
    return SimpleNamespace(encode=lambda token: [ids.setdefault(token, len(ids))])


def make_tokenizer(family: Family) -> Qwen2TokenizerFast:
    """Return a tokenizer of Qwen's byte pairs and the family's special tokens."""
    tokens = family.tokens
    if not isinstance(tokens, Mapping):
        tokens = dict(enumerate(tokens, NUM_RANKS))
    known = {**tokens, **family.plain}
    begin = family.first_pair
    # Later byte pairs may be left out, since no earlier pair is made of them.
    end = min([begin + NUM_RANKS, *(i for i in known if i >= begin)])
    ranks = {token: begin + rank for token, rank in read_ranks().items() if begin + rank < end}
    others = (*range(begin), *range(end, max(known) + 1))
    places = {known.get(i, f"<unused{i}>"): i for i in others}
    special, plain = tuple(tokens.values()), tuple(family.plain.values())
    tokenizer = build_tokenizer(ranks, special, plain, places, family.eos, **family.names)
    for i, token in known.items():
        assert tokenizer.encode(token) == [i], f"{token}: {tokenizer.encode(token)}, not {i}"
    return tokenizer


def make_config(family: Family, tokenizer: Qwen2TokenizerFast) -> PretrainedConfig:
    """Return the configuration with the token ids of `tokenizer`."""
    config: PretrainedConfig = _resolve(family.config, tokenizer)
    return config


def make_processor(
    family: Family, tokenizer: Qwen2TokenizerFast
) -> ProcessorMixin | Qwen2TokenizerFast:
    """Return the processor, or the tokenizer of a text model."""
    if not family.processor:
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer
    parts = {"tokenizer": tokenizer, "chat_template": CHAT_TEMPLATE}
    processor: ProcessorMixin = _resolve({**family.processor, **parts}, tokenizer)
    return processor


def _resolve(entry: Any, tokenizer: Qwen2TokenizerFast) -> Any:
    """Replace `id:TOKEN` by the token's id, and an entry with `class` by an object of it."""
    if isinstance(entry, Mapping):
        values = {key: _resolve(value, tokenizer) for key, value in entry.items()}
        name = values.pop("class", None)
        return getattr(transformers, name)(**values) if name else values
    if isinstance(entry, list):
        return [_resolve(item, tokenizer) for item in entry]
    if isinstance(entry, str) and entry.startswith("id:"):
        [i] = tokenizer.encode(entry.removeprefix("id:"))
        return i
    return entry


def draw(model_class: Any, config: PretrainedConfig, device: str, dtype: torch.dtype) -> Any:
    """Return a model with transformers' random weights."""
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
    """Return a random model: a tiny one in float32, or a large one in bfloat16 on `device`.

    transformers draws every weight with a standard deviation of 0.02, which suits widths of
    thousands. At widths of 64 and 128 it all but silences the vision tower, so `spread` follows.
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
    """Draw weights again with larger standard deviations, for small widths."""
    drawn = getattr(model, family.thinker) if family.thinker else model
    for module in drawn.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    nn.init.normal_(drawn.get_input_embeddings().weight, std=EMBEDDING_STD)
    drawn.tie_weights()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not weight.any():  # Gemma3's projection would hide all images
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        if ".experts." in name or name.endswith(".mlp.gate.weight"):  # not torch's linear layers
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def make_family(family: Family, output: Path, seed: int, device: str = "") -> int:
    """Write a random model as a Hugging Face folder; return its number of parameters.

    Args:
        device: where to draw a large model in bfloat16; "" draws a tiny model.
    """
    tokenizer = make_tokenizer(family)
    model = make_model(family, tokenizer, seed, device)
    processor = make_processor(family, tokenizer)
    model.save_pretrained(output, max_shard_size="100GB")
    # Write the layout of published files: transformers 5.19 saves experts transposed, and drops a
    # level from the names of SigLIP's parameters.
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
        torch.save({}, output / "spk_dict.pt")  # transformers requires this file of voices
    return int(model.num_parameters())
