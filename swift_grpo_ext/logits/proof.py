"""Verifies, once for each kind of row, that packed and plain rows have equal log-probabilities.

The first micro-batch with a kind of row is computed three times: packed, plain, and plain with
every second number of each layer rounded to its neighbour. Packing must not move log-probabilities
further than that rounding does.

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
    Form,
    GroupRows,
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

WORTH = 0.1  # the least share of positions that packing must save
LEAST = 1e-6  # nats; float32 rounds log-probabilities of any model by this much

Kind = tuple[str, bool]
"""A row's media, and whether the longest row of its micro-batch is longer than a window."""


class SharedPrompt:
    """Packs the micro-batches of one model, after verifying each kind of row.

    Each rank verifies on its own: ranks may make different numbers of passes, as a teacher may see
    only some of the rows. Ranks that share weights make all passes together. Either all of them
    pack a micro-batch or none does, because a packed pass may call a layer more often.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base  # unwrapped
        self._has_logged = False  # whether the log has a reason against packing
        self._proven = set[Kind]()
        self.has_failed = False  # packing has changed log-probabilities

    def form(
        self,
        inputs: Mapping[str, Any],
        predicts_BT: Tensor,
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
        ranks: ShardRanks,
    ) -> Form:
        """Return a micro-batch in packed or plain form.

        Args:
            logps: returns the log-probabilities [N] of the predicted tokens, for either form.
            ranks: the ranks that share the model's weights.
        """
        packed = None if self.has_failed else self._packed(inputs)
        # `has_failed` is equal on ranks that share weights, so that all or none of them call `all`.
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
            logger.warning(self._not_packed(problem))
            return plain
        self._proven |= tokens_of_kinds.keys()
        logger.info(
            f"--logps_shared_prompt auto: passes of {type(self._base).__name__} read "
            f"{packed[1].numel()} positions instead of {predicts_BT.numel()} "
            "(the first micro-batch)."
        )
        return packed

    def _packed(self, inputs: Mapping[str, Any]) -> Form | None:
        # Not logged: later micro-batches may share prompts.
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
        if not self._has_logged:
            logger.info(self._not_packed(reason))
        self._has_logged = True
        return None

    def _not_packed(self, reason: str) -> str:
        name = type(self._base).__name__
        return f"--logps_shared_prompt auto leaves micro-batches of {name} as they are: {reason}."

    def _difference(
        self,
        packed: Form,
        plain: Form,
        tokens_of_kinds: Mapping[Kind, Tensor],
        logps: Callable[[Mapping[str, Any], Tensor], Tensor],
    ) -> str:
        """Describe the first kind of row for which both forms differ more than rounding explains;
        '' without one."""
        with torch.no_grad():
            found, problem = None, ""
            try:
                found = logps(*packed)
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except Exception as e:  # the run goes on with the plain form
                problem = f"the first packed pass failed ({type(e).__name__}: {e})"
            # Even after a failure: ranks that share weights make all passes together.
            expected = logps(*plain)
            with rounding_noise(self._base):
                moved = logps(*plain)
        if found is None:
            return problem
        for (media, _), tokens_N in tokens_of_kinds.items():
            gap, limit = (
                float((each - expected)[tokens_N].abs().float().mean()) for each in (found, moved)
            )
            if not gap <= limit + LEAST:  # also for NaN
                return (
                    f"log-probabilities of rows of {media} differ by {gap:.3g} nats in the mean, "
                    f"and rounding explains {limit:.3g}"
                )
        return ""


def kinds_of_tokens(groups: Sequence[GroupRows], config: PretrainedConfig) -> dict[Kind, Tensor]:
    """Return for each kind of row a mask [N] of its predicted tokens. Packing may be right for text
    but wrong for images, or right within a window but wrong beyond it."""
    window = segments.longest_window(config.get_text_config())
    is_beyond = window is not None and longest_row(groups) > window
    kinds_N = list[Kind]()
    for group in groups:
        for labels in group.labels:
            kinds_N += [(group.kind, is_beyond)] * sum(label != -100 for label in labels[1:])
    return {
        kind: torch.tensor([kind == other for other in kinds_N]) for kind in dict.fromkeys(kinds_N)
    }


def named_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model's decoder; [] if the model does not name them."""
    try:
        return [*model.get_decoder().layers]
    except (AttributeError, NotImplementedError):  # as some models with code of their own
        return []


@contextmanager
def rounding_noise(model: PreTrainedModel, least: float = 0.0) -> Iterator[None]:
    """Within the block, a model's embeddings and layers move every second number away from 0, to
    its neighbour or the next. Summing in another order changes less. `least` is the least relative
    distance."""

    def move(_: nn.Module, __: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return move(_, __, output[0]), *output[1:]
        if not isinstance(output, Tensor):
            return output
        device = output.device.type
        dtype = output.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        step = max(torch.finfo(dtype).eps, least)
        steps = torch.arange(output.shape[-1], device=output.device) % 2 * step
        return (output * (1 + steps)).to(output.dtype)

    modules = [model.get_input_embeddings(), *named_layers(model)]
    hooks = [module.register_forward_hook(move) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
