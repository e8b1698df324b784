"""The canary: whether engines sample with the trainer's weights (SPEC M4).

After a weight update each engine draws a few tokens for one fixed prompt: the run's first with
media, or its first where no rank begins with any. The log-probabilities of these tokens must be the
trainer's. So an engine is seen that takes weights and does not use them, and a prefix or encoder
cache that outlived an update: the prompt is always the same. An update that changes less than
rounding does is not told from none.

The trainer's forward is a collective where weights are sharded. Every rank makes equally many,
whatever its probes turn out to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from math import isnan
from typing import Any

import torch
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, encode_sample
from swift.trainers import disable_gradient_checkpointing
from swift.utils import get_logger

from swift_grpo_ext.rollout.placeholders import placeholder_ids
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.agreement import DisagreementError, Gap, gap_limit
from swift_grpo_ext.training.batch import check_prompt_of, gap_between, rollouts_own_prompts
from swift_grpo_ext.upstream.encoding import only_sampled_tokens
from swift_grpo_ext.weights.checksums import WeightUpdateError

logger = get_logger()

MAX_TOKENS = 8
NUM_DRAWS = 2
"""Completions of each engine, in one request. An engine is at fault where all of them say so: in 16
bits one expert that is chosen otherwise moves a few tokens by whole nats."""

MARGIN = 4.0
"""A mean over so few tokens lies further from 0 than one over a round (`gap_limit`)."""

ROUND = 2**31
"""Number of a round that no run has: the canary's noise is nobody else's."""

Draw = Callable[[Any, Sequence[SampleId], Any], list[Any]]
"""Draws one ms-swift sample under each of some ids, with a request config; gives outputs."""


class WeightCanary:
    """Draws and judges the canary; every rank calls each method.

    Args:
        args: of the training; `--rollout_mismatch` says what to do about a gap.
        ranks: all training ranks.
        off: why there can be none in this run; "" where there can.
    """

    def __init__(self, args: Any, ranks: RankGroup, off: str) -> None:
        self._action, self._ranks = args.rollout_mismatch, ranks
        self._is_mixed = bool(args.bf16 or args.fp16)
        self._temperature = args.temperature
        self._is_due = False
        self._prompt: Any = None
        self._probes: list[Any] | None = None
        if off and ranks.rank == 0:
            logger.info(f"No canary tests what engines sample with: {off}.")
        self._flies = not off

    def weights_changed(self) -> None:
        self._is_due = self._flies

    def draw(self, samples: Sequence[Any], config: Any, num_engines: int, draw: Draw) -> None:
        """Let the engines draw, where weights have changed since the last time.

        Args:
            samples: of the round that begins; of the run's first round one is kept.
            config: ms-swift's request config.
            num_engines: that this rank calls, alone or with all others. Engine k is asked for the
                samples whose group is k; numbers from the last engine on begin anew with the first.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._prompt = self._prompt or self._choose(samples)
        sizes = self._ranks.all_gather(num_engines)
        count = max(-(-max(sizes) // self._ranks.size), 1)
        own = range(self._ranks.rank * count, (self._ranks.rank + 1) * count)
        ids = [
            SampleId(phase="eval", step=0, number=ROUND, group=group, index=index)
            for group in own
            for index in range(NUM_DRAWS)
        ]
        self._probes = []
        for output in draw(self._prompt, ids, probe_config(config)):
            probe = deepcopy(self._prompt)
            probe.apply_rollout_output(rollout_output=output)
            probe.rollout_prompt_ids = output.response.prompt_token_ids
            self._probes.append(probe)

    def _choose(self, samples: Sequence[Any]) -> Any:
        """Return one sample, the same on all ranks."""
        own = next(filter(_has_media, samples), samples[0])
        ranks_with_media = [
            r for r, has in enumerate(self._ranks.all_gather(_has_media(own))) if has
        ]
        chosen = ranks_with_media[0] if ranks_with_media else 0
        offered = own if self._ranks.rank == chosen else None  # images travel once
        return deepcopy(self._ranks.all_gather(offered)[chosen])

    def judge(self, trainer: Any, step: int) -> float | None:
        """Compare what was drawn with the trainer's own model, before it trains on.

        Returns:
            The largest mean gap of an engine in nats; None where nothing was drawn or compared.

        Raises:
            WeightUpdateError: on every rank, with `--rollout_mismatch stop`; names the engine.
        """
        if self._probes is None:
            return None
        probes, self._probes = self._probes, None
        gaps = self._gaps_of_engines(trainer, probes)
        if not gaps:
            return None
        engine, gap = max(gaps, key=lambda pair: (isnan(pair[1].mean), pair[1].mean))
        bits = 16 if self._is_mixed else torch.finfo(trainer.model.dtype).bits
        limit = MARGIN * gap_limit(bits, self._temperature)
        if not gap.mean <= limit:  # nor NaN
            text = (
                f"{engine} does not sample with the trainer's weights: at step {step} the canary's "
                f"log-probabilities lie {gap.mean:.3g} nats from the trainer's in the mean of "
                f"{gap.count} tokens, in each of {NUM_DRAWS} draws above the {limit:g} that "
                "rounding explains. It has other weights, a cache of older ones, sees the prompt "
                "otherwise, or uses numbers of other precision. Start it anew and resume from the "
                "last checkpoint; where the precision is meant (a quantized engine), "
                "--rollout_mismatch warn."
            )
            if self._action == "stop":
                raise WeightUpdateError(text)
            if self._ranks.rank == 0:
                logger.warning(text)
        return gap.mean

    def _gaps_of_engines(self, trainer: Any, probes: Sequence[Any]) -> list[tuple[str, Gap]]:
        """Return each engine's name and gap, of all ranks; none where a rank cannot encode."""
        draws = [probes[n : n + NUM_DRAWS] for n in range(0, len(probes), NUM_DRAWS)]
        batches, failure = [], ""
        try:
            batches = [encoded_batch(trainer, of_engine) for of_engine in draws]
        except Exception as e:  # the others would wait in their forward
            failure = f"on rank {self._ranks.rank} {type(e).__name__}: {e}"
        failures = [text for text in self._ranks.all_gather(failure) if text]
        if failures:
            if self._ranks.rank == 0:
                logger.warning(
                    "The canary's prompt could not be encoded for training, so that no "
                    f"engine was compared after this update ({failures[0]})."
                )
            return []
        own = []
        for of_engine, (inputs, batch) in zip(draws, batches, strict=True):
            found = sample_gaps(trainer, of_engine, inputs, batch)
            gaps = [gap for gap in found if gap is not None]
            if gaps:
                own.append((_engine_of(of_engine[0]), _least(gaps)))
        return [pair for pairs in self._ranks.all_gather(own) for pair in pairs]


def _has_media(sample: Any) -> bool:
    return bool(sample.images or sample.videos or sample.audios)


def _least(gaps: Sequence[Gap]) -> Gap:
    """Return the gap with the least mean; NaN, which nothing explains, where one has it."""
    return min(gaps, key=lambda gap: (not isnan(gap.mean), gap.mean))


def _engine_of(probe: Any) -> str:
    return str((probe.rollout_infos or {}).get("replica", "The engine"))


def probe_config(config: Any, max_tokens: int = MAX_TOKENS) -> Any:
    """A request config for so many tokens at most of the whole distribution, as in training."""
    config = copy(config)
    config.max_tokens = min(config.max_tokens or max_tokens, max_tokens)
    config.top_p, config.top_k, config.min_p, config.repetition_penalty = 1.0, -1, 0.0, 1.0
    config.structured_outputs_regex = None
    return config


def sample_gaps(
    trainer: Any, samples: Sequence[Any], inputs: dict[str, Any], batch: Any
) -> list[Gap | None]:
    """Compare drawn samples' log-probabilities with those of the trainer's model, in one forward.

    Args:
        inputs, batch: `encoded_batch` of the samples.

    Returns:
        A gap for each sample; None where training sees another prompt, which the round's own check
        names, or where the engine gave no log-probabilities.
    """
    checkpointing = disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    )
    with torch.no_grad(), checkpointing:
        logps, _ = trainer._get_per_token_logps_and_entropies(trainer.model, inputs, batch)
    drawn = batch.rollout_per_token_logps
    placeholders = placeholder_ids(trainer.template)
    gaps: list[Gap | None] = []
    for row, sample in enumerate(samples):
        try:
            check_prompt_of(sample, trainer.template, placeholders)
        except DisagreementError:
            gaps.append(None)
            continue
        mask = batch.completion_mask[row].bool()
        gaps.append(None if drawn is None else gap_between(drawn[row], logps[row], mask))
    return gaps


def sample_gap(trainer: Any, sample: Any) -> Gap:
    """Return the gap of one drawn sample, without a token where it cannot be compared."""
    return sample_gaps(trainer, [sample], *encoded_batch(trainer, [sample]))[0] or Gap()


def encoded_batch(trainer: Any, samples: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """A model's inputs and the `GRPOBatch` of drawn samples, as ms-swift makes them for training.

    It leaves what a template made of each sample in its `encoded`.
    """
    template = trainer.template
    sampled = only_sampled_tokens(template, samples)
    # Before the context, in which the template has no `max_length`.
    own_prompts = rollouts_own_prompts(template, samples)
    with own_prompts, trainer._template_context(template), sampled:
        for sample in samples:
            sample.encoded = encode_sample(sample, template)
            sample.encoded.pop("_extra_kwargs", None)
        inputs, batch = collate_to_grpo_micro_batch(
            list(samples), template, device=trainer.accelerator.device, use_logits_to_keep=True
        )
    inputs.pop("labels", None)
    return inputs, batch
