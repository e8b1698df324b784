"""The gap between log-probabilities of rollout and training at equal weights (docs/promises.md).

The first pass over a round has the weights that generated it. So each token tests whether its
engine samples from the trainer's weights (M4), and whether both sides see the same row (M5).

The gap is judged for each engine and each kind of row: an engine with older weights, or a kind of
media that one side reads otherwise, disappears in the mean of a round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING

import numpy as np
import torch
from swift.utils import get_logger

from swift_grpo_ext.training.encode import DisagreementError, kind_of_row

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.rollout.sample import RolloutSample

logger = get_logger()

Group = tuple[str, str]
"""An engine's name and a kind of row."""

SPIKES = 32
"""A few tokens may be so many limits apart, in all: `most_explained`."""

CUT_OFF = 2.0
"""Nats by which `--top_k`, `--min_p` and `--repetition_penalty` may move log-probabilities in the
mean: e^-2 = 14% of the distribution are left. One wrong tensor moves them less (0.23 nats where it
is transposed, the tiny model): with such settings NaN and wholly other weights alone are found."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance, in nats, of two log-probabilities of each of some tokens."""

    total: float = 0.0
    """Sum of absolute differences."""

    count: int = 0
    """Number of tokens."""

    largest: float = 0.0

    @property
    def mean(self) -> float:
        """The mean difference in nats; 0 where there was no token."""
        return self.total / self.count if self.count else 0.0

    def __str__(self) -> str:
        return (
            f"{self.mean:.3g} nats in the mean of {self.count} tokens, {self.largest:.3g} at most"
        )

    def __add__(self, other: Gap) -> Gap:
        largest = float(np.maximum(self.largest, other.largest))  # NaN where one of them is
        return Gap(self.total + other.total, self.count + other.count, largest)


def gaps_between(
    rollout_BT: torch.Tensor, training_BT: torch.Tensor, mask_BT: torch.Tensor
) -> list[Gap]:
    """Compare log-probabilities of samples, in nats, where `mask_BT` is true."""
    if not mask_BT.numel():  # `amax` has no value for rows without columns
        return [Gap()] * len(mask_BT)
    # Filled and not multiplied: padding may hold NaN, which 0 would not take away.
    difference = (training_BT - rollout_BT).abs().float().masked_fill(~mask_BT, 0)
    # One stack, so that the device is waited for once.
    columns = difference.sum(1), mask_BT.sum(1).float(), difference.amax(1)
    return [Gap(total, int(count), most) for total, count, most in torch.stack(columns, 1).tolist()]


def gap_limit(bits: int, temperature: float = 1.0) -> float:
    """Return the mean gap, in nats, above which something is wrong rather than imprecise.

    A log-probability is a difference of logits, of which large models have some around 2^4. A float
    of 16 bits that keeps 8 of them as its mantissa (bfloat16) rounds those to steps of 2^-4, by
    2^-5 at most; layers before add to it, and averaging over tokens takes from it. Twice a step is
    beyond that. 32 bits round to 2^-19 there; their limit is that of kernels that sum in different
    orders, with a wide margin. Other weights, another prompt or dropout lie well above both: with
    LoRA's default dropout of 0.05 single ratios were off by 0.7 to 1 nats.

    Floats of 8 bits keep 4 of them or 3 (E4M3, E5M2: "FP8 Formats for Deep Learning", 2209.05433).
    A sum of rounded products is as imprecise, for its size, as one of them. So E4M3 moves
    log-probabilities 2^4 times as far as bfloat16 does, and has 2^4 times the limit. (With matrices
    and their inputs rounded, the tiny model: bfloat16 0.0043 nats, E4M3 0.055, E5M2 0.13, matrices
    of 4 bits 0.14.) Beyond 2 nats an engine has wholly other weights, with any numbers.

    Args:
        bits: of the less precise of both sides' numbers; 8 and fewer are quantized ones.
        temperature: of the sampling. Logits are divided by it, and their rounding with them; one
            above 1 leaves the limit as it is.
    """
    limit = 0.01 if bits > 16 else 0.125 if bits == 16 else 2.0
    return limit / min(temperature or 1.0, 1.0)


def most_explained(limit: float, count: int) -> float:
    """Return the largest mean gap, in nats, that rounding explains in so many tokens.

    The mean over few tokens lies further from 0: in 16 bits an expert that is chosen otherwise
    moves a token by whole nats (two by 2 nats each are `SPIKES` limits).

    Args:
        limit: for very many tokens (`gap_limit`).
    """
    return limit * (1 + SPIKES / max(count, 1))


def sampling_shift(args: RolloutGRPOConfig) -> float:
    """Return by how many nats, in the mean, log-probabilities of a rollout may lie from those of
    training because of the settings alone.

    vLLM's log-probabilities are those of the distribution that it samples from. One that keeps a
    share p of it adds -log(p) to each.
    """
    # One token (`--top_k 1`), or what a grammar allows, may be any share. Where a flag is None, the
    # model's generation settings decide. With `--async_generate` weights are of an earlier step.
    is_unbounded = (
        args.async_generate
        or args.structured_outputs_regex
        or args.top_k == 1
        or None in (args.top_p, args.top_k, args.min_p, args.repetition_penalty)
    )
    if is_unbounded:
        return inf
    # `--top_p` keeps that share or more; how much the others keep depends on the model.
    shift = -log(args.top_p) if 0 < args.top_p < 1 else 0.0
    if args.top_k > 1 or args.min_p or args.repetition_penalty != 1:
        shift += CUT_OFF
    return shift


