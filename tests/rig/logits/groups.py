"""Groups of samples for tiny models, collated as in ms-swift, and passes over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from swift_grpo_ext.logits.packed import GroupRows, SharedPromptInputs
from swift_grpo_ext.logits.shim import base_model
from tests.rig.logits.models import IMAGE, PLACEHOLDERS
from tests.unit.logits.test_logps import Batch, Ours, config_of

ROWS = ((9, 4, 0, 0), (9, 6, 0, 0), (9, 2, 3, 3), (12, 3, 0, 0), (12, 1, 0, 0))


@dataclass
class Group(Batch):
    """Groups of samples with one prompt each. Neighbouring rows with prompts of one length are a
    group; a row with a tool's image is a group of its own."""

    has_images: bool = False
    """Whether each prompt begins with an image."""

    images: list[list[dict[str, Tensor]]] = field(default_factory=list)
    """The images of each row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.inputs["input_ids"]
        own: dict[int, Tensor] = {}
        for row, (prompt, *_) in enumerate(self.rows):
            first = self.first_of(row)
            here = slice(first, first + prompt)
            ids[row, here] = own.setdefault(prompt, ids[row, here].clone())
            if self.has_images:
                ids[row, first : first + 6] = PLACEHOLDERS

    def first_of(self, row: int) -> int:
        return int(self.inputs["attention_mask"][row].int().argmax())

    def see(self, model: Any, pixels: Callable[[int], dict[str, Tensor]]) -> Group:
        """Give prompts and tools' answers an image each, with the positions of ms-swift's
        template."""
        ids = self.inputs["input_ids"]
        seen: dict[int, Any] = {}
        given = pixels(1)
        for row, (prompt, completion, tool, _) in enumerate(self.rows):
            images = [seen.setdefault(prompt, pixels(1))] if self.has_images else []
            if tool:
                first = self.first_of(row) + prompt + completion
                ids[row, first : first + 6] = PLACEHOLDERS
                images.append(given)
            self.images.append(images)
        self.inputs |= self.media(range(len(self.rows)))
        if "image_grid_thw" in self.inputs:
            find_positions = base_model(model).model.get_rope_index
            kinds = {"mm_token_type_ids": (ids == IMAGE).int()}
            if not kinds.keys() <= inspect.signature(find_positions).parameters.keys():
                kinds = {}
            wanted = ("image_grid_thw", "attention_mask")
            given_to_it = {name: self.inputs[name] for name in wanted}
            positions, _ = find_positions(ids, **given_to_it, **kinds)
            self.inputs |= {**kinds, "position_ids": positions}
        return self

    def media(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the model inputs of the images of some rows."""
        images = [image for row in rows if self.images for image in self.images[row]]
        return {k: torch.cat([image[k] for image in images]) for k in images[0]} if images else {}

    def shared(self) -> Group:
        """Return the same batch with inputs that may be packed."""
        attended = self.inputs["attention_mask"].bool()

        def group_of(row: int) -> tuple[int, int]:
            prompt, _, tool, _ = self.rows[row]
            return prompt, row if tool and self.images else -1

        groups, heads = list[GroupRows](), list[int]()
        for (prompt, _), same in groupby(range(len(self.rows)), key=group_of):
            rows = [*same]
            ids, labels = (
                [values[row][attended[row]].tolist() for row in rows]
                for values in (self.inputs["input_ids"], self.labels)
            )
            has_images = self.has_images or bool(self.images and self.images[rows[0]])
            kind = "image" if has_images else "text"
            groups.append(GroupRows(prompt if len(rows) > 1 else 0, ids, labels, kind))
            heads.append(max(rows, key=lambda row: sum(self.rows[row])))
        kept = attended[heads].any(0)
        of_heads = {
            name: value[..., heads, :][..., kept]
            for name, value in self.inputs.items()
            if value.shape[-2:] == attended.shape
        }
        texts = {name: self.inputs[name] for name in ("input_ids", "attention_mask")}
        of_heads |= self.media(heads)
        shared = copy(self)
        shared.inputs = SharedPromptInputs(texts, groups, of_heads, lambda: dict(self.inputs))
        return shared


def positions_of(model: Any) -> list[int]:
    """Return a list that gets the number of positions of each later pass of the decoder."""
    seen: list[int] = []
    decoder = base_model(model).get_decoder()
    decoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0][..., 0].numel()), with_kwargs=True
    )
    return seen


def sharing() -> Any:
    """Return a trainer that packs prompts where it can."""
    return Ours(config_of(), keys=set(), padding_free=False)


def make_pass(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Return log-probabilities without gradients, as of the old policy."""
    with torch.no_grad():
        logps_BK, _ = trainer._get_per_token_logps_and_entropies_single(
            model, copy(batch.inputs), batch.grpo_batch()
        )
    return logps_BK
