"""Read the prompt of a group once in a training pass (`--logps_shared_prompt`).

A pass over B samples of one prompt has it B times in its batch. Here the whole batch becomes one
*packed row* without padding: each prompt once, with its samples behind it, whose positions count on
from it. Layers that mix positions read it by segments (`segments.py`), so that a sample sees its
prompt and itself. The sums are those of the batch, in another order (shared-prefix forward: arXiv
2506.05433).

    prompt a b c, samples d e and f g  ->  a b  c d  c f     (what predicts nothing is left out)

Letters in names are shapes: B rows of a batch, T positions of a row, L positions of the packed row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from swift.utils import get_logger
from torch import Tensor, nn
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from swift_grpo_ext.logits import segments
from swift_grpo_ext.logits.sharding import ShardRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = get_logger()

Ints = NDArray[np.int64]

MEDIA = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""For each kind the input that lays the media of one sample after those of another, and the one
that says how many of its rows each medium has; where that is not given, each has one."""

MORE_MEDIA = {
    "image": ("image_sizes", "image_position_ids"),
    "video": ("video_position_ids",),
}
"""Further inputs with a row for each medium."""

FOR_POSITIONS = ("second_per_grid_ts", "mm_token_type_ids")
"""Only positions are made of them, which a packed row brings along. Their rows may be fewer than a
batch's, as templates leave out those without media."""

WORTH = 0.1
"""The share of a pass that `--logps_shared_prompt auto` has to save."""


class UnknownInputError(ValueError):
    """An input of a model that cannot be packed."""


Kind = tuple[tuple[str, ...], int]
"""A row's media, and how many `borders` the longest row of its batch lies beyond."""

PLACEHOLDERS = ("image", "video", "audio")
"""Media for which a configuration names a token."""

LEAST = 1e-6
"""Nats by which float32 rounds a log-probability, with any model."""


class PackedBatch(NamedTuple):
    """A batch as one packed row."""

    inputs: dict[str, Any]
    """The arguments of the model's forward."""

    predicts_1L: Tensor
    """The positions whose logits are wanted, in the order in which they stood in the batch."""


