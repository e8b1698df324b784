"""Logits of chosen positions, from every decoder model, and log-probabilities of tokens there.

The model's output embedding (its *head*) is given the hidden states of the wanted positions only,
in chunks, so that the logits of others are never computed; the first forward shows whether that
works. What the model does to logits after its head (nothing, soft-capping, scaling by a constant)
has to be known as a function: `find_transform` compares those that the configuration names with the
model's own logits. Where none is the model's, the wanted positions pass its head and its own code
at once.

A head that is called twice in a forward, or not at all, cannot be worked at. Such a model is asked
for its last positions by its own keyword, `logits_to_keep` or `num_logits_to_keep`. Where none has
an effect, the logits of all positions are computed: warned about once, or refused.

Letters in names are shapes: B rows, T positions of a row, N chosen positions, K last positions, H
hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from swift_grpo_ext.logits.chunked import FromLogits, Logps, Outputs, in_chunks, token_logps
from swift_grpo_ext.logits.sharding import ShardRanks, shard_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.modeling_outputs import CausalLMOutputWithPast

KEYWORDS = ("logits_to_keep", "num_logits_to_keep")
"""Spellings, newest first: the second is that of transformers up to 4.48."""

Transform = Callable[[Tensor], Tensor]


class UnsupportedModelError(RuntimeError):
    """A model computes the logits of all positions, whatever it is asked for."""


@dataclass
class HeadCalls:
    """Inputs and outputs of the head in one forward."""

    shapes: list[torch.Size] = field(default_factory=list)
    """Shapes of the hidden states of each call, before positions were chosen."""

    probe_V: Tensor | None = None
    """A copy of the last call's logits at its last position, [1, V], as all hooks of the head left
    them."""

    @property
    def problem(self) -> str | None:
        """Why positions could not be chosen there; None where they were."""
        if len(self.shapes) != 1:
            return f"a forward calls its output embedding {len(self.shapes)} times, not once"
        if len(self.shapes[0]) != 3:
            return f"its output embedding takes {tuple(self.shapes[0])}, not [rows, positions, H]"
        return None


class LogitsShim:
    """Asks one model for the logits of some positions.

    `model` arguments of the methods are the model itself or any wrapping of it (PEFT, DDP), so that
    the wrapper's own hooks run. Ranks that share its weights (`sharding.py`) call the methods
    together; each then goes the same way, and calls the head equally often.
    """

    chunk_size = 1024
    """The logits of this many positions exist at a time."""

    def __init__(
        self,
        model: nn.Module,
        *,
        strict: bool = False,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        """
        Args:
            model: the model, wrapped or not.
            strict: raise `UnsupportedModelError` where only slicing is left.
            warn: takes one line where logits are sliced, or there are no chunks.
        """
        base = base_model(model)
        self._name = type(base).__name__.removeprefix("FSDP")  # FSDP2 renames a model's class
        self._config: PretrainedConfig | None = getattr(base, "config", None)
        self._strict, self._warn = strict, warn
        # Only a keyword that `forward` names counts: `**kwargs` may swallow one without effect, as
        # Qwen2's of transformers 4.48 do with `logits_to_keep`.
        named = inspect.signature(base.forward).parameters
        self._keyword = next((keyword for keyword in KEYWORDS if keyword in named), None)
        self._head = output_embedding(base)
        self._reason = "" if self._head is not None else "it names no output embedding"
        self._head_works = self._is_out_of_graphs = self._has_warned = False
        self._transform: Transform | None = None
        """The model does this to its head's logits; None until a first pass in chunks showed it."""

        self._can_chunk = True
        self._ranks = ShardRanks()

    def ranks(self, model: nn.Module) -> ShardRanks:
        """Return the ranks that call this shim's methods together."""
        if not self._ranks.groups:  # once found they stay: FSDP2 may show whole weights later
            self._ranks = shard_ranks(model)
        return self._ranks

    def logps(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        mask_BT: Tensor,
        targets_N: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> Logps:
        """Return log-probabilities of `targets_N` at the positions where `mask_BT` is true.

        Args:
            model, inputs, mask_BT: as of `compute`.
            targets_N: token ids, each of which the position of `mask_BT` predicts.
            temperature: the number by which logits are divided.
            with_entropy: whether entropies are wanted too.

        Raises:
            UnsupportedModelError: as `compute`.
        """
        function = partial(token_logps, temperature=temperature, with_entropy=with_entropy)
        outputs = self.compute(model, inputs, mask_BT, function, [targets_N])
        return Logps(*outputs)

    def compute(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        mask_BT: Tensor,
        function: FromLogits,
        columns: Sequence[Tensor] = (),
    ) -> Outputs:
        """Return what `function` makes of the logits at the positions where `mask_BT` is true.

        Args:
            model: the model or any wrapping of it.
            inputs: the arguments of its forward.
            mask_BT: N positions, row by row.
            function: takes their logits; its first output is differentiable.
            columns: tensors [N, ...] that it takes too.

        Raises:
            UnsupportedModelError: only slicing is left, with `strict`.
        """
        # ms-swift leaves `logits_to_keep` in the inputs, which the next pass over them gets too
        # (4.6, grpo_trainer.py, `_get_logps_via_local_forward`). Here it would cut them twice.
        inputs = {name: value for name, value in inputs.items() if name not in KEYWORDS}
        if self._can_chunk:
            outputs = self._in_chunks(model, inputs, mask_BT, function, columns)
            if outputs is not None:
                return outputs
            # The reason is one of the model, so later passes do not try again.
            self._can_chunk = False
        logits_NV = self.select(model, inputs, mask_BT)
        self._warn_once(
            f"{self._name} has no log-probabilities in chunks: {self._reason}. The logits of all "
            "its completion positions take memory at once."
        )
        return function(logits_NV, *columns, overwrite=False)

    def select(self, model: nn.Module, inputs: Mapping[str, Any], mask_BT: Tensor) -> Tensor:
        """Return [N, V], the logits of the positions where `mask_BT` is true, row by row.

        Rows of positions and of `mask_BT` are aligned at their ends.

        Raises:
            UnsupportedModelError: only slicing is left, with `strict`.
        """
        output, _ = self._at_head(
            model, inputs, lambda hidden: select_positions(hidden, mask_BT), int(mask_BT.sum())
        )
        if output is not None:
            return output.logits.squeeze(0)  # not [0]: its backward would make a copy
        # From the first column in which any row wants a position.
        num_kept = mask_BT.shape[1] - int(mask_BT.any(0).int().argmax())
        keep = {self._keyword: num_kept} if self._keyword else {}
        logits_BKV = model(**inputs, **keep).logits
        if logits_BKV.shape[1] != num_kept:
            self._keyword = None  # it was swallowed on the way, and is not tried again
            text = (
                f"{self._name} computes the logits of all positions: it has no keyword that works "
                f"({' or '.join(KEYWORDS)}), and {self._reason}."
            )
            if self._strict:
                raise UnsupportedModelError(
                    f"{text} Use --logits_shim auto to slice them, at the cost of their memory."
                )
            self._warn_once(f"{text} They are sliced, which saves no memory.")
        return select_positions(logits_BKV, mask_BT).squeeze(0)

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(text)

    def _in_chunks(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        mask_BT: Tensor,
        function: FromLogits,
        columns: Sequence[Tensor],
    ) -> Outputs | None:
        """Return what `compute` does, made within the head's call; None where that does not
        work."""
        head, transform = self._head, self._transform or unchanged
        # As many as the rank with the most tokens has: each call of a sharded head gathers its
        # weight from all ranks.
        num_chunks = self.ranks(model).most(-(-int(mask_BT.sum()) // self.chunk_size))
        outputs: Outputs | None = None

        def at_head(hidden_BTH: Tensor) -> Tensor:
            nonlocal outputs
            assert head is not None
            # Called as a module, so that hooks of others run, as LoRA's, FSDP's and `mask_models`'.
            outputs = in_chunks(
                lambda hidden_CH: transform(head(hidden_CH[None]).squeeze(0)),
                select_positions(hidden_BTH, mask_BT).squeeze(0),
                columns,
                function,
                chunk_size=self.chunk_size,
                num_chunks=num_chunks,
            )
            # The forward goes on with one position, whose logits [1, 1, V] show what it does to
            # them.
            return hidden_BTH[:1, -1:]

        output, calls = self._at_head(model, inputs, at_head, 1)
        if output is None:
            return None
        if self._transform is None:
            # Every rank is here together: `find_transform` reduces over them.
            assert calls.probe_V is not None
            self._transform = find_transform(
                self._config, calls.probe_V, output.logits.detach(), self.ranks(model).highest
            )
            if self._transform is None:
                self._reason = "what it does to logits after its head is not known"
                return None
            if self._transform is not unchanged:
                # They were computed without it, as nobody knew: once more, with the right one.
                return self._in_chunks(model, inputs, mask_BT, function, columns)
        assert outputs is not None
        first, *others = outputs
        assert first is not None
        if torch.is_grad_enabled():
            # Wrappers look for the model's own output in the graph (it has no weight there): DDP
            # with `find_unused_parameters`, and FSDP's and DeepSpeed's hooks that begin a backward.
            first = first + output.logits.flatten()[:0].sum()
        return first, *others

    def _at_head(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        select: Callable[[Tensor], Tensor],
        num_positions: int,
    ) -> tuple[CausalLMOutputWithPast | None, HeadCalls]:
        """Return the output for the `num_positions` that `select` leaves, and what the head was
        called with. None where that fails on one rank or more: the head is not tried again."""
        calls, output = HeadCalls(), None
        if self._head is None:
            return None, calls

        # 1. Let a compiled model call its head in Python.
        if not self._is_out_of_graphs and any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
            for module in model.modules()
        ):
            # Dynamo has no guards on hooks (`skip_nnmodule_hook_guards`): a call without any would
            # be compiled, and its code would run where there are some. A hook that stays breaks the
            # graph, so that a compiled model calls its head in Python, hooks included.
            self._head.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
            # What was compiled before has no such break. Dynamo does guard against a `forward` of
            # the module's own (`guard_to_detect_forward_monkeypatching`), so that the frames that
            # call the head, and no others, are compiled once more.
            self._head.forward = self._head.forward
            self._is_out_of_graphs = True

        # 2. Run the forward.
        with select_at_head(self._head, select, calls):
            try:
                output = model(**inputs)
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except (RuntimeError, ValueError, IndexError) as e:
                # What fails before the head, or in it, does not fail because positions are missing:
                # it is a fault of its own, or a collective broke (gloo says so by a RuntimeError),
                # and another forward would wait for ranks that make none. Nor does what fails
                # after a forward that worked.
                if self._head_works or calls.probe_V is None:
                    raise
                failed = f"its forward fails on fewer positions ({type(e).__name__}: {e})"
                self._reason = calls.problem or failed

        # 3. Agree: where one rank has to go another way, all of them do.
        works = output is not None and not calls.problem and output.logits.shape[1] == num_positions
        if self.ranks(model).all(works):
            self._head_works = True
            return output, calls
        if works:
            self._reason = "its forward fails on fewer positions on another rank"
        elif output is not None:
            self._reason = calls.problem or f"its logits came as {tuple(output.logits.shape)}"
        self._head = None
        return None, calls


# --- the head ---


@contextmanager
def select_at_head(
    head: nn.Module, select: Callable[[Tensor], Tensor], calls: HeadCalls
) -> Iterator[None]:
    """Within the block, `head` is given `select(hidden_BTH)` in place of all hidden states; `calls`
    notes it. `select` may call the head, which is then given what it asks for."""
    is_selecting = False

    # Both hooks write to Python objects, which compiled code cannot.
    @torch.compiler.disable
    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        nonlocal is_selecting
        if is_selecting:  # `select` calls the head, for a chunk
            return None
        # Some models give hidden states by a keyword.
        name = None if args else next(iter(kwargs))
        hidden = kwargs[name] if name else args[0]
        calls.shapes.append(hidden.shape)
        if calls.problem:  # leave this call alone; `_at_head` gives the output up
            return None
        is_selecting = True
        chosen = select(hidden)
        is_selecting = False
        return (args, {**kwargs, name: chosen}) if name else ((chosen, *args[1:]), kwargs)

    @torch.compiler.disable
    def note(_: nn.Module, __: tuple[Any, ...], logits: Tensor) -> None:
        calls.probe_V = logits.detach().flatten(0, -2)[-1:].clone()

    # Ours comes before all other hooks, which then see chosen positions, and notes what they left.
    handles = [
        head.register_forward_pre_hook(hook, with_kwargs=True, prepend=True),
        head.register_forward_hook(note),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def select_positions(hidden_BTH: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [1, N, H]: the positions where `mask_BT` is true, row by row.

    A model may put positions before those of its input ids (prompt tuning, image features), or give
    its last ones only: rows are aligned at their ends.
    """
    surplus = hidden_BTH.shape[1] - mask_BT.shape[1]
    if surplus:
        mask_BT = nn.functional.pad(mask_BT, (surplus, 0))  # cut off, where negative
    # By indices: a mask of booleans would be turned into them once more in the backward.
    return hidden_BTH.flatten(0, 1)[mask_BT.flatten().nonzero()[:, 0]][None]


def find_transform(
    config: PretrainedConfig | None,
    raw: Tensor,
    final: Tensor,
    highest: Callable[[Tensor], Tensor] = lambda errors: errors,
) -> Transform | None:
    """Return the transform that turns the head's logits `raw` into the model's `final`, or None.

    Known are `final_logit_softcapping` as in Gemma, `logit_scale` as in Cohere and `logits_scaling`
    as in Granite (their modelling files in transformers).

    Args:
        config: the model's configuration (its text model's counts, where it has one).
        raw: logits as the head made them, of any shape.
        final: the same logits as the model returned them.
        highest: the maximum over ranks, so that all of them find one transform.
    """
    text = None if config is None else config.get_text_config()
    transforms: list[Transform] = []
    if cap := getattr(text, "final_logit_softcapping", None):
        transforms.append(lambda logits: (logits / cap).tanh() * cap)
    if factor := getattr(text, "logit_scale", None):
        transforms.append(lambda logits: logits * factor)
    if divisor := getattr(text, "logits_scaling", None):
        transforms.append(lambda logits: logits / divisor)
    transforms.append(unchanged)

    # A head of 16 bits may have its logits made 32 bits wide behind it: the coarser type counts.
    precision = max(torch.finfo(raw.dtype).eps, torch.finfo(final.dtype).eps)
    raw, final = raw.flatten().float(), final.flatten().float()
    # A rank whose shapes differ reduces all the same: the others wait for it in `highest`.
    errors = torch.full((len(transforms),), float("inf"))
    if raw.shape == final.shape:
        # As a share of each number, or of the median one if that is more. So a token that a hook
        # rules out, by a number as low as can be or minus infinity, counts for no more than others.
        size = torch.maximum(final.abs(), final.abs().median())
        for number, transform in enumerate(transforms):
            computed = transform(raw)
            relative = (computed - final).abs() / size
            errors[number] = relative.masked_fill(computed == final, 0).max()
    errors = highest(errors)
    best = int(errors.argmin())
    # Each transform rounds up to three times (division, tanh, product), by half a step each.
    return transforms[best] if errors[best] <= 4 * precision else None


def unchanged(logits: Tensor) -> Tensor:
    return logits


# --- the model ---


WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)
"""Classes whose `module` is the wrapped model (by name: DeepSpeed need not be installed)."""


def base_model(model: nn.Module) -> nn.Module:
    """Return the model without DDP, FSDP, DeepSpeed, `torch.compile` and PEFT around it."""
    while True:
        if type(model).__name__ in WRAPPERS:
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that makes logits of hidden states: the outermost that a model in it
    names."""
    for module in model.modules():
        name_it = getattr(module, "get_output_embeddings", None)
        try:
            head = name_it() if name_it is not None else None
        except (AttributeError, NotImplementedError):
            continue  # a wrapper without a head of its own: one of its models may have one
        if isinstance(head, nn.Module):
            return head
    return None
