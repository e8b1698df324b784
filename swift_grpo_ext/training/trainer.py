"""GRPO trainer: adds `CompletionLogps` and GRPO's own hooks to `RolloutTraining`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers import GRPOTrainer, grpo_trainer
from swift.trainers import disable_gradient_checkpointing
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from swift_grpo_ext.logits import router_replay
from swift_grpo_ext.logits.proof import named_layers, rounding_noise
from swift_grpo_ext.logits.router_replay import RouterReplay
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.rollout.placeholders import mask_models
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.scheduler import watch
from swift_grpo_ext.training.batch import check_batches, collate_groups, complete_teacher_views
from swift_grpo_ext.training.checkpoints import WholeCheckpoints
from swift_grpo_ext.training.gap import sampling_shift
from swift_grpo_ext.training.resampling import DynamicSampling
from swift_grpo_ext.training.rollouts import Round
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.patches import replaced

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch
    from torch.utils.data import DataLoader


class RolloutGRPOTrainer(WholeCheckpoints, DynamicSampling, GRPOTrainer):
    """GRPO with the rollouts of `swift_grpo_ext`."""

    sample_cls = RolloutSample
    encoding_module = grpo_trainer
    _skips_old_pass = False  # only true while a round's batches are made
    _last_skipped: GRPOBatch | None = None  # the last batch without an old-policy pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.router_replay_mode == "R3":
            router_replay.batch_routed_experts()
            self._router_replay = RouterReplay(*filter(None, (self.model, self.ref_model)))
        mask_models(self, self.template)

    def _prepare_vllm_engine(self) -> Any:
        if self.args.router_replay_mode == "R3":
            given = self.args.vllm_engine_kwargs or {}
            self.args.vllm_engine_kwargs = {**given, **router_replay.CAPTURES}
        return super()._prepare_vllm_engine()

    # --- a round begins: its prompts ---

    def _prepare_scheduler(self) -> None:
        watch(getattr(self.args, "multi_turn_scheduler", None), self.args.tool_timeout)
        super()._prepare_scheduler()

    def _prefetch(self, dataloader: DataLoader) -> None:
        """With `--async_generate`, generate the samples of the first training (or eval) batch."""
        evaluates = self.control.should_evaluate
        if not evaluates:
            # Each round trains on the samples of the batch before its own. ms-swift prefetches the
            # loader's first batch, which the first round then generates a second time.
            clock = self._rounds.clock
            batch = clock.batches_at(self.state.global_step)
            self._rounds.begin_training(batch)
            before = clock.generation_batch_before(batch)
            dataloader = [self.rows_of(self._get_train_sampler().batch(*before))]
        # Names, seeds and group size depend on the mode, which ms-swift has not set yet.
        was_training = self.model.training
        self.model.train(not evaluates)
        super()._prefetch(dataloader)
        self.model.train(was_training)

    # --- the training batch ---

    def _prepare_batch_inputs(self, samples: list[RolloutSample]) -> list[dict[str, Any]]:
        has_views = complete_teacher_views(samples, self.ranks)
        self._skips_old_pass = not self.needs_old_logps(has_views=has_views)
        # Liger's loss and `dynamic_num_samples` read the model inputs, which must stay plain.
        reads_inputs = self.use_liger_loss or self.dynamic_num_samples
        shares = self.completion_logps.shares_prompts and not reads_inputs
        name = "collate_to_grpo_micro_batch"
        with replaced(grpo_trainer, name, collate_groups) if shares else nullcontext():
            batches = super()._prepare_batch_inputs(samples)
        self._skips_old_pass, self._last_skipped = False, None
        grpo_batches = [batch["grpo_batch"] for batch in batches]
        inputs = [batch["model_inputs"] for batch in batches]
        micro_batches = list(zip(self._chunks, grpo_batches, inputs, strict=True))
        check_batches(micro_batches, self.args, self.ranks, self._encoder.fault)
        if getattr(self, "_is_dynamic_self_distillation", False):
            # ms-swift 4.6 sets this flag in every run without a teacher, and then rejects
            # `--loss_type real` and `fipo`, and `--off_policy_sequence_mask_delta`.
            self._has_teacher = any(b.teacher_per_token_logps is not None for b in grpo_batches)
        return batches

    # --- log-prob passes; all call `_get_per_token_logps_and_entropies_single` (4.6) ---

    def needs_old_logps(self, *, has_views: bool = False) -> bool:
        """Return whether a round needs a separate old-policy pass before its loss; all ranks get
        the same answer. `has_views` is true if the teacher sees prompts of its own."""
        # If all passes with gradients of a round precede its first update, they have the old
        # policy's weights. ms-swift's loss then takes None as the old log-probabilities (4.6,
        # grpo_trainer.py, `_compute_loss_and_metrics`).
        args = self.args
        batches_per_round = args.steps_per_generation * self.template.sequence_parallel_size
        # ms-swift has multiplied `gradient_accumulation_steps` by `sequence_parallel_size`, too.
        has_several_updates = args.gradient_accumulation_steps % batches_per_round != 0
        return bool(
            (self.model.training and has_several_updates)
            or has_views
            or self._has_teacher_explicit()
            or (self.kl_in_reward and self.beta)
            or self._reference_needs_gathered_weights()
            or self.use_liger_loss
            # The number of batches depends on how many samples the conversations made.
            or self.dynamic_num_samples
        )

    def _reference_needs_gathered_weights(self) -> bool:
        # ms-swift generates in inference mode without vLLM. `disable_adapter`, for a reference of
        # LoRA, fails on ZeRO-3's gathered weights until another pass has gathered them.
        without_vllm = not self.args.use_vllm and is_deepspeed_zero3_enabled()
        return without_vllm and bool(self.beta) and self.ref_model is None

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, model_inputs: dict[str, Any], grpo_batch: GRPOBatch, **kwargs: Any
    ) -> Any:
        # For each batch, ms-swift's first call is for the old policy, a second for the reference.
        if self._skips_old_pass and grpo_batch is not self._last_skipped:
            self._last_skipped = grpo_batch
            return None, None
        upstream = super()._get_per_token_logps_and_entropies
        logps, entropies = upstream(model, model_inputs, grpo_batch, **kwargs)
        if not self._skips_old_pass and grpo_batch.old_per_token_logps is None:
            grpo_batch.old_per_token_logps = logps.detach()
        return logps, entropies

    def _get_per_token_logps_and_entropies_single(
        self,
        model: nn.Module,
        model_inputs: dict[str, Any],
        grpo_batch: GRPOBatch,
        compute_entropy: bool = False,
    ) -> Any:
        upstream = super()._get_per_token_logps_and_entropies_single
        # `_get_logps_via_local_forward` below unwraps it.
        restricted = self.completion_logps.restrict(model, grpo_batch)
        replay = self._router_replay
        with replay.active(model, model_inputs) if replay else nullcontext(model_inputs) as inputs:
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
        # Upstream's method sets it, but is only called if `compute` falls back to that method.
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
        # ms-swift pads rows to a multiple of the ranks, but slices from the padded end (4.6,
        # grpo_trainer.py:1558): with two ranks, tokens of odd rows got their neighbours' values.
        is_whole = self.template.padding_free
        surplus = 0 if is_whole else -input_ids.shape[1] % self.template.sequence_parallel_size
        results = super()._get_logps_via_sp(
            *(model, model_inputs, grpo_batch, logits_to_keep + surplus, input_ids),
            compute_entropy,
        )
        return tuple(None if t is None else t[:, : t.shape[1] - surplus] for t in results)

    # --- the rewards of samples ---

    def _postprocess_batch(
        self, samples: list[RolloutSample], batch_encoded_inputs: list[dict[str, Any]]
    ) -> None:
        super()._postprocess_batch(samples, batch_encoded_inputs)
        grpo_batches = [batch["grpo_batch"] for batch in batch_encoded_inputs]
        micro_batches = list(zip(self._chunks, grpo_batches, strict=True))
        values = self.own_share(samples, self._rewards_per_func)
        rounded = self._rounded_logps(batch_encoded_inputs)
        self._round = Round(samples, micro_batches, values, rounded)
        if self._round.is_measured:
            self._end_round()

    def _rounded_logps(self, batches: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """Return `rounded_logps` of each micro-batch of an early round; empty in later rounds."""
        # The noise imitates neither quantized numbers nor sampling settings, and compiled layers
        # ignore it. No GPU has run it.
        args = self.args
        is_unknown = self.least_bits < 16 or sampling_shift(args) or args.torch_compile
        is_early = self.model.training and self._gap_check.is_early
        if is_unknown or not is_early or not args.use_vllm or has_accelerator():
            return []
        return self.rounded_logps(batches)

    def rounded_logps(self, batches: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """Return the log-probabilities [B, T] of micro-batches, in nats, with other rounding in
        each layer; empty if the model does not name its layers."""
        if not named_layers(base_model(self.model)):
            return []
        checkpointing = disable_gradient_checkpointing(
            self.model, self.args.gradient_checkpointing_kwargs
        )
        least = torch.finfo(torch.bfloat16).eps if self.least_bits <= 16 else 0.0
        single = self._get_per_token_logps_and_entropies_single
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(checkpointing)
            # A router's jitter would make later steps of a resumed run differ.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(rounding_noise(base_model(self.model), least))
            if self._router_replay:
                stack.enter_context(self._router_replay.uncounted())
            return [single(self.model, b["model_inputs"], b["grpo_batch"])[0] for b in batches]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return ms-swift's loss. The last loss of a round ends the round, before its backward."""
        loss = super().compute_loss(*args, **kwargs)
        if self._round is not None and self._round.is_measured:
            self._end_round()
        return loss
