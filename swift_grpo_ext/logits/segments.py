"""Attention and gated delta nets that read a packed row by segments.

A packed row holds the prompts of groups, each with its samples behind it (`packed.py`). Layers that
mix positions find the segments in their `attention_mask`, a tensor of int32 [1, 1, 4, L]:
transformers hands on a mask of four dimensions, and recomputation for gradient checkpointing calls
a layer with its arguments again.

`sdpa` and `eager` are called for each prompt, and for each block of its samples; flash attention
once, with the keys of all segments gathered. A gated delta net is called with the prompts, and then
with the samples, which go on from the state at the end of their prompt.

Positions and windows are counted within a sample, which begins with its prompt.

Letters in names are shapes: L positions of the packed row, K keys of a call, H hidden size, P
prompts, S samples, T positions of the longest of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swift_grpo_ext.upstream.patches import Moment, patch, repair

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Attention = Callable[..., tuple[Tensor, Tensor | None]]  # one of transformers' `AttentionInterface`
DENSE = ("sdpa", "eager")  # called for each piece; flash attention is called once
KINDS = {"full_attention", "sliding_attention"}  # of a model's `layer_types`
if hasattr(masking_utils, "create_recurrent_attention_mask"):  # transformers 5.12 has other states
    KINDS.add("linear_attention")
WITH_WINDOW, EVERYWHERE = 1, 2
"""The layers in which the positions of an image see each other; 0: no layers."""


def is_packed(mask: object) -> TypeGuard[Tensor]:
    """Return whether an `attention_mask` is that of a packed row."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.int32


@dataclass(frozen=True)
class Segment:
    """Positions of a prompt, of one of its samples, or of several that follow one another."""

    start: int
    stop: int
    prompt: Segment | None = None  # None: it is a prompt

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def places(self) -> Tensor:
        return torch.arange(self.start, self.stop)

    @property
    def seen(self) -> list[Segment]:
        """Those whose keys its positions see."""
        return [self.prompt, self] if self.prompt else [self]


