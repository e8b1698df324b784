"""Layers that mix positions, reading a packed row by segments.

A packed row holds the prompts of groups, each with its samples behind it (`packed.py`).
Norms, projections and experts treat each position by itself, and need not know. Attention and gated
delta nets do. They find the segments in what travels as `attention_mask`: a tensor of int32
[1, 1, 3, L]. transformers hands it on untouched, as it has four dimensions, and no attention takes
it for its own. Nothing is decided by a context: recomputation for gradient checkpointing calls a
layer long after the pass, with the mask that it had.

- `sdpa` and `eager` are called for each prompt, and for each block of its samples.
- Flash attention is called once, with the keys of all segments gathered; `flex_attention` once,
  with a mask of its own.
- A gated delta net is called with the prompts, and then with the samples, which go on from the
  state that it had at the end of their prompt.

Positions are counted within a sample, which begins with its prompt; so are windows.

Letters in names are shapes: L positions of the packed row, K keys of a call, H hidden size, P
prompts, S samples, T positions of the longest of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.utils.rnn import pad_sequence
from transformers import modeling_flash_attention_utils as flash

from swift_grpo_ext.upstream.patches import Moment, patch, patch_entry, repair

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""A function of transformers' `AttentionInterface`."""

DENSE = ("sdpa", "eager")
"""Implementations that are called for each piece; others are called once."""

KINDS = {"full_attention", "sliding_attention", "linear_attention"}
"""Those of a configuration's `layer_types` that are read by segments."""


class UnsupportedAttentionError(ValueError):
    """A layer cannot be called by segments."""


WITH_WINDOW, EVERYWHERE = 1, 2
"""The layers in which the positions of an image see each other; 0: no layers."""


def make_mask(groups_L: Tensor, samples_L: Tensor, looks_ahead_L: Tensor) -> Tensor:
    """Return what travels as `attention_mask` [1, 1, 3, L].

    Args:
        groups_L: the group of each position.
        samples_L: 0 in its prompt, n in its n-th sample.
        looks_ahead_L: `WITH_WINDOW` or `EVERYWHERE` in images whose positions see each other.
    """
    return torch.stack([groups_L, samples_L, looks_ahead_L]).to(torch.int32)[None, None]


