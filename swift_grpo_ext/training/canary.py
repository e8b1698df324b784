"""The canary: whether engines sample with the trainer's weights (SPEC M4).

After a weight update each engine draws a few tokens for one fixed prompt, the first of this run,
with its media. The log-probabilities of these tokens must be the trainer's. So an engine is seen
that takes weights and does not use them, and a prefix or encoder cache that outlived an update: the
prompt is always the same. An update that changes less than rounding does is not told from none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, encode_sample
from swift.trainers import disable_gradient_checkpointing
from swift.utils import get_logger

from swift_grpo_ext.rollout.placeholders import placeholder_ids
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.agreement import DisagreementError, Gap, gap_limit
from swift_grpo_ext.training.batch import check_prompt_of, gap_of, rollouts_own_prompts
from swift_grpo_ext.upstream.encoding import only_sampled_tokens
from swift_grpo_ext.weights.checksums import WeightUpdateError

logger = get_logger()

MAX_TOKENS = 8
MARGIN = 4.0
"""A mean over so few tokens lies further from 0 than one over a round (`gap_limit`)."""

ROUND = 2**31
"""Number of a round that no run has: the canary's noise is nobody else's."""

Draw = Callable[[Any, Sequence[SampleId], Any], list[Any]]
"""Draws one ms-swift sample under each of some ids, with a request config; gives outputs."""


class WeightCanary:
    """Draws and judges the canary; every rank calls each method.

    Args:
        args: of the training; `--rollout_canary` says what to do about a gap.
        ranks: all training ranks.
        off: why there can be none in this run; "" where there can.
    """

    def __init__(self, args: Any, ranks: RankGroup, off: str) -> None:
        self._action, self._ranks = args.rollout_canary, ranks
        self._is_mixed = bool(args.bf16 or args.fp16)
        self._is_due = False
        self._prompt: Any = None
        self._probes: list[Any] | None = None
        if off and self._action != "off" and ranks.rank == 0:
            logger.info(f"--rollout_canary {self._action} has no effect: {off}.")
        self._flies = self._action != "off" and not off

    def weights_changed(self) -> None:
        self._is_due = self._flies

    def draw(self, samples: Sequence[Any], config: Any, num_engines: int, draw: Draw) -> None:
        """Let the engines draw, where weights have changed since the last time.

        Args:
            samples: of the round that begins; the first of the run is kept.
            config: ms-swift's request config.
            num_engines: that this rank calls, alone or with all others.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._prompt = self._prompt or deepcopy(samples[0])
        sizes = self._ranks.all_gather(num_engines)
        count = max(-(-max(sizes) // self._ranks.size), 1)
        own = self._ranks.rank * count
        ids = [
            SampleId(phase="eval", step=0, number=ROUND, group=own + k, index=0)
            for k in range(count)
        ]
        config = probe_config(config)
        self._probes = []
        for output in draw(self._prompt, ids, config):
            probe = deepcopy(self._prompt)
            probe.apply_rollout_output(rollout_output=output)
            probe.rollout_prompt_ids = output.response.prompt_token_ids
            self._probes.append(probe)

    def judge(self, trainer: Any, step: int) -> float | None:
        """Compare what was drawn with the trainer's own model, before it trains on.

        Returns:
            The largest mean gap of an engine in nats; None where nothing was drawn.

        Raises:
            WeightUpdateError: on every rank, with `--rollout_canary stop`; names the engine.
        """
        if self._probes is None:
            return None
        probes, self._probes = self._probes, None
        own = [(_engine_of(probe), sample_gap(trainer, probe)) for probe in probes]
        gaps = [pair for pairs in self._ranks.all_gather(own) for pair in pairs]
        engine, gap = max(gaps, key=lambda pair: pair[1].mean)
        bits = 16 if self._is_mixed else torch.finfo(trainer.model.dtype).bits
        limit = MARGIN * gap_limit(bits)
        if not gap.mean <= limit:  # nor NaN
            text = (
                f"{engine} does not sample with the trainer's weights: at step {step} the canary's "
                f"log-probabilities lie {gap.mean:.3g} nats from the trainer's in the mean of "
                f"{gap.count} tokens, above the {limit:g} that rounding explains. It has other "
                "weights, a cache of older ones, sees the prompt otherwise, or uses numbers of "
                "other precision. Start it anew and resume from the last checkpoint; where the "
                "precision is meant (a quantized engine), --rollout_canary warn or off."
            )
            if self._action == "stop":
                raise WeightUpdateError(text)
            if self._ranks.rank == 0:
                logger.warning(text)
        return gap.mean


def _engine_of(probe: Any) -> str:
    return str((probe.rollout_infos or {}).get("replica", "The engine"))


def probe_config(config: Any, max_tokens: int = MAX_TOKENS) -> Any:
    """A request config for so many tokens at most of the whole distribution, as in training."""
    config = copy(config)
    config.max_tokens = min(config.max_tokens or max_tokens, max_tokens)
    config.top_p, config.top_k, config.min_p, config.repetition_penalty = 1.0, -1, 0.0, 1.0
    config.structured_outputs_regex = None
    return config


def sample_gap(trainer: Any, probe: Any) -> Gap:
    """Between a drawn sample's log-probabilities and those of the trainer's model."""
    inputs, batch = encoded_batch(trainer, [probe])
    try:
        check_prompt_of(probe, trainer.template, placeholder_ids(trainer.template))
    except DisagreementError:
        return Gap()  # of two prompts; the round's own check says so
    checkpointing = disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    )
    with torch.no_grad(), checkpointing:
        logps, _ = trainer._get_per_token_logps_and_entropies(trainer.model, inputs, batch)
    batch.old_per_token_logps = logps
    return gap_of(batch)


def encoded_batch(trainer: Any, samples: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """A model's inputs and the `GRPOBatch` of drawn samples, as ms-swift makes them for training.

    It leaves what a template made of each sample in its `encoded`.
    """
    template = trainer.template
    sampled = only_sampled_tokens(template, samples)
    own_prompts = rollouts_own_prompts(template, samples)
    with trainer._template_context(template), sampled, own_prompts:
        for sample in samples:
            sample.encoded = encode_sample(sample, template)
            sample.encoded.pop("_extra_kwargs", None)
        inputs, batch = collate_to_grpo_micro_batch(
            list(samples), template, device=trainer.accelerator.device, use_logits_to_keep=True
        )
    inputs.pop("labels", None)
    return inputs, batch