class SharedPrompt:
    """Packs the batches of one model. The first batch that has a kind of row is computed both ways.

    Each rank finds that out by itself: how many passes it makes may depend on its own rows, as with
    a teacher whom only some of them ask. Ranks that share the weights make all passes together, and
    all pack a batch, or none does: a packed pass may call a layer more often.
    """

    def __init__(self, base: PreTrainedModel, flag: Literal["auto", "true"] = "true") -> None:
        """
        Args:
            base: the model, unwrapped.
            flag: the value of `--logps_shared_prompt`.
        """
        self._base, self._flag = base, flag
        self._has_told = False
        self._saving = 0.0
        """The share of the pass that the last packed batch is expected to save."""

        self._proven = set[Kind]()
        """The kinds of rows that packing leaves as they are."""

        self.has_failed = False
        """It is True once log-probabilities of a batch have differed."""

    def pack(
        self,
        inputs: Mapping[str, Any],
        predicts_BT: Tensor,
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
        plain: Callable[[], Tensor] | None = None,
    ) -> PackedBatch | None:
        """Pack a batch; None where it stays as it is.

        Args:
            inputs: the arguments of the model's forward.
            predicts_BT: positions whose logits are wanted.
            logps: log-probabilities of what they predict, of either form of the batch.
            ranks: those that share the model's weights.
            plain: log-probabilities of the batch as it is, where those take several forwards.
        """
        # The same on all ranks that share weights: it was agreed by `_is_equal`.
        if self.has_failed:
            return None
        packed = self._packed(inputs, predicts_BT)
        # Each rank reaches this, whatever its batch holds: one alone must not go another way.
        if not ranks.all(packed is not None):
            return None
        assert packed is not None
        tokens_of_kinds = kinds_of_tokens(inputs["input_ids"], predicts_BT, self._base.config)
        if ranks.all(tokens_of_kinds.keys() <= self._proven):
            return packed
        # The proof: three more passes, without gradients.
        plain = plain or partial(logps, inputs, predicts_BT)
        if not self._is_equal(packed, predicts_BT.numel(), tokens_of_kinds, logps, plain, ranks):
            return None
        self._proven |= tokens_of_kinds.keys()
        return packed

    def _packed(self, inputs: Mapping[str, Any], predicts_BT: Tensor) -> PackedBatch | None:
        if len(predicts_BT) == 1:  # it has nothing to share, and says nothing of later batches
            return None
        reason = reason_against(self._base, inputs)
        try:
            if not reason:
                return pack(inputs, predicts_BT, self._base, self._is_worth)
        except UnknownInputError as e:
            reason = str(e)
        # `auto` is the default, which nobody asked for: no warning.
        self._tell_once(reason, logger.info if self._flag == "auto" else logger.warning)
        return None

    def _is_worth(self, saving: float) -> bool:
        self._saving = saving
        if self._flag == "true" or saving > WORTH:
            return True
        text = f"of the first batch that shares prompts, {saving:.0%} would be saved"
        self._tell_once(f"{text}, and {WORTH:.0%} is the least that it is done for", logger.info)
        return False

    def _is_equal(
        self,
        packed: PackedBatch,
        num_positions: int,
        tokens_of_kinds: Mapping[Kind, Tensor],
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        plain: Callable[[], Tensor],
        ranks: ShardRanks,
    ) -> bool:
        """Return whether the log-probabilities of a batch are those of the packed row, on all
        ranks: for each kind of row, no further apart than rounding puts two plain passes."""
        problem = ""
        with torch.no_grad():
            found = None
            try:
                found = logps(*packed)
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except Exception as e:  # what cannot handle a batch never ends a run: leave it plain
                problem = f"its first packed pass failed ({type(e).__name__}: {e})"
            # After a failure too: ranks that share weights all make all passes.
            expected = plain()
            with rounded_otherwise(self._base):
                moved = plain()
        for (media, _), tokens_N in tokens_of_kinds.items() if found is not None else ():
            gap, limit = (
                float((each - expected)[tokens_N].abs().float().mean()) for each in (found, moved)
            )
            # NaN is not below any bound.
            if not gap <= limit + LEAST:
                problem = (
                    f"log-probabilities of rows of {'+'.join(media) or 'text'} lie {gap:.3g} nats "
                    f"apart in the mean, and rounding explains {limit:.3g}"
                )
        if ranks.all(not problem):
            logger.info(
                f"--logps_shared_prompt {self._flag}: passes of {type(self._base).__name__} read "
                f"{packed.predicts_1L.numel()} positions in the place of {num_positions}, which is "
                f"expected to save {self._saving:.0%} of their time (the first batch)."
            )
            return True
        self.has_failed = True
        self._has_told = False  # what was said before (too little to save) was no fault
        self._tell_once(
            problem or "on a rank that shares its weights, packed rows differ", logger.warning
        )
        return False

    def _tell_once(self, reason: str, tell: Callable[[str], object]) -> None:
        if not self._has_told:
            tell(
                f"--logps_shared_prompt {self._flag} leaves batches of "
                f"{type(self._base).__name__} as they are: {reason}. (Said once.)"
            )
        self._has_told = True


# --- the proof ---


def kinds_of_tokens(
    input_ids_BT: Tensor, predicts_BT: Tensor, config: PretrainedConfig
) -> dict[Kind, Tensor]:
    """Return which of the N tokens that a batch predicts stand in rows of a kind, for each kind.

    Where a kind of row comes for the first time, packing has to show that it leaves them as they
    are: it may be right for text and wrong for images, or right below a border and wrong beyond.
    """
    row_N = predicts_BT.nonzero()[:, 0]
    num_beyond = sum(input_ids_BT.shape[1] > border for border in borders(config.get_text_config()))
    sees_B = {m: (input_ids_BT == placeholder(config, m)).any(1).tolist() for m in PLACEHOLDERS}
    tokens = dict[Kind, Tensor]()
    for row in row_N.unique().tolist():
        kind = tuple(media for media in PLACEHOLDERS if sees_B[media][row]), num_beyond
        tokens[kind] = tokens.get(kind, False) | (row_N == row)
    return tokens


def borders(text: PretrainedConfig) -> list[int]:
    """Return the lengths of rows beyond which a text model's layers do something else: they see a
    part of the row, or turn heads by other angles."""
    window = segments.longest_window(text)
    return [*([window] if window else []), *rotary_borders(text).values()]


def rotary_borders(text: PretrainedConfig) -> dict[str, int]:
    """Return by its type each rotary embedding that follows the longest row of a pass, with the
    length from which on it does (transformers 5.19, modeling_rope_utils.py, `dynamic_rope_update`).
    """
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    found = dict[str, int]()
    # One for all layers, or one for each kind of layer.
    for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        name = each.get("rope_type", each.get("type"))
        if name in ("longrope", "dynamic"):
            trained = each.get("original_max_position_embeddings")
            trained = trained or getattr(text, "original_max_position_embeddings", None)
            found[name] = int(trained or text.max_position_embeddings)
    return found


