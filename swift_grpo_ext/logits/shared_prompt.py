"""Read the prompt of a group once in a training pass (`--logps_shared_prompt`).

A pass over B samples of one prompt has it B times in its batch. Here the samples lie behind it in
one row, and a mask lets each see the prompt and itself alone; positions count on from the prompt.
The sums are those of the batch, in another order (shared-prefix forward: arXiv 2506.05433).

    prompt a b c, samples d e and f g  ->  a b  c d  c f     (what predicts nothing is left out)

Letters in names are shapes: B rows of a batch, T positions of a row; R rows of the folded batch, L
positions of one of those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from swift_grpo_ext.logits.sharding import ShardRanks

MEDIA = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Inputs that lay what belongs to one sample after what belongs to another: the pixels of a kind,
and how many rows of them each medium has, where that differs."""

FOR_POSITIONS = ("second_per_grid_ts", "mm_token_type_ids")
"""Positions are made of them, and nothing else. Templates may leave out rows without media."""

PAIR_MASKED = ("sdpa", "eager")
"""Implementations that take a mask of [R, 1, L, L]."""


@dataclass(frozen=True)
class Layout:
    """Where the positions of a folded batch come from.

    Attributes:
        rows, columns: [R, L], of the batch.
        positions: [R, L], counted from the first token of the prompt.
        segments: [R, L]; 0: the prompt, n: its n-th sample, -1: nothing.
        samples: of each folded row the rows of the batch in it.
    """

    rows: Tensor
    columns: Tensor
    positions: Tensor
    segments: Tensor
    samples: list[list[int]]

    def take(self, values: Tensor) -> Tensor:
        """[..., R, L] of [..., B, T]."""
        return values[..., self.rows.to(values.device), self.columns.to(values.device)]

    def take_mask(self, mask_BT: Tensor) -> Tensor:
        """[R, L]: as `take`, false where the prompt or nothing is."""
        return self.take(mask_BT) & (self.segments > 0).to(mask_BT.device)

    def attention_mask(self, device: torch.device | str = "cpu") -> Tensor:
        """[R, 1, L, L]: whether a position, of the third dimension, sees one of the fourth."""
        segments = self.segments.to(device)
        own, seen = segments[:, :, None], segments[:, None, :]
        mask = ((seen == 0) | (seen == own)).tril_().logical_and_(own >= 0)
        # Nothing sees itself, as a softmax over nothing would be NaN.
        mask.diagonal(dim1=-2, dim2=-1).fill_(True)
        return mask[:, None]


def layout_of(
    samples: Sequence[Sample], have_same_media: Callable[[int, int], bool], width: int
) -> Layout | None:
    """How a batch is folded; None where that saves nothing.

    Args:
        have_same_media: whether the prompts of two rows have.
        width: of the model; decides how many samples it pays to put in one row.
    """
    folded: list[list[int]] = []
    for group in _groups(samples, have_same_media):
        size = _best_size(samples[group[0]], [len(samples[n].suffix) for n in group], width)
        folded += [group[n : n + size] for n in range(0, len(group), size)]
    if len(folded) == len(samples):
        return None
    return _layout([[samples[n] for n in group] for group in folded])


@dataclass(frozen=True)
class Sample:
    """A row of a batch without its padding.

    Attributes:
        ids: [T], tokens of the whole row.
        prompt: token ids, the last of which predicts the first token of the completion.
        shared: columns of the prompt but the last.
        suffix: columns from the prompt's last on, up to the last that predicts something.
    """

    row: int
    ids: Any
    prompt: bytes
    shared: Any
    suffix: Any


