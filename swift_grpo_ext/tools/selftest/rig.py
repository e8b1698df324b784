"""Generate with the real trainer, its engine, and the user's rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from copy import copy, deepcopy
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.rlhf_trainers.utils import (
    aggressive_empty_cache,
    collate_to_grpo_micro_batch,
    set_expandable_segments,
)
from swift.trainers import disable_gradient_checkpointing
from swift.utils import remove_response

from swift_grpo_ext.checks.rows import encoding_error, media_of
from swift_grpo_ext.checks.rows import prompt_of as prompt_of_row
from swift_grpo_ext.logits.proof import rounding_noise
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.rollout.generate import generate
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.rounds import sample_ids_at
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.tools.selftest.outcome import NotTriedError
from swift_grpo_ext.training.batch import collate_groups
from swift_grpo_ext.training.encode import GroupEncoder, check_rollout_prompts
from swift_grpo_ext.training.gap import BoundedGap, Gap, gaps_between
from swift_grpo_ext.training.group import DisagreementError, kind_of_row
from swift_grpo_ext.upstream.placeholders import placeholder_ids

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

NUM_PROMPTS = 4
MAX_GROUP_SIZE = 8
MAX_TOKENS = 64  # of a completion, where the user's own limit is higher
ROWS_LOOKED_AT = 500  # of the data set, evenly spread

Row = dict[str, Any]


def reason_against(trainer: RolloutGRPOTrainer) -> str:
    """Return which setting of a training keeps a rig from generating as it does; "" for none."""
    if not trainer._settings.generates:
        return "rounds are generated as ms-swift generates them"
    if trainer.args.async_generate:
        return "with --async_generate rollouts are a step behind the trainer's weights"
    if trainer.enable_server_multi_turn:
        return "the server's --multi_turn_scheduler makes its own requests"
    if trainer.template.sequence_parallel_size > 1:
        return "--sequence_parallel_size spreads a sample over ranks"
    return ""


class Rig:
    """A trainer that generates and computes, and never trains. All ranks make the same calls."""

    def __init__(self, trainer: RolloutGRPOTrainer) -> None:
        self.trainer = trainer
        # As the training does before its first step: number types of mixed precision, no DDP yet.
        trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.train()
        if trainer.vllm_mode == "colocate" and trainer.args.sleep_level > 0:
            # As ms-swift wakes its engine before a rollout (rollout_mixin.py, `_fast_infer`).
            aggressive_empty_cache()
            set_expandable_segments(False)
            trainer.engine.engine.wake_up()
        self.update_weights()

    # --- rows ---

    def rows(self) -> list[Row]:
        """Return rows of the data set, evenly spread."""
        data = self.trainer.train_dataset
        numbers = np.linspace(0, len(data) - 1, min(len(data), ROWS_LOOKED_AT)).astype(int)
        return [data[int(number)] for number in numbers]

    @cached_property
    def prompts(self) -> list[Row]:
        """A few different prompts."""
        different = {prompt_hash(prompt_of_row(row)): row for row in reversed(self.rows())}
        return self.usable(reversed(different.values()), NUM_PROMPTS)

    def hardest_prompts(self, count: int) -> list[Row]:
        """Return the rows with most media, and those with the longest texts."""
        rows = self.rows()
        by_text = sorted(rows, key=lambda row: -len(str(row.get("messages"))))
        by_media = sorted(rows, key=lambda row: -len(media_of(row)))
        return [*self.usable(by_media, count), *self.usable(by_text, count)]

    def usable(self, rows: Iterable[Row], count: int) -> list[Row]:
        """Return the first `count` rows whose prompts the template encodes, the same on all ranks;
        raises `NotTriedError` where it encodes none. A training replaces the others, or ends."""
        given, numbers, reason = list(rows), list[int](), ""
        for number, row in enumerate(given):
            if len(numbers) == count:
                break
            if error := encoding_error(self.trainer.template, row, self.trainer._max_model_len):
                reason = reason or error
            else:
                numbers.append(number)
        # A URL may fail on one rank only, which would then generate for other prompts.
        numbers, *_ = self.trainer.ranks.all_gather(numbers)
        if not numbers:
            raise NotTriedError(f"the template refuses every prompt, the first one: {reason}")
        return [given[number] for number in numbers]

    def ids(self, step: int, num_groups: int, group_size: int | None = None) -> list[SampleId]:
        """Name the samples of a round."""
        size = group_size or min(int(self.trainer.num_generations), MAX_GROUP_SIZE)
        return sample_ids_at(RoundId("train", step, 0), range(num_groups * size), size)

    # --- generating ---

    def config(self, max_tokens: int = MAX_TOKENS) -> RequestConfig:
        """Return the user's request config, for so many tokens at most."""
        config = self.trainer._get_request_config()
        config.max_tokens = min(int(self.trainer.max_completion_length), max_tokens)
        return config

    def generate(
        self,
        rows: Sequence[Row],
        ids: Sequence[SampleId],
        config: RequestConfig | None = None,
        run_seed: int | None = None,
    ) -> tuple[list[RolloutSample], list[RolloutOutput]]:
        """Generate samples as the training does, each rank a part of them, perhaps with a seed in
        place of `--seed`; return ms-swift's samples and their outputs, in the order of `ids`, on
        every rank."""
        trainer, settings, ranks = self.trainer, self.trainer._settings, self.trainer.ranks
        if run_seed is not None:
            settings = copy(settings)
            settings.run_seed = run_seed
        samples = trainer._set_inputs_system(trainer.to_samples([deepcopy(row) for row in rows]))
        for sample in samples:
            remove_response(sample.messages)
        start, end = (len(ids) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        with trainer.offload_context() if trainer.enable_offload else nullcontext():
            outputs, _ = generate(
                list(ids[start:end]),
                [prompt_hash(sample) for sample in samples[start:end]],
                make_request=lambda position: samples[start + position].to_infer_request(),
                make_metadata=partial(settings.metadata, as_arrays=True),
                engine_ranks=trainer._engine_ranks(is_global_inputs=False),
                call_engine=partial(trainer._call_engine, config=config or self.config()),
            )
        return samples, [output for share in ranks.all_gather(outputs) for output in share]

    def generate_tokens(
        self, ids: Sequence[SampleId], run_seed: int | None = None
    ) -> list[SampleRow]:
        """Generate samples of the few prompts; a group has the number of its prompt."""
        rows = [self.prompts[sample_id.group] for sample_id in ids]
        _, outputs = self.generate(rows, ids, run_seed=run_seed)
        samples = []
        for sample_id, output in zip(ids, outputs, strict=True):
            choice = output.response.choices[0]
            logprobs = list(chain(*(output.rollout_logprobs or ())))
            samples.append(
                SampleRow(
                    sample_id=sample_id,
                    seed=None,
                    rank=0,
                    replica="",
                    weight_version=0,
                    finish_reason=choice.finish_reason,
                    token_ids=choice.token_ids,
                    logprobs=logprobs or None,
                    text=choice.message.content,
                    fingerprint=str(output.response.prompt_token_ids),
                    prompt="",
                    media=[],
                )
            )
        return samples

    @cached_property
    def first_round(self) -> list[SampleRow]:
        """Round 0 of the few prompts, with which others are compared."""
        return self.generate_tokens(self.ids(0, len(self.prompts)))

    def generate_for_training(
        self, rows: Sequence[Row], ids: Sequence[SampleId], config: RequestConfig | None = None
    ) -> list[RolloutSample]:
        """Generate samples with their completions, as the training encodes them."""
        samples, outputs = self.generate(rows, ids, config)
        for sample, sample_id, output in zip(samples, ids, outputs, strict=True):
            sample.sample_id, sample.request_id = sample_id, sample_id.request_id
            sample.prompt_hash = prompt_hash(sample)  # without the answer, which comes next
            sample.apply_rollout_output(rollout_output=output)
            sample.rollout_prompts = [answer_of(output).prompt]
        return samples

    # --- training's view ---

    def encode(self, samples: Sequence[RolloutSample]) -> tuple[dict[str, Any], GRPOBatch]:
        """Encode generated samples as the training does, each into its `encoded`, and return the
        model's inputs and their batch."""
        trainer, template = self.trainer, self.trainer.template
        device, shares = trainer.accelerator.device, trainer.completion_logps.shares_prompts
        collate = collate_groups if shares else collate_to_grpo_micro_batch
        encoder = GroupEncoder(template, trainer.args)
        # As ms-swift makes its micro-batches (4.6, grpo_trainer.py, `_prepare_batch_inputs`).
        with trainer._template_context(template):
            for sample in samples:
                sample.encoded = encoder.encode(sample)
            inputs, batch = collate(list(samples), template, device=device, use_logits_to_keep=True)
        inputs.pop("labels", None)  # given labels, models compute a loss of their own
        if "use_cache" in trainer.model_kwarg_keys:
            inputs["use_cache"] = False
        return inputs, batch

    def gap(self, samples: Sequence[RolloutSample]) -> Gap:
        return sum((look.gap for look in self.looks(samples).values()), Gap())

    def looks(self, samples: Sequence[RolloutSample]) -> dict[str, BoundedGap]:
        """Compare log-probabilities of generated samples with those of the trainer's model, and
        with what rounding does to those; for each kind of row. Samples with another prompt in
        training are left out: `prompts` names them."""
        trainer, looks = self.trainer, defaultdict[str, BoundedGap](BoundedGap)
        # Of the side with fewer bits, which may be the engine.
        bits = min(trainer.number_bits, trainer._engine_bits)
        least = torch.finfo(torch.bfloat16).eps if bits <= 16 else 0.0
        placeholders = placeholder_ids(trainer.template)
        for sample in samples:
            inputs, batch = self.encode([sample])
            checkpointing = disable_gradient_checkpointing(
                trainer.model, trainer.args.gradient_checkpointing_kwargs
            )
            with torch.no_grad(), checkpointing:  # a collective where weights are sharded
                logps, _ = trainer._get_per_token_logps_and_entropies(trainer.model, inputs, batch)
                with rounding_noise(base_model(trainer.model), least):
                    rounded, _ = trainer._get_per_token_logps_and_entropies(
                        trainer.model, inputs, batch
                    )
            with suppress(DisagreementError):
                check_rollout_prompts(sample, sample.encoded, trainer.template, placeholders)
                if (rollout := batch.rollout_per_token_logps) is not None:
                    mask = batch.completion_mask.bool()
                    [gap], [rounding] = (gaps_between(x, logps, mask) for x in (rollout, rounded))
                    looks[kind_of_row(sample)] += BoundedGap(gap, rounding)
        return dict(looks)

    def update_weights(self) -> None:
        """Give the engines the trainer's weights, verified."""
        self.trainer._move_model_to_vllm(skip_async_check=True)
