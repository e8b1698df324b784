"""The canary: each engine must sample with the trainer's weights (docs/promises.md, M4).

Checksums (`weights/sync.py`) tell what an engine was given, and not whether it uses that. So after
each weight update each engine generates a few tokens for one fixed prompt, before the next round is
generated, and their log-probabilities are held against the trainer's model, before that trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from io import BytesIO
from math import isnan
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import encode_sample
from swift.template import Template
from swift.template.vision_utils import rescale_image
from swift.trainers import disable_gradient_checkpointing
from swift.utils import get_logger

from swift_grpo_ext.checks.rows import media_of
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.batch import (
    DisagreementError,
    check_prompts_of,
    collate,
    rollouts_own_prompts,
    with_answer,
)
from swift_grpo_ext.training.gap import Gap, gaps_between
from swift_grpo_ext.upstream.encoding import only_sampled_tokens
from swift_grpo_ext.upstream.placeholders import placeholder_ids
from swift_grpo_ext.upstream.rows import COLUMNS, KINDS, RowFormError, read_row
from swift_grpo_ext.weights.checksums import WeightUpdateError

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

logger = get_logger()

MAX_TOKENS = 8
COMPLETIONS = 2
"""Completions of each engine, in one request. An engine is at fault where all of them say so: in 16
bits one expert that is chosen otherwise moves a few tokens by whole nats."""

MARGIN = 4.0
"""A mean over so few tokens lies further from 0 than one over a round, which the limit is for."""

PIXELS = 448 * 448
"""Largest area of an image in the canary's prompt: 256 tokens of Qwen2.5-VL. Every update pays for
them in each engine and in the trainer, and a small image tells other weights as well as a large."""

ROUND = 2**31
"""Number of a round that no run has: the canary's noise is nobody else's."""

Encoded: TypeAlias = "tuple[dict[str, Any], GRPOBatch]"
"""A model's inputs, and their batch."""

Generate = Callable[[OnPolicySample, Sequence[SampleId], RequestConfig], list[RolloutOutput]]
"""Generates one completion of a sample under each of some ids."""


# --- generated samples against the trainer's own model ---