def samples_of(input_ids_BT: Tensor, attended_BT: Tensor, predicts_BT: Tensor) -> list[Sample]:
    """The samples of a batch.

    Args:
        attended_BT: which positions are not padding.
        predicts_BT: those whose logits are wanted.
    """
    ids, attended, predicts = (x.cpu().numpy() for x in (input_ids_BT, attended_BT, predicts_BT))
    samples = []
    for row in range(len(ids)):
        columns = np.flatnonzero(attended[row])
        wanted = np.flatnonzero(predicts[row][columns])
        start, stop = (wanted[0], wanted[-1] + 1) if len(wanted) else (len(columns) - 1,) * 2
        prompt = ids[row][columns[: start + 1]].tobytes()
        samples.append(Sample(row, ids[row], prompt, columns[:start], columns[start:stop]))
    return samples


def _groups(
    samples: Sequence[Sample], have_same_media: Callable[[int, int], bool]
) -> list[list[int]]:
    """Indices of samples that follow one another, of one prompt."""
    groups = [[0]]
    for a, b in pairwise(samples):
        if a.prompt == b.prompt and have_same_media(a.row, b.row):
            groups[-1].append(b.row)
        else:
            groups.append([b.row])
    return groups


def _best_size(sample: Sample, suffixes: Sequence[int], width: int) -> int:
    """How many samples stand in a row at the least cost.

    In units of 4 x width operations, a layer's weights (about 12 x width^2 of them) cost 6 x width
    for each position, and its attention 1 for each pair of positions, masked ones too.
    """

    def cost(size: int) -> int:
        rows = [suffixes[n : n + size] for n in range(0, len(suffixes), size)]
        length = len(sample.shared) + max(map(sum, rows))
        return len(rows) * length * (6 * width + length)

    return min(range(1, len(suffixes) + 1), key=cost)


def _layout(folded: Sequence[Sequence[Sample]]) -> Layout:
    length = max(len(p[0].shared) + sum(len(s.suffix) for s in p) for p in folded)
    empty: Any = np.zeros((len(folded), length), np.int64)
    rows, columns, positions, segments = empty, empty.copy(), empty.copy(), empty - 1
    for number, samples in enumerate(folded):
        end = start = len(samples[0].shared)
        pieces = [(0, 0, samples[0].row, samples[0].shared)]
        for segment, sample in enumerate(samples, 1):
            pieces.append((segment, end, sample.row, sample.suffix))
            end += len(sample.suffix)
        for segment, at, row, source in pieces:
            here = slice(at, at + len(source))
            rows[number, here], columns[number, here] = row, source
            segments[number, here] = segment
            positions[number, here] = np.arange(len(source)) + start * (segment > 0)
    rows, columns, positions, segments = map(torch.from_numpy, (rows, columns, positions, segments))
    return Layout(rows, columns, positions, segments, [[s.row for s in p] for p in folded])


class UnknownInputError(ValueError):
    """An input of a model that cannot be folded."""


class Media(NamedTuple):
    """A row's part of the inputs that `MEDIA` names, by the inputs' names."""

    of_prompt: dict[str, Tensor]

    of_suffix: dict[str, Tensor]
    """An environment or a tool gave it. It is the sample's own, though another's may be equal."""


def media_of(inputs: Mapping[str, Any], samples: Sequence[Sample], config: Any) -> list[Media]:
    """Return the media of each row of a batch.

    A row has the next media that its placeholders take up, in tokens of one size: first those of
    its prompt, then of its suffix, then of what lies behind, which is not read.

    Args:
        config: of the whole model.

    Raises:
        UnknownInputError: where that does not come out even.
    """
    rows = [Media({}, {}) for _ in samples]
    config = getattr(config, "thinker_config", config)  # Qwen-Omni
    for kind, (pixels, grid) in MEDIA.items():
        values, grids = inputs.get(pixels), inputs.get(grid)
        if values is None:
            continue
        token = getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))
        sizes = [1] * len(values) if grids is None else grids.prod(-1).tolist()
        num_tokens = list[int]()
        for sample in samples:
            is_media = sample.ids == (-1 if token is None else token)
            pieces = [int(is_media[part].sum()) for part in (sample.shared, sample.suffix)]
            num_tokens += [*pieces, int(is_media.sum()) - sum(pieces)]
        counts = _num_media(sizes, num_tokens)
        if counts is None or sum(sizes) != len(values):
            raise UnknownInputError(f"{pixels} cannot be told apart by sample")
        ends = [0, *accumulate(counts)]
        num_rows = [sum(sizes[a:b]) for a, b in pairwise(ends)]
        split = getattr(values, "split_parts", values.split)
        parts = {pixels: split(num_rows)}
        if grids is not None:
            parts[grid] = grids.split(counts)
        for name, pieces_of in parts.items():
            for n, row in enumerate(rows):
                row.of_prompt[name], row.of_suffix[name] = pieces_of[3 * n : 3 * n + 2]
    return rows


