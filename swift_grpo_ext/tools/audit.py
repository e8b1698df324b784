"""`swift-grpo-ext audit FILE`: do rollouts that a framework dumped share noise? Pure.

**With log-probabilities and token ids**: the collision test (`collision`) of every step, against
earlier steps too. It needs the log-probabilities under which tokens were sampled, from the engine.

**Without**: equal completions may come from a policy that has collapsed. But samples of one prompt
are exchangeable: if their noise is independent, no position in a group is special. Two tests ask
whether it is, and assume nothing else:

- *shared*: given how many pairs of a group are equal, all pairs of positions are equally likely to
  be among them. Over groups, the number of equal pairs at positions (i, j) is then a sum of
  independent trials of known means, p on average over n groups; P(at least s) is at most
  exp(-n KL(s/n || p)) (Hoeffding 1963, theorem 1). Corrected for the number of pairs.
- *frozen*: a prompt that comes again. Given which samples of both groups are equal, all orders of
  the later group are equally likely. The number of k positions at which both have equal samples
  has the mean r_k (n - k)! / n!, r_k being the rook number of the equal pairs (Riordan, An
  Introduction to Combinatorial Analysis, 1958), so P(at least k) is at most that (Markov). Over
  prompts by Fisher's combination.

Noise that all samples of a group share looks like collapse to them: only log-probabilities tell.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from swift_grpo_ext.diversity.collision import PromptMemory, collision_test, format_p, log2_fisher
from swift_grpo_ext.diversity.sample import Sample, group_samples
from swift_grpo_ext.tools.dumps import Dump

COLLAPSED_SHARE = 0.1
"""Of groups with copies, from which on the verdict is collapse."""

Verdict = Literal["shared noise", "collapse", "healthy"]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was found."""

    verdict: Verdict
    num_steps: int
    num_groups: int
    """Of two samples or more."""

    num_samples: int
    num_with_logprobs: int
    num_groups_with_copies: int
    log10_p: float
    """Of the noise being independent, corrected for all that was looked at; at most 0."""

    evidence: list[str]
    """In words, the strongest first."""

    notes: list[str]


def audit(dump: Dump, alarm_p: float) -> Audit:
    """Test all steps; shared noise is a p-value below `alarm_p`."""
    groups = [[g for g in group_samples(step) if len(g) > 1] for step in dump.steps]
    flat = [group for of_step in groups for group in of_step]
    samples = [sample for step in dump.steps for sample in step]
    with_logprobs = sum(sample.logprobs is not None for sample in samples)
    copies = sum(len({_content(s) for s in group}) < len(group) for group in flat)
    notes = []
    if with_logprobs:
        found = _collisions(dump.steps)
    else:
        notes.append(
            "The files hold no log-probabilities with token ids: noise that all samples of a "
            "group share cannot be told from collapse (name columns with --logprobs and "
            "--token-ids)."
        )
        found = [_shared_positions(flat)]
        if dump.repeats_rows:
            notes.append("ms-swift repeats rows in this file: steps are not compared.")
        else:
            found.append(_frozen_positions(groups))
    found.sort()
    log2_p = min(0.0, found[0][0] + math.log2(len(found))) if found else 0.0
    is_shared = log2_p < math.log2(alarm_p)
    is_collapsed = bool(flat) and copies >= COLLAPSED_SHARE * len(flat)
    return Audit(
        verdict="shared noise" if is_shared else "collapse" if is_collapsed else "healthy",
        num_steps=len(dump.steps),
        num_groups=len(flat),
        num_samples=len(samples),
        num_with_logprobs=with_logprobs,
        num_groups_with_copies=copies,
        log10_p=log2_p * math.log10(2),
        evidence=[words for p, words in found if p < 0 and words][:5] if is_shared else [],
        notes=notes,
    )


def _content(sample: Sample) -> bytes:
    return sample.token_ids.tobytes()