def is_packed(mask: object) -> TypeGuard[Tensor]:
    """Return whether something that is given as `attention_mask` is that of a packed row."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.int32


@dataclass(frozen=True)
class Segment:
    """A prompt, or a sample behind it."""

    start: int
    stop: int
    prompt: Segment | None = None
    """Of a sample."""

    @property
    def place(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start


class Piece(NamedTuple):
    """Positions that look in one call of attention: at themselves, and at those of their prompt."""

    place: slice
    prompt: int | None = None
    """Its number among the pieces; None: it is a prompt."""


class Segments:
    """What the mask of a packed row says, and what layers make of it, once for all of them."""

    def __init__(self, mask: Tensor) -> None:
        # 1. The segments: runs of positions with one group and one number.
        content = mask[0, 0]
        runs, sizes = torch.unique_consecutive(content[:2], dim=1, return_counts=True)
        self.segments, prompt, start = list[Segment](), None, 0
        for number, size in zip(runs[1].tolist(), sizes.tolist(), strict=True):
            segment = Segment(start, start + size, prompt if number else None)
            prompt = prompt if number else segment
            self.segments.append(segment)
            start = segment.stop

        # 2. For each position the number of its segment and of its prompt's, and its place in its
        # sample: a sample's own positions count on from the end of its prompt.
        self.device, self.length = mask.device, start
        self.prompts = [segment for segment in self.segments if segment.prompt is None]
        self.samples = [segment for segment in self.segments if segment.prompt is not None]
        self.pieces = [*self._cut()]
        numbers = {segment.start: number for number, segment in enumerate(self.segments)}
        prompt_number = [numbers[(s.prompt or s).start] for s in self.segments]
        before = [s.start - (s.prompt.size if s.prompt else 0) for s in self.segments]
        table = torch.tensor([list(numbers.values()), prompt_number, before], device=self.device)
        self._segment_L, self._prompt_L, before_L = table.repeat_interleave(
            sizes.to(self.device), dim=1
        )
        self._position_L = torch.arange(start, device=self.device) - before_L

        # 3. A number for each image, from 1 on; 0 where there is none. Two images that touch at the
        # border of segments are two.
        is_image_L = content[2] > 0
        self._looks_ahead = int(content[2].max())
        begins_L = is_image_L.clone()
        begins_L[1:] &= ~is_image_L[:-1] | (self._segment_L[1:] != self._segment_L[:-1])
        self._image_L = begins_L.cumsum(0) * is_image_L
        self._masks = dict[tuple[int, int | None], Tensor]()
        self._block_masks = dict[int | None, BlockMask]()

    @staticmethod
    def of(mask: Tensor) -> Segments:
        """Return the segments of a packed row, made once."""
        # The mask keeps them: all layers of a pass, recomputed ones too, come with the same one.
        segments: Segments | None = getattr(mask, "_segments", None)
        if segments is None:
            segments = mask._segments = Segments(mask)
        return segments

    def _cut(self) -> Iterator[Piece]:
        """Yield each prompt, and its samples in blocks.

        Samples of a block do not see each other, and are computed as if they did, by a mask. One
        call for each sample would be exact, and as many small calls as there are samples.
        """
        number = 0
        for prompt in self.prompts:
            yield Piece(prompt.place)
            prompt_number, number = number, number + 1
            # A block has no more positions than its prompt, unless one sample has: at most twice
            # the pairs that are seen are computed, and at most twice the keys copied.
            samples = [sample for sample in self.samples if sample.prompt is prompt]
            while samples:
                start = samples[0].start
                stop = max(
                    sample.stop
                    for sample in samples
                    if sample is samples[0] or sample.stop - start <= prompt.size
                )
                yield Piece(slice(start, stop), prompt_number)
                number += 1
                samples = [sample for sample in samples if sample.start >= stop]

    def looks_ahead(self, window: int | None) -> bool:
        """Return whether there are images whose positions see each other in such a layer."""
        return self._looks_ahead >= (EVERYWHERE if window is None else WITH_WINDOW)

    def sees(self, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        """Return whether positions see others; all shapes that go together.

        Args:
            query: the positions that look.
            key: those looked at.
            window: how many positions are seen at most, one's own included.
        """
        segment, position, image = self._segment_L, self._position_L, self._image_L
        seen = position[key] <= position[query]
        if self.looks_ahead(window):
            seen = seen | ((image[key] == image[query]) & (image[query] > 0))
        seen = seen & ((segment[key] == segment[query]) | (segment[key] == self._prompt_L[query]))
        return seen if window is None else seen & (position[key] > position[query] - window)

    def mask(self, piece: Piece, window: int | None) -> Tensor:
        """Return [1, 1, queries, K]: which keys the positions of a piece see, their prompt's
        first."""
        key = piece.place.start, window
        if key not in self._masks:
            row = torch.arange(self.length, device=self.device)
            keys_K = own = row[piece.place]
            if piece.prompt is not None:
                keys_K = torch.cat([row[self.pieces[piece.prompt].place], own])
            self._masks[key] = self.sees(own[:, None], keys_K, window)[None, None]
        return self._masks[key]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the mask of `flex_attention`."""

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(query, key, window)

        if window not in self._block_masks:
            shape = (None, None, self.length, self.length)  # of any row, any head
            self._block_masks[window] = create_block_mask(sees, *shape, self.device)
        return self._block_masks[window]

    @cached_property
    def variable_lengths(self) -> tuple[Tensor, dict[str, Any]]:
        """The places [K] of the keys of all segments, one after the other, and the arguments of
        transformers' flash attention that say where those of each segment begin."""
        parts, q_ends, k_ends = list[Tensor](), [0], [0]
        for segment in self.segments:
            own = [segment.prompt, segment] if segment.prompt else [segment]
            parts += [torch.arange(part.start, part.stop) for part in own]
            q_ends.append(segment.stop)
            k_ends.append(k_ends[-1] + sum(part.size for part in own))
        places_K = torch.cat(parts).to(self.device)
        q, k = (torch.tensor(ends, dtype=torch.int32) for ends in (q_ends, k_ends))
        return places_K, {
            "cu_seq_lens_q": q.to(self.device),
            "cu_seq_lens_k": k.to(self.device),
            "max_length_q": int(q.diff().max()),
            "max_length_k": int(k.diff().max()),
        }

    @cached_property
    def batches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The places of the prompts [P, T], with padding on the left, and of the samples [S, T], on
        the right; the prompt of each sample [S]; and where each position of the row stands in both,
        flattened and one behind the other [L]. Padding has the place L."""

        def rows(segments: Sequence[Segment], side: str) -> Tensor:
            places = [torch.arange(segment.start, segment.stop) for segment in segments]
            return pad_sequence(places, True, self.length, side)

        prompts_PT, samples_ST = rows(self.prompts, "left"), rows(self.samples, "right")
        if samples_ST.shape[1] == 1:  # a kernel for one token of generation has no backward
            samples_ST = nn.functional.pad(samples_ST, (0, 1), value=self.length)
        numbers = {prompt.start: number for number, prompt in enumerate(self.prompts)}
        prompts_S = torch.tensor([numbers[s.prompt.start] for s in self.samples if s.prompt])
        flat = torch.cat([prompts_PT.flatten(), samples_ST.flatten()])
        stands_L = torch.empty(self.length + 1, dtype=torch.int64)
        stands_L[flat] = torch.arange(len(flat))
        return tuple(x.to(self.device) for x in (prompts_PT, samples_ST, prompts_S, stands_L[:-1]))


# --- attention ---


def by_segments(attend: Attention, name: str) -> Attention:
    """Return a function of attention that reads packed rows by segments, and others as before.

    Args:
        attend: the function.
        name: of the implementation.
    """

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
        if name == "flex_attention":
            return attend(module, query, key, value, segments.block_mask(window), **kwargs)
        if name not in DENSE:
            # Flash attention takes no mask of pairs. Its causality aligns a segment's last query
            # with its last key: that of a sample sees the whole prompt and itself.
            places_K, lengths = segments.variable_lengths
            key, value = (x.index_select(2, places_K) for x in (key, value))
            return attend(module, query, key, value, None, **(kwargs | lengths))
        sizes = [piece.place.stop - piece.place.start for piece in segments.pieces]
        # One split: its backward writes a row once, where that of a slice writes zeros beside it.
        queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
        outputs = []
        for piece, q, k, v in zip(segments.pieces, queries, keys, values, strict=True):
            if (prompt := piece.prompt) is not None:
                k, v = torch.cat([keys[prompt], k], 2), torch.cat([values[prompt], v], 2)
            # Each position of this piece sees all keys up to its own, and no others.
            is_causal = (
                piece.prompt is None
                and (window is None or window >= q.shape[2])
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
    """Return how many positions the layers with a window see, of a text model's configuration."""
    window = getattr(text, "sliding_window", None)
    return window if getattr(text, "use_sliding_window", True) else None


