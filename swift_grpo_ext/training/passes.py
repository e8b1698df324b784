"""The passes over samples for which ms-swift's trainer wants log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import nn

from swift_grpo_ext.logits.joined_passes import JoinedPasses
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.router_replay import RouterReplay
from swift_grpo_ext.training.batch import collate
from swift_grpo_ext.upstream.patches import wrapped

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.rollout.sample import RolloutSample


class TrainingPasses(GRPOTrainer):
    """A trainer that has `CompletionLogps` make the passes of policy, reference and local teacher.

    All of ms-swift's passes go through `_get_per_token_logps_and_entropies_single` (4.6).
    """

    completion_logps: CompletionLogps
    _router_replay: RouterReplay | None = None
    _joined_passes: JoinedPasses | None = None

    def _prepare_batch_inputs(self, samples: list[RolloutSample]) -> list[dict[str, Any]]:
        with self._joining_passes(samples):
            return super()._prepare_batch_inputs(samples)

    @contextmanager
    def _joining_passes(self, samples: list[RolloutSample]) -> Iterator[None]:
        """Take several micro-batches together in the passes within the block, where that saves.

        Enter it before other contexts that change how `template` collates.
        """
        if self.dynamic_num_samples or not self.completion_logps.can_join:
            yield
            return

        def collate_copies(upstream: Callable[..., Any], batch: list[Any], **kwargs: Any) -> Any:
            # What it concatenates it takes out (ms-swift 4.6, template/base.py, `concat_tensor`),
            # and samples are collated a second time, in the joined pass.
            return upstream([dict(encoded) for encoded in batch], **kwargs)

        self._joined_passes = self.completion_logps.joined_passes(
            self.split_by_mini_batches(samples),
            partial(collate, self),
            self.temperature,
            self.model,
        )
        try:
            with wrapped(self.template, "data_collator", collate_copies):
                yield
        finally:
            self._joined_passes = None

    def _get_per_token_logps_and_entropies_single(
        self,
        model: nn.Module,
        model_inputs: dict[str, Any],
        grpo_batch: GRPOBatch,
        compute_entropy: bool = False,
    ) -> Any:
        upstream = super()._get_per_token_logps_and_entropies_single

        def alone() -> Any:
            # ms-swift hands it on to `_get_logps_via_local_forward` below, which unwraps it.
            restricted = self.completion_logps.restrict(model, grpo_batch)
            replay = self._router_replay
            given = replay.given(model, model_inputs) if replay else nullcontext(model_inputs)
            with given as inputs:
                return upstream(restricted, inputs, grpo_batch, compute_entropy)

        if self._joined_passes is None:
            return alone()
        # No entropies: such passes are without gradients, where ms-swift asks for none.
        return self._joined_passes.add(model, grpo_batch, lambda: alone()[0]), None

    def _get_logps_via_local_forward(
        self,
        model: nn.Module,
        model_inputs: dict[str, Any],
        logits_to_keep: int,
        input_ids: torch.Tensor,
        compute_entropy: bool = False,
    ) -> Any:
        own = super()._get_logps_via_local_forward
        # ms-swift sets it there, which is called only where we leave the computing to it.
        if "use_cache" in self.model_kwarg_keys:
            model_inputs["use_cache"] = False
        return self.completion_logps.compute(
            model,
            model_inputs,
            input_ids,
            lambda model: own(model, model_inputs, logits_to_keep, input_ids, compute_entropy),
            temperature=self.temperature,
            with_entropy=compute_entropy,
        )

    def _get_logps_via_sp(
        self,
        model: nn.Module,
        model_inputs: dict[str, Any],
        grpo_batch: GRPOBatch,
        logits_to_keep: int,
        input_ids: torch.Tensor,
        compute_entropy: bool = False,
    ) -> Any:
        # ms-swift pads rows to a multiple of the ranks, and then counts from their padded end (4.6,
        # grpo_trainer.py:1558): two ranks gave tokens of odd rows the values of the next ones.
        is_whole = self.template.padding_free
        surplus = 0 if is_whole else -input_ids.shape[1] % self.template.sequence_parallel_size
        found = super()._get_logps_via_sp(
            *(model, model_inputs, grpo_batch, logits_to_keep + surplus, input_ids),
            compute_entropy,
        )
        return tuple(None if of is None else of[:, : of.shape[1] - surplus] for of in found)