def _num_media(sizes: Sequence[int], num_tokens: Sequence[int]) -> list[int] | None:
    """How many media the tokens of each piece stand for, if tokens are all of one size."""
    left, counts = [*reversed(sizes)], list[int]()
    of_token, of_size = sum(sizes), sum(num_tokens)  # one size has both
    for number in num_tokens:
        missing, before = number * of_token, len(left)
        while missing > 0 and left:
            missing -= left.pop() * of_size
        if missing:
            return None
        counts.append(before - len(left))
    return None if left else counts


def folded_inputs(
    inputs: Mapping[str, Any], layout: Layout, media: Sequence[Media], mask: Tensor
) -> dict[str, Any]:
    """The arguments of a model's forward for a folded batch.

    Args:
        inputs: those for the batch; tensors of [..., B, T] among them are folded.
        media: `media_of` them.
        mask: of the attention.

    Raises:
        UnknownInputError: for tensors of other shapes.
    """
    shape, device = inputs["input_ids"].shape, inputs["input_ids"].device
    folded: dict[str, Any] = {"position_ids": layout.positions.to(device)}
    for name, value in inputs.items():
        if name in media[0].of_prompt:
            # A model hands out media in the order of placeholders, which is that of the folded row.
            parts = [
                part
                for rows in layout.samples
                for part in (media[rows[0]].of_prompt, *(media[row].of_suffix for row in rows))
            ]
            own = [part[name] for part in parts if len(part[name])]
            if not own:  # the tower would not be called, as on other ranks it is
                raise UnknownInputError(f"all {name} come after the last token that is trained on")
            folded[name] = own[0] if len(own) == 1 else torch.cat(own)
        elif name == "attention_mask":
            folded[name] = mask
        elif isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-2:] == shape:
            folded[name] = layout.take(value)
        elif name not in FOR_POSITIONS:
            if not isinstance(value, (type(None), bool, int, float, str)):
                shape = tuple(getattr(value, "shape", ()))
                raise UnknownInputError(f"the input {name} {shape} is not known")
            folded[name] = value
    return folded


def reason_against(model: Any, inputs: Mapping[str, Any]) -> str:
    """Why a model's batches cannot be folded; '' where they can."""
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        return "its forward takes no position_ids"
    text = model.config.get_text_config()
    attention = getattr(text, "_attn_implementation", None)
    if attention not in PAIR_MASKED:
        return f"--attn_impl {attention} takes no mask of pairs (sdpa and eager do)"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    has_window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if kinds != {"full_attention"} or has_window:
        return f"its layers do not look at all positions ({', '.join(sorted(kinds))})"
    if "token_type_ids" in inputs:
        return "an image's positions look ahead"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "mrope_section" in rope and "position_ids" not in inputs:
        return "its positions are made of its images"
    return ""


