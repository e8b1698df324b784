"""Computes the prompt of a group once in a training pass (`--logps_shared_prompt`).

A micro-batch repeats a group's prompt in the row of each sample. A *packed row* has each prompt
once, without its last token, which each sample repeats before its response. It has no padding, and
each sample's position ids continue the prompt's. Layers that mix positions process it by segments
(`segments.py`): a sample sees its prompt and itself. Results differ only in the order of sums
(shared-prefix forward: arXiv 2506.05433).

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

# Position inputs, which grow by 1 a token after the prompt.
POSITIONS = ("position_ids", "text_position_ids")
# Inputs [G, T] that are 0 for text, and therefore for all tokens of responses.
PER_TOKEN = ("mm_token_type_ids", "token_type_ids", "image_token_types")
# Inputs only used to compute position ids, which a packed row already has. They may have fewer than
# G rows: templates leave out rows without media.
FOR_POSITIONS = ("second_per_grid_ts", "mm_token_type_ids")

Form = tuple[Mapping[str, Any], Tensor]
"""The arguments of a model's forward, and the mask of the wanted logits: [B, T] for plain rows,
[1, L] for a packed row. Both masks name the same tokens in the same order."""


class UnknownInputError(ValueError):
    """A model input cannot be packed."""


class GroupRows(NamedTuple):
    """The adjacent rows of one prompt's samples in a micro-batch."""

    prompt: int  # tokens of the shared prompt; 0 for a single sample
    ids: list[Sequence[int]]  # each sample's row: prompt and response
    labels: list[Sequence[int]]  # as long as `ids`; -100 for tokens that are not trained on
    kind: str = "text"  # the media of each row, such as `image`; `text` without media

    @property
    def is_shared(self) -> bool:
        return len(self.ids) > 1

    @property
    def num_positions(self) -> tuple[int, list[int]]:
        """The numbers of positions of the prompt and of each sample in the packed row. The prompt's
        last token belongs to each sample, as it predicts the sample's first token. A single sample
        counts as prompt."""
        if not self.is_shared:
            return len(self.ids[0]), []
        return self.prompt - 1, [len(ids) - self.prompt + 1 for ids in self.ids]


class SharedPromptInputs(dict[str, Any]):
    """A micro-batch that can be converted to the plain or the packed form.

    Its items are the inputs that ms-swift's trainer reads, `input_ids` [B, T] and `attention_mask`,
    and the settings of the forward that the trainer adds for both forms, such as `use_cache`.
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
            groups: in the order of the rows. Only the prompt may have media in groups of several.
            heads: ms-swift's collated inputs of each group's longest sample.
            plain: collates all B rows as ms-swift does.
        """
        super().__init__(texts)
        self.groups, self.heads, self.plain = groups, heads, plain

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if not isinstance(value, Tensor)}


