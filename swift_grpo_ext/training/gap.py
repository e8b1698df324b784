"""Checks the gap between log-probabilities of rollout and training at equal weights.

The first training pass over a round uses the weights that generated it. Each token therefore tests
whether its engine samples from the trainer's weights (M4), and whether both sides see the same row
(M5). Engines and kinds of rows are checked one by one: a fault of one would vanish in the mean.

`gap_limit` suits all models, and is too wide for some engines that see images wrongly in 16 bits:
without M-RoPE's height and width the tiny Qwen2.5-VL has a gap of 0.01 to 0.04 nats, and the limit
is 0.125. GRPO's first rounds without a GPU therefore also measure how far rounding moves their own
tokens. Rows with media are compared with rows of text, and each engine with the others
(`unlike_their_peers`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import exp, inf, isfinite, log, sqrt
from statistics import fmean, median, variance
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy  # its modules load when they are used
import torch
from swift.utils import get_logger

from swift_grpo_ext.training.group import DisagreementError, kind_of_row

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.rollout.sample import RolloutSample
    from swift_grpo_ext.sampling.seeding import SampleId

logger = get_logger()

Source = tuple[str, str]  # an engine's name and a kind of row

# `rounding_noise` measures how far rounding moves log-probabilities. A gap may be
# `ROUNDINGS` times that, and more for few tokens. In 5,000 samples of healthy tokens for each of
# four models in bfloat16, the largest gap was 0.7 of this bound.
ROUNDINGS, FEW = 1.5, 256
LEAST = 0.001  # nats; kernels approximate exponentials (1.4e-4 nats on the CPU in float32)

# Some rows may have `TIMES` the gap of their peers, both divided by their rounding. Healthy rows
# with media have 1.0 to 1.3 times that of text (the noise leaves out the vision tower). Student's t
# over groups adds a margin, which chance exceeds once in 100,000 comparisons. Gaps below `CLEAR`
# are not compared: `LEAST`, which each gap and rounding gets, would decide their ratio.
TIMES, CHANCE = 1.5, 1e-5
CLEAR = 5 * LEAST

UNITS = "each in units of its rounding"

SPIKES = 32  # slack for outliers: the mean of N tokens may exceed the limit by 32 / N limits

# In the first rounds after a start or a resume, any gap beyond its bound ends the run. Later a gap
# must also exceed `FAR` bounds, or `JUMP` times the median of the run's earlier rounds.
NUM_EARLY = 2
FAR, JUMP = 4.0, 8.0
MAX_HISTORY = 100

# Nats by which `--top_k`, `--min_p` and `--repetition_penalty` may shift the mean, if they keep
# e^-2 = 14% of the distribution. With these settings a single wrong tensor goes unnoticed (a
# transposed one shifts the mean by 0.23 nats in the tiny model).
CUT_OFF = 2.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences of tokens' log-probabilities, in nats."""

    total: float = 0.0  # sum of absolute differences
    count: int = 0  # of tokens
    largest: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def __str__(self) -> str:
        return (
            f"{self.mean:.3g} nats in the mean of {self.count} tokens, {self.largest:.3g} at most"
        )

    def __add__(self, other: Gap) -> Gap:
        largest = float(np.maximum(self.largest, other.largest))  # keeps NaN
        return Gap(self.total + other.total, self.count + other.count, largest)


@dataclass(frozen=True, slots=True)
class BoundedGap:
    """The gap of some tokens, and how far rounding moves their training log-probabilities."""

    gap: Gap = field(default_factory=Gap)
    rounding: Gap = field(default_factory=Gap)  # of no tokens if it was not measured

    def __add__(self, other: BoundedGap) -> BoundedGap:
        return BoundedGap(self.gap + other.gap, self.rounding + other.rounding)

    @property
    def excess(self) -> float:
        """The logarithm of the gap in units of its rounding."""
        return log((self.gap.mean + LEAST) / (self.rounding.mean + LEAST))

    @property
    def bound(self) -> float:
        """The mean gap, in nats, that rounding explains; infinite if rounding was not measured."""
        if not self.rounding.count:
            return inf
        return max(ROUNDINGS * (1 + FEW / max(self.gap.count, 1)) * self.rounding.mean, LEAST)