def encoded_batch(trainer: RolloutGRPOTrainer, samples: Sequence[OnPolicySample]) -> Encoded:
    """Encode generated samples as ms-swift does for training.

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
        return collate(trainer, samples)


def sample_gaps(
    trainer: RolloutGRPOTrainer, samples: Sequence[OnPolicySample], encoded: Encoded
) -> list[Gap | None]:
    """Compare log-probabilities of generated samples with those of the trainer's model, in one
    forward, which is a collective where weights are sharded.

    Args:
        encoded: `encoded_batch` of the samples.

    Returns:
        A gap for each sample; None where training sees another prompt, which the round's own check
        names, or where the engine gave no log-probabilities.
    """
    inputs, batch = encoded
    checkpointing = disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    )
    # What is said of prompts that are read once is to be of the user's rows.
    with torch.no_grad(), checkpointing, trainer._logps.sharing_nothing():
        logps, _ = trainer._get_per_token_logps_and_entropies(trainer.model, inputs, batch)
    rollout = batch.rollout_per_token_logps
    if rollout is None:
        return [None] * len(samples)
    placeholders = placeholder_ids(trainer.template)
    compared = gaps_between(rollout, logps, batch.completion_mask.bool())
    gaps: list[Gap | None] = []
    for row, sample in enumerate(samples):
        try:
            check_prompts_of(sample, trainer.template, placeholders)
        except DisagreementError:
            gaps.append(None)
        else:
            gaps.append(compared[row])
    return gaps


def sample_gap(trainer: RolloutGRPOTrainer, sample: OnPolicySample) -> Gap:
    """Return the gap of one generated sample, without a token where it cannot be compared."""
    return sample_gaps(trainer, [sample], encoded_batch(trainer, [sample]))[0] or Gap()


def probe_config(config: RequestConfig, max_tokens: int = MAX_TOKENS) -> RequestConfig:
    """Return a request config for so many tokens at most of the whole distribution, as in
    training."""
    config = copy(config)
    config.max_tokens = min(config.max_tokens or max_tokens, max_tokens)
    config.top_p, config.top_k, config.min_p, config.repetition_penalty = 1.0, -1, 0.0, 1.0
    config.structured_outputs_regex = None
    return config


def shrink_media(sample: OnPolicySample) -> None:
    """Take a sample's videos out, and scale its images down to `PIXELS`, wherever they stand; those
    of parts of `content` move to `images`. What cannot be read or scaled stays as it is: other
    ranks wait for this one. Where objects have places in the images, all stay as they are."""
    if sample.objects:
        return
    try:
        read = read_row(sample)
    except RowFormError:
        return
    sample.messages = read.messages
    for kind, name in zip(KINDS, COLUMNS, strict=True):
        setattr(sample, name, [medium.value for medium in read.of_kind(kind)])
    sample.videos = []  # thousands of tokens each
    for message in sample.messages:
        if isinstance(text := message.get("content"), str):
            message["content"] = text.replace("<video>", "")
    for i, image in enumerate(sample.images):
        try:
            full = Template._load_image(image, load_images=True)
            small = rescale_image(full, PIXELS)
            if small is full:
                continue
            small.save(content := BytesIO(), "png")
        except Exception:  # Pillow's readers raise many kinds
            continue
        sample.images[i] = {"bytes": content.getvalue(), "path": None}


# --- the canary ---


class WeightCanary:
    """Says whether engines sample with the trainer's weights; every rank calls each method.

    The prompt is the run's first with images, or its first where no rank begins with any; its
    images are small, and videos are left out. It is always the same, so that a prefix or encoder
    cache that outlived an update is seen as well as an engine that takes weights and does not use
    them. An update that changes less than rounding does is not told from none.

    Args:
        action: `--rollout_mismatch`: what to do about a gap.
        ranks: all training ranks.
        limit: the mean gap of a round, in nats, above which something is wrong (`gap_limit`).
        is_on: whether there can be one in this run.
    """

    def __init__(
        self, action: Literal["stop", "warn"], ranks: RankGroup, limit: float, *, is_on: bool
    ) -> None:
        self._action, self._ranks, self._limit = action, ranks, MARGIN * limit
        self._is_on, self._is_due = is_on, False
        self._prompt: OnPolicySample | None = None
        self._generated: list[OnPolicySample] = []

    def weights_changed(self) -> None:
        self._is_due = self._is_on

    def generate(
        self,
        samples: Sequence[OnPolicySample],
        config: RequestConfig,
        num_engines: int,
        engines: Generate,
    ) -> None:
        """Let the engines generate, where weights have changed since the last time.

        Args:
            samples: of the round that begins; of the run's first round one is kept.
            config: the round's.
            num_engines: that this rank calls, alone or with all others.
            engines: asks engine k for the samples whose group is k; numbers from the last engine on
                begin anew with the first.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._prompt = self._prompt or self._choose(samples)
        sizes = self._ranks.all_gather(num_engines)
        # Every rank asks equally often: its forward over the answers is a collective.
        count = max(-(-max(sizes) // self._ranks.size), 1)
        ids = [
            SampleId(phase="eval", step=0, number=ROUND, group=group, index=index)
            for group in range(self._ranks.rank * count, (self._ranks.rank + 1) * count)
            for index in range(COMPLETIONS)
        ]
        for output in engines(self._prompt, ids, probe_config(config)):
            self._generated.append(with_answer(self._prompt, output))

    def _choose(self, samples: Sequence[OnPolicySample]) -> OnPolicySample:
        """Return one sample, the same on all ranks."""

        def shows(sample: OnPolicySample) -> bool:
            return any(medium.kind != "video" for medium in media_of(sample))

        offered = next(filter(shows, samples), samples[0])
        offers = self._ranks.all_gather(shows(offered))
        chosen = offers.index(True) if any(offers) else 0
        prompt = None
        if self._ranks.rank == chosen:  # only one rank's sample travels, with its images
            prompt = deepcopy(offered)
            shrink_media(prompt)
        return self._ranks.all_gather(prompt)[chosen]

    def judge(self, trainer: RolloutGRPOTrainer, step: int) -> float | None:
        """Compare what was generated with the trainer's own model, before it trains on.

        Returns:
            The largest mean gap of an engine in nats; None where nothing was generated or compared.

        Raises:
            WeightUpdateError: on every rank, with `--rollout_mismatch stop`; names the engine.
        """
        if not self._generated:
            return None
        generated, self._generated = self._generated, []
        starts = range(0, len(generated), COMPLETIONS)
        of_engines = [generated[start : start + COMPLETIONS] for start in starts]
        batches, failure = [], ""
        try:
            batches = [encoded_batch(trainer, samples) for samples in of_engines]
        except Exception as e:  # the others would wait in their forward
            failure = f"on rank {self._ranks.rank} {type(e).__name__}: {e}"
        if failures := [text for text in self._ranks.all_gather(failure) if text]:
            if self._ranks.rank == 0:
                logger.warning(
                    "The canary's prompt could not be encoded for training, so that no "
                    f"engine was compared after this update ({failures[0]})."
                )
            return None
        of_rank = []
        for samples, batch in zip(of_engines, batches, strict=True):
            gaps = [gap for gap in sample_gaps(trainer, samples, batch) if gap is not None]
            if gaps:  # the least counts, or NaN, which nothing explains
                gap = min(gaps, key=lambda gap: (not isnan(gap.mean), gap.mean))
                engine = str((samples[0].rollout_infos or {}).get("replica", "The engine"))
                of_rank.append((gap, engine))
        compared = [gap for gaps in self._ranks.all_gather(of_rank) for gap in gaps]
        if not compared:
            return None
        gap, engine = max(compared, key=lambda pair: (isnan(pair[0].mean), pair[0].mean))
        if not gap.mean <= self._limit:  # nor NaN
            text = (
                f"{engine} does not sample with the trainer's weights: at step {step} the canary's "
                f"log-probabilities lie {gap.mean:.3g} nats from the trainer's in the mean of "
                f"{gap.count} tokens, in each of {COMPLETIONS} completions above the "
                f"{self._limit:g} that rounding explains. It has other weights, a cache of older "
                "ones, sees the prompt otherwise, or uses numbers of other precision. Start it "
                "anew and resume from the last checkpoint; where the precision is meant (a "
                "quantized engine), --rollout_mismatch warn."
            )
            if self._action == "stop":
                raise WeightUpdateError(text)
            if self._ranks.rank == 0:
                logger.warning(text)
        return gap.mean
