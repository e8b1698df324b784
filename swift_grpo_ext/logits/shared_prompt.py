"""Read the prompt of a group once in a training pass (`--logps_shared_prompt`).

A pass over B samples of one prompt has it B times in its batch. Here they become a *packed group*:
the samples lie behind their prompt in one row, and a mask lets each see the prompt and itself
alone; positions count on from the prompt. The sums are those of the batch, in another order
(shared-prefix forward: arXiv 2506.05433).

    prompt a b c, samples d e and f g  ->  a b  c d  c f     (what predicts nothing is left out)

Letters in names are shapes: B rows of a batch, T positions of a row; R rows of packed groups, L
positions of one of those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from swift.utils import get_logger
from torch import Tensor, nn

from swift_grpo_ext.logits.sharding import ShardRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = get_logger()

Ints = NDArray[np.int64]

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


class UnknownInputError(ValueError):
    """An input of a model that cannot be packed."""


class PackedBatch(NamedTuple):
    """A batch as packed groups."""

    inputs: dict[str, Any]
    """The arguments of the model's forward."""

    predicts_RL: Tensor
    """The positions whose logits are wanted, in the order in which they stood in the batch."""


class SharedPrompt:
    """Packs the batches of one model, once a first one has shown that nothing else changes.

    Each rank finds that out by itself: how many passes it makes may depend on its own rows, as with
    a teacher whom only some of them ask. Ranks that share the weights make all passes together, and
    agree within them.
    """

    def __init__(self, base: nn.Module, limit: float) -> None:
        """
        Args:
            base: the model, unwrapped.
            limit: mean difference of log-probabilities, in nats, that rounding explains.
        """
        self._base, self._limit = base, limit
        self._has_warned = False
        self._is_proven = False
        """Whether batches are packed where they can be, on all ranks that share the weights."""

        self.has_failed = False
        """Whether the log-probabilities of the first batch differed."""

    def pack(
        self,
        inputs: Mapping[str, Any],
        predicts_BT: Tensor,
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
    ) -> PackedBatch | None:
        """Pack a batch; None where it stays as it is.

        Args:
            inputs: the arguments of the model's forward.
            predicts_BT: positions whose logits are wanted.
            logps: log-probabilities of what they predict, of either form of the batch.
            ranks: those that share the model's weights. Until a first batch is proven, what they
                agree on decides whether they run further passes; after it each runs one.
        """
        if self.has_failed:
            return None
        packed = None
        if len(predicts_BT) > 1:  # one row has nothing to share, and says nothing of later batches
            reason = reason_against(self._base, inputs)
            try:
                packed = None if reason else pack(inputs, predicts_BT, self._base.config)
            except UnknownInputError as e:
                reason = str(e)
            if reason:
                self._warn_once(reason)
        if self._is_proven:
            return packed
        if not ranks.all(packed is not None):  # one alone must not run another forward
            return None
        assert packed is not None
        with torch.no_grad():
            difference = (logps(*packed) - logps(inputs, predicts_BT)).abs().float()
        gap = float(difference.mean()) if difference.numel() else 0.0
        self._is_proven = ranks.all(gap <= self._limit)
        if self._is_proven:
            logger.info(
                f"--logps_shared_prompt: passes of {type(self._base).__name__} read "
                f"{packed.predicts_RL.numel()} positions in the place of {predicts_BT.numel()} "
                "(the first batch)."
            )
            return packed
        self.has_failed = True
        self._warn_once(
            f"log-probabilities of the first batch lie {gap:.3g} nats apart in the mean on this "
            f"rank, or on one that shares its weights, above the {self._limit:g} that rounding "
            "explains"
        )
        return None

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            logger.warning(
                f"--logps_shared_prompt leaves batches of {type(self._base).__name__} as they are: "
                f"{reason}. (Said once.)"
            )
        self._has_warned = True


