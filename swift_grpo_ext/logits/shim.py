"""Computes logits of chosen positions, and log-probabilities, for any decoder model.

The model's output embedding (its *head*) gets the hidden states of the wanted positions only, in
chunks. The first forward shows whether that works, and which function the model applies to logits
after its head. If the function is unknown, all wanted positions go through the head and the model's
own code at once. If a forward does not call the head exactly once, the model's own keyword selects
the last positions; without one, the logits of all positions are sliced, with a warning or an error.

Letters in names are shapes: B rows, T positions of a row, N chosen positions, K last positions, H
hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from swift.utils import get_logger
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from swift_grpo_ext.logits.chunked import FromLogits, Logps, Outputs, in_chunks, token_logps
from swift_grpo_ext.logits.sharding import ShardRanks, shard_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.modeling_outputs import CausalLMOutputWithPast

logger = get_logger()

# The second keyword is the one of model code for transformers before 4.49.
KEYWORDS = ("logits_to_keep", "num_logits_to_keep")
Transform = Callable[[Tensor], Tensor]


class LogitsShim:
    """Computes the logits of some positions of one model; `strict` forbids slicing all logits.

    Methods take the model itself or a wrapper (PEFT, DDP), so that the wrapper's hooks run. Ranks
    that share its weights (`sharding.py`) call the methods together. All of them then use the same
    method, and call the head equally often.
    """

    chunk_size = 1024  # the logits of this many positions exist at a time

    def __init__(self, model: nn.Module, *, strict: bool = False) -> None:
        base = base_model(model)
        self._name = type(base).__name__.removeprefix("FSDP")  # FSDP2 renames the class
        self._config: PretrainedConfig | None = getattr(base, "config", None)
        self._strict = strict
        # `forward` must name the keyword: `**kwargs` may ignore it.
        named = inspect.signature(base.forward).parameters
        self._keyword = next((keyword for keyword in KEYWORDS if keyword in named), None)
        self._head = output_embedding(base)
        self._reason = "" if self._head is not None else "it names no output embedding"
        self._head_works = self._is_out_of_graphs = False
        self._transform: Transform | None = None  # found by the first pass in chunks
        self._can_chunk = True
        self._ranks = ShardRanks()

    def ranks(self, model: nn.Module) -> ShardRanks:
        """Return the ranks that call this shim's methods together."""
        if not self._ranks.groups:  # keep them: FSDP2 may have whole weights later
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
        """Return log-probabilities of `targets_N`, which the positions of the mask predict."""
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
        """Return the outputs of `function` for the logits at the N positions where `mask_BT` is
        true, row by row, and for `columns` [N, ...]. The first output is differentiable.

        Raises:
            RuntimeError: slicing is the only option, but `strict` forbids it.
        """
        # ms-swift leaves `logits_to_keep` in the inputs for the next pass (4.6, grpo_trainer.py,
        # `_get_logps_via_local_forward`). Here positions would be cut twice.
        inputs = {name: value for name, value in inputs.items() if name not in KEYWORDS}
        if self._can_chunk:
            outputs = self._in_chunks(model, inputs, mask_BT, function, columns)
            if outputs is not None:
                return outputs
            self._can_chunk = False  # the model will not allow it later either
        logits_NV = self.select(model, inputs, mask_BT)
        self._warn(
            f"{self._name} has no log-probabilities in chunks: {self._reason}. The logits of all "
            "its completion positions take memory at once."
        )
        return function(logits_NV, *columns, overwrite=False)

    def select(self, model: nn.Module, inputs: Mapping[str, Any], mask_BT: Tensor) -> Tensor:
        """Return the logits [N, V] of the positions where `mask_BT` is true, row by row."""
        found = self._at_head(
            model, inputs, lambda hidden: select_positions(hidden, mask_BT), int(mask_BT.sum())
        )
        if found is not None:
            return found[0].logits.squeeze(0)  # the backward of `[0]` would copy
        # Keep the columns from the first wanted position of any row on.
        num_kept = mask_BT.shape[1] - int(mask_BT.any(0).int().argmax())
        keep = {self._keyword: num_kept} if self._keyword else {}
        logits_BKV = model(**inputs, **keep).logits
        if logits_BKV.shape[1] != num_kept:
            self._keyword = None  # the model ignored it
            text = (
                f"{self._name} computes the logits of all positions: it has no keyword that works "
                f"({' or '.join(KEYWORDS)}), and {self._reason}."
            )
            if self._strict:
                raise RuntimeError(
                    f"{text} Use --logits_shim auto to slice them, at the cost of their memory."
                )
            self._warn(f"{text} They are sliced, which saves no memory.")
        return select_positions(logits_BKV, mask_BT).squeeze(0)

    def _warn(self, text: str) -> None:
        logger.warning_once(text, hash_id=f"logits of {self._name}")

    def _in_chunks(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        mask_BT: Tensor,
        function: FromLogits,
        columns: Sequence[Tensor],
    ) -> Outputs | None:
        """Compute outputs in chunks within the call of the head; return None if that fails."""
        head, transform = self._head, self._transform or unchanged
        # The most of any rank: each call of a sharded head gathers its weight from all ranks.
        num_chunks = int(self.ranks(model).highest(-(-mask_BT.sum() // self.chunk_size)))
        outputs: Outputs | None = None

        def at_head(hidden_BTH: Tensor) -> Tensor:
            nonlocal outputs
            assert head is not None
            # Calls the module, so that the hooks of LoRA, FSDP and `mask_models` run.
            outputs = in_chunks(
                lambda hidden_CH: transform(head(hidden_CH[None]).squeeze(0)),
                select_positions(hidden_BTH, mask_BT).squeeze(0),
                columns,
                function,
                chunk_size=self.chunk_size,
                num_chunks=num_chunks,
            )
            # The forward continues with one position: its logits [1, 1, V] reveal the transform.
            return hidden_BTH[:1, -1:]

        found = self._at_head(model, inputs, at_head, 1)
        if found is None:
            return None
        output, probe_V = found
        if self._transform is None:
            self._transform = find_transform(
                self._config, probe_V, output.logits.detach(), self.ranks(model).highest
            )
            if self._transform is None:
                self._reason = "its transform of logits after the head is not known"
                return None
            if self._transform is not unchanged:  # compute again: `outputs` lack the transform
                return self._in_chunks(model, inputs, mask_BT, function, columns)
        assert outputs is not None
        first, *others = outputs
        assert first is not None
        if torch.is_grad_enabled():
            # Put the model's own output into the graph, as an empty sum: DDP looks for it with
            # `find_unused_parameters`, and FSDP's and DeepSpeed's backward hooks start from it.
            first = first + output.logits.flatten()[:0].sum()
        return first, *others

    def _at_head(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        select: Callable[[Tensor], Tensor],
        num_positions: int,
    ) -> tuple[CausalLMOutputWithPast, Tensor] | None:
        """Run a forward in which `select` reduces the head's hidden states to `num_positions`.
        Return the output, and the head's logits [1, V] at the last position, after all hooks. If it
        fails on any rank, return None and never try the head again. `select` may call the head.
        """
        head = self._head
        if head is None:
            return None
        if not self._is_out_of_graphs and any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
            for module in model.modules()
        ):
            keep_out_of_graphs(head)
            self._is_out_of_graphs = True

        # 1. Hook the head. Both hooks modify Python objects, which compiled code cannot.
        shapes, probes, is_selecting = list[torch.Size](), list[Tensor](), False

        @torch.compiler.disable
        def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            nonlocal is_selecting
            if is_selecting:  # `select` is calling the head for a chunk
                return None
            hidden = args[0] if args else torch.empty(0)  # keyword arguments are not supported
            shapes.append(hidden.shape)
            if len(shapes) > 1 or hidden.ndim != 3:  # step 3 discards the output
                return None
            is_selecting = True
            chosen = select(hidden)
            is_selecting = False
            return chosen, *args[1:]

        @torch.compiler.disable
        def record(_: nn.Module, __: tuple[Any, ...], logits: Tensor) -> None:
            probes[:] = [logits.detach().flatten(0, -2)[-1:].clone()]

        # `choose` runs before all other hooks, so that they see chosen positions; `record` is last.
        handles = [
            head.register_forward_pre_hook(choose, prepend=True),
            head.register_forward_hook(record),
        ]

        # 2. Run the forward.
        output, problem = None, ""
        try:
            output = model(**inputs)
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except (RuntimeError, ValueError, IndexError) as e:
            # The selection is not to blame if the head has worked before, or has not returned yet.
            # The error may be a broken collective (gloo raises RuntimeError): another forward would
            # then wait for ranks that make none.
            if self._head_works or not probes:
                raise
            problem = f"its forward fails on fewer positions ({type(e).__name__}: {e})"
        finally:
            for handle in handles:
                handle.remove()

        # 3. Agree: if the head does not work on one rank, no rank uses it.
        if len(shapes) != 1:
            problem = f"a forward calls its output embedding {len(shapes)} times, not once"
        elif len(shapes[0]) != 3:
            problem = f"its output embedding takes {tuple(shapes[0])}, not [rows, positions, H]"
        elif output is not None and output.logits.shape[1] != num_positions:
            problem = f"its logits came as {tuple(output.logits.shape)}"
        if self.ranks(model).all(not problem):
            assert output is not None
            self._head_works = True
            return output, probes[0]
        self._reason = problem or "its forward fails on fewer positions on another rank"
        self._head = None
        return None


# --- the head ---


def keep_out_of_graphs(head: nn.Module) -> None:
    """Make a compiled model call its head and the head's hooks in Python."""
    # Dynamo does not guard on hooks (`skip_nnmodule_hook_guards`): code compiled without hooks
    # would ignore later ones. A permanent uncompiled hook breaks the graph at the head.
    head.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    # Code that is already compiled has no such break. Dynamo guards on a module's own `forward`
    # (`guard_to_detect_forward_monkeypatching`): setting it recompiles just the frames that call
    # the head.
    head.forward = head.forward


def select_positions(hidden_BTH: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the positions where `mask_BT` is true, row by row, as [1, N, H].

    Rows are aligned at their ends: a model may insert positions before those of its input ids
    (prompt tuning, image features), or return only its last positions.
    """
    surplus = hidden_BTH.shape[1] - mask_BT.shape[1]
    mask_BT = nn.functional.pad(mask_BT, (surplus, 0))  # a negative surplus crops
    # By indices: the backward would convert a boolean mask to indices again.
    return hidden_BTH.flatten(0, 1)[mask_BT.flatten().nonzero()[:, 0]][None]


def find_transform(
    config: PretrainedConfig | None,
    raw: Tensor,
    final: Tensor,
    highest: Callable[[Tensor], Tensor] = lambda errors: errors,
) -> Transform | None:
    """Return the transform that turns the head's logits `raw` into the model's `final`, or None.

    It tries `final_logit_softcapping` (Gemma), `logit_scale` (Cohere), `logits_scaling` (Granite)
    and none: a configuration may name one that its model does not apply (PaliGemma 2). `highest`
    returns the maximum over ranks, so that all of them find the same transform.
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

    # A model may convert the logits of a 16-bit head to 32 bits: the coarser type counts.
    precision = max(torch.finfo(raw.dtype).eps, torch.finfo(final.dtype).eps)
    raw, final = raw.flatten().float(), final.flatten().float()
    # Ranks with other shapes call `highest` too: the others wait for them there.
    errors = torch.full((len(transforms),), float("inf"))
    if raw.shape == final.shape:
        # Relative to each number, or to the median if that is larger. Errors of masked tokens (at
        # minus infinity or a very low number) then count no more than others.
        size = torch.maximum(final.abs(), final.abs().median())
        for number, transform in enumerate(transforms):
            computed = transform(raw)
            relative = (computed - final).abs() / size
            errors[number] = relative.masked_fill(computed == final, 0).max()
    errors = highest(errors)
    best = int(errors.argmin())
    # A transform rounds up to three times (division, tanh, product), each by up to half a step.
    return transforms[best] if errors[best] <= 4 * precision else None


def unchanged(logits: Tensor) -> Tensor:
    return logits


# --- the model ---


def base_model(model: nn.Module) -> nn.Module:
    """Return the model without DDP, FSDP, DeepSpeed, `torch.compile` and PEFT around it."""
    while True:
        # By name: DeepSpeed need not be installed.
        if type(model).__name__.endswith(("DataParallel", "DeepSpeedEngine")):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the output embedding of the outermost module that has one, or None."""
    for module in model.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        try:
            head = get_head() if get_head is not None else None
        except (AttributeError, NotImplementedError):
            continue  # a wrapper without a head; an inner model may have one
        if isinstance(head, nn.Module):
            return head
    return None