def window_of(module: nn.Module, given: int | None) -> int | None:
    """Return the window that a module of attention names to its implementation.

    Raises:
        UnsupportedAttentionError: it names none, where the configuration has one for its layer.
    """
    window = longest_window(module.config)
    # Where layers differ, the configuration's window is that of some of them.
    kinds = getattr(module.config, "layer_types", None)
    number = getattr(module, "layer_idx", None)
    if kinds and number is not None and kinds[number] != "sliding_attention":
        window = None
    if window is not None and given is None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} does not tell its implementation of its window"
        )
    return given


def eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call the eager attention of a module's own file, as transformers does."""
    attend: Attention = in_its_file(module, "eager_attention_forward")
    return attend(module, *args, **kwargs)


# --- gated delta nets ---


class States:
    """What a gated delta net asks of transformers' cache (5.19, cache_utils.py), for one of them.

    transformers' own copies states in place, over what the backward still needs: torch refuses
    that. These are assigned.

    Args:
        width: how many positions the convolution sees.
    """

    record_past = True  # one position more is no step of generation

    def __init__(self, width: int) -> None:
        self._width = width
        self._has_previous = False
        self.conv_states = dict[int, Tensor]()
        self.recurrent_states = dict[int, Tensor]()

    # A net asks for `cache.layers[its number].recurrent_states[0]`. All of that is this object, as
    # it is one net's. An attribute that held it would be a circle, and keep tensors until the
    # garbage collector comes by.
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
            # As the convolution pads what is shorter than it.
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
        for ours, theirs in (
            (self.conv_states, selected.conv_states),
            (self.recurrent_states, selected.recurrent_states),
        ):
            theirs.update({n: states.index_select(0, rows) for n, states in ours.items()})
        return selected


