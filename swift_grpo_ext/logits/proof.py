"""The proof that packed rows have the log-probabilities of plain ones, made once a kind of row.

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
    saving,
)
from swift_grpo_ext.logits.sharding import ShardRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = get_logger()

WORTH = 0.1  # the share of a pass that packing has to save
LEAST = 1e-6  # nats by which float32 rounds a log-probability, with any model
PLACEHOLDERS = ("image", "video", "audio")  # media for which a configuration names a token

Kind = tuple[tuple[str, ...], bool]
"""A row's media, and whether the longest row of its micro-batch is longer than a window."""

Form = tuple[Mapping[str, Any], Tensor]
"""The arguments of a model's forward, and the positions of the wanted logits, [B, T] or [1, L]."""


class SharedPrompt:
    """Packs the micro-batches of one model, and proves each kind of row.

    Each rank proves alone: its number of passes may depend on its own rows (a teacher may have some
    rows only). Ranks that share the weights make all passes together: all of them pack a
    micro-batch, or none does, since a packed pass may call a layer more often.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base  # unwrapped
        self._has_told = False
        self._proven = set[Kind]()
        self.has_failed = False  # log-probabilities of a micro-batch have differed

    def form(
        self,
        inputs: Mapping[str, Any],
        predicts_BT: Tensor,
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
    ) -> Form:
        """Return a micro-batch packed, or plain; other arguments of a forward stay as they are.

        Args:
            logps: returns log-probabilities [N] of the tokens that either form predicts.
            ranks: those that share the model's weights.
        """
        packed = None if self.has_failed else self._packed(inputs)
        # `has_failed` is the same on ranks that share weights: all of them ask `ranks`, or none.
        if self.has_failed or not ranks.all(packed is not None):
            return plain_inputs(inputs), predicts_BT
        assert packed is not None
        assert isinstance(inputs, SharedPromptInputs)
        tokens_of_kinds = kinds_of_tokens(inputs.groups, self._base.config)
        if ranks.all(tokens_of_kinds.keys() <= self._proven):
            return packed
        plain = plain_inputs(inputs), predicts_BT
        problem = self._difference(packed, plain, tokens_of_kinds, logps)
        if not ranks.all(not problem):
            self.has_failed = True
            problem = problem or "on a rank that shares its weights, packed rows differ"
            logger.warning(self._left_alone(problem))
            return plain
        self._proven |= tokens_of_kinds.keys()
        logger.info(
            f"--logps_shared_prompt auto: passes of {type(self._base).__name__} read "
            f"{packed.predicts_1L.numel()} positions in the place of {predicts_BT.numel()} (the "
            "first micro-batch)."
        )
        return packed

    def _packed(self, inputs: Mapping[str, Any]) -> PackedBatch | None:
        # A micro-batch with nothing to share says nothing of later ones.
        if not (isinstance(inputs, SharedPromptInputs) and any(g.is_shared for g in inputs.groups)):
            return None
        reason = reason_against(self._base, inputs.heads)
        share = saving(inputs.groups)
        if not reason and share <= WORTH:
            reason = f"the first would save {share:.0%}, and {WORTH:.0%} is the least"
        try:
            if not reason:
                return pack(inputs, self._base)
        except UnknownInputError as e:
            reason = str(e)
        if not self._has_told:
            logger.info(self._left_alone(reason))
        self._has_told = True
        return None

    def _left_alone(self, reason: str) -> str:
        name = type(self._base).__name__
        return f"--logps_shared_prompt auto leaves micro-batches of {name} as they are: {reason}."

    def _difference(
        self,
        packed: PackedBatch,
        plain: Form,
        tokens_of_kinds: Mapping[Kind, Tensor],
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
    ) -> str:
        """Return for which kind of row both forms lie further apart than rounding explains; ''
        where none does."""
        with torch.no_grad():
            found, problem = None, ""
            try:
                found = logps(*packed)
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except Exception as e:  # a form that fails never ends a run: the other one is left
                problem = f"the first packed pass failed ({type(e).__name__}: {e})"
            # After a failure too: ranks that share weights make all passes together.
            expected = logps(*plain)
            with rounded_otherwise(self._base):
                moved = logps(*plain)
        if found is None:
            return problem
        for (media, _), tokens_N in tokens_of_kinds.items():
            gap, limit = (
                float((each - expected)[tokens_N].abs().float().mean()) for each in (found, moved)
            )
            # NaN is not below any bound.
            if not gap <= limit + LEAST:
                return (
                    f"log-probabilities of rows of {'+'.join(media) or 'text'} lie {gap:.3g} nats "
                    f"apart in the mean, and rounding explains {limit:.3g}"
                )
        return ""


def kinds_of_tokens(groups: Sequence[GroupRows], config: PretrainedConfig) -> dict[Kind, Tensor]:
    """Return which of the N predicted tokens are in each kind of row: packing may be right for text
    and wrong for images, or right within a window and wrong beyond."""
    window = segments.longest_window(config.get_text_config())
    is_beyond = window is not None and longest_row(groups) > window
    kinds_N = list[Kind]()
    for group in groups:
        for ids, labels in zip(group.ids, group.labels, strict=True):
            media = tuple(kind for kind in PLACEHOLDERS if placeholder(config, kind) in ids)
            kinds_N += [(media, is_beyond)] * sum(label != -100 for label in labels[1:])
    return {
        kind: torch.tensor([kind == other for other in kinds_N]) for kind in dict.fromkeys(kinds_N)
    }


def placeholder(config: PretrainedConfig, kind: str) -> int:
    """Return the id of a kind of media's token; -1 where a model has none."""
    config = getattr(config, "thinker_config", config)  # Qwen-Omni
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((i for name in names if (i := getattr(config, name, None)) is not None), -1)


@contextmanager
def rounded_otherwise(model: PreTrainedModel, least: float = 0.0) -> Iterator[None]:
    """Let a model's embeddings and layers round every second number to its neighbour: sums in
    another order change less. `least` is the least distance of a neighbour, as a share."""

    def move(_: nn.Module, __: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return move(_, __, output[0]), *output[1:]
        device = output.device.type
        dtype = output.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        step = max(torch.finfo(dtype).eps, least)
        steps = torch.arange(output.shape[-1], device=output.device) % 2 * step
        return (output * (1 + steps)).to(output.dtype)

    modules = [model.get_input_embeddings(), *getattr(model.get_decoder(), "layers", ())]
    hooks = [module.register_forward_hook(move) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