class Segments:
    """The segments of a packed row, and the forms that layers need of them, each made once.

    Rows of the mask: the group; 0 in its prompt, n in its n-th sample; `WITH_WINDOW` or
    `EVERYWHERE` in images whose positions see each other; the place in the sample.
    """

    def __init__(self, mask: Tensor) -> None:
        self.device, self.length = mask.device, mask.shape[-1]
        _, self._numbers_L, looks_ahead_L, self._columns_L = mask[0, 0]
        self._looks_ahead = int(looks_ahead_L.max())
        # A number for each image, 0 where there is none.
        _, runs_L = torch.unique_consecutive(mask[0, 0, :3], dim=1, return_inverse=True)
        self._images_L = (runs_L + 1) * (looks_ahead_L > 0)
        self._masks = dict[tuple[Segment, int | None], Tensor]()

        # A segment is a run of positions with one group and one number. Attention is called for
        # pieces: prompts, and blocks of samples with a mask between these. A block has no more
        # positions than its prompt, unless one sample has: at most twice the pairs that are seen
        # are computed, and twice the keys copied.
        self.segments, self.pieces = list[Segment](), list[Segment]()
        runs, sizes = torch.unique_consecutive(mask[0, 0, :2], dim=1, return_counts=True)
        prompt, start = None, 0
        for number, size in zip(runs[1].tolist(), sizes.tolist(), strict=True):
            segment = Segment(start, start + size, prompt if number else None)
            start, prompt = segment.stop, segment.prompt or segment
            self.segments.append(segment)
            last = self.pieces[-1] if self.pieces else segment
            if last.prompt is prompt and segment.stop - last.start <= prompt.size:
                self.pieces[-1] = Segment(last.start, segment.stop, prompt)
            else:
                self.pieces.append(segment)

    @staticmethod
    def of(mask: Tensor) -> Segments:
        """Return the segments of a packed row, which the mask keeps for all layers."""
        segments: Segments | None = getattr(mask, "_segments", None)
        if segments is None:
            segments = mask._segments = Segments(mask)
        return segments

    def looks_ahead(self, window: int | None) -> bool:
        """Return whether the positions of an image see each other in a layer with this window."""
        return self._looks_ahead >= (EVERYWHERE if window is None else WITH_WINDOW)

    def mask(self, piece: Segment, window: int | None) -> Tensor:
        """Return [1, 1, queries, K]: which keys a piece's positions see, their prompt's first, in a
        layer that sees the last `window` positions, one's own included."""
        if (piece, window) not in self._masks:
            query = piece.places.to(self.device)[:, None]
            key = torch.cat([part.places for part in piece.seen]).to(self.device)
            number, column, image = self._numbers_L, self._columns_L, self._images_L
            seen = column[key] <= column[query]
            if self.looks_ahead(window):
                seen = seen | ((image[key] == image[query]) & (image[query] > 0))
            seen = seen & ((number[key] == 0) | (number[key] == number[query]))
            if window is not None:
                seen = seen & (column[key] > column[query] - window)
            self._masks[piece, window] = seen[None, None]
        return self._masks[piece, window]

    @cached_property
    def variable_lengths(self) -> tuple[Tensor, dict[str, Any]]:
        """The places [K] of the keys of all segments, and the arguments of transformers' flash
        attention for where each segment begins."""
        keys = [part.places for segment in self.segments for part in segment.seen]
        q_sizes = [segment.size for segment in self.segments]
        k_sizes = [sum(part.size for part in segment.seen) for segment in self.segments]
        q, k = (
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=self.device)
            for sizes in (q_sizes, k_sizes)
        )
        return torch.cat(keys).to(self.device), {
            "cu_seq_lens_q": q,
            "cu_seq_lens_k": k,
            "max_length_q": max(q_sizes),
            "max_length_k": max(k_sizes),
        }

    @cached_property
    def batches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The places of the prompts [P, T], padded on the left, and of the samples [S, T], padded
        on the right, with the place L for padding; the prompt of each sample [S]; and the index of
        each position [L] in the prompts and samples, flattened."""
        prompts = [segment for segment in self.segments if segment.prompt is None]
        samples = [segment for segment in self.segments if segment.prompt is not None]

        def rows(segments: Sequence[Segment], side: str) -> Tensor:
            return pad_sequence([each.places for each in segments], True, self.length, side)

        prompts_PT, samples_ST = rows(prompts, "left"), rows(samples, "right")
        prompts_S = torch.tensor([prompts.index(sample.seen[0]) for sample in samples])
        flat = torch.cat([prompts_PT.flatten(), samples_ST.flatten()])
        stands_L = torch.empty(self.length + 1, dtype=torch.int64)
        stands_L[flat] = torch.arange(len(flat))
        return tuple(x.to(self.device) for x in (prompts_PT, samples_ST, prompts_S, stands_L[:-1]))


# --- attention ---


def by_segments(attend: Attention, name: str) -> Attention:
    """Return attention that reads packed rows by segments, and others by `attend`."""

    @wraps(attend)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # query and key [1, heads, L, width]; the result [1, L, heads, width]
        if not is_packed(attention_mask):
            return attend(module, query, key, value, attention_mask, **kwargs)
        segments = Segments.of(attention_mask)
        window = window_of(module, kwargs.get("sliding_window"))
        kwargs.pop("position_ids", None)  # flash attention would look for sequences in them
        if name not in DENSE:
            # Causality aligns a segment's last query with its last key, so that a sample sees its
            # prompt and itself.
            places_K, lengths = segments.variable_lengths
            key, value = (x.index_select(2, places_K) for x in (key, value))
            return attend(module, query, key, value, None, **(kwargs | lengths))
        sizes = [piece.size for piece in segments.pieces]
        # One split: its backward writes a row once, where that of a slice writes zeros beside it.
        splits = (x.split(sizes, dim=2) for x in (query, key, value))
        parts = dict(zip(segments.pieces, zip(*splits, strict=True), strict=True))
        outputs = []
        for piece, (q, k, v) in parts.items():
            if piece.prompt is not None:
                _, k_prompt, v_prompt = parts[piece.prompt]
                k, v = torch.cat([k_prompt, k], 2), torch.cat([v_prompt, v], 2)
            is_causal = (
                piece.prompt is None
                and (window is None or window >= piece.size)
                and not segments.looks_ahead(window)
            )
            seen = None  # transformers' `sdpa` is causal then, by a faster kernel
            if name != "sdpa" or not is_causal:
                seen = segments.mask(piece, window)
                if name == "eager":  # which adds its mask to the scores
                    lowest = torch.finfo(query.dtype).min
                    seen = query.new_zeros(seen.shape).masked_fill_(~seen, lowest)
            outputs.append(attend(module, q, k, v, seen, **kwargs)[0])
        return torch.cat(outputs, dim=1), None

    attention.reads_segments = True  # type: ignore[attr-defined]
    return attention


def longest_window(text: PretrainedConfig) -> int | None:
    """Return the window of a text model's layers that have one; None without any."""
    window = getattr(text, "sliding_window", None)
    return window if getattr(text, "use_sliding_window", True) else None


def window_of(module: nn.Module, given: int | None) -> int | None:
    """Return the window that a module of attention gives its implementation; raise `ValueError`
    where it gives none and the configuration has one for its layer."""
    kinds = getattr(module.config, "layer_types", None)
    # Where layers differ, the configuration's window is that of some of them.
    has_window = not kinds or kinds[module.layer_idx] == "sliding_attention"
    if given is None and has_window and longest_window(module.config) is not None:
        raise ValueError(f"{type(module).__name__} does not tell its implementation of its window")
    return given


def eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call the eager attention of a module's own file, as transformers does."""
    attend: Attention = in_its_file(module, "eager_attention_forward")
    return attend(module, *args, **kwargs)


# --- gated delta nets ---


