"""Read the prompt of a group once in a training pass (`--logps_shared_prompt`).

A micro-batch repeats the prompt of a group in each of its samples' rows. A *packed row* holds each
prompt once, with its samples behind it, whose positions count on from it, and no padding. Layers
that mix positions read it by segments (`segments.py`): a sample sees its prompt and itself. The
sums are those of the micro-batch, in another order (shared-prefix forward: arXiv 2506.05433).

    prompt a b c, samples d e and f g  ->  a b  c d e  c f g

Letters in names are shapes: B rows of a micro-batch, G groups, T positions of a row, L positions of
the packed row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from swift_grpo_ext.logits import segments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Inputs that count tokens up, from the last of a prompt on by 1.
POSITIONS = ("position_ids", "text_position_ids")
# Inputs [G, T] that are 0 at text, and so at tokens of a sample's own.
PER_TOKEN = ("mm_token_type_ids", "token_type_ids", "image_token_types")
# Models count positions from these, which a packed row brings along. Templates leave out the rows
# without media: there may be fewer than G.
FOR_POSITIONS = ("second_per_grid_ts", "mm_token_type_ids")


class UnknownInputError(ValueError):
    """An input of a model that cannot be packed."""


class GroupRows(NamedTuple):
    """The samples of one prompt in a micro-batch, next to each other."""

    prompt: int  # tokens of the prompt that all have in common; 0 where there is one sample
    ids: list[Sequence[int]]  # the whole row of each sample: prompt and response
    labels: list[Sequence[int]]  # as long as `ids`; -100 marks a token that is not trained on

    @property
    def is_shared(self) -> bool:
        return len(self.ids) > 1

    @property
    def num_positions(self) -> tuple[int, list[int]]:
        """Positions of the prompt in the packed row, and of each sample behind it. A sample begins
        with the prompt's last token, which predicts its first own one. A group of one sample is all
        prompt."""
        if not self.is_shared:
            return len(self.ids[0]), []
        return self.prompt - 1, [len(ids) - self.prompt + 1 for ids in self.ids]


class SharedPromptInputs(dict[str, Any]):
    """A micro-batch from which the plain and the packed form are made.

    Items are what ms-swift's trainer reads, `input_ids` [B, T] and `attention_mask`, and settings
    of the forward that the trainer adds, such as `use_cache`: both forms get these.
    """

    def __init__(
        self,
        texts: Mapping[str, Any],
        groups: list[GroupRows],
        heads: dict[str, Any],
        plain: Callable[[], dict[str, Any]],
    ) -> None:
        """
        Args:
            texts: the items.
            groups: in the order of the rows. All media of several samples are in the prompt.
            heads: the inputs of each group's longest sample, as ms-swift collates them.
            plain: collates all B rows as ms-swift does.
        """
        super().__init__(texts)
        self.groups, self.heads, self.plain = groups, heads, plain

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if not isinstance(value, Tensor)}


class PackedBatch(NamedTuple):
    """A micro-batch as one packed row."""

    inputs: dict[str, Any]  # the arguments of the model's forward
    predicts_1L: Tensor  # the positions of the wanted logits, in the order of the rows


def plain_inputs(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a forward over the micro-batch as ms-swift makes it."""
    if isinstance(inputs, SharedPromptInputs):
        return inputs.plain() | inputs.settings
    return inputs


# --- what is packed ---


