"""Logits of the last k positions, or of any chosen ones, from every decoder model (SPEC L1 to L5).

A model is asked in the first of these ways that works, which its first forward shows:

1. its own keyword, `logits_to_keep` or `num_logits_to_keep` (last positions only);
2. at its head: the output embedding is given the hidden states of the wanted positions only;
3. slicing the logits of all positions, which saves nothing: warned about once, or refused.

In 1 and 2 the logits of other positions are never computed. What the model does to logits after
its head is its own code, run on fewer positions. Letters in names are shapes: B rows, T positions
of a row, N chosen positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from swift_grpo_ext.logits.chunked import Logps, chunked_logps, token_logps
from swift_grpo_ext.logits.head import (
    HeadCalls,
    Transform,
    find_transform,
    keep_out_of_graphs,
    output_embedding,
    select_at_head,
    select_positions,
    summed_in_float32,
    unchanged,
)
from swift_grpo_ext.logits.sharding import ShardRanks, backward_takes_chunks, shard_ranks

KEYWORDS = ("logits_to_keep", "num_logits_to_keep")
"""Spellings, newest first."""


class UnsupportedModelError(RuntimeError):
    """A model computes the logits of all positions, whatever it is asked for."""


class LogitsShim:
    """Asks one model for the logits of some positions.

    `model` arguments of the methods are the model itself or any wrapping of it (PEFT, DDP), so that
    the wrapper's own hooks run. Ranks that share its weights (`sharding.py`) call the methods
    together; each then goes the same way, and calls the head equally often.
    """

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
            strict: raise `UnsupportedModelError` where nothing works, in place of slicing.
            warn: is told, once, that logits are sliced, or that chunks are impossible.
        """
        base = base_model(model)
        self._name = type(base).__name__.removeprefix("FSDP")  # FSDP2 renames a model's class
        self._config = getattr(base, "config", None)
        self._strict = strict
        self._warn = warn
        self._keyword = keyword_of(base)
        self._head = output_embedding(base)
        self._head_works = self._is_out_of_graphs = False
        self._reason = "" if self._head is not None else "it names no output embedding"
        self._transform: Transform | None = None
        self._can_chunk = True
        self._has_warned_of_slicing = False
        self._ranks = ShardRanks()

    @property
    def way(self) -> str:
        """How the last positions are asked for next: a keyword, `head` or `slice`."""
        return self._keyword or ("head" if self._head is not None else "slice")

    def ranks(self, model: nn.Module) -> ShardRanks:
        """The ranks that call this shim's methods together."""
        if not self._ranks.groups:
            self._ranks = shard_ranks(model)
        return self._ranks

    def last(self, model: nn.Module, inputs: Mapping[str, Any], num_positions: int) -> Any:
        """The output of `model(**inputs)`, with the logits of the last positions of each row.

        Returns:
            The model's own output; its `logits` are [B, num_positions, V].

        Raises:
            UnsupportedModelError: nothing works, with `strict`.
            ValueError: there are fewer positions.
        """
        inputs = _without_keywords(inputs)
        self._keep_head_out_of_graphs(model)
        output = None
        if self._keyword:
            output = model(**inputs, **{self._keyword: num_positions})
            if self.ranks(model).all(output.logits.shape[1] == num_positions):
                return output
            self._keyword = None  # swallowed on the way: all logits came
        elif self._head is not None:
            kept, _ = self._at_head(
                model, inputs, lambda hidden_BTH: hidden_BTH[:, -num_positions:], num_positions
            )
            if kept is not None:
                return kept
        if self._head is None:
            self._refuse_or_warn()
        output = model(**inputs) if output is None else output
        found = output.logits.shape[1]
        if found < num_positions:
            raise ValueError(
                f"{self._name} returned logits of {found} positions, expected {num_positions}."
            )
        output.logits = output.logits[:, -num_positions:]
        return output

    def select(
        self, model: nn.Module, inputs: Mapping[str, Any], mask_BT: Tensor
    ) -> tuple[Tensor, bool]:
        """[N, V]: the logits of the positions where `mask_BT` is true, row by row; and whether
        nothing but the caller needs them.

        Rows of positions and of `mask_BT` are aligned at their ends. Raises as `last`.
        """
        inputs = _without_keywords(inputs)
        output, calls = self._at_head(
            model, inputs, lambda hidden: select_positions(hidden, mask_BT), int(mask_BT.sum())
        )
        if output is not None:
            # Not [0], whose backward would make a copy.
            return output.logits.squeeze(0), calls.is_result(output.logits)
        num_positions = mask_BT.shape[1] - int(mask_BT.any(0).int().argmax())
        logits_BKV = self.last(model, inputs, num_positions).logits
        return select_positions(logits_BKV, mask_BT[:, -num_positions:]).squeeze(0), True

    def logps(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        mask_BT: Tensor,
        targets_N: Tensor,
        *,
        chunk_size: int = 0,
        **options: Any,
    ) -> Logps:
        """Log-probabilities of `targets_N` at the positions where `mask_BT` is true, row by row.

        Args:
            model: the model or any wrapping of it.
            inputs: the arguments of its forward.
            mask_BT: N positions, each that whose logits predict a target.
            targets_N: token ids.
            chunk_size: positions whose logits exist at a time; 0: all at once.
            options: `temperature` and `with_entropy`, of `token_logps`.

        Raises as `last`, and `UnsupportedModelError` where chunks are impossible, with `strict`.
        """
        if chunk_size and self._can_chunk:
            found = self._chunked_logps(
                model, _without_keywords(inputs), mask_BT, targets_N,
                chunk_size=chunk_size,
                num_chunks=self.ranks(model).most(-(-len(targets_N) // chunk_size)),
                **options,
            )  # fmt: skip
            if not isinstance(found, str):
                return found
            self._can_chunk = False
            text = f"log-probabilities of {self._name} cannot be computed in chunks: {found}."
            if self._strict:
                remedy = "Use --logps_chunk_size 0, or --logits_shim auto."
                raise UnsupportedModelError(f"{text} {remedy}")
            self._warn(f"{text} --logps_chunk_size has no effect. (Said once.)")
        logits_NV, is_own = self.select(model, inputs, mask_BT)
        return token_logps(logits_NV, targets_N, **options, overwrite=is_own)

    # --- the ways ---

    def _keep_head_out_of_graphs(self, model: nn.Module) -> None:
        if self._head is not None and not self._is_out_of_graphs:
            self._is_out_of_graphs = keep_out_of_graphs(self._head, model)

    def _at_head(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        select: Callable[[Tensor], Tensor],
        num_positions: int,
    ) -> tuple[Any, HeadCalls]:
        """The output for the positions that `select` leaves, of that number, and what the head was
        called with. None where that does not work, on any rank: the head is not tried again."""
        calls, output = HeadCalls(), None
        if self._head is None:
            return None, calls
        self._keep_head_out_of_graphs(model)
        with select_at_head(self._head, select, calls):
            try:
                output = model(**inputs)
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except (RuntimeError, ValueError, IndexError) as e:
                # What fails before the head, or in it, does not fail for want of positions: the
                # other ranks wait there, or a collective broke (a plain RuntimeError with gloo).
                if self._head_works or calls.problem or calls.result is None:
                    raise
                self._reason = f"its forward fails on fewer positions ({type(e).__name__}: {e})"
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

    def _chunked_logps(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        mask_BT: Tensor,
        targets_N: Tensor,
        **options: Any,
    ) -> Logps | str:
        """Log-probabilities computed in the head's call; why not, where that does not work.

        The head is called by chunks, hooks of others on it included. The model is left with the
        true logits, [1, 1, V], of the last position, which show what it does to them.
        """
        head, transform = self._head, self._transform or unchanged
        if not backward_takes_chunks(head):
            return "FSDP2 shards its output embedding alone, which works from torch 2.11 on"
        logps = None

        def compute(hidden_BTH: Tensor) -> Tensor:
            nonlocal logps
            assert head is not None
            is_sharded = bool(self.ranks(model).groups)
            call = head if is_sharded else summed_in_float32(head, max(options["num_chunks"], 1))
            logps = chunked_logps(
                lambda hidden_CH: transform(call(hidden_CH[None]).squeeze(0)),
                select_positions(hidden_BTH, mask_BT).squeeze(0),
                targets_N,
                **options,
            )
            return hidden_BTH[:1, -1:]

        output, calls = self._at_head(model, inputs, compute, 1)
        if output is None:
            return self._reason
        assert logps is not None
        if self._transform is None:
            self._transform = find_transform(
                self._config, calls.probe_V, output.logits.detach(), self.ranks(model).highest
            )
            if self._transform is None:
                return "what it does to logits after its head is not known"
            if self._transform is not unchanged:
                return self._chunked_logps(model, inputs, mask_BT, targets_N, **options)
        if torch.is_grad_enabled():
            # Wrappers look for the model's own output in the graph (it has no weight there): DDP
            # with `find_unused_parameters`, and FSDP's and DeepSpeed's hooks that begin a backward.
            logps = logps._replace(logps_N=logps.logps_N + output.logits.flatten()[:0].sum())
        return logps

    def _refuse_or_warn(self) -> None:
        text = (
            f"{self._name} computes the logits of all positions: it has no keyword that works "
            f"({' or '.join(KEYWORDS)}), and {self._reason}."
        )
        if self._strict:
            raise UnsupportedModelError(
                f"{text} Use --logits_shim auto to slice them, at the cost of their memory."
            )
        if not self._has_warned_of_slicing:
            self._has_warned_of_slicing = True
            self._warn(f"{text} They are sliced, which saves no memory. (Said once.)")


WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)
"""Classes whose `module` is the wrapped model (by name: DeepSpeed need not be installed)."""


def base_model(model: Any) -> nn.Module:
    """The model itself, without DDP, FSDP, DeepSpeed, `torch.compile` and PEFT around it."""
    while True:
        if type(model).__name__ in WRAPPERS:
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return cast(nn.Module, model)


def keyword_of(model: nn.Module) -> str | None:
    """The spelling that the model's `forward` names; `**kwargs` may as well swallow one."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in KEYWORDS if name in parameters), None)


def _without_keywords(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in KEYWORDS}
