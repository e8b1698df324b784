"""Makes attention and gated delta nets process packed rows by segments.

A packed row has the prompts of groups, each followed by its samples (`packed.py`). Layers that mix
positions get the segments as their `attention_mask`, a tensor of int32 [1, 1, 4, L]: transformers
passes a mask of four dimensions on unchanged, and gradient checkpointing recomputes a layer with
the same arguments.

`sdpa` and `eager` are called for each prompt and each block of its samples. Flash attention is
called once, with the gathered keys of all segments. A gated delta net is called for the prompts,
and then for the samples, which start from the state at the end of their prompt.

Positions and windows are relative to a sample, which begins with its prompt.

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

from swift_grpo_ext.upstream.patches import patch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Attention = Callable[..., tuple[Tensor, Tensor | None]]  # one of transformers' `AttentionInterface`
DENSE = ("sdpa", "eager")  # called for each attention block; flash attention is called once
KINDS = {"full_attention", "sliding_attention"}  # supported `layer_types`
if hasattr(masking_utils, "create_recurrent_attention_mask"):  # transformers 5.12 has other states
    KINDS.add("linear_attention")
WITH_WINDOW, EVERYWHERE = 1, 2
"""The layers with bidirectional attention within images: layers with a window, or all. 0: none."""


def is_packed(mask: object) -> TypeGuard[Tensor]:
    """Return whether an `attention_mask` belongs to a packed row."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.int32


@dataclass(frozen=True)
class Segment:
    """Positions of a prompt, of one of its samples, or of several consecutive samples."""

    start: int
    stop: int
    prompt: Segment | None = None  # the samples' prompt; None for a prompt itself

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.stop)

    @property
    def visible(self) -> list[Segment]:
        """The segments that this one may attend to."""
        return [self.prompt, self] if self.prompt else [self]


class Segments:
    """The segments of a packed row, and cached tensors that layers derive from them.

    Rows of the mask: the group; 0 in its prompt, n in its n-th sample; `WITH_WINDOW` or
    `EVERYWHERE` in images with bidirectional attention; the index in the sample.
    """

    def __init__(self, mask: Tensor) -> None:
        self.device, self.length = mask.device, mask.shape[-1]
        _, self._numbers_L, looks_ahead_L, self._columns_L = mask[0, 0]
        self._looks_ahead = int(looks_ahead_L.max())
        # The number of an image, 0 outside of images.
        _, runs_L = torch.unique_consecutive(mask[0, 0, :3], dim=1, return_inverse=True)
        self._images_L = (runs_L + 1) * (looks_ahead_L > 0)
        self._masks = dict[tuple[Segment, int | None], Tensor]()

        # A segment is a run of positions with one group and number. Attention is called for blocks:
        # a prompt, or several samples that a mask separates. A block of several samples has no more
        # positions than its prompt. So attention computes at most twice the visible pairs, and
        # copies at most twice the keys.
        self.segments, self.blocks = list[Segment](), list[Segment]()
        runs, sizes = torch.unique_consecutive(mask[0, 0, :2], dim=1, return_counts=True)
        prompt, start = None, 0
        for number, size in zip(runs[1].tolist(), sizes.tolist(), strict=True):
            segment = Segment(start, start + size, prompt if number else None)
            start, prompt = segment.stop, segment.prompt or segment
            self.segments.append(segment)
            last = self.blocks[-1] if self.blocks else segment
            if last.prompt is prompt and segment.stop - last.start <= prompt.size:
                self.blocks[-1] = Segment(last.start, segment.stop, prompt)
            else:
                self.blocks.append(segment)

    @staticmethod
    def of(mask: Tensor) -> Segments:
        """Return the segments of a packed row, cached on its mask for all layers."""
        segments: Segments | None = getattr(mask, "_segments", None)
        if segments is None:
            segments = mask._segments = Segments(mask)
        return segments

    def looks_ahead(self, window: int | None) -> bool:
        """Return whether attention within images is bidirectional in a layer with this window."""
        return self._looks_ahead >= (EVERYWHERE if window is None else WITH_WINDOW)

    def mask(self, block: Segment, window: int | None) -> Tensor:
        """Return the mask [1, 1, queries, K] of a block; keys of its prompt come first. A layer
        with a window sees the last `window` positions, including the query's own."""
        if (block, window) not in self._masks:
            query = block.positions.to(self.device)[:, None]
            key = torch.cat([part.positions for part in block.visible]).to(self.device)
            number, column, image = self._numbers_L, self._columns_L, self._images_L
            seen = column[key] <= column[query]
            if self.looks_ahead(window):
                seen = seen | ((image[key] == image[query]) & (image[query] > 0))
            seen = seen & ((number[key] == 0) | (number[key] == number[query]))
            if window is not None:
                seen = seen & (column[key] > column[query] - window)
            self._masks[block, window] = seen[None, None]
        return self._masks[block, window]

    @cached_property
    def variable_lengths(self) -> tuple[Tensor, dict[str, Any]]:
        """The positions [K] of the keys of all segments, and the segments' boundaries as arguments
        of transformers' flash attention."""
        keys = [part.positions for segment in self.segments for part in segment.visible]
        q_sizes = [segment.size for segment in self.segments]
        k_sizes = [sum(part.size for part in segment.visible) for segment in self.segments]
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
        """Indices that batch prompts and samples: positions of prompts [P, T], padded on the left;
        positions of samples [S, T], padded on the right; each sample's prompt [S]; and the index
        [L] of each position in both batches, flattened and joined. Padding has the position L."""
        prompts = [segment for segment in self.segments if segment.prompt is None]
        samples = [segment for segment in self.segments if segment.prompt is not None]

        def rows(segments: Sequence[Segment], side: str) -> Tensor:
            return pad_sequence([each.positions for each in segments], True, self.length, side)

        prompts_PT, samples_ST = rows(prompts, "left"), rows(samples, "right")
        prompts_S = torch.tensor([prompts.index(sample.visible[0]) for sample in samples])
        flat = torch.cat([prompts_PT.flatten(), samples_ST.flatten()])
        index_L = torch.empty(self.length + 1, dtype=torch.int64)
        index_L[flat] = torch.arange(len(flat))
        return tuple(x.to(self.device) for x in (prompts_PT, samples_ST, prompts_S, index_L[:-1]))