def _collisions(steps: Sequence[Sequence[Sample]]) -> list[tuple[float, str]]:
    """log2 of each step's p-value, and its strongest evidence."""
    memory = PromptMemory()
    found = []
    for samples in steps:
        test = collision_test(samples, memory)
        memory.remember(samples)
        words = "many samples share improbable beginnings"
        if test.collisions:
            best = test.collisions[0]
            ids = [origin.sample_id for origin in best.samples]
            indices = ", ".join(str(name.index) for name in ids[:8])
            words = (
                f"samples {indices} of group {ids[0].group} begin with the same {best.num_tokens} "
                f"tokens, {best.bits:.0f} bits"
            )
            if best.earlier:
                words += f", as step {best.earlier[0].sample_id.step} had them (frozen noise)"
        step = samples[0].origin.sample_id.step
        found.append((test.log2_p, f"step {step} (counted from 0): {words}"))
    return found


def _shared_positions(groups: Sequence[Sequence[Sample]]) -> tuple[float, str]:
    """Whether equal samples of a group favour some pair of positions."""
    means: dict[tuple[int, int], float] = defaultdict(float)
    counts, sizes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for group in groups:
        pairs = list(combinations(range(len(group)), 2))
        equal = [(i, j) for i, j in pairs if _content(group[i]) == _content(group[j])]
        for pair in pairs:
            means[pair] += len(equal) / len(pairs)
        sizes.update(pairs)
        counts.update(equal)
    found = [(_log2_tail(s, means[pair], sizes[pair]), pair) for pair, s in counts.items()]
    if not found:
        return 0.0, ""
    log2_p, pair = min(found)
    return log2_p + math.log2(len(means)), (
        f"samples {pair[0]} and {pair[1]} of their groups are equal in {counts[pair]} groups, and "
        f"{means[pair]:.1f} were expected"
    )


def _log2_tail(count: int, mean: float, num_trials: int) -> float:
    """log2 of a bound of P(sum of independent trials >= count)."""
    if count <= mean:
        return 0.0
    share, expected = count / num_trials, mean / num_trials
    divergence = share * math.log(share / expected)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - expected))
    return -num_trials * divergence / math.log(2)


def _frozen_positions(steps: Sequence[Sequence[Sequence[Sample]]]) -> tuple[float, str]:
    """Whether samples repeat those of the prompt's last group at their own positions."""
    last: dict[str, Sequence[Sample]] = {}
    log2_ps: list[float] = []
    num_repeated = num_compared = 0
    for groups in steps:
        for group in groups:
            before = last.get(group[0].prompt_hash)
            if before is not None and len(before) == len(group):
                now, then = [[_content(s) for s in g] for g in (group, before)]
                fixed = sum(a == b for a, b in zip(now, then, strict=True))
                log2_ps.append(_log2_matching(then, now, fixed))
                num_repeated += fixed
                num_compared += len(group)
            last[group[0].prompt_hash] = group
    return log2_fisher(log2_ps), (
        f"{num_repeated} of {num_compared} samples are those that their prompt had at the same "
        "position the time before (frozen noise)"
    )


def _log2_matching(then: Sequence[bytes], now: Sequence[bytes], fixed: int) -> float:
    """log2 of a bound of P(at least `fixed` equal positions) over all orders of `now`."""
    n = len(now)
    rooks = np.array([1.0])
    for content in set(then) & set(now):
        a, b = then.count(content), now.count(content)
        block = [float(math.comb(a, k) * math.perm(b, k)) for k in range(min(a, b) + 1)]
        rooks = np.convolve(rooks, block)
    log_p = math.log(rooks[fixed]) + math.lgamma(n - fixed + 1) - math.lgamma(n + 1)
    return min(0.0, log_p / math.log(2))


def report(result: Audit, *, as_json: bool) -> str:
    """The findings as JSON, or in words."""
    if as_json:
        return json.dumps(asdict(result), indent=2)
    lines = [
        f"{result.num_samples:,} samples, {result.num_groups:,} groups, {result.num_steps:,} "
        f"steps; {result.num_with_logprobs:,} samples with log-probabilities",
        f"groups with equal completions: {result.num_groups_with_copies:,}",
        f"p-value of independent noise: {format_p(result.log10_p)}",
        f"verdict: {result.verdict}",
    ]
    return "\n".join([*lines, *(f"  {words}" for words in (*result.evidence, *result.notes))])
