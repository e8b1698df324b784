"""Logits of chosen positions, from every decoder model, and log-probabilities of tokens there.

The model's output embedding (its *head*) gets the hidden states of the wanted positions only, in
chunks. The first forward shows whether that works, and which function the model applies to logits
after its head. Where that function is not known, all wanted positions pass the head and the model's
own code at once. Where a forward does not call the head exactly once, the model's own keyword asks
for its last positions, or the logits of all positions are sliced, with a warning, or refused.

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

# Newest first: the second is that of code for transformers before 4.49.
KEYWORDS = ("logits_to_keep", "num_logits_to_keep")
Transform = Callable[[Tensor], Tensor]


class LogitsShim:
    """Asks one model for the logits of some positions; `strict` forbids to slice those of all.

    Methods take the model itself or any wrapping of it (PEFT, DDP), so that the wrapper's own hooks
    run. Ranks that share its weights (`sharding.py`) call them together; each then goes the same
    way, and calls the head equally often.
    """

    chunk_size = 1024  # the logits of this many positions exist at a time

    def __init__(self, model: nn.Module, *, strict: bool = False) -> None:
        base = base_model(model)
        self._name = type(base).__name__.removeprefix("FSDP")  # FSDP2 renames a model's class
        self._config: PretrainedConfig | None = getattr(base, "config", None)
        self._strict = strict
        # Only a keyword that `forward` names counts: `**kwargs` may swallow one without effect.
        named = inspect.signature(base.forward).parameters
        self._keyword = next((keyword for keyword in KEYWORDS if keyword in named), None)
        self._head = output_embedding(base)
        self._reason = "" if self._head is not None else "it names no output embedding"
        self._head_works = self._is_out_of_graphs = False
        self._transform: Transform | None = None  # until a first pass in chunks has shown it
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
        """Return log-probabilities of the tokens that positions of the mask predict."""
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
            RuntimeError: only slicing is left, with `strict`.
        """
        # ms-swift leaves `logits_to_keep` in the inputs, which the next pass over them gets too
        # (4.6, grpo_trainer.py, `_get_logps_via_local_forward`). Here it would cut them twice.
        inputs = {name: value for name, value in inputs.items() if name not in KEYWORDS}
        if self._can_chunk:
            outputs = self._in_chunks(model, inputs, mask_BT, function, columns)
            if outputs is not None:
                return outputs
            self._can_chunk = False  # the reason is one of the model
        logits_NV = self.select(model, inputs, mask_BT)
        self._warn(
            f"{self._name} has no log-probabilities in chunks: {self._reason}. The logits of all "
            "its completion positions take memory at once."
        )
        return function(logits_NV, *columns, overwrite=False)

    def select(self, model: nn.Module, inputs: Mapping[str, Any], mask_BT: Tensor) -> Tensor:
        """Return [N, V], the logits of the positions where `mask_BT` is true, row by row."""
        found = self._at_head(
            model, inputs, lambda hidden: select_positions(hidden, mask_BT), int(mask_BT.sum())
        )
        if found is not None:
            return found[0].logits.squeeze(0)  # not [0]: its backward would make a copy
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
        """Do as `compute`, within the head's call; return None where that fails."""
        head, transform = self._head, self._transform or unchanged
        # As many as the rank with the most tokens has: each call of a sharded head gathers its
        # weight from all ranks.
        num_chunks = self.ranks(model).most(-(-int(mask_BT.sum()) // self.chunk_size))
        outputs: Outputs | None = None

        def at_head(hidden_BTH: Tensor) -> Tensor:
            nonlocal outputs
            assert head is not None
            # Called as a module: the hooks of LoRA, FSDP and `mask_models` run.
            outputs = in_chunks(
                lambda hidden_CH: transform(head(hidden_CH[None]).squeeze(0)),
                select_positions(hidden_BTH, mask_BT).squeeze(0),
                columns,
                function,
                chunk_size=self.chunk_size,
                num_chunks=num_chunks,
            )
            # The forward goes on with one position: its logits [1, 1, V] show the transform.
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
                self._reason = "what it does to logits after its head is not known"
                return None
            if self._transform is not unchanged:  # `outputs` were computed without it: once more
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
    ) -> tuple[CausalLMOutputWithPast, Tensor] | None:
        """Return the output for the `num_positions` that `select` leaves of the hidden states, and
        the head's logits [1, V] at the last of them, after all hooks. None where that fails on any
        rank: the head is not tried again. `select` may call the head.
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

        # 1. Hook the head. Both hooks write to Python objects, which compiled code cannot.
        shapes, probes, is_selecting = list[torch.Size](), list[Tensor](), False

        @torch.compiler.disable
        def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            nonlocal is_selecting
            if is_selecting:  # `select` calls the head, for a chunk
                return None
            hidden = args[0] if args else torch.empty(0)  # a keyword's are left alone
            shapes.append(hidden.shape)
            if len(shapes) > 1 or hidden.ndim != 3:  # the output is given up below
                return None
            is_selecting = True
            chosen = select(hidden)
            is_selecting = False
            return chosen, *args[1:]

        @torch.compiler.disable
        def note(_: nn.Module, __: tuple[Any, ...], logits: Tensor) -> None:
            probes[:] = [logits.detach().flatten(0, -2)[-1:].clone()]

        # The first comes before all other hooks, which then see chosen positions; the second last.
        handles = [
            head.register_forward_pre_hook(choose, prepend=True),
            head.register_forward_hook(note),
        ]

        # 2. Run the forward.
        output, problem = None, ""
        try:
            output = model(**inputs)
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except (RuntimeError, ValueError, IndexError) as e:
            # Missing positions are no cause of what fails before the head, or in it, or after a
            # forward that worked. It may be a broken collective (gloo's RuntimeError): another
            # forward would wait for ranks that make none.
            if self._head_works or not probes:
                raise
            problem = f"its forward fails on fewer positions ({type(e).__name__}: {e})"
        finally:
            for handle in handles:
                handle.remove()

        # 3. Agree: where one rank has to go another way, all of them do.
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
    """Let a compiled model call its head in Python, hooks included."""
    # Dynamo has no guards on hooks (`skip_nnmodule_hook_guards`): code that was compiled without
    # them would run where there are some. A hook that stays breaks the graph.
    head.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    # Older code has no such break. Dynamo does guard against a `forward` of the module's own
    # (`guard_to_detect_forward_monkeypatching`): frames that call the head, and no others, are
    # compiled once more.
    head.forward = head.forward


def select_positions(hidden_BTH: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [1, N, H]: the positions where `mask_BT` is true, row by row.

    A model may put positions before those of its input ids (prompt tuning, image features), or give
    its last ones only: rows are aligned at their ends.
    """
    surplus = hidden_BTH.shape[1] - mask_BT.shape[1]
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
    as in Granite. A configuration may name one that its model does not apply (PaliGemma 2).
    `highest` gives the maximum over ranks, so that all of them find one transform.
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
    # A rank with other shapes calls `highest` all the same: the others wait for it there.
    errors = torch.full((len(transforms),), float("inf"))
    if raw.shape == final.shape:
        # As a share of each number, or of the median one if that is more: a token that a hook rules
        # out, by a number as low as can be or minus infinity, counts for no more than others.
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
    """Return the head of the outermost model that names one; None where none does."""
    for module in model.modules():
        name_it = getattr(module, "get_output_embeddings", None)
        try:
            head = name_it() if name_it is not None else None
        except (AttributeError, NotImplementedError):
            continue  # a wrapper without a head of its own: one of its models may have one
        if isinstance(head, nn.Module):
            return head
    return None
