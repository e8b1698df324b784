"""GKD trainer (on-policy distillation): adds a teacher and the loss to `RolloutTraining`.

ms-swift decides at random if the student generates a round (`--lmbda`). Groups have one sample.

Letters in names are shapes: B rows, T positions of a row, N positions that predict a token of a
completion, K most probable tokens of a teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import GKDTrainer, gkd_helpers
from swift.rlhf_trainers.gkd_loss import DataSource, _align_vocab, jsd_loss
from swift.rlhf_trainers.utils import build_rollout_logps, encode_sample
from swift.trainers import disable_gradient_checkpointing
from torch import Tensor, nn

from swift_grpo_ext.logits.chunked import Outputs, token_logps
from swift_grpo_ext.logits.logps import scattered
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.placeholders import mask_placeholders
from swift_grpo_ext.rollout.sample import RolloutGKDSample
from swift_grpo_ext.training.batch import check_batches, complete_teacher_views
from swift_grpo_ext.training.checkpoints import WholeCheckpoints
from swift_grpo_ext.training.group import DisagreementError
from swift_grpo_ext.training.rollouts import RolloutTraining, Round
from swift_grpo_ext.upstream.placeholders import placeholder_ids

if TYPE_CHECKING:
    from swift.template import Template

# Key in a teacher's request for the number of tokens that its sample has in training.
NUM_TOKENS = f"{wire.KEY}.num_tokens"


class RolloutGKDTrainer(WholeCheckpoints, RolloutTraining, GKDTrainer):
    """Distillation with the rollouts of `swift_grpo_ext`."""

    sample_cls = RolloutGKDSample
    encoding_module = gkd_helpers
    reward_func_names: Sequence[str] = ()
    reward_weights = torch.zeros(0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placeholders = placeholder_ids(self.template)

    # --- the rollout ---

    def _generate_completions(self, samples: list[RolloutGKDSample]) -> list[RolloutGKDSample]:
        # Only while generating, unlike GRPO: the loss compares whole distributions.
        masks = None if self.args.use_vllm else mask_placeholders(self.model, self._placeholders)
        with masks or nullcontext():  # a handle removes its hook at exit
            return super()._generate_completions(samples)

    # --- the training batch ---

    def _encode(self, sample: RolloutGKDSample, template: Template) -> dict[str, Any]:
        # Answers from the data set are text, without sampled tokens.
        encode = super()._encode if self._data_source == DataSource.STUDENT else encode_sample
        sample.encoded = encode(sample, template)
        return sample.encoded

    def _prepare_batch_inputs(self, samples: list[RolloutGKDSample]) -> list[dict[str, Any]]:
        complete_teacher_views(samples, self.ranks)
        batches = super()._prepare_batch_inputs(samples)
        if self._data_source == DataSource.STUDENT:
            micro_batches = []
            for batch, chunk in zip(batches, self._chunks, strict=True):
                completions = completions_of(chunk, self.accelerator.device)
                batch["rollout"] = chunk, completions
                micro_batches.append((chunk, completions, batch["model_inputs"]))
            check_batches(micro_batches, self.args, self.ranks, self._encoder.fault)
        return batches

    def _postprocess_batch(
        self, samples: list[RolloutGKDSample], batch_encoded_inputs: list[dict[str, Any]]
    ) -> None:
        super()._postprocess_batch(samples, batch_encoded_inputs)
        if self._data_source != DataSource.STUDENT:
            return
        micro_batches = [batch["rollout"] for batch in batch_encoded_inputs]
        self._round = Round(samples, micro_batches, [()] * len(samples))
        # With fresh weights, `compute_loss` measures the gap and ends the round; all ranks agree.
        is_fresh = self.state.global_step == self._last_loaded_step
        if not (self.model.training and is_fresh) or self._computes_upstreams_loss:
            self._end_round()

    @property
    def _computes_upstreams_loss(self) -> bool:
        return self.completion_logps.is_off or self.use_liger_gkd_loss

    # --- the loss ---

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return ms-swift's loss, computed from the logits of completions only: the mean over
        positions of the generalized Jensen-Shannon divergence (arXiv:2306.13649)."""
        if self._computes_upstreams_loss:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        columns = self._teachers_logits(model, inputs)
        forward, mask_BT, targets_N = predictions(inputs["model_inputs"])
        if len(columns[0]) != len(targets_N):
            raise DisagreementError(
                f"The teacher sees {len(columns[0])} tokens of completions, and the student "
                f"{len(targets_N)}. Both must have the same response."
            )
        round_ = self._round if "rollout" in inputs else None
        is_on_policy = inputs["gkd_batch"].data_source == DataSource.STUDENT
        alpha = 0.0 if is_on_policy else self.args.sft_alpha

        def losses(
            logits_NV: Tensor, targets_N: Tensor, *teacher: Tensor, overwrite: bool
        ) -> Outputs:
            total, count = divergence(logits_NV, teacher, self.beta, self.temperature)
            supervised = token_logps(logits_NV, targets_N).logps_N if alpha else None
            with torch.no_grad():
                logps_N = self._sampled_logps(logits_NV, targets_N) if round_ else None
            return total[None], count[None], supervised, logps_N

        total, count, supervised, logps_N = self.completion_logps.shim(model).compute(
            model, forward, mask_BT, losses, [targets_N, *columns]
        )
        if round_ is not None and logps_N is not None:
            _, completions = inputs["rollout"]
            completions.old_per_token_logps = scattered(logps_N, completions.completion_mask)
            # End the round before the last backward of the round or of an update.
            if round_.is_measured or self.accelerator.sync_gradients:
                self._end_round()
        assert total is not None
        assert count is not None
        loss = total.sum() / count.sum().clamp(min=1)
        if supervised is not None:
            loss = loss - alpha * supervised.sum() / max(len(targets_N), 1)
        return (loss, None) if return_outputs else loss

    def _teachers_logits(self, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
        """Return the teacher's logits [N, V], or its top logits [N, K] and their tokens [N, K]."""
        forward, mask_BT, _ = predictions(inputs["teacher_model_inputs"])
        if self.use_teacher_api:
            batch = inputs["gkd_batch"]
            return [batch.teacher_topk_logprobs[mask_BT], batch.teacher_topk_indices[mask_BT]]

        def kept(logits_NV: Tensor, *, overwrite: bool) -> Outputs:
            top = self.gkd_logits_topk
            return (logits_NV,) if top is None else tuple(logits_NV.topk(top))

        ready = nullcontext()
        if not self._is_self_distillation:
            model, ready = self.teacher_model, self.load_teacher_model_context()
        elif self._teacher_use_disable_adapter:  # the teacher is the student without its adapter
            ready = self.accelerator.unwrap_model(model).disable_adapter()
        plain = disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), ready, plain:
            shim = self.completion_logps.shim(model)
            return list(shim.compute(model, forward, mask_BT, kept))

    # --- the gap between rollout and training ---

    def _sampled_logps(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Return log-probabilities [N] in the rollout's distribution, which has no placeholders."""
        logps_N = token_logps(logits_NV, targets_N, temperature=self.temperature).logps_N
        # Derive the log-sum over the vocabulary from `logps_N`: no second pass over the logits.
        sampled_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        total_N = sampled_N.float() / self.temperature - logps_N
        others_NP = logits_NV[:, self._placeholders].float() / self.temperature
        shares_NP = (others_NP - total_N[:, None]).exp()
        return logps_N - torch.log1p(-shares_NP.sum(1))

    # --- a teacher's server ---

    def _build_teacher_requests(self, samples: list[RolloutGKDSample]) -> list[RolloutInferRequest]:
        requests: list[RolloutInferRequest] = super()._build_teacher_requests(samples)
        for sample, request in zip(samples, requests, strict=True):
            if not sample.teacher_prompt and sample.teacher_images is None:  # else counts differ
                request.data_dict[NUM_TOKENS] = torch.as_tensor(sample.encoded["input_ids"]).numel()
        return requests

    def _infer_teacher_requests(self, handle: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        requests = handle["all_requests"]
        numbers = [request.data_dict.pop(NUM_TOKENS, None) for request in requests]
        try:
            parsed = super()._infer_teacher_requests(handle, *args, **kwargs)
            check_teacher(requests, numbers, parsed)
        except Exception as e:  # the other ranks wait for answers: scatter the error instead
            return [e] * len(requests)
        return parsed

    def _scatter_teacher_parsed(self, handle: dict[str, Any], parsed_global: Any) -> Any:
        parsed = super()._scatter_teacher_parsed(handle, parsed_global)
        if parsed and isinstance(parsed[0], Exception):
            raise parsed[0]
        return parsed


def predictions(encoded: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the arguments of a forward, the mask [B, T] of positions that predict a labelled
    token, and those tokens [N]."""
    labels_BT = encoded["labels"]
    predicted_BT = labels_BT[:, 1:] != -100
    forward = {name: value for name, value in encoded.items() if name != "labels"}
    mask_BT = nn.functional.pad(predicted_BT, (0, 1))
    return forward, mask_BT, labels_BT[:, 1:][predicted_BT]


def divergence(
    logits_NV: Tensor, teacher: Sequence[Tensor], beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the divergence of student and teacher summed over positions, in nats, and the number
    of positions, like ms-swift's `gkd_loss`. `teacher` is either logits [N, V] (the vocabulary may
    differ), or top log-probabilities [N, K] and their tokens [N, K]."""
    if len(teacher) == 2:  # positions that a server left out are infinite, and do not count
        teachers, tokens_NK = teacher
        known_N = ~teachers.isinf().all(-1)
        students, teachers = logits_NV.gather(-1, tokens_NK)[known_N], teachers[known_N]
    else:
        students, teachers = _align_vocab(logits_NV, teacher[0])
    count = torch.tensor(len(students), device=students.device)
    return jsd_loss(students / temperature, teachers / temperature, beta), count


def completions_of(samples: Sequence[RolloutGKDSample], device: torch.device) -> GRPOBatch:
    """Return a batch with a row for each encoded sample: a mask of its trained tokens, from the
    first column on, and the rollout's log-probabilities."""
    labels = [torch.as_tensor(sample.encoded["labels"]).flatten()[1:] for sample in samples]
    trained = [torch.ones(int((own != -100).sum()), dtype=torch.bool) for own in labels]
    mask_BK = nn.utils.rnn.pad_sequence(trained, batch_first=True).to(device)
    return GRPOBatch(
        completion_mask=mask_BK,
        truncated_mask=mask_BK.new_zeros(len(samples)),
        seq_lengths=mask_BK.sum(1),
        rollout_per_token_logps=build_rollout_logps(
            [sample.rollout_logprobs for sample in samples], mask_BK, device
        ),
    )


def check_teacher(
    requests: Sequence[RolloutInferRequest],
    numbers: Sequence[int | None],  # tokens in training; None if unknown
    parsed: Sequence[tuple[Sequence[Any], Sequence[Any]]],
) -> None:
    """Raise `DisagreementError` if a teacher's server scored another number of tokens than training
    has: ms-swift would align its log-probabilities with the wrong tokens."""
    for request, number, (logprobs, _) in zip(requests, numbers, parsed, strict=True):
        num_scored = len(logprobs) + 1  # the first token has none
        if number not in (None, num_scored):
            raise DisagreementError(
                f"{request.uuid}: the teacher's server scored {num_scored} tokens, and training "
                f"has {number}. The server needs the student's tokenizer, template, --max_length, "
                "MAX_PIXELS and the like (--teacher_model_server)."
            )