def reason_against(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
    """Return why inputs of an unwrapped model's forward cannot be packed; '' where they can."""
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        return "its forward takes no position_ids"
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        # transformers flattens the mask to one number for each position of the batch (5.19,
        # qwen3_moe and others, `load_balancing_loss_func`).
        return "--router_aux_loss_coef is computed of a mask of rows"
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope and "position_ids" not in inputs:
        # The model would count them row by row of the batch, which a packed row does not show.
        return "its positions are made of its images"
    return segments.reason_against(model)


def pack(inputs: SharedPromptInputs, model: PreTrainedModel) -> PackedBatch:
    """Pack a micro-batch for which `reason_against` names no reason. The unwrapped model's layers
    read packed rows from here on. Raises `UnknownInputError`.
    """
    groups = inputs.groups
    if any(group.is_shared and group.prompt < 2 for group in groups):
        raise UnknownInputError("a prompt has one token, which each sample needs for itself")
    layout = layout_of(groups, inputs.heads)
    packed = layout.inputs(inputs.heads) | inputs.settings
    packed["attention_mask"] = layout.attention_mask(inputs.heads, model)
    segments.read_by_segments(model)
    return PackedBatch(packed, layout.predicts_L[None].bool())


# --- what it saves ---


def longest_row(groups: Sequence[GroupRows]) -> int:
    return max(len(ids) for group in groups for ids in group.ids)


def saving(groups: Sequence[GroupRows]) -> float:
    """Return the share of positions, repeated prompts and padding, that a packed row leaves out."""
    num_plain = longest_row(groups) * sum(len(group.ids) for group in groups)
    parts = [group.num_positions for group in groups]
    return 1 - sum(prompt + sum(samples) for prompt, samples in parts) / num_plain


# --- the layout ---


@dataclass(frozen=True)
class Layout:
    """The positions of a packed row."""

    firsts_G: Tensor  # the column at which a group's row of `heads` begins, behind its padding
    ids_L: Tensor
    predicts_L: Tensor  # 1 where the next token of the sample is trained on
    columns_L: Tensor  # the place in the sample's row
    ahead_L: Tensor  # how far behind the first own token of the sample; 0 in prompts
    groups_L: Tensor
    numbers_L: Tensor  # 0 in a group's prompt, n in its n-th sample; one sample is all prompt

    def inputs(self, heads: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a model's forward, but for its mask."""
        packed: dict[str, Any] = {"position_ids": self.columns_L[None]}
        shape = heads["input_ids"].shape
        for name, value in heads.items():
            if name in ("input_ids", "attention_mask"):
                continue
            is_per_token = isinstance(value, Tensor) and value.shape[-2:] == shape
            if is_per_token and name in POSITIONS:
                # A head's first own token counts on from its media, and text counts up by 1.
                packed[name] = self.take(value) + self.ahead_L
            elif is_per_token and name in PER_TOKEN:
                packed[name] = self.take(value)
            elif is_per_token:
                raise UnknownInputError(f"the input {name} {tuple(value.shape)} is not known")
            elif name not in FOR_POSITIONS:
                packed[name] = value
        return packed | {"input_ids": self.ids_L[None]}

    def take(self, values: Tensor) -> Tensor:
        """Return [..., 1, L] of the heads' inputs [..., G, T]. A sample's own tokens have the value
        of the head's first one."""
        columns_L = self.columns_L - self.ahead_L + self.firsts_G[self.groups_L]
        return values[..., self.groups_L, columns_L].unsqueeze(-2)

    def attention_mask(
        self, heads: Mapping[str, Any], model: PreTrainedModel
    ) -> Tensor | dict[str, Tensor]:
        """Return what is given as `attention_mask`."""
        kinds_L = torch.zeros_like(self.groups_L)
        name, layers = images_that_look_ahead(model)
        if layers and name in heads:
            if heads[name].shape != heads["input_ids"].shape:
                raise UnknownInputError(f"{name} does not name the images of each row")
            kinds_L = self.take(heads[name])[0]
        # 1 is an image and 2 a video in both families; 3, audio, reads as text does.
        looks_ahead_L = layers * ((kinds_L == 1) | (kinds_L == 2))
        rows = torch.stack([self.groups_L, self.numbers_L, looks_ahead_L, self.columns_L])
        mask = rows.to(torch.int32)[None, None]
        kinds_of_layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
        if "linear_attention" not in kinds_of_layers:
            return mask
        # transformers gives gated delta nets no mask where it is a tensor of four dimensions (5.19,
        # masking_utils.py, `create_recurrent_attention_mask`), and they would run from one sample
        # into the next. It hands on a dictionary as it is.
        return dict.fromkeys(kinds_of_layers, mask)


def layout_of(groups: Sequence[GroupRows], heads: Mapping[str, Any]) -> Layout:
    """Lay the samples of a micro-batch out as one packed row."""
    input_ids, attended = heads["input_ids"], heads["attention_mask"]
    if attended.shape != input_ids.shape:
        raise UnknownInputError("the mask is one of pairs already")
    parts = []
    for number, group in enumerate(groups):
        prompt, samples = group.num_positions
        # Each piece: 0 or the sample's number, its row, and where it begins and ends there.
        pieces = [(0, 0, 0, prompt)]
        pieces += [(n + 1, n, prompt, prompt + length) for n, length in enumerate(samples)]
        for n, row, start, stop in pieces:
            columns = np.arange(start, stop)
            ids, labels = np.asarray(group.ids[row]), np.asarray(group.labels[row])
            predicts = np.append(labels[1:] != -100, False)
            ahead = np.maximum(columns - group.prompt, 0) if group.is_shared else 0 * columns
            same = (np.full(len(columns), value) for value in (number, n))
            parts.append(np.stack([ids[start:stop], predicts[start:stop], columns, ahead, *same]))
    table = torch.from_numpy(np.concatenate(parts, axis=1)).to(input_ids.device)
    return Layout(attended.int().argmax(dim=1), *table)


def images_that_look_ahead(model: PreTrainedModel) -> tuple[str, int]:
    """Return the input that names the positions of images, and the layers in which an image sees
    all of itself; 0: in none. Both families make their mask in `create_masks_for_vision_model`
    (transformers 5.19); other models make no mask of these inputs (Gemma 3n)."""
    classes = {cls.__name__ for cls in type(model).__mro__}  # FSDP2 derives its own
    if "Gemma3ForConditionalGeneration" in classes:
        return "token_type_ids", segments.EVERYWHERE
    text = model.config.get_text_config()
    gemma4 = {"Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"}
    if classes & gemma4 and text.use_bidirectional_attention == "vision":
        # transformers 5.12 lets them look ahead in all layers.
        is_new = segments.in_its_file(model, "create_masks_for_vision_model")
        return "mm_token_type_ids", segments.WITH_WINDOW if is_new else segments.EVERYWHERE
    return "", 0
