"""Batches for tiny models, collated as in ms-swift, ways to their log-probabilities, and the
comparison of two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.utils import build_completion_mask_and_seq_lengths
from torch import Tensor, nn

from scripts.bench import passes
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.packed import Form
from swift_grpo_ext.logits.shim import LogitsShim, base_model, output_embedding
from swift_grpo_ext.training import RolloutGRPOTrainer
from swift_grpo_ext.upstream.patches import wrapped
from tests.rig.arguments import training_arguments
from tests.rig.logits.models import IMAGE, IMAGES, PLACEHOLDERS, TYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
        """Add the inputs of the model's template: positions, and an image at the beginning of each
        prompt. Text models get none."""
        base: Any = base_model(model)
        kind, ids = base.config.model_type, self.inputs["input_ids"]
        if with_images and kind in IMAGES:
            shape, others = IMAGES[kind]
            pixels = {prompt: torch.randn(shape) for prompt, *_ in self.rows}
            self.inputs["pixel_values"] = torch.cat([pixels[prompt] for prompt, *_ in self.rows])
            self.inputs |= {name: torch.cat([of] * len(ids)) for name, of in others.items()}
            for row, first in enumerate(self.inputs["attention_mask"].argmax(1).tolist()):
                ids[row, first : first + len(PLACEHOLDERS)] = PLACEHOLDERS
        if kind in TYPES:
            self.inputs[TYPES[kind]] = (ids == IMAGE).int()
        if "mrope_section" in str(base.config):
            names = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
            given = {name: self.inputs[name] for name in names if name in self.inputs}
            self.inputs["position_ids"], _ = base.model.get_rope_index(ids, **given)
        return self

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
        """Return the same batch with inputs that may be packed."""
        shared = copy(self)
        shared.inputs = passes.shared(self)
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
    logps = shim.logps(
        model, inputs, predicts, batch.targets_N, temperature=TEMPERATURE, with_entropy=True
    )
    return torch.stack([*logps])


def chosen(
    model: Any, batch: Batch, *, once: bool = False, chunk_size: int = LogitsShim.chunk_size
) -> Tensor:
    """Compute the logits of the wanted positions alone; with `once`, read each prompt once."""
    shim = LogitsShim(model)
    shim.chunk_size = chunk_size
    return by_shim(shim, model, batch, packed_form(model, batch) if once else None)


def packed_form(model: Any, batch: Batch) -> Form:
    form = passes.packed(base_model(model), batch)
    assert form[1].numel() < batch.predicts_BT.numel()
    return form


# --- comparisons ---

Run = tuple[Tensor, dict[str, Tensor]]
"""Values, and the gradient of a weighted sum of them by each trained weight."""


def values_and_gradients(model: Any, values_of: Callable[[], Tensor]) -> Run:
    """Return the values, and the gradients of a fixed mixture of them by all trained weights."""
    model.zero_grad(set_to_none=True)
    values = values_of()
    mixture = torch.linspace(-1, 1, values.numel(), device=values.device).reshape(values.shape)
    (values * mixture).sum().backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return values.detach(), {n: p.grad.clone() for n, p in learning.items() if p.grad is not None}


def assert_close(found: Run, expected: Run, tolerance: float = 1e-5) -> None:
    """Assert that all errors are at most `tolerance`."""
    errors = errors_of(found, expected).items()
    assert {name: error for name, error in errors if not error <= tolerance} == {}  # also NaN


def errors_of(run: Run, expected: Run) -> dict[str, float]:
    """Return the relative errors of the values (the largest difference by the largest value), and
    of the gradient of each weight.

    Gradients that cancel are pure rounding (a key's bias does not change a softmax), so the
    denominator is at least a tenth of the longest gradient.
    """
    assert run[0].shape == expected[0].shape
    assert run[1].keys() == expected[1].keys() != set(), "other weights have gradients"
    lengths = {name: float(gradient.double().norm()) for name, gradient in expected[1].items()}
    least = max(lengths.values()) / 10
    errors = {"values": 0.0}
    if run[0].numel():  # a rank may have no tokens
        apart = (run[0].double() - expected[0].double()).abs().max()
        errors["values"] = float(apart / expected[0].abs().max())
    for name, length in lengths.items():
        difference = float((run[1][name].double() - expected[1][name].double()).norm())
        errors[name] = difference / max(length, least, 1e-30)  # all may be 0
    return errors


@contextmanager
def counted_positions(model: Any) -> Iterator[list[int]]:
    """Count the positions that the head computes within the block, one number for each call."""
    counts: list[int] = []

    def forward(own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        logits = own(hidden)
        counts.append(logits[..., 0].numel())
        return logits

    # `forward` and not a hook: a chunked pass calls the head within the head's own call.
    with wrapped(output_embedding(base_model(model)), "forward", forward):
        yield counts


# --- ms-swift's trainer and ours, with the attributes that their log-probabilities use ---


class Upstream(GRPOTrainer):
    """ms-swift's trainer."""

    def __init__(self, *, padding_free: bool = False, parallel: int = 1, **flags: Any) -> None:
        self.args = training_arguments(**{"logits_shim": "strict", **flags})
        self.model_kwarg_keys = {"logits_to_keep"}
        self.temperature = TEMPERATURE
        settings = {"padding_free": padding_free, "sequence_parallel_size": parallel}
        self.template = SimpleNamespace(**settings)


class Ours(RolloutGRPOTrainer):
    """Our trainer; it packs prompts where it can."""

    def __init__(self, **settings: Any) -> None:
        Upstream.__init__(self, **settings)
        self.completion_logps = CompletionLogps(self.args, self.template)


def loss_pass(trainer: Any, model: Any, batch: Batch, *, entropy: bool = False) -> Tensor:
    """Return the log-probabilities (and entropies) of completion tokens. Those of other positions
    are finite: they are masked by multiplication."""
    grpo_batch = batch.grpo_batch()
    logps_BK, entropies_BK = trainer._get_per_token_logps_and_entropies_single(
        model, copy(batch.inputs), grpo_batch, compute_entropy=entropy
    )
    mask = grpo_batch.completion_mask
    assert logps_BK.shape == mask.shape
    assert logps_BK.isfinite().all()
    if entropies_BK is None:
        return logps_BK[mask]
    return torch.stack([logps_BK[mask], entropies_BK[mask]])


def make_pass(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Return log-probabilities without gradients, as of the old policy."""
    with torch.no_grad():
        return loss_pass(trainer, model, batch)


def seen_positions(model: Any) -> list[int]:
    """Return a list that gets the number of positions of each later pass of the decoder."""
    seen: list[int] = []
    # The last norm: no backward computes it again.
    base_model(model).get_decoder().norm.register_forward_pre_hook(
        lambda _, args: seen.append(args[0][..., 0].numel())
    )
    return seen