@dataclass(frozen=True, slots=True)
class RoundGap:
    """The gap of one rank's samples of a round."""

    groups: dict[Group, Gap]

    excess: float = 0.0
    """How many times as far as rounding and the settings explain the furthest sample lies."""

    furthest: str = ""
    """Names that sample, with its gap."""


def measure_gap(
    micro_batches: Sequence[tuple[Sequence[RolloutSample], GRPOBatch]], limit: float, shift: float
) -> RoundGap:
    """Return the gap of this rank's samples.

    Args:
        micro_batches: of a round, each with its samples.
        limit: the mean gap, in nats, that rounding explains in many tokens.
        shift: the mean gap, in nats, that the sampling settings explain (`sampling_shift`).
    """
    groups = defaultdict[Group, Gap](Gap)
    worst = (0.0, "")
    for samples, batch in micro_batches:
        rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
        # ms-swift has no rollout's with `--use_vllm false`, and none of a batch where one lacks it.
        if rollout is None or training is None:
            continue
        gaps = gaps_between(rollout, training, batch.completion_mask.bool())
        for sample, gap in zip(samples, gaps, strict=True):
            engine, kind = (sample.rollout_infos or {}).get("replica", ""), kind_of_row(sample)
            groups[str(engine), kind] += gap
            excess = gap.mean / (most_explained(limit, gap.count) + shift)
            worst = max(worst, (excess, f"{sample.sample_id} ({kind}): {gap}"))
    return RoundGap(dict(groups), *worst)


def judge_gap(
    gaps: Sequence[RoundGap], args: RolloutGRPOConfig, limit: float, step: int
) -> dict[str, float]:
    """Hold the gap of each engine and each kind of row, over all ranks, against what rounding and
    the settings explain (M4, M5).

    Args:
        gaps: of all ranks, the same on each of them.
        limit: the mean gap, in nats, that rounding explains in many tokens.
        step: the optimizer step, for the message.

    Returns:
        Metrics by name; none where there were no log-probabilities of rollouts.

    Raises:
        DisagreementError: on every rank, with `--rollout_mismatch stop`; names engines and rows.
    """
    shift = sampling_shift(args)
    groups, kinds = defaultdict[Group, Gap](Gap), defaultdict[str, Gap](Gap)
    for rank_gap in gaps:
        for (engine, kind), gap in rank_gap.groups.items():
            groups[engine, kind] += gap
            kinds[kind] += gap
    whole = sum(kinds.values(), Gap())
    if not whole.count:
        return {}
    # NaN is not below any bound: `>` would let it pass.
    beyond = {
        group: gap
        for group, gap in groups.items()
        if not gap.mean <= most_explained(limit, gap.count) + shift
    }
    furthest = max(gaps, key=lambda rank_gap: rank_gap.excess)
    if beyond:
        _warn_or_stop(beyond, groups, args, limit, shift, step)
    elif furthest.excess > 1:
        logger.warning_once(
            f"Step {step}: log-probabilities of single samples lie further apart between rollout "
            f"and training than rounding explains, the furthest of {furthest.furthest}. Its row is "
            "seen otherwise on the two sides, or numbers overflow.",
            hash_id="sample_gap",
        )
    metrics = {"rollout_gap/mean": whole.mean, "rollout_gap/max": whole.largest}
    if len(kinds) > 1:
        metrics |= {f"rollout_gap/{kind}": gap.mean for kind, gap in kinds.items()}
    return metrics


def _warn_or_stop(
    beyond: Mapping[Group, Gap],
    groups: Mapping[Group, Gap],
    args: RolloutGRPOConfig,
    limit: float,
    shift: float,
    step: int,
) -> None:
    """Say which engines and rows have a gap that nothing explains, and what that points to; raise
    it with `--rollout_mismatch stop`."""
    names = [f"{engine} rows of {kind}".lstrip() for engine, kind in beyond]
    found = "; ".join(f"{n}: {gap}" for n, gap in zip(names, beyond.values(), strict=True))
    cause = (
        "Rollouts and training do not see the same weights or prompts, or choose other experts "
        "(--router_replay_mode R3)."
    )
    # The cause lies where all that disagrees has something in common that nothing else has.
    engines, kinds = ({group[i] for group in beyond} for i in (0, 1))
    if kinds < {kind for _, kind in groups}:
        cause = "Other rows agree: such media are read, placed or encoded otherwise on one side."
    elif engines < {engine for engine, _ in groups}:
        cause = (
            "Other engines agree: this one has other weights, or a cache of older ones. Restart "
            "it and resume from the last checkpoint."
        )
    settings = f", and the {shift:.3g} of the sampling settings" if 0 < shift < inf else ""
    text = (
        f"Step {step}: log-probabilities of the rollout and of training lie further apart than the "
        f"{limit:g} nats in the mean that rounding explains{settings}. {found}. {cause}"
    )
    if args.rollout_mismatch == "stop":
        raise DisagreementError(f"{text} --rollout_mismatch warn trains all the same.")
    logger.warning_once(text, hash_id=f"rollout_gap {names}")