def delta_net_by_segments(
    module: nn.Module, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return the forward of a gated delta net that reads packed rows by segments, and others as
    before."""

    @wraps(forward)
    def read(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        mask = kwargs.get("attention_mask")
        if not is_packed(mask):
            return forward(hidden_states, *args, **kwargs)
        # Prompts are padded on the left, where zeros leave the state as it is; on the right it
        # would fade. Samples may be padded there, as nothing goes on from them.
        prompts_PT, samples_ST, prompts_S, stands_L = Segments.of(mask).batches
        padded = nn.functional.pad(hidden_states[0], (0, 0, 0, 1))  # [L + 1, H]
        states = States(module.conv_kernel_size)
        prompt_outputs = forward(padded[prompts_PT], cache_params=states)
        # Values would be right without it, so that the proof of the first batch cannot see this.
        if prompt_outputs.requires_grad and not states.recurrent_states[0].requires_grad:
            raise UnsupportedAttentionError(
                f"--logps_shared_prompt: {type(module).__name__} gives the state at the end of a "
                "prompt without its gradient. Use --logps_shared_prompt false."
            )
        sample_outputs = forward(padded[samples_ST], cache_params=states.select(prompts_S))
        return torch.cat([prompt_outputs.flatten(0, 1), sample_outputs.flatten(0, 1)])[stands_L][
            None
        ]

    read.reads_segments = True  # type: ignore[attr-defined]
    return read


# --- models ---


def reason_against(model: PreTrainedModel) -> str:
    """Return why a model's layers cannot be called by segments; '' where they can."""
    text = model.config.get_text_config()
    name = text._attn_implementation
    is_flash = "flash" in name
    if not is_flash and name not in (*DENSE, "flex_attention"):
        return f"--attn_impl {name} is not called by segments (sdpa and flash_attn are)"
    if others := set(getattr(text, "layer_types", None) or ()) - KINDS:
        return f"its layers are of another kind ({', '.join(sorted(others))})"
    # Flash attention before 2.1 and Ascend's do. A transformers that does not say is not trusted.
    aligns_at_the_top = getattr(flash, "flash_attn_supports_top_left_mask", lambda: True)
    if is_flash and aligns_at_the_top():
        return "this flash attention aligns queries with the first keys, not with the last"
    interfaces = attention_interfaces(model)
    # Since transformers 5 a module looks `eager` up in its interface too (`get_interface`), with
    # its file's own function as the default. One entry of ours then serves all files, each of which
    # has to have that function: `eager_attention` calls it.
    finds_eager = all(hasattr(each, "get_interface") for each in interfaces) and all(
        in_its_file(module, "eager_attention_forward")
        for module in model.modules()
        if type(module).__name__.endswith("Attention")
        and in_its_file(module, "ALL_ATTENTION_FUNCTIONS") is not None
    )
    if not interfaces or (name == "eager" and not finds_eager):
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
    for interface in attention_interfaces(model):
        attend = eager_attention if name == "eager" else interface[name]
        if not hasattr(attend, "reads_segments"):
            patch_entry(interface, name, by_segments(attend, name))
    for module in model.modules():
        is_delta_net = type(module).__name__.endswith("GatedDeltaNet")
        if is_delta_net and not hasattr(module.forward, "reads_segments"):
            patch(module, forward=delta_net_by_segments(module, module.forward))


def attention_interfaces(model: PreTrainedModel) -> list[MutableMapping[str, Attention]]:
    """Return transformers' `AttentionInterface`s in which a decoder's attention looks its
    implementation up: one, or none where a module of attention does it otherwise."""
    found = list[MutableMapping[str, Attention]]()
    for module in getattr(model, "get_decoder", lambda: model)().modules():
        if type(module).__name__.endswith("Attention"):
            interface = in_its_file(module, "ALL_ATTENTION_FUNCTIONS")
            if interface is None:
                return []
            if not any(interface is other for other in found):
                found.append(interface)
    return found


def in_its_file(module: nn.Module, name: str) -> Any:
    """Return what has a name in the file of a module's class, or of one that it is derived from:
    FSDP2 derives classes of its own."""
    # In the order of inheritance, as Python itself would look a method up.
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)
