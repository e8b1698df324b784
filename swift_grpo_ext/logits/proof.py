"""Packed rows have the log-probabilities of plain ones: shown on the first of each kind of row.

The first micro-batch that has a kind of row is computed three times: packed, plain, and plain with
every second number of each layer rounded to its neighbour. Packing may move log-probabilities as
far as that rounding does, and no further.

Letters in names are shapes: B rows of a micro-batch, T positions of a row, N positions that predict
a token that is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from swift.utils import get_logger
from torch import Tensor, nn

from swift_grpo_ext.logits import segments
from swift_grpo_ext.logits.packed import (
    GroupRows,
    PackedBatch,
    SharedPromptInputs,
    UnknownInputError,
    longest_row,
    pack,
    plain_inputs,
    reason_against,
    rotary_borders,
)
from swift_grpo_ext.logits.sharding import ShardRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = get_logger()

WORTH = 0.1
"""The share of a pass that packing has to save."""

LEAST = 1e-6
"""Nats by which float32 rounds a log-probability, with any model."""

PLACEHOLDERS = ("image", "video", "audio")
"""Media for which a configuration names a token."""

Kind = tuple[tuple[str, ...], int]
"""A row's media, and how many `borders` the longest row of its micro-batch lies beyond."""

Form = tuple[Mapping[str, Any], Tensor]
"""The arguments of a model's forward, and the positions of the wanted logits: [B, T], or [1, L]
of a packed row."""


class SharedPrompt:
    """Packs the micro-batches of one model, and proves each kind of row.

    Each rank proves alone: its number of passes may depend on its own rows, as with a teacher
    that only some of them have. Ranks that share the weights make all passes together. All of them
    pack a micro-batch, or none does: a packed pass may call a layer more often.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        """
        Args:
            base: the model, unwrapped.
        """
        self._base = base
        self._has_told = False
        self._saving = 0.0
        """The share of the pass that the last packed row is expected to save."""

        self._proven = set[Kind]()
        self.has_failed = False
        """It is True once log-probabilities of a micro-batch have differed."""

    def form(
        self,
        inputs: Mapping[str, Any],
        predicts_BT: Tensor,
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
    ) -> Form:
        """Return a micro-batch packed, or as it is.

        Args:
            inputs: the micro-batch, or the arguments of a forward, which stay as they are.
            predicts_BT: positions whose logits are wanted.
            logps: log-probabilities [N] of what they predict, of either form.
            ranks: those that share the model's weights.
        """
        packed = None if self.has_failed else self._packed(inputs)
        # `has_failed` is the same on ranks that share weights. Each of them reaches this, whatever
        # its micro-batch holds: one alone must not go another way.
        if self.has_failed or not ranks.all(packed is not None):
            return plain_inputs(inputs), predicts_BT
        assert packed is not None
        assert isinstance(inputs, SharedPromptInputs)
        tokens_of_kinds = kinds_of_tokens(inputs.groups, self._base.config)
        if ranks.all(tokens_of_kinds.keys() <= self._proven):
            return packed
        plain = plain_inputs(inputs), predicts_BT
        if not self._is_equal(packed, plain, tokens_of_kinds, logps, ranks):
            return plain
        self._proven |= tokens_of_kinds.keys()
        return packed

    def _packed(self, inputs: Mapping[str, Any]) -> PackedBatch | None:
        # One sample has nothing to share, and says nothing of later micro-batches.
        if not isinstance(inputs, SharedPromptInputs) or len(inputs["input_ids"]) == 1:
            return None
        reason = reason_against(self._base, inputs.heads)
        try:
            if not reason:
                return pack(inputs, self._base, self._is_worth)
        except UnknownInputError as e:
            reason = str(e)
        self._tell_once(reason)
        return None

    def _is_worth(self, saving: float) -> bool:
        self._saving = saving
        if saving > WORTH:
            return True
        self._tell_once(
            f"the first that shares prompts would save {saving:.0%}, and {WORTH:.0%} is the least"
        )
        return False

    def _is_equal(
        self,
        packed: PackedBatch,
        plain: Form,
        tokens_of_kinds: Mapping[Kind, Tensor],
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
    ) -> bool:
        """Return whether the log-probabilities of both forms are equal on all ranks: for each kind
        of row, no further apart than rounding puts two plain passes."""
        problem = ""
        with torch.no_grad():
            found = None
            try:
                found = logps(*packed)
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except Exception as e:  # a form that fails never ends a run: the other one is left
                problem = f"the first packed pass failed ({type(e).__name__}: {e})"
            # After a failure too: ranks that share weights all make all passes.
            expected = logps(*plain)
            with rounded_otherwise(self._base):
                moved = logps(*plain)
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
                f"--logps_shared_prompt auto: passes of {type(self._base).__name__} read "
                f"{packed.predicts_1L.numel()} positions in the place of {plain[1].numel()}, which "
                f"is expected to save {self._saving:.0%} of their time (the first micro-batch)."
            )
            return True
        self.has_failed = True
        self._has_told = False  # the line before, of a small saving, named no fault
        problem = problem or "on a rank that shares its weights, packed rows differ"
        self._tell_once(problem, logger.warning)
        return False

    def _tell_once(self, reason: str, tell: Callable[[str], object] | None = None) -> None:
        if not self._has_told:
            (tell or logger.info)(
                "--logps_shared_prompt auto leaves micro-batches of "
                f"{type(self._base).__name__} as they are: {reason}."
            )
        self._has_told = True


def kinds_of_tokens(groups: Sequence[GroupRows], config: PretrainedConfig) -> dict[Kind, Tensor]:
    """Return, for each kind of row, which of the N predicted tokens stand in such rows.

    Packing may be right for text and wrong for images, or right below a border and wrong beyond.
    """
    length = longest_row(groups)
    num_beyond = sum(length > border for border in borders(config.get_text_config()))
    kinds_N = list[Kind]()
    for group in groups:
        for ids, labels in zip(group.ids, group.labels, strict=True):
            media = tuple(kind for kind in PLACEHOLDERS if placeholder(config, kind) in ids)
            kinds_N += [(media, num_beyond)] * sum(label != -100 for label in labels[1:])
    return {
        kind: torch.tensor([kind == other for other in kinds_N]) for kind in dict.fromkeys(kinds_N)
    }


def borders(text: PretrainedConfig) -> list[int]:
    """Return the lengths of rows beyond which a text model's layers do something else: they see a
    part of the row, or turn heads by other angles."""
    window = segments.longest_window(text)
    return [*([window] if window else []), *rotary_borders(text).values()]


def placeholder(config: PretrainedConfig, kind: str) -> int:
    """Return the id of a kind of media's token; -1 where a model has none."""
    config = getattr(config, "thinker_config", config)  # Qwen-Omni
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((i for name in names if (i := getattr(config, name, None)) is not None), -1)


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