def gaps_between(
    rollout_BT: torch.Tensor, training_BT: torch.Tensor, mask_BT: torch.Tensor
) -> list[Gap]:
    """Return each sample's gap over the tokens where `mask_BT` is true."""
    if not mask_BT.numel():  # `amax` raises for rows without columns
        return [Gap()] * len(mask_BT)
    # Not multiplied by the mask: padding may hold NaN, and NaN * 0 is NaN.
    difference = (training_BT - rollout_BT).abs().float().masked_fill(~mask_BT, 0)
    # One stack: a single transfer from the device.
    columns = difference.sum(1), mask_BT.sum(1).float(), difference.amax(1)
    return [Gap(total, int(count), most) for total, count, most in torch.stack(columns, 1).tolist()]


def gap_limit(bits: int, temperature: float = 1.0) -> float:
    """Return the mean gap, in nats, that imprecision cannot explain. `bits` is the size of the less
    precise side's numbers."""
    # Large models have logits around 2^4. bfloat16 (8 significant bits) has steps of 2^-3 there:
    # the limit is one step. float32 has steps of 2^-19: the limit has a wide margin for kernels
    # that sum in other orders. E4M3 (arXiv:2209.05433) has 4 significant bits: the limit is 2^4
    # times that of bfloat16.
    limit = 0.01 if bits > 16 else 0.125 if bits == 16 else 2.0
    # The temperature divides logits and their rounding errors; above 1 the limit stays as it is.
    return limit / min(temperature or 1.0, 1.0)


def sampling_shift(args: RolloutGRPOConfig) -> float:
    """Return the mean gap, in nats, that the sampling settings explain."""
    # vLLM reports log-probabilities of the distribution that it samples from. Settings that keep a
    # share p of the distribution add -log(p) to each. No bound is known for the share of
    # `--top_k 1`, a grammar, or settings left to the model (None). `--async_generate` samples with
    # older weights.
    is_unbounded = (
        args.async_generate
        or args.structured_outputs_regex
        or args.top_k == 1
        or None in (args.top_p, args.top_k, args.min_p, args.repetition_penalty)
    )
    if is_unbounded:
        return inf
    # `--top_p` keeps at least that share; what the other settings keep depends on the model.
    shift = -log(args.top_p) if 0 < args.top_p < 1 else 0.0
    if args.top_k > 1 or args.min_p or args.repetition_penalty != 1:
        shift += CUT_OFF
    return shift


class SampleGap(NamedTuple):
    """The gap of one sample."""

    name: SampleId
    source: Source
    gap: BoundedGap


def measure_gap(
    micro_batches: Sequence[tuple[Sequence[RolloutSample], GRPOBatch]],
    rounded: Sequence[torch.Tensor] = (),
) -> list[SampleGap]:
    """Return the gaps of this rank's samples. `rounded` has, for each micro-batch, the training
    log-probabilities [B, T] with other rounding, or is empty."""
    measured = []
    for (samples, batch), other in zip_longest(micro_batches, rounded):
        rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
        # ms-swift sets None with `--use_vllm false`, or if one sample of the batch lacks them.
        if rollout is None or training is None:
            continue
        mask = batch.completion_mask.bool()
        gaps = gaps_between(rollout, training, mask)
        roundings = [Gap()] * len(gaps) if other is None else gaps_between(other, training, mask)
        for sample, *pair in zip(samples, gaps, roundings, strict=True):
            source = str((sample.rollout_infos or {}).get("replica", "")), kind_of_row(sample)
            measured.append(SampleGap(sample.sample_id, source, BoundedGap(*pair)))
    return measured


