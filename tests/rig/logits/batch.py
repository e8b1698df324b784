"""Batches for tiny models, collated as in ms-swift, and ways to their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from typing import Any

import torch
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers.utils import build_completion_mask_and_seq_lengths
from torch import Tensor, nn

from swift_grpo_ext.logits.packed import Form, GroupRows, SharedPromptInputs, pack
from swift_grpo_ext.logits.shim import LogitsShim, base_model
from tests.rig.logits.models import IMAGE, IMAGES, PLACEHOLDERS, TYPES

Rows = Sequence[Sequence[int]]

ROWS: Rows = ((9, 4), (9, 6), (9, 2, 3, 3), (12, 3), (12, 1))
"""Two groups."""

UNEQUAL: Rows = ((9, 4), (3, 6), (5, 2, 3, 3))
"""Three prompts."""


class Batch:
    """Rows with lengths of prompt, completion, tool's answer and second completion. Only
    completions are trained on, as in a conversation. Prompts of one length are the same; adjacent
    rows with one prompt are a group."""

    def __init__(self, rows: Rows, layout: str = "right") -> None:
        """`layout` is the side of padding, or `packed` for padding-free rows."""
        torch.manual_seed(2)
        self.rows, self.layout = [(*row, 0, 0)[:4] for row in rows], layout
        self.images: list[list[dict[str, Tensor]]] = [[] for _ in rows]
        prompts = {row[0]: torch.randint(3, 150, (row[0],)) for row in rows}
        ids, labels = list[Tensor](), list[Tensor]()
        for prompt, first, tool, second in self.rows:
            new = torch.randint(3, 150, (first + tool + second,))
            ids.append(torch.cat([prompts[prompt], new]))
            labels.append(ids[-1].clone())
            labels[-1][:prompt] = labels[-1][prompt + first : prompt + first + tool] = -100
        self.inputs: dict[str, Any]
        if layout == "packed":
            self.labels = torch.cat(labels)[None]
            positions = torch.cat([torch.arange(len(i)) for i in ids])[None]
            self.inputs = {"input_ids": torch.cat(ids)[None], "position_ids": positions}
        else:
            pad = torch.nn.utils.rnn.pad_sequence
            side = {"batch_first": True, "padding_side": layout}
            self.labels = pad(labels, padding_value=-100, **side)
            mask = pad([torch.ones_like(i) for i in ids], **side)
            self.inputs = {"input_ids": pad(ids, **side), "attention_mask": mask}

    def see(self, model: nn.Module, *, with_images: bool = True) -> Batch:
        """Add the inputs of the model's template: positions, and images at the beginning of prompts
        and tools' answers. Text models get none."""
        base: Any = base_model(model)
        kind, ids = base.config.model_type, self.inputs["input_ids"]
        if with_images and kind in IMAGES:
            of_prompts = {prompt: IMAGES[kind]() for prompt, *_ in self.rows}
            of_tools = IMAGES[kind]()
            firsts = self.inputs["attention_mask"].argmax(1).tolist()
            for row, (prompt, completion, tool, _) in enumerate(self.rows):
                first = firsts[row]
                ids[row, first : first + len(PLACEHOLDERS)] = PLACEHOLDERS
                self.images[row] = [of_prompts[prompt]]
                if tool:
                    first += prompt + completion
                    ids[row, first : first + len(PLACEHOLDERS)] = PLACEHOLDERS
                    self.images[row].append(of_tools)
            self.inputs |= self.media(range(len(self.rows)))
        if kind in TYPES:
            self.inputs[TYPES[kind]] = (ids == IMAGE).int()
        if "mrope_section" in str(base.config):
            names = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
            given = {name: self.inputs[name] for name in names if name in self.inputs}
            self.inputs["position_ids"], _ = base.model.get_rope_index(ids, **given)
        return self

    def media(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the model inputs of the images of some rows."""
        images = [image for row in rows for image in self.images[row]]
        return {k: torch.cat([image[k] for image in images]) for k in images[0]} if images else {}

    def to(self, model: Any) -> Batch:
        """Move the batch to the model's device, and its pixels to the model's precision."""
        for name, value in self.inputs.items():
            dtype = model.dtype if value.is_floating_point() else None
            self.inputs[name] = value.to(model.device, dtype)
        self.labels = self.labels.to(model.device)
        return self

    @property
    def predicts_BT(self) -> Tensor:
        """Positions that predict completion tokens."""
        return nn.functional.pad(self.labels[:, 1:] != -100, (0, 1))

    @property
    def targets_N(self) -> Tensor:
        return self.labels[:, 1:][self.labels[:, 1:] != -100]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Each group's tokens of the prompt and number of samples, as in the benches' batches."""
        groups = groupby(prompt for prompt, *_ in self.rows)
        return [(prompt, len([*same])) for prompt, same in groups]

    def grpo_batch(self) -> GRPOBatch:
        """Return the batch as `collate_to_grpo_micro_batch` makes it."""
        first = self.labels.ne(-100).int().argmax(-1)
        num_kept = int((self.labels.shape[-1] - first).max())
        mask, lengths, _ = build_completion_mask_and_seq_lengths(
            self.labels,
            len(self.rows),
            padding_free=self.layout == "packed",
            encoded_batch=self.inputs,
            logits_to_keep=num_kept,
        )
        return GRPOBatch(
            completion_mask=mask,
            truncated_mask=torch.zeros(len(self.rows), dtype=torch.bool),
            seq_lengths=lengths,
            logits_to_keep=num_kept,
        )

    def shared(self) -> Batch:
        """Return the same batch with inputs that may be packed. A row with a tool's image is a
        group of its own."""
        attended = self.inputs["attention_mask"].bool()

        def group_of(row: int) -> tuple[int, int]:
            prompt, _, tool, _ = self.rows[row]
            return prompt, row if tool and self.images[row] else -1

        groups, heads = list[GroupRows](), list[int]()
        for (prompt, _), same in groupby(range(len(self.rows)), key=group_of):
            rows = [*same]
            ids, labels = (
                [values[row][attended[row]].tolist() for row in rows]
                for values in (self.inputs["input_ids"], self.labels)
            )
            kind = "image" if self.images[rows[0]] else "text"
            groups.append(GroupRows(prompt if len(rows) > 1 else 0, ids, labels, kind))
            heads.append(max(rows, key=lambda row: sum(self.rows[row])))
        kept = attended[heads].any(0)
        of_heads = {
            name: value[..., heads, :][..., kept]
            for name, value in self.inputs.items()
            if value.shape[-2:] == attended.shape
        }
        media = {name: value.to(self.inputs[name]) for name, value in self.media(heads).items()}
        texts = {name: self.inputs[name] for name in ("input_ids", "attention_mask")}
        shared = copy(self)
        shared.inputs = SharedPromptInputs(
            texts, groups, of_heads | media, lambda: dict(self.inputs)
        )
        return shared


# --- ways to log-probabilities and entropies [2, N] ---

TEMPERATURE = 1.5
Way = Callable[[Any, Batch], Tensor]


def plain(model: Any, batch: Batch) -> Tensor:
    """Compute them from transformers' logits of all positions."""
    logits_NV = model(**batch.inputs).logits[batch.predicts_BT].float()
    log_p_NV = (logits_NV / TEMPERATURE).log_softmax(-1)
    logps_N = log_p_NV.gather(-1, batch.targets_N[:, None])[:, 0]
    return torch.stack([logps_N, -(log_p_NV.exp() * log_p_NV).sum(-1)])


def by_shim(shim: LogitsShim, model: Any, batch: Batch, form: Form | None = None) -> Tensor:
    inputs, predicts = form or (batch.inputs, batch.predicts_BT)
    logps_N, entropies_N = shim.logps(
        model, inputs, predicts, batch.targets_N, temperature=TEMPERATURE, with_entropy=True
    )
    assert entropies_N is not None
    return torch.stack([logps_N, entropies_N])


def chosen(model: Any, batch: Batch, *, chunk_size: int = LogitsShim.chunk_size) -> Tensor:
    """Compute the logits of the wanted positions alone."""
    shim = LogitsShim(model)
    shim.chunk_size = chunk_size
    return by_shim(shim, model, batch)


def packed(model: Any, batch: Batch, *, chunk_size: int = LogitsShim.chunk_size) -> Tensor:
    """Read each prompt once."""
    form = packed_form(model, batch)
    assert form[1].numel() < batch.predicts_BT.numel()
    shim = LogitsShim(model)
    shim.chunk_size = chunk_size
    return by_shim(shim, model, batch, form)


def packed_form(model: Any, batch: Batch) -> Form:
    inputs = batch.shared().inputs
    assert isinstance(inputs, SharedPromptInputs)
    return pack(inputs, base_model(model))
