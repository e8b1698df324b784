"""The passes over samples for which ms-swift's trainer wants log-probabilities."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import nn

from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.router_replay import RouterReplay

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch


class TrainingPasses(GRPOTrainer):
    """A trainer that has `CompletionLogps` make the passes of policy, reference and local teacher.

    All of ms-swift's passes go through `_get_per_token_logps_and_entropies_single` (4.6).
    """

    completion_logps: CompletionLogps
    _router_replay: RouterReplay | None
    _leaves_out_old_pass = False  # now, while a round's batches are made
    _begun: GRPOBatch | None = None  # of the last pass of an old policy that was left out

    def needs_old_logps(self, *, has_views: bool = False) -> bool:
        """Return whether a round needs the log-probabilities of its old policy before its loss, the
        same on all ranks; `has_views`: a teacher sees prompts of its own in this round."""
        # Where all of a round's passes with gradients precede its first update, the first of them
        # has the old policy's weights: ms-swift's loss takes None for them (4.6, grpo_trainer.py,
        # `_compute_loss_and_metrics`).
        args = self.args
        batches_per_round = args.steps_per_generation * self.template.sequence_parallel_size
        # ms-swift has multiplied `gradient_accumulation_steps` by that size, too.
        has_several_updates = args.gradient_accumulation_steps % batches_per_round != 0
        return bool(
            (self.model.training and has_several_updates)
            or has_views
            or self._has_teacher_explicit()
            or (self.kl_in_reward and self.beta)
            or self.use_liger_loss
            # Batches are cut by the number of samples that conversations make.
            or self.dynamic_num_samples
        )

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, model_inputs: dict[str, Any], grpo_batch: GRPOBatch, **kwargs: Any
    ) -> Any:
        # ms-swift asks for the old policy's first, and then perhaps for a reference's.
        if self._leaves_out_old_pass and grpo_batch is not self._begun:
            self._begun = grpo_batch
            return None, None
        upstream = super()._get_per_token_logps_and_entropies
        found = upstream(model, model_inputs, grpo_batch, **kwargs)
        if not self._leaves_out_old_pass and grpo_batch.old_per_token_logps is None:
            grpo_batch.old_per_token_logps = found[0].detach()
        return found

    def _get_per_token_logps_and_entropies_single(
        self,
        model: nn.Module,
        model_inputs: dict[str, Any],
        grpo_batch: GRPOBatch,
        compute_entropy: bool = False,
    ) -> Any:
        upstream = super()._get_per_token_logps_and_entropies_single
        # ms-swift hands it on to `_get_logps_via_local_forward` below, which unwraps it.
        restricted = self.completion_logps.restrict(model, grpo_batch)
        replay = self._router_replay
        with replay.given(model, model_inputs) if replay else nullcontext(model_inputs) as inputs:
            return upstream(restricted, inputs, grpo_batch, compute_entropy)

    def _get_logps_via_local_forward(
        self,
        model: nn.Module,
        model_inputs: dict[str, Any],
        logits_to_keep: int,
        input_ids: torch.Tensor,
        compute_entropy: bool = False,
    ) -> Any:
        upstream = super()._get_logps_via_local_forward
        # ms-swift sets it there, which is called only where we leave the computing to it.
        if "use_cache" in self.model_kwarg_keys:
            model_inputs["use_cache"] = False
        return self.completion_logps.compute(
            model,
            model_inputs,
            input_ids,
            lambda model: upstream(model, model_inputs, logits_to_keep, input_ids, compute_entropy),
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