class GapCheck:
    """Compares the gap of each engine and each kind of row with the gap that rounding and sampling
    settings explain (M4, M5). All ranks call it with the same values.

    A wrong setup shows in the first rounds. Later a policy may drift: a mixture of experts comes
    close to the limit, and must not end a training of days.
    """

    def __init__(self, args: RolloutGRPOConfig, limit: float) -> None:
        self._args, self._limit, self._shift = args, limit, sampling_shift(args)
        self._num_rounds = 0  # of training, since the start or a resume
        self._means = defaultdict[Source, deque[float]](lambda: deque(maxlen=MAX_HISTORY))

    @property
    def is_early(self) -> bool:
        """Return whether the run is in its first rounds since the start or a resume."""
        return self._num_rounds < NUM_EARLY

    def check(
        self, gaps: Sequence[SampleGap], step: int, *, is_training: bool = True
    ) -> dict[str, float]:
        """Return the metrics of a round by name. `gaps` has the samples of all ranks.

        Raises:
            DisagreementError: a gap is too large, with `--rollout_mismatch stop`.
        """
        by_source = defaultdict[Source, BoundedGap](BoundedGap)
        by_kind = defaultdict[str, Gap](Gap)
        for _, (engine, kind), bounded in gaps:
            by_source[engine, kind] += bounded
            by_kind[kind] += bounded.gap
        whole = sum(by_kind.values(), Gap())
        is_early = self.is_early
        self._num_rounds += is_training
        if not whole.count:
            return {}
        beyond, shift = dict[Source, str](), self._shift
        # Logits are divided by the temperature, and errors of their kernels with them.
        least = LEAST / min(self._args.temperature or 1.0, 1.0)
        settings = f", {shift:.3g} of it by sampling settings" if 0 < shift < inf else ""
        for source, bounded in by_source.items():
            bound = min(self._limit_of(bounded.gap), max(bounded.bound, least))
            # `not <=` also catches NaN, which `>` would let pass.
            if not bounded.gap.mean <= bound:
                beyond[source] = f"{bound:.3g} explained{settings}"
        beyond = unlike_their_peers(gaps) | beyond
        if beyond:
            gap_of = {s: b.gap for s, b in by_source.items()}
            self._report(step, beyond, gap_of, is_early=is_early)
        elif outliers := [s for s in gaps if s.gap.gap.mean > self._limit_of(s.gap.gap)]:
            name, (_, kind), bounded = max(outliers, key=lambda each: each.gap.gap.mean)
            logger.warning_once(
                f"Step {step}: the log-probabilities of a sample differ more between rollout and "
                f"training than rounding explains: {name} ({kind}): {bounded.gap}. Either both "
                "sides see different rows, or numbers overflow.",
                hash_id="sample_gap",
            )
        for source, bounded in by_source.items():
            self._means[source].append(bounded.gap.mean)
        metrics = {"rollout_gap/mean": whole.mean, "rollout_gap/max": whole.largest}
        if len(by_kind) > 1:
            metrics |= {f"rollout_gap/{kind}": gap.mean for kind, gap in by_kind.items()}
        return metrics

    def _limit_of(self, gap: Gap) -> float:
        """Return the mean gap, in nats, that rounding and sampling settings explain in any
        model."""
        # In 16 bits, the choice of another expert moves a token by whole nats.
        return self._limit * (1 + SPIKES / max(gap.count, 1)) + self._shift

    def _median(self, source: Source) -> float:
        return median(self._means[source]) if self._means[source] else inf

    def _report(
        self,
        step: int,
        beyond: Mapping[Source, str],
        gaps: Mapping[Source, Gap],
        *,
        is_early: bool,
    ) -> None:
        found = "; ".join(
            f"{engine} rows of {kind}: {gaps[engine, kind]} ({why})".lstrip()
            for (engine, kind), why in beyond.items()
        )
        text = (
            f"Step {step}: log-probabilities of the rollout and of training differ by more than "
            f"rounding explains. {found}. {likely_cause(beyond, gaps)}"
        )
        ends = is_early or any(
            not gaps[s].mean <= min(FAR * self._limit_of(gaps[s]), JUMP * self._median(s))
            for s in beyond
        )
        if ends and self._args.rollout_mismatch == "stop":
            raise DisagreementError(f"{text} --rollout_mismatch warn trains anyway.")
        before = [f"{self._median(s):.3g}" for s in beyond if self._means[s]]
        trend = f" Before, it was {', '.join(before)} nats in the median." if before else ""
        logger.warning_once(f"{text}{trend}", hash_id=f"rollout_gap {[*beyond]}")