# --- attention ---


def by_segments(attend: Attention, name: str) -> Attention:
    """Return attention that computes packed rows by segments, and other rows with `attend`."""

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
        kwargs.pop("position_ids", None)  # flash attention would infer sequences from them
        if name not in DENSE:
            # Flash attention aligns a segment's last query with its last key, so that a sample sees
            # its prompt and itself.
            positions_K, lengths = segments.variable_lengths
            key, value = (x.index_select(2, positions_K) for x in (key, value))
            return attend(module, query, key, value, None, **(kwargs | lengths))
        sizes = [block.size for block in segments.blocks]
        # One split: its backward writes the row once; each slice's would write a row of zeros.
        splits = (x.split(sizes, dim=2) for x in (query, key, value))
        parts = dict(zip(segments.blocks, zip(*splits, strict=True), strict=True))
        outputs = []
        for block, (q, k, v) in parts.items():
            if block.prompt is not None:
                _, k_prompt, v_prompt = parts[block.prompt]
                k, v = torch.cat([k_prompt, k], 2), torch.cat([v_prompt, v], 2)
            is_causal = (
                block.prompt is None
                and (window is None or window >= block.size)
                and not segments.looks_ahead(window)
            )
            seen = None  # transformers' `sdpa` then uses its faster causal kernel
            if name != "sdpa" or not is_causal:
                seen = segments.mask(block, window)
                if name == "eager":  # it adds the mask to the scores
                    lowest = torch.finfo(query.dtype).min
                    seen = query.new_zeros(seen.shape).masked_fill_(~seen, lowest)
            outputs.append(attend(module, q, k, v, seen, **kwargs)[0])
        return torch.cat(outputs, dim=1), None

    attention.reads_segments = True  # type: ignore[attr-defined]
    return attention


def longest_window(text: PretrainedConfig) -> int | None:
    """Return the sliding window of a text model, or None."""
    window = getattr(text, "sliding_window", None)
    return window if getattr(text, "use_sliding_window", True) else None


def window_of(module: nn.Module, given: int | None) -> int | None:
    """Return the window that an attention module passes on; raise `ValueError` if it passes none
    although the configuration has one for its layer."""
    kinds = getattr(module.config, "layer_types", None)
    # If layers differ, only some of them have the configuration's window.
    has_window = not kinds or kinds[module.layer_idx] == "sliding_attention"
    if given is None and has_window and longest_window(module.config) is not None:
        raise ValueError(f"{type(module).__name__} passes no window to its implementation")
    return given


def eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call the eager attention that the module's own file defines, as transformers does."""
    attend: Attention = in_its_file(module, "eager_attention_forward")
    return attend(module, *args, **kwargs)


# --- gated delta nets ---


class DeltaNetCache:
    """The part of transformers' cache (5.19, cache_utils.py) that a gated delta net uses.
    transformers' own cache overwrites states in place that the backward still needs."""

    record_past = True  # a call with one position is not a generation step

    def __init__(self, width: int) -> None:
        self._width = width  # kernel size of the convolution
        self._has_previous = False
        self.conv_states = dict[int, Tensor]()
        self.recurrent_states = dict[int, Tensor]()

    # A net reads `cache.layers[layer_idx].recurrent_states[0]`. Not an attribute: that would be a
    # reference cycle, and keep tensors until garbage collection.
    @property
    def layers(self) -> DeltaNetCache:
        return self

    def __getitem__(self, layer_idx: int) -> DeltaNetCache:
        return self

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self._has_previous

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Return `states` [rows, channels, positions] with the previous positions in front."""
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

    def select(self, rows: Tensor) -> DeltaNetCache:
        """Return a cache that starts from the states of these rows."""
        selected = DeltaNetCache(self._width)
        selected._has_previous = True
        selected.conv_states, selected.recurrent_states = (
            {n: states.index_select(0, rows) for n, states in each.items()}
            for each in (self.conv_states, self.recurrent_states)
        )
        return selected


def delta_net_by_segments(
    module: nn.Module, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a gated delta net's `forward` that also accepts packed rows."""

    @wraps(forward)
    def read(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        mask = kwargs.get("attention_mask")
        if not is_packed(mask):
            return forward(hidden_states, *args, **kwargs)
        # Zeros on the left keep the initial state. Zeros on the right decay the final state, which
        # only matters for prompts.
        prompts_PT, samples_ST, prompts_S, index_L = Segments.of(mask).batches
        padded = nn.functional.pad(hidden_states[0], (0, 0, 0, 1))  # [L + 1, H]
        states = DeltaNetCache(module.conv_kernel_size)
        prompts_out = forward(padded[prompts_PT], cache_params=states)
        # Check gradients here, as `proof.py` only compares values.
        if prompts_out.requires_grad and not states.recurrent_states[0].requires_grad:
            raise ValueError(
                f"--logps_shared_prompt: {type(module).__name__} returns the state at the end of a "
                "prompt without its gradient. Use --logps_shared_prompt false."
            )
        samples_out = forward(padded[samples_ST], cache_params=states.select(prompts_S))
        return torch.cat([prompts_out.flatten(0, 1), samples_out.flatten(0, 1)])[None, index_L]

    read.reads_segments = True  # type: ignore[attr-defined]
    return read


# --- models ---


def reason_against(model: PreTrainedModel) -> str:
    """Return why a model's layers cannot be called by segments; '' if they can."""
    text = model.config.get_text_config()
    name = text._attn_implementation
    is_flash = "flash" in name
    if not is_flash and name not in DENSE:
        return f"--attn_impl {name} is not called by segments (sdpa, eager and flash_attn are)"
    if others := set(getattr(text, "layer_types", None) or ()) - KINDS:
        return f"its layers are of another kind ({', '.join(sorted(others))})"
    # Flash attention before 2.1 and Ascend's align at the top left.
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


def read_by_segments(model: PreTrainedModel) -> None:
    """Make a model's attention and gated delta nets accept packed rows.

    Symptom: attention and gated delta nets treat a row of several samples as one text
    (--logps_shared_prompt).
    Upstream: transformers 5.19, modeling_utils.py (`AttentionInterface`): packed sequences cannot
    share a prompt. Can go when transformers supports packed sequences with a shared prompt.
    """
    name = model.config.get_text_config()._attn_implementation
    # `eager` has no entry: modules look it up here, and default to their own file's function.
    attend = ALL_ATTENTION_FUNCTIONS.get(name, eager_attention)
    if not hasattr(attend, "reads_segments"):
        ALL_ATTENTION_FUNCTIONS.register(name, by_segments(attend, name))
    for module in model.modules():
        is_delta_net = type(module).__name__.endswith("GatedDeltaNet")
        if is_delta_net and not hasattr(module.forward, "reads_segments"):
            patch(module, forward=delta_net_by_segments(module, module.forward))


def in_its_file(module: nn.Module, name: str) -> Any:
    """Return the global `name` of the file that defines a module's class or one of its bases (FSDP2
    uses a derived class), or None."""
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)