def reason_against(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
    """Return why a model's batches cannot be packed; '' where they can."""
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


def pack(
    inputs: Mapping[str, Any], predicts_BT: Tensor, config: PretrainedConfig
) -> PackedBatch | None:
    """Pack a batch; None where that saves nothing. The configuration is that of the whole model.

    Raises:
        UnknownInputError: an input is not known.
    """
    input_ids, text = inputs["input_ids"], config.get_text_config()
    attended = inputs.get("attention_mask")
    attended = torch.ones_like(input_ids) if attended is None else attended
    if attended.shape != input_ids.shape:
        raise UnknownInputError("the mask is one of pairs already")
    samples = samples_of(input_ids, attended.bool(), predicts_BT)
    media = media_of(inputs, samples, config)

    def have_same_media(a: int, b: int) -> bool:
        ours, theirs = media[a].of_prompt, media[b].of_prompt
        return all(
            # Copies of one image often are views of one tensor.
            ours[name].shape == theirs[name].shape
            and (
                ours[name].data_ptr() == theirs[name].data_ptr()
                or torch.equal(ours[name], theirs[name])
            )
            for name in ours
        )

    layout = layout_of(samples, have_same_media, text.hidden_size)
    if layout is None:
        return None
    mask = layout.attention_mask(input_ids.device)
    if text._attn_implementation == "eager":  # which adds its mask to the scores
        dtype = text.dtype or torch.float32
        mask = mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    return PackedBatch(packed_inputs(inputs, layout, media, mask), layout.take_mask(predicts_BT))


# --- samples ---


@dataclass(frozen=True)
class Sample:
    """A row of a batch without its padding."""

    row: int
    ids: Ints
    """[T], the tokens of the whole row."""

    prompt: bytes
    """Token ids, the last of which predicts the first token of the completion."""

    shared: Ints
    """Columns of the prompt but the last."""

    suffix: Ints
    """Columns from the prompt's last on, up to the last that predicts something."""


def samples_of(input_ids_BT: Tensor, attended_BT: Tensor, predicts_BT: Tensor) -> list[Sample]:
    """Return the samples of a batch, whose padding is not `attended` to."""
    ids, attended, predicts = (x.cpu().numpy() for x in (input_ids_BT, attended_BT, predicts_BT))
    samples = []
    for row in range(len(ids)):
        columns = np.flatnonzero(attended[row])
        wanted = np.flatnonzero(predicts[row][columns])
        start, stop = (wanted[0], wanted[-1] + 1) if len(wanted) else (len(columns) - 1,) * 2
        prompt = ids[row][columns[: start + 1]].tobytes()
        samples.append(Sample(row, ids[row], prompt, columns[:start], columns[start:stop]))
    return samples


class Media(NamedTuple):
    """A row's part of the inputs that `MEDIA` names, by the inputs' names."""

    of_prompt: dict[str, Tensor]

    of_suffix: dict[str, Tensor]
    """An environment or a tool gave it. It is the sample's own, though another's may be equal."""


def media_of(
    inputs: Mapping[str, Any], samples: Sequence[Sample], config: PretrainedConfig
) -> list[Media]:
    """Return the media of each row of a batch.

    A row has the next media that its placeholders take up, in tokens of one size: first those of
    its prompt, then of its suffix, then of what lies behind, which is not read.

    Raises:
        UnknownInputError: placeholders and media do not come out even.
    """
    rows = [Media({}, {}) for _ in samples]
    config = getattr(config, "thinker_config", config)  # Qwen-Omni
    for kind, (pixels, grid) in MEDIA.items():
        values, grids = inputs.get(pixels), inputs.get(grid)
        if values is None:
            continue
        token = getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))
        num_tokens = list[int]()  # three pieces of each row
        for sample in samples:
            is_media = sample.ids == (-1 if token is None else token)
            pieces = [int(is_media[part].sum()) for part in (sample.shared, sample.suffix)]
            num_tokens += [*pieces, int(is_media.sum()) - sum(pieces)]
        sizes = [1] * len(values) if grids is None else grids.prod(-1).tolist()
        media_ends, piece_ends = np.cumsum([0, *sizes]), np.cumsum(num_tokens)
        # Both in one unit, as all tokens are of one size.
        media_at, piece_at = media_ends * piece_ends[-1], piece_ends * media_ends[-1]
        last = np.searchsorted(media_at, piece_at)
        is_even = np.isin(piece_at, media_at).all() and last[-1] == len(sizes)
        if not is_even or media_ends[-1] != len(values):
            raise UnknownInputError(f"{pixels} cannot be told apart by sample")
        split = getattr(values, "split_parts", values.split)
        parts = {pixels: split(np.diff(media_ends[last], prepend=0).tolist())}
        if grids is not None:
            parts[grid] = grids.split(np.diff(last, prepend=0).tolist())
        for name, pieces_of in parts.items():
            for n, row in enumerate(rows):
                row.of_prompt[name], row.of_suffix[name] = pieces_of[3 * n : 3 * n + 2]
    return rows


# --- the layout ---


