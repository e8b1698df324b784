"""Work at a model's output embedding (its head), for the span of one forward.

Letters in names are shapes: B rows, T positions of a row, N chosen positions, K kept positions of
each row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swift_grpo_ext.logits.chunked import Logps, chunked_logps


@dataclass
class HeadCalls:
    """What the head was given during one forward, and what it made of that."""

    shapes: list[torch.Size] = field(default_factory=list)
    """Of the hidden states of each call, before positions were chosen."""

    result: tuple[int, int] | None = None
    """Address and version of the last call's logits, as all hooks of the head left them. By the
    version, autograd counts what is done to a tensor in place."""

    probe_V: Tensor | None = None
    """A copy of those logits' last position."""

    def is_result(self, logits: Tensor) -> bool:
        """Whether these are the head's own logits, which nothing has been done to."""
        return self.result == (logits.data_ptr(), logits._version)

    @property
    def is_past_head(self) -> bool:
        """Whether the head has made logits of what it was given."""
        return self.result is not None

    @property
    def problem(self) -> str | None:
        """Why positions could not be chosen there; None where they were."""
        if len(self.shapes) != 1:
            return f"a forward calls its output embedding {len(self.shapes)} times, not once"
        if len(self.shapes[0]) != 3:
            return f"its output embedding takes {tuple(self.shapes[0])}, not [rows, positions, H]"
        return None


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The module that makes logits of hidden states: the outermost that a model in it names."""
    for module in model.modules():
        name_it = getattr(module, "get_output_embeddings", None)
        try:
            head = name_it() if name_it is not None else None
        except (AttributeError, NotImplementedError):
            continue  # a wrapper without a head of its own: one of its models may have one
        if isinstance(head, nn.Module):
            return head
    return None


def last_positions(hidden_BTH: Tensor, num_positions: int) -> Tensor:
    """[B, K, H]: the last `num_positions` of each row."""
    return hidden_BTH[:, -num_positions:, :]


def select_positions(hidden_BTH: Tensor, mask_BT: Tensor) -> Tensor:
    """[1, N, H]: the positions where `mask_BT` is true, row by row.

    A model may put positions before those of its input ids (prompt tuning, image features): rows
    are aligned at their ends.
    """
    surplus = hidden_BTH.shape[1] - mask_BT.shape[1]
    if surplus:
        mask_BT = nn.functional.pad(mask_BT, (surplus, 0))
    return hidden_BTH.flatten(0, 1)[mask_BT.flatten().nonzero()[:, 0]][None]


@contextmanager
def select_at_head(head: nn.Module, select: Callable[[Tensor], Tensor]) -> Iterator[HeadCalls]:
    """Within the block, `head` is given `select(hidden_BTH)` in place of all hidden states.

    `select` may call the head, which is then given what it asks for.
    """
    calls = HeadCalls()
    is_selecting = False

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal is_selecting
        if is_selecting:
            return None
        name = None if args else next(iter(kwargs))
        hidden = kwargs[name] if name else args[0]
        calls.shapes.append(hidden.shape)
        if calls.problem:
            return None
        is_selecting = True
        chosen = select(hidden)
        is_selecting = False
        return (args, {**kwargs, name: chosen}) if name else ((chosen, *args[1:]), kwargs)

    def note(_: nn.Module, __: Any, logits: Tensor) -> None:
        calls.result = logits.data_ptr(), logits._version
        calls.probe_V = logits.detach().flatten(0, -2)[-1:].clone()

    handles = [
        head.register_forward_pre_hook(hook, with_kwargs=True, prepend=True),
        head.register_forward_hook(note),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class ChunkedLogpsAtHead:
    """A `select` of `select_at_head` that computes log-probabilities of the chosen positions.

    The head is called by chunks, hooks of others on it included. The model is left with the true
    logits, [1, 1, V], of the last position, which show what it does to them.
    """

    head: nn.Module
    transform: Callable[[Tensor], Tensor]
    """What the model does to logits after its head, such as soft-capping."""

    mask_BT: Tensor
    """The positions that are wanted, N of them."""

    targets_N: Tensor
    """The tokens that they predict."""

    options: dict[str, Any]
    """Of `chunked_logps`."""

    logps: Logps | None = None
    """The result."""

    def __call__(self, hidden_BTH: Tensor) -> Tensor:
        self.logps = chunked_logps(
            lambda hidden_CH: self.transform(self.head(hidden_CH[None]).squeeze(0)),
            select_positions(hidden_BTH, self.mask_BT).squeeze(0),
            self.targets_N,
            **self.options,
        )
        return hidden_BTH[:1, -1:]