class SharedPrompt:
    """Folds the batches of one model, once a first one has shown that nothing else changes.

    Each rank finds that out by itself: how many passes it makes may depend on its own rows, as with
    a teacher whom only some of them ask. Ranks that share the weights make all passes together, and
    agree within them.

    Args:
        base: the model, unwrapped.
        warn: is told, once, why a batch is not folded.
        inform: is told, once, what folding the first batch saves.
        limit: mean difference of log-probabilities, in nats, that rounding explains.
    """

    def __init__(
        self,
        base: Any,
        warn: Callable[[str], object],
        inform: Callable[[str], object],
        limit: float,
    ) -> None:
        self._base, self._limit = base, limit
        self._name = type(base).__name__
        self._warn: Callable[[str], object] | None = warn
        self._inform = inform
        self.has_failed = False
        """Whether the log-probabilities of the first batch differed."""
        self.is_proven = False
        """Whether batches are folded where they can be, on all ranks that share the weights."""

    def fold(
        self,
        inputs: Mapping[str, Any],
        predicts_BT: Tensor,
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
    ) -> Folded | None:
        """A batch, folded; None where it stays as it is.

        Args:
            inputs: the arguments of the model's forward.
            predicts_BT: positions whose logits are wanted.
            logps: log-probabilities of what they predict, of either form of the batch.
            ranks: those that share the model's weights. Until a first batch is proven, what they
                agree on decides whether they run further passes; after it each runs one.
        """
        if self.has_failed:
            return None
        folded = self._fold(inputs, predicts_BT)
        if self.is_proven:
            return folded
        if not ranks.all(folded is not None):  # one alone must not run another forward
            return None
        assert folded is not None
        with torch.no_grad():
            difference = (logps(*folded) - logps(inputs, predicts_BT)).abs().float()
        gap = float(difference.mean()) if difference.numel() else 0.0
        self.is_proven = ranks.all(gap <= self._limit)
        if self.is_proven:
            self._inform(
                f"--logps_shared_prompt: passes of {self._name} read {folded.predicts.numel()} "
                f"positions in the place of {predicts_BT.numel()} (the first batch)."
            )
            return folded
        self.has_failed = True
        self._tell(
            f"log-probabilities of the first batch lie {gap:.3g} nats apart in the mean on this "
            f"rank, or on one that shares its weights, above the {self._limit:g} that rounding "
            "explains"
        )
        return None

    def _fold(self, inputs: Mapping[str, Any], predicts_BT: Tensor) -> Folded | None:
        if len(predicts_BT) == 1:  # nothing to share, and no word on the run's other batches
            return None
        if reason := reason_against(self._base, inputs):
            self._tell(reason)
            return None
        try:
            return fold(inputs, predicts_BT, self._base.config)
        except UnknownInputError as e:
            self._tell(str(e))
            return None

    def _tell(self, reason: str) -> None:
        if self._warn is not None:
            self._warn(
                f"--logps_shared_prompt leaves batches of {self._name} as they are: {reason}. "
                "(Said once.)"
            )
        self._warn = None


class Folded(NamedTuple):
    """The arguments of a model's forward, and which of its positions predict something, in the
    order in which they did in the batch."""

    inputs: dict[str, Any]
    predicts: Tensor


def fold(inputs: Mapping[str, Any], predicts_BT: Tensor, config: Any) -> Folded | None:
    """A batch, folded; None where that saves nothing.

    Args:
        config: of the whole model.

    Raises:
        UnknownInputError: for an input that is not known.
    """
    input_ids, text = inputs["input_ids"], config.get_text_config()
    attended = inputs.get("attention_mask")
    attended = torch.ones_like(input_ids) if attended is None else attended
    if attended.shape != input_ids.shape:
        raise UnknownInputError("the mask is one of pairs already")
    samples = samples_of(input_ids, attended.bool(), predicts_BT)
    media = media_of(inputs, samples, config)

    def have_same_media(a: int, b: int) -> bool:
        prompts = media[a].of_prompt, media[b].of_prompt
        return all(_are_equal(prompts[0][name], prompts[1][name]) for name in prompts[0])

    layout = layout_of(samples, have_same_media, text.hidden_size)
    if layout is None:
        return None
    mask = layout.attention_mask(input_ids.device)
    if text._attn_implementation == "eager":  # adds it
        dtype = text.dtype or torch.float32
        mask = mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    return Folded(folded_inputs(inputs, layout, media, mask), layout.take_mask(predicts_BT))


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))