@dataclass(frozen=True)
class Layout:
    """Where the positions of packed groups come from."""

    rows: Tensor
    columns: Tensor
    """[R, L] both: the places in the batch."""

    positions: Tensor
    """[R, L], counted from the first token of the prompt."""

    segments: Tensor
    """[R, L]; 0: the prompt, n: its n-th sample, -1: nothing."""

    samples: list[list[int]]
    """For each row of packed groups, the rows of the batch in it."""

    def take(self, values: Tensor) -> Tensor:
        """Return [..., R, L] of [..., B, T]."""
        return values[..., self.rows.to(values.device), self.columns.to(values.device)]

    def take_mask(self, mask_BT: Tensor) -> Tensor:
        """Return [R, L], as `take`; false where the prompt or nothing is."""
        return self.take(mask_BT) & (self.segments > 0).to(mask_BT.device)

    def attention_mask(self, device: torch.device | str = "cpu") -> Tensor:
        """Return [R, 1, L, L]: whether a position, of the third dimension, sees one of the
        fourth."""
        segments = self.segments.to(device)
        seeing, seen = segments[:, :, None], segments[:, None, :]
        mask = ((seen == 0) | (seen == seeing)).tril_().logical_and_(seeing >= 0)
        # Nothing sees itself, as a softmax over nothing would be NaN.
        mask.diagonal(dim1=-2, dim2=-1).fill_(True)
        return mask[:, None]


def layout_of(
    samples: Sequence[Sample], have_same_media: Callable[[int, int], bool], width: int
) -> Layout | None:
    """Lay the samples of a batch out as packed groups; None where that saves nothing.

    Args:
        samples: the rows of the batch.
        have_same_media: whether the prompts of two rows have the same media.
        width: the model's hidden size; decides how many samples it pays to put in one row.
    """
    groups = [[samples[0]]]  # samples that follow one another, of one prompt
    for a, b in pairwise(samples):
        if a.prompt == b.prompt and have_same_media(a.row, b.row):
            groups[-1].append(b)
        else:
            groups.append([b])
    packed: list[list[Sample]] = []
    for group in groups:
        size = _best_size(group, width)
        packed += [group[n : n + size] for n in range(0, len(group), size)]
    if len(packed) == len(samples):
        return None

    length = max(len(p[0].shared) + sum(len(s.suffix) for s in p) for p in packed)
    rows, columns, positions = (np.zeros((len(packed), length), np.int64) for _ in range(3))
    segments = np.full_like(rows, -1)
    for number, (first, *_) in enumerate(packed):
        start = end = len(first.shared)
        pieces = [(0, 0, first.row, first.shared)]
        for segment, sample in enumerate(packed[number], 1):
            pieces.append((segment, end, sample.row, sample.suffix))
            end += len(sample.suffix)
        for segment, at, row, source in pieces:
            here = slice(at, at + len(source))
            rows[number, here], columns[number, here] = row, source
            segments[number, here] = segment
            positions[number, here] = np.arange(len(source)) + (start if segment else 0)
    return Layout(
        rows=torch.from_numpy(rows),
        columns=torch.from_numpy(columns),
        positions=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        samples=[[sample.row for sample in p] for p in packed],
    )


def _best_size(group: Sequence[Sample], width: int) -> int:
    """Return how many samples stand in a row at the least cost.

    In units of 4 x width operations, a layer's weights (about 12 x width^2 of them) cost 6 x width
    for each position, and its attention 1 for each pair of positions, masked ones too.
    """

    def cost(size: int) -> int:
        lengths = [
            sum(len(sample.suffix) for sample in group[n : n + size])
            for n in range(0, len(group), size)
        ]
        length = len(group[0].shared) + max(lengths)
        return len(lengths) * length * (6 * width + length)

    return min(range(1, len(group) + 1), key=cost)


def packed_inputs(
    inputs: Mapping[str, Any], layout: Layout, media: Sequence[Media], mask: Tensor
) -> dict[str, Any]:
    """Return the arguments of a model's forward for packed groups: tensors of [..., B, T] among
    the inputs are packed.

    Raises:
        UnknownInputError: a tensor has another shape.
    """
    shape, device = inputs["input_ids"].shape, inputs["input_ids"].device
    packed: dict[str, Any] = {"position_ids": layout.positions.to(device)}
    for name, value in inputs.items():
        if name in media[0].of_prompt:
            # A model hands out media in the order of placeholders, which is that of the packed row.
            parts = [
                part[name]
                for rows in layout.samples
                for part in (media[rows[0]].of_prompt, *(media[row].of_suffix for row in rows))
                if len(part[name])
            ]
            if not parts:  # the tower would not be called, as on other ranks it is
                raise UnknownInputError(f"all {name} come after the last token that is trained on")
            packed[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif name == "attention_mask":
            packed[name] = mask
        elif isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-2:] == shape:
            packed[name] = layout.take(value)
        elif name not in FOR_POSITIONS:
            if not isinstance(value, (type(None), bool, int, float, str)):
                shape = tuple(getattr(value, "shape", ()))
                raise UnknownInputError(f"the input {name} {shape} is not known")
            packed[name] = value
    return packed