@contextmanager
def rounded_otherwise(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's embeddings and layers round every second number to its neighbour.

    What that changes, rounding explains: sums in another order do less. The numbers that a model
    computes in say how far the neighbour is, and its layers how far that carries (a mixture of
    experts chooses others).
    """

    def move(_: nn.Module, __: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return move(_, __, output[0]), *output[1:]
        device = output.device.type
        dtype = output.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        steps = torch.arange(output.shape[-1], device=output.device) % 2 * torch.finfo(dtype).eps
        return (output * (1 + steps)).to(output.dtype)

    decoder = getattr(model, "get_decoder", lambda: model)()
    modules = [model.get_input_embeddings(), *getattr(decoder, "layers", ())]
    hooks = [module.register_forward_hook(move) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- what is packed ---


def reason_against(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
    """Return why a model's batches cannot be packed; '' where they can."""
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        return "its forward takes no position_ids"
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        # transformers flattens the mask to one number for each position of the batch (5.19,
        # qwen3_moe and others, `load_balancing_loss_func`).
        return "--router_aux_loss_coef is computed of a mask of rows"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "mrope_section" in rope and "position_ids" not in inputs:
        # The model would count them row by row of the batch, which a packed row does not show.
        return "its positions are made of its images"
    return segments.reason_against(model)


def pack(
    inputs: Mapping[str, Any],
    predicts_BT: Tensor,
    model: PreTrainedModel,
    is_worth: Callable[[float], bool] = bool,
) -> PackedBatch | None:
    """Pack a batch; None where that saves less than it should. The model's layers read packed rows
    from here on.

    Args:
        inputs: the arguments of the model's forward.
        predicts_BT: positions whose logits are wanted.
        model: unwrapped, and none that `reason_against` names a reason for.
        is_worth: says whether packing is done for a share of the pass that is expected to be saved.

    Raises:
        UnknownInputError: an input is not known.
    """
    input_ids, config = inputs["input_ids"], model.config
    attended = inputs.get("attention_mask")
    attended = torch.ones_like(input_ids) if attended is None else attended
    if attended.shape != input_ids.shape:
        raise UnknownInputError("the mask is one of pairs already")
    samples = samples_of(input_ids, attended.bool(), predicts_BT)
    media = media_of(inputs, samples, config)

    def have_same_media(a: int, b: int) -> bool:
        ours, theirs = media[a].prompt, media[b].prompt
        return all(
            # Copies of one image often are views of one tensor.
            ours[name].shape == theirs[name].shape
            and (
                ours[name].data_ptr() == theirs[name].data_ptr()
                or torch.equal(ours[name], theirs[name])
            )
            for name in ours
        )

    groups = groups_of(samples, have_same_media)
    if len(groups) == len(samples):
        return None
    share = saving([*map(GroupLengths.of, groups)], config.get_text_config())
    if share <= 0 or not is_worth(share):
        return None
    layout = layout_of(groups)
    packed_length = int(layout.positions_L.max()) + 1
    for name, border in rotary_borders(config.get_text_config()).items():
        # Beyond its border the one takes other factors, and the other new ones at each length.
        both = packed_length > border, input_ids.shape[1] > border
        if both[0] != both[1] or (name == "dynamic" and any(both)):
            raise UnknownInputError(f"its rotary embedding ({name}) follows the longest row")
    mask = layout.attention_mask(inputs, model)
    segments.read_by_segments(model)
    return PackedBatch(packed_inputs(inputs, layout, media, mask), layout.take(predicts_BT))


# --- samples ---


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch without its padding."""

    row: int
    ids: Ints
    """[T], the tokens of the whole row."""

    prompt: bytes
    """Token ids, the last of which predicts the first token of the completion. As bytes they are
    compared at once."""

    shared: Ints
    """Columns of the prompt but the last."""

    suffix: Ints
    """Columns from the prompt's last on, up to the last that predicts something."""


def samples_of(input_ids_BT: Tensor, attended_BT: Tensor, predicts_BT: Tensor) -> list[BatchRow]:
    """Return the samples of a batch, whose padding is not `attended` to."""
    ids, attended, predicts = (x.cpu().numpy() for x in (input_ids_BT, attended_BT, predicts_BT))
    samples = []
    for row in range(len(ids)):
        columns = np.flatnonzero(attended[row])
        wanted = np.flatnonzero(predicts[row][columns])
        # A row that predicts nothing keeps an empty suffix, and stays a prompt from end to end.
        start, stop = (wanted[0], wanted[-1] + 1) if len(wanted) else (len(columns) - 1,) * 2
        prompt = ids[row][columns[: start + 1]].tobytes()
        samples.append(BatchRow(row, ids[row], prompt, columns[:start], columns[start:stop]))
    return samples


def groups_of(
    samples: Sequence[BatchRow], have_same_media: Callable[[int, int], bool]
) -> list[list[BatchRow]]:
    """Return samples that follow one another and are of one prompt, its media included.

    Args:
        samples: the rows of the batch.
        have_same_media: whether the prompts of two rows have the same media.
    """
    groups = [[samples[0]]]
    for a, b in pairwise(samples):
        # Nothing is shared by prompts of one token, nor by samples that predict nothing.
        can_share = min(len(a.shared), len(a.suffix), len(b.suffix)) > 0
        if can_share and a.prompt == b.prompt and have_same_media(a.row, b.row):
            groups[-1].append(b)
        else:
            groups.append([b])
    return groups


class GroupLengths(NamedTuple):
    """How long the samples of one prompt are, in tokens."""

    prompt: int
    suffixes: Sequence[int]
    """From the prompt's last token on, of each sample."""

    @classmethod
    def of(cls, group: Sequence[BatchRow]) -> GroupLengths:
        return cls(len(group[0].shared), [len(sample.suffix) for sample in group])

    @property
    def num_positions(self) -> int:
        """How many positions of a packed row they take."""
        return self.prompt + sum(self.suffixes)


def saving(groups: Sequence[GroupLengths], text: PretrainedConfig) -> float:
    """Return the share of a pass's operations that is expected to be saved, its towers left out.

    Ms-swift's rows are as long as the longest.
    """
    longest = max(group.prompt + suffix for group in groups for suffix in group.suffixes)
    num_rows = sum(len(group.suffixes) for group in groups)
    return 1 - pass_cost(groups, text) / pass_cost([GroupLengths(0, [longest])] * num_rows, text)


def pass_cost(groups: Sequence[GroupLengths], text: PretrainedConfig) -> float:
    """Return about how many operations a pass takes that reads each prompt once.

    Args:
        groups: the samples of a batch.
        text: the configuration of the model's text.
    """
    # In units of 4 x width operations a layer's weights (about 12 x width^2 of them) cost 6 x width
    # for a position, and its attention 1 for each pair that is seen.
    window = segments.longest_window(text) or math.inf
    longest = max(suffix for group in groups for suffix in group.suffixes)
    total = 0.0
    for kind in getattr(text, "layer_types", None) or ["full_attention"]:
        is_linear = kind == "linear_attention"
        most = {"linear_attention": 0.0, "sliding_attention": window}.get(kind, math.inf)

        def cost(length: int, before: int = 0, most: float = most) -> float:
            return length * (6 * text.hidden_size + min(before + length / 2, most))

        for prompt, suffixes in groups:
            total += cost(prompt)
            # A gated delta net has samples in rows, which all are as long as the longest.
            total += sum(cost(longest if is_linear else length, prompt) for length in suffixes)
    return total


class Media(NamedTuple):
    """A row's part of the inputs that `MEDIA` and `MORE_MEDIA` name, by the inputs' names."""

    prompt: dict[str, Tensor]

    suffix: dict[str, Tensor]
    """An environment or a tool gave it. It is the sample's own, though another's may be equal."""


def media_of(
    inputs: Mapping[str, Any], samples: Sequence[BatchRow], config: PretrainedConfig
) -> list[Media]:
    """Return the media of each row of a batch: first those of its prompt, then of its suffix, then
    of what lies behind, which is not read.

    Raises:
        UnknownInputError: placeholders and media do not come out even.
    """
    rows = [Media({}, {}) for _ in samples]
    for kind, (pixels, grid) in MEDIA.items():
        values, grids = inputs.get(pixels), inputs.get(grid)
        if values is None:
            continue
        # 1. How many rows of pixels each medium has, and how many placeholders, in proportion.
        columns: dict[str, Tensor] = {
            name: value
            for name in (grid, *MORE_MEDIA[kind])
            if (value := inputs.get(name)) is not None
        }
        areas = columns.get("image_sizes")
        num_rows = _rows_of_media(values, grids, areas, config)
        sizes = num_rows if grids is not None or areas is None else areas.prod(-1).tolist()

        # 2. How many media have come by the end of each piece of each row.
        ends = _ends(samples, placeholder(config, kind), sizes, is_exact=grids is not None)
        if ends is None or not (
            sum(num_rows) == len(values) and all(len(x) == len(sizes) for x in columns.values())
        ):
            raise UnknownInputError(f"{pixels} cannot be split by sample")

        # 3. Cut all inputs of this kind there. Pixels of `media/` that are encoded once bring a
        # method of their own for it.
        row_ends = np.cumsum([0, *num_rows])[ends]
        split = getattr(values, "split_parts", values.split)
        parts = {pixels: split(np.diff(row_ends, prepend=0).tolist())}
        for name, column in columns.items():
            parts[name] = column.split(np.diff(ends, prepend=0).tolist())
        for name, pieces_of in parts.items():
            for n, row in enumerate(rows):
                # Of three pieces the last lies behind what is read.
                row.prompt[name], row.suffix[name] = pieces_of[3 * n : 3 * n + 2]
    return rows


def _rows_of_media(
    values: Tensor, grids: Tensor | None, sizes: Tensor | None, config: PretrainedConfig
) -> list[int]:
    """Return how many rows of the pixels each medium has."""
    if grids is not None:
        sizes_of_grids: list[int] = grids.prod(-1).tolist()
        return sizes_of_grids
    tiles = getattr(config, "image_grid_pinpoints", None)
    if sizes is None or not tiles or values.ndim != 4:
        return [1] * len(values)  # a row of pixels for each medium, as in LLaVA-OneVision
    # LLaVA-NeXT, whose tiles ms-swift lays one after the other.
    side = config.vision_config.image_size
    return [int(image_size_to_num_patches(size, tiles, side)) for size in sizes.tolist()]


def _ends(
    samples: Sequence[BatchRow], token: int, sizes: Sequence[int], *, is_exact: bool
) -> Ints | None:
    """Return the number of media up to the end of each of three pieces of each sample (its prompt,
    its suffix and what lies behind), or None.

    A medium has placeholders in proportion to its size. Unless that `is_exact`, it may also have
    those that follow one another, as where an image is cut into tiles by its shape.
    """
    num_tokens, num_runs = list[int](), list[int]()
    for sample in samples:
        is_media = sample.ids == token
        begins = is_media & ~np.concatenate([[False], is_media[:-1]])
        parts = [np.zeros(len(is_media), bool) for _ in range(2)]
        for part, columns in zip(parts, (sample.shared, sample.suffix), strict=True):
            part[columns] = True
        for part in (*parts, ~(parts[0] | parts[1])):
            num_tokens.append(int((is_media & part).sum()))
            num_runs.append(int((begins & part).sum()))
    media_ends, piece_ends = np.cumsum([0, *sizes]), np.cumsum(num_tokens)
    # Where media and pieces end, both as a part of the total: times the other's total, so that they
    # are whole numbers. Each piece has to end where a medium does.
    media_at, piece_at = media_ends * piece_ends[-1], piece_ends * media_ends[-1]
    ends = np.searchsorted(media_at, piece_at)
    if np.isin(piece_at, media_at).all() and ends[-1] == len(sizes):
        return ends
    # Else each run of placeholders may be one medium.
    ends = np.cumsum(num_runs)
    return ends if ends[-1] == len(sizes) and not is_exact else None


# --- the layout ---


@dataclass(frozen=True)
class Layout:
    """Where the positions of a packed row come from."""

    rows_L: Ints
    columns_L: Ints
    """The place of each in the batch."""

    positions_L: Ints
    """Counted from the first token of its prompt."""

    groups_L: Ints
    numbers_L: Ints
    """The group of each; and 0 in its prompt, n in its n-th sample. The sample of a group that has
    but one is a prompt from beginning to end."""

    samples: list[list[int]]
    """For each group, its rows of the batch."""

    def take(self, values: Tensor) -> Tensor:
        """Return [..., 1, L] of [..., B, T]."""
        places = np.stack([self.rows_L, self.columns_L])
        rows, columns = torch.from_numpy(places).to(values.device)
        return values[..., rows, columns].unsqueeze(-2)

    def attention_mask(
        self, inputs: Mapping[str, Any], model: PreTrainedModel
    ) -> Tensor | dict[str, Tensor]:
        """Return what is given as `attention_mask`."""
        text, device = model.config.get_text_config(), inputs["input_ids"].device
        groups, numbers = (torch.from_numpy(x).to(device) for x in (self.groups_L, self.numbers_L))
        kinds = torch.zeros_like(groups)
        name, layers = images_that_look_ahead(model)
        if layers and name in inputs:
            kinds = self.take(inputs[name])[0]
        # 1 is an image and 2 a video in both families; 3, audio, reads as text does.
        looks_ahead = layers * ((kinds == 1) | (kinds == 2))
        mask = segments.make_mask(groups, numbers, looks_ahead)
        kinds_of_layers = getattr(text, "layer_types", None) or ()
        if "linear_attention" not in kinds_of_layers:
            return mask
        # Of a tensor of four dimensions, transformers gives gated delta nets nothing (5.19,
        # masking_utils.py, `create_recurrent_attention_mask`), and they would run from one sample
        # into the next. It hands on a dictionary as it is.
        return dict.fromkeys(kinds_of_layers, mask)


def images_that_look_ahead(model: PreTrainedModel) -> tuple[str, int]:
    """Return the input that names the positions of images, of a model whose images see all of
    themselves, and the layers in which they do (`segments.make_mask`); 0: in none.

    By the class, as other models have the same inputs and make no mask of them (Gemma 3n). Both
    families make theirs in `create_masks_for_vision_model` (transformers 5.19).
    """
    classes = {cls.__name__ for cls in type(model).__mro__}  # FSDP2 derives its own
    if "Gemma3ForConditionalGeneration" in classes:
        return "token_type_ids", segments.EVERYWHERE
    text = model.config.get_text_config()
    gemma4 = {"Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"}
    if classes & gemma4 and text.use_bidirectional_attention == "vision":
        return "mm_token_type_ids", segments.WITH_WINDOW
    return "", 0


def layout_of(groups: Sequence[Sequence[BatchRow]]) -> Layout:
    """Lay the samples of a batch out as one packed row."""
    parts = list[Ints]()
    for group, samples in enumerate(groups):
        shared = samples[0].shared
        pieces = [(samples[0].row, shared, 0, 0)]
        for n, sample in enumerate(samples, 1):
            pieces.append((sample.row, sample.suffix, len(shared), n if len(samples) > 1 else 0))
        for row, columns, first, number in pieces:
            positions = np.arange(first, first + len(columns))
            same = (np.full(len(columns), value) for value in (row, group, number))
            parts.append(np.stack([columns, positions, *same]))
    columns_L, positions_L, rows_L, groups_L, numbers_L = np.concatenate(parts, axis=1)
    return Layout(
        rows_L, columns_L, positions_L, groups_L, numbers_L,
        samples=[[sample.row for sample in samples] for samples in groups],
    )  # fmt: skip


def placeholder(config: PretrainedConfig, kind: str) -> int:
    """Return the id of a kind of media's token; -1 where a model has none."""
    config = getattr(config, "thinker_config", config)  # Qwen-Omni
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((i for name in names if (i := getattr(config, name, None)) is not None), -1)


def packed_inputs(
    inputs: Mapping[str, Any],
    layout: Layout,
    media: Sequence[Media],
    mask: Tensor | dict[str, Tensor],
) -> dict[str, Any]:
    """Return the arguments of a model's forward for a packed row: tensors of [..., B, T] among the
    inputs are packed.

    Raises:
        UnknownInputError: a tensor has another shape.
    """
    shape, device = inputs["input_ids"].shape, inputs["input_ids"].device
    positions = torch.from_numpy(layout.positions_L).to(device)
    packed: dict[str, Any] = {"position_ids": positions[None]}
    for name, value in inputs.items():
        if name in media[0].prompt:
            # A model hands out media in the order of placeholders, which is that of the packed row.
            parts = [
                part[name]
                for rows in layout.samples
                for part in (
                    media[rows[0]].prompt,
                    *(media[row].suffix for row in rows),
                )
                if len(part[name])
            ]
            if not parts:
                # Without pixels the tower is not called, while other ranks gather its weights.
                raise UnknownInputError(f"all {name} come after the last token that is trained on")
            packed[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-2:] == shape:
            # Positions of the batch among them ([3, B, T] with M-RoPE), in the place of ours.
            packed[name] = layout.take(value)
        elif name not in (*FOR_POSITIONS, "attention_mask"):
            if not isinstance(value, (type(None), bool, int, float, str)):
                shape = tuple(getattr(value, "shape", ()))
                raise UnknownInputError(f"the input {name} {shape} is not known")
            packed[name] = value
    return packed | {"attention_mask": mask}
