"""Work at a model's output embedding (its head), for the span of one forward.

What a model does to logits after its head (nothing, soft-capping, scaling by a constant) has to be
known as a function for log-probabilities in chunks. It is found by what the configuration says and
held against the model's own logits: a model with another transform is recognized, not guessed.

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
from torch._dynamo import OptimizedModule

Transform = Callable[[Tensor], Tensor]


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


def keep_out_of_graphs(head: nn.Module, model: nn.Module) -> bool:
    """Have `model` call `head` in Python, hooks included, where it is compiled.

    Dynamo has no guards on hooks (`skip_nnmodule_hook_guards`): a call without any would be
    compiled, and its code would run where there are some. A hook that stays breaks the graph there.

    Returns:
        Whether the model is compiled.
    """
    is_compiled = any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )
    if is_compiled:
        head.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    return is_compiled


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
def select_at_head(
    head: nn.Module, select: Callable[[Tensor], Tensor], calls: HeadCalls
) -> Iterator[None]:
    """Within the block, `head` is given `select(hidden_BTH)` in place of all hidden states; `calls`
    notes it. `select` may call the head, which is then given what it asks for.

    With `torch.compile` the hooks run as they are: they write to Python objects, which compiled
    code cannot.
    """
    is_selecting = False

    @torch.compiler.disable
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

    @torch.compiler.disable
    def note(_: nn.Module, __: Any, logits: Tensor) -> None:
        calls.result = logits.data_ptr(), logits._version
        calls.probe_V = logits.detach().flatten(0, -2)[-1:].clone()

    handles = [
        head.register_forward_pre_hook(hook, with_kwargs=True, prepend=True),
        head.register_forward_hook(note),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_transform(
    config: Any,
    raw: Tensor,
    final: Tensor,
    highest: Callable[[Tensor], Tensor] = lambda errors: errors,
) -> Transform | None:
    """The transform that turns the head's logits `raw` into the model's `final`, or None.

    Args:
        config: the model's configuration (its text model's counts, where it has one).
        raw: logits as the head made them, of any shape.
        final: the same logits as the model returned them.
        highest: the maximum over ranks, so that all of them find one transform.
    """
    precision = max(torch.finfo(raw.dtype).eps, torch.finfo(final.dtype).eps)
    raw, final = raw.flatten().float(), final.flatten().float()
    transforms = list(known_transforms(config))
    errors = highest(torch.tensor([_error(transform(raw), final) for transform in transforms]))
    best = int(errors.argmin())
    return transforms[best] if errors[best] <= 4 * precision else None


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of each number, or of the median one if that is more.

    Tokens that are ruled out by a number that is as low as can be, or minus infinity, do not count
    for more than others.
    """
    if found.shape != expected.shape:
        return float("inf")
    size = expected.abs()
    relative = (found - expected).abs() / torch.maximum(size, size.median())
    return float(relative.masked_fill(found == expected, 0).max())


def known_transforms(config: Any) -> Iterator[Transform]:
    """`final_logit_softcapping` as in Gemma, `logit_scale` as in Cohere, `logits_scaling` as in
    Granite (their modelling files in transformers)."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if cap := getattr(config, "final_logit_softcapping", None):
        yield lambda logits: (logits / cap).tanh() * cap
    if factor := getattr(config, "logit_scale", None):
        yield lambda logits: logits * factor
    if divisor := getattr(config, "logits_scaling", None):
        yield lambda logits: logits / divisor
    yield unchanged


def unchanged(logits: Tensor) -> Tensor:
    return logits


# --- gradients of the head ---


class _Sum:
    """Of the gradients that the calls of one backward give a parameter, in float32."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = self._num_left = num_calls
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor | None:
        """The whole, in the gradient's type, with the last call; None before."""
        self._sum = gradient.float() if self._sum is None else self._sum.add_(gradient)
        self._num_left -= 1
        if self._num_left:
            return None
        whole, self._sum, self._num_left = self._sum, None, self._num_calls
        return whole.to(gradient.dtype)


class _SummedInFloat32(torch.autograd.Function):
    """A parameter as one of several calls uses it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.total.add(gradient), None


def summed_in_float32(head: nn.Module, num_calls: int) -> Callable[[Tensor], Tensor]:
    """`head` for that many calls in one graph, whose gradients are summed in float32.

    autograd sums them in the parameters' type: 16 bits round each partial sum. Takes float32 memory
    of the size of the head during the backward. The head itself where no rounding is to be saved: a
    single call, parameters of 32 bits without autocast, frozen ones. Not for sharded heads, whose
    gradients ZeRO-3 and FSDP take from the parameters themselves.
    """
    sums = {
        name: _Sum(num_calls)
        for name, parameter in head.named_parameters()
        if parameter.requires_grad
        and (parameter.itemsize < 4 or torch.is_autocast_enabled(parameter.device.type))
    }
    if num_calls == 1 or not sums or not torch.is_grad_enabled():
        return head

    def call(hidden: Tensor) -> Tensor:
        own = dict(head.named_parameters())
        uses = {name: _SummedInFloat32.apply(own[name], total) for name, total in sums.items()}
        logits: Tensor = torch.func.functional_call(head, uses, (hidden,))
        return logits

    return call