def unlike_their_peers(gaps: Sequence[SampleGap]) -> dict[Source, str]:
    """Return the sources with larger gaps than their peers, relative to rounding, and by how much.
    The peers of an engine's rows with media are its rows of text; the peers of any rows are those
    of the same kind in the other engines."""
    excesses: dict[Source, dict[SampleId, list[float]]] = defaultdict(lambda: defaultdict(list))
    gap_of = defaultdict[Source, Gap](Gap)
    for name, source, bounded in gaps:
        gap_of[source] += bounded.gap
        if bounded.rounding.count and isfinite(bounded.rounding.mean):
            excesses[source][name.group_id].append(bounded.excess)
    # Samples of a group share a prompt, and are not independent.
    means = {s: [fmean(group) for group in groups.values()] for s, groups in excesses.items()}
    found = {}
    for (engine, kind), own in means.items():
        if gap_of[engine, kind].mean < CLEAR:
            continue
        others = [v for (e, k), of in means.items() if k == kind and e != engine for v in of]
        if (times := least_ratio(own, others)) > TIMES:
            found[engine, kind] = f"at least {times:.2g} times that of other engines, {UNITS}"
        text = means.get((engine, "text"))
        if kind == "text" or not text:
            continue
        media = [v for (e, k), of in means.items() if e == engine and k != "text" for v in of]
        times = least_ratio(own, text)
        # Few prompts of one kind prove little: all media are compared together, too. A kind far
        # below their mean is left out.
        if fmean(own) > max(fmean(text) + log(TIMES), fmean(media) - log(TIMES)):
            times = max(times, least_ratio(media, text))
        if times > TIMES:
            found[engine, kind] = f"at least {times:.2g} times that of rows of text, {UNITS}"
    return found


def least_ratio(own: Sequence[float], peers: Sequence[float]) -> float:
    """Return a lower bound of the ratio of two geometric means, from logarithms; 0 if unknown. By
    chance it is above the true ratio once in `1 / CHANCE` comparisons."""
    freedom = len(own) + len(peers) - 2
    if min(len(own), len(peers)) < 2:
        return 0.0
    pooled = ((len(own) - 1) * variance(own) + (len(peers) - 1) * variance(peers)) / freedom
    # A small part may scatter more than the pooled variance says.
    own_error = max(pooled, variance(own)) / len(own)
    error = sqrt(own_error + max(pooled, variance(peers)) / len(peers))
    quantile = float(scipy.special.stdtrit(freedom, 1 - CHANCE))
    return exp(fmean(own) - fmean(peers) - quantile * error)


def likely_cause(beyond: Collection[Source], sources: Collection[Source]) -> str:
    """Describe the likely cause: a kind of row that is beyond its bound in each engine, or some of
    the engines."""
    engines, kinds = ({source[i] for source in beyond} for i in (0, 1))
    is_every_engine = all(source in beyond for source in sources if source[1] in kinds)
    if is_every_engine and len(beyond) < len(sources):
        return "Other rows agree: one side reads, places or encodes such rows differently."
    if engines < {engine for engine, _ in sources}:
        return (
            "Other engines agree: this one has other weights, or a cache of older ones. Restart "
            "it and resume from the last checkpoint."
        )
    return (
        "Rollouts and training do not see the same weights or prompts, or choose other experts "
        "(--router_replay_mode R3)."
    )