def plain_inputs(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a forward over ms-swift's own micro-batch."""
    if isinstance(inputs, SharedPromptInputs):
        return inputs.plain() | inputs.settings
    return inputs


# --- packing ---


def reason_against(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
    """Return why the inputs of an unwrapped model cannot be packed; '' if they can."""
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        return "its forward takes no position_ids"
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        # Its loss needs a mask with one number per position of the batch (transformers 5.19,
        # qwen3_moe and others, `load_balancing_loss_func`).
        return "the loss of --router_aux_loss_coef needs a mask of plain rows"
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope and "position_ids" not in inputs:
        # The model would compute them for each row of the batch, not for a packed row.
        return "it computes its position ids from images"
    return segments.reason_against(model)


def pack(inputs: SharedPromptInputs, model: PreTrainedModel) -> Form:
    """Return a micro-batch, for which `reason_against` returns '', as one packed row. Raise
    `UnknownInputError` if that fails. From then on, layers of the unwrapped model accept such rows.
    """
    groups = inputs.groups
    if any(group.is_shared and group.prompt < 2 for group in groups):
        raise UnknownInputError("a prompt has one token, which each sample needs for itself")
    layout = layout_of(groups, inputs.heads)
    packed = layout.inputs(inputs.heads) | inputs.settings
    packed["attention_mask"] = layout.attention_mask(inputs.heads, model)
    segments.read_by_segments(model)
    return packed, layout.predicts_L[None].bool()


# --- savings ---


def longest_row(groups: Sequence[GroupRows]) -> int:
    return max(len(ids) for group in groups for ids in group.ids)


def saving(groups: Sequence[GroupRows]) -> float:
    """Return the share of positions that packing saves: repeated prompts and padding."""
    num_plain = longest_row(groups) * sum(len(group.ids) for group in groups)
    parts = [group.num_positions for group in groups]
    return 1 - sum(prompt + sum(samples) for prompt, samples in parts) / num_plain


# --- the layout ---


@dataclass(frozen=True)
class Layout:
    """The positions of a packed row."""

    firsts_G: Tensor  # the column of the first token in a group's row of `heads`, after padding
    ids_L: Tensor
    predicts_L: Tensor  # 1 if the next token of the sample is trained on
    columns_L: Tensor  # the index in the sample's row
    ahead_L: Tensor  # the distance from the first token of the response; 0 in prompts
    groups_L: Tensor
    numbers_L: Tensor  # 0 in a group's prompt, n in its n-th sample; 0 for a single sample

    def inputs(self, heads: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a model's forward, without the attention mask."""
        packed: dict[str, Any] = {"position_ids": self.columns_L[None]}
        shape = heads["input_ids"].shape
        for name, value in heads.items():
            if name in ("input_ids", "attention_mask"):
                continue
            is_per_token = isinstance(value, Tensor) and value.shape[-2:] == shape
            if is_per_token and name in POSITIONS:
                # The head's first response token continues after its media; text adds 1 a token.
                packed[name] = self.take(value) + self.ahead_L
            elif is_per_token and name in PER_TOKEN:
                packed[name] = self.take(value)
            elif is_per_token:
                raise UnknownInputError(f"the input {name} {tuple(value.shape)} is not known")
            elif name not in FOR_POSITIONS:
                packed[name] = value
        return packed | {"input_ids": self.ids_L[None]}

    def take(self, values: Tensor) -> Tensor:
        """Return values [..., 1, L] from the heads' inputs [..., G, T]. All response tokens get the
        value of the head's first response token."""
        columns_L = self.columns_L - self.ahead_L + self.firsts_G[self.groups_L]
        return values[..., self.groups_L, columns_L].unsqueeze(-2)

    def attention_mask(
        self, heads: Mapping[str, Any], model: PreTrainedModel
    ) -> Tensor | dict[str, Tensor]:
        """Return the `attention_mask` argument (`segments.Segments` has its rows)."""
        kinds_L = torch.zeros_like(self.groups_L)
        name, layers = images_that_look_ahead(model)
        if layers and name in heads:
            if heads[name].shape != heads["input_ids"].shape:
                raise UnknownInputError(f"{name} does not name the images of each row")
            kinds_L = self.take(heads[name])[0]
        # In both families 1 is an image, 2 a video, and 3 audio, which has causal attention.
        looks_ahead_L = layers * ((kinds_L == 1) | (kinds_L == 2))
        channels = torch.stack([self.groups_L, self.numbers_L, looks_ahead_L, self.columns_L])
        mask = channels.to(torch.int32)[None, None]
        kinds_of_layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
        if "linear_attention" not in kinds_of_layers:
            return mask
        # For gated delta nets, transformers drops a mask of four dimensions: states would leak from
        # one sample into the next (5.19, masking_utils.py, `create_recurrent_attention_mask`). It
        # passes a dictionary on unchanged.
        return dict.fromkeys(kinds_of_layers, mask)


def layout_of(groups: Sequence[GroupRows], heads: Mapping[str, Any]) -> Layout:
    """Return the layout of a micro-batch as one packed row."""
    input_ids, attended = heads["input_ids"], heads["attention_mask"]
    if attended.shape != input_ids.shape:
        raise UnknownInputError(f"attention_mask has the shape {tuple(attended.shape)}")
    parts = []
    for group_index, group in enumerate(groups):
        prompt, samples = group.num_positions
        # For each segment: 0 or the sample's number, its row, and its start and stop in the row.
        segments_of_group = [(0, 0, 0, prompt)]
        segments_of_group += [(n + 1, n, prompt, prompt + size) for n, size in enumerate(samples)]
        for n, row, start, stop in segments_of_group:
            columns = np.arange(start, stop)
            ids, labels = np.asarray(group.ids[row]), np.asarray(group.labels[row])
            predicts = np.append(labels[1:] != -100, False)
            ahead = np.maximum(columns - group.prompt, 0) if group.is_shared else 0 * columns
            same = (np.full(len(columns), value) for value in (group_index, n))
            parts.append(np.stack([ids[start:stop], predicts[start:stop], columns, ahead, *same]))
    table = torch.from_numpy(np.concatenate(parts, axis=1)).to(input_ids.device)
    return Layout(attended.int().argmax(dim=1), *table)


def images_that_look_ahead(model: PreTrainedModel) -> tuple[str, int]:
    """Return the input that marks image positions, and a code of `segments` for the layers with
    bidirectional attention within images (0: none). Gemma 3 and 4 have such layers: they build
    their masks in `create_masks_for_vision_model` (transformers 5.19). Gemma 3n does not use these
    inputs."""
    classes = {cls.__name__ for cls in type(model).__mro__}  # FSDP2 uses a derived class
    if "Gemma3ForConditionalGeneration" in classes:
        return "token_type_ids", segments.EVERYWHERE
    text = model.config.get_text_config()
    gemma4 = {"Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"}
    if classes & gemma4 and text.use_bidirectional_attention == "vision":
        # transformers 5.12 lets them look ahead in all layers.
        is_new = segments.in_its_file(model, "create_masks_for_vision_model")
        return "mm_token_type_ids", segments.WITH_WINDOW if is_new else segments.EVERYWHERE
    return "", 0