class States:
    """The part of transformers' cache (5.19, cache_utils.py) that one gated delta net uses.
    transformers' own copies states in place, over what the backward still needs."""

    record_past = True  # one position more is no step of generation

    def __init__(self, width: int) -> None:
        self._width = width  # positions that the convolution sees
        self._has_previous = False
        self.conv_states = dict[int, Tensor]()
        self.recurrent_states = dict[int, Tensor]()

    # A net asks for `cache.layers[its number].recurrent_states[0]`. An attribute that held this
    # object would be a circle, and keep tensors until the garbage collector comes by.
    @property
    def layers(self) -> States:
        return self

    def __getitem__(self, layer_idx: int) -> States:
        return self

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self._has_previous

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Return [rows, channels, positions], with those before them."""
        if self._has_previous:
            states = torch.cat([self.conv_states[state_idx], states], dim=-1)
        elif (missing := self._width - states.shape[-1]) > 0:
            states = nn.functional.pad(states, (missing, 0))
        self.conv_states[state_idx] = states[..., -self._width :]
        return states

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = states
        return states

    def select(self, rows: Tensor) -> States:
        """Return the states of some rows, to go on from."""
        selected = States(self._width)
        selected._has_previous = True
        selected.conv_states, selected.recurrent_states = (
            {n: states.index_select(0, rows) for n, states in each.items()}
            for each in (self.conv_states, self.recurrent_states)
        )
        return selected


def delta_net_by_segments(
    module: nn.Module, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a gated delta net's `forward` that reads packed rows by segments too."""

    @wraps(forward)
    def read(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        mask = kwargs.get("attention_mask")
        if not is_packed(mask):
            return forward(hidden_states, *args, **kwargs)
        # On the left, zeros leave the state as it is; on the right it would fade, which does not
        # matter for samples.
        prompts_PT, samples_ST, prompts_S, stands_L = Segments.of(mask).batches
        padded = nn.functional.pad(hidden_states[0], (0, 0, 0, 1))  # [L + 1, H]
        states = States(module.conv_kernel_size)
        prompts_out = forward(padded[prompts_PT], cache_params=states)
        # The proof of the first batch sees values alone.
        if prompts_out.requires_grad and not states.recurrent_states[0].requires_grad:
            raise ValueError(
                f"--logps_shared_prompt: {type(module).__name__} gives the state at the end of a "
                "prompt without its gradient. Use --logps_shared_prompt false."
            )
        samples_out = forward(padded[samples_ST], cache_params=states.select(prompts_S))
        return torch.cat([prompts_out.flatten(0, 1), samples_out.flatten(0, 1)])[None, stands_L]

    read.reads_segments = True  # type: ignore[attr-defined]
    return read


# --- models ---


def reason_against(model: PreTrainedModel) -> str:
    """Return why a model's layers cannot be called by segments; '' where they can."""
    text = model.config.get_text_config()
    name = text._attn_implementation
    is_flash = "flash" in name
    if not is_flash and name not in DENSE:
        return f"--attn_impl {name} is not called by segments (sdpa, eager and flash_attn are)"
    if others := set(getattr(text, "layer_types", None) or ()) - KINDS:
        return f"its layers are of another kind ({', '.join(sorted(others))})"
    # Flash attention before 2.1 and Ascend's do.
    aligns_at_the_top = getattr(flash, "flash_attn_supports_top_left_mask", lambda: True)
    if is_flash and aligns_at_the_top():
        return "this flash attention aligns queries with the first keys, not with the last"
    interfaces = [
        in_its_file(module, "ALL_ATTENTION_FUNCTIONS")
        for module in model.get_decoder().modules()
        if type(module).__name__.endswith("Attention")
    ]
    if not interfaces or any(each is not ALL_ATTENTION_FUNCTIONS for each in interfaces):
        return "its attention is not that of transformers' AttentionInterface"
    return ""


@repair(
    Moment.CALLED,
    symptom="Attention and gated delta nets read a row of several samples as one text "
    "(--logps_shared_prompt).",
    upstream="transformers 5.19, modeling_utils.py (`AttentionInterface`): its packed "
    "sequences share no prompt.",
    until="an attention of transformers lets samples share a prompt",
)
def read_by_segments(model: PreTrainedModel) -> None:
    """Let a model's attention and gated delta nets read packed rows."""
    name = model.config.get_text_config()._attn_implementation
    # Modules look `eager` up here too, with the function of their own file as the default.
    attend = ALL_ATTENTION_FUNCTIONS.get(name, eager_attention)
    if not hasattr(attend, "reads_segments"):
        ALL_ATTENTION_FUNCTIONS.register(name, by_segments(attend, name))
    for module in model.modules():
        is_delta_net = type(module).__name__.endswith("GatedDeltaNet")
        if is_delta_net and not hasattr(module.forward, "reads_segments"):
            patch(module, forward=delta_net_by_segments(module, module.forward))


def in_its_file(module: nn.Module, name: str) -> Any:
    """Return what has a name in the file of a module's class, or of one of its bases (FSDP2 derives
    its own); None where no file has it."""
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)
