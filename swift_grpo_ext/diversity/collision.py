"""The collision test: were samples drawn with shared noise? Pure.

**Null hypothesis.** Every sample is drawn, token by token, from the distribution q(token | prompt,
earlier tokens) under which its log-probabilities are given, with noise independent of the noise of
every other sample, of this round and of earlier ones. Nothing is assumed about q.

**The bound.** Compare a sample Y with a given completion y. Let b be the surprisal, -log2 q in
bits, of their longest common prefix. Then P(b >= c) <= 2^-c: one shortest prefix of y has q(prefix)
<= 2^-c, and b >= c only if Y begins with it, which has probability q(prefix). The bound holds under
any temperature, top-k, top-p, penalty, grammar or mask, since q is what is left after them; for
completions of any length, since the end of a sequence is a token; and for y from another policy (an
earlier round, other weights), since only Y is drawn again. For k samples and y, P <= 2^-(k c). So n
samples that all share a prefix of b bits have probability <= 2^-((n - 1) b). Their number of
*coincidences* is e = n - 1, or e = n against a completion of an earlier round.

**Many pairs.** A weighted Bonferroni bound over all comparisons corrects the `log2_p` of a round:
R rounds of independent samples give at most R times the alarm level of alarms.

- Half of the level: *one improbable set* of n samples of one prompt, or of n samples with one
  completion of an earlier round. Sets with e coincidences get the share 1/2 of it (e = 1: pairs) or
  1 / (2 e (e - 1)); the shares add up to 1. With remembered completions each of the two families
  gets half. For pairs alone, p = 4 x (number of pairs) x 2^-b: 34 bits in a round of 128 groups of
  8 are an alarm at 1e-6.
- The other half: *many sets, none improbable alone*, as when a whole round is frozen and each
  sample has 10 bits. Compare each sample, in the order of their ids, with the D different
  completions of its prompt that came before, remembered ones included: p_i = min(1, D x 2^-b_i) is
  a p-value given all that came before, so Fisher's method (1932) may combine them.

**Which log-probabilities.** The test needs those of q. ms-swift 4.6 starts vLLM with
`processed_logprobs` (rlhf_trainers/rollout_mixin.py), which come after temperature, top-k, top-p,
mask and penalties. If samples disagree about the surprisal of a prefix that they share (kernels
that depend on the batch; replicas with other weights), the least counts.

**What it cannot see.** With greedy decoding, equal completions are right. Completions without
log-probabilities (`--use_vllm false`) are counted, not tested. Nearly certain completions prove
nothing: 8 samples of 3 bits look alike anyway (scripts/bench/results/diversity.md). The test misses
noise that different prompts share, and noise that is shared only after the completions differ. If a
scheduler branches one completion into several on purpose, the test reports shared noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import pairwise
from math import comb, log, log2
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy  # its modules load when they are used: the page needs none (31 MB)
from cachetools import LRUCache
from numpy.typing import NDArray

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]

MAX_PREFIX_TOKENS = 4096  # compared of a completion; the rest could only add coincidences
MAX_COLLISIONS = 16  # that a round keeps: the most improbable ones
MAX_BYTES = 64 * 2**20  # for earlier rounds: 13,000 samples with beginnings of 1,000 tokens
BYTES_OF_SAMPLE = 1000  # of a remembered sample beside its tokens
MAX_PER_PROMPT = 64  # samples that are remembered
MAX_KEPT_BITS = 96.0  # of a remembered sample; 2^-96 is 1e-29, an alarm among any number of pairs

Kind = Literal["shared", "frozen"]


def known_logprobs(row: SampleRow) -> Floats | None:
    """Return log-probabilities, [tokens] float32, NaN where unknown; None if all are unknown or
    their number differs from that of the tokens."""
    if row.logprobs is None or len(row.logprobs) != len(row.token_ids):
        return None
    logprobs = np.asarray(row.logprobs, np.float32)  # None becomes NaN
    return None if len(logprobs) and np.isnan(logprobs).all() else logprobs


def surprisal_bits(row: SampleRow) -> Floats:
    """Return the surprisal of each token, -log2 q, [tokens] float64, at least 0."""
    # Impossible values (missing, NaN, minus infinity, above 0) add nothing: a sum that is too large
    # could be a false alarm.
    logprobs = known_logprobs(row)
    if logprobs is None:
        return np.zeros(len(row.token_ids))
    bits = logprobs.astype(np.float64) / -np.log(2)
    return np.where(np.isfinite(bits), np.maximum(bits, 0.0), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collision:
    """Samples of one prompt that share a prefix, with its p-value."""

    kind: Kind  # `shared`: within this round; `frozen`: with an earlier round
    samples: tuple[SampleRow, ...]  # of this round
    earlier: tuple[SampleRow, ...]  # of earlier rounds; empty unless `frozen`
    num_tokens: int  # of the common prefix
    bits: float  # of surprisal, of the common prefix
    log2_p: float  # corrected for all comparisons; above 0 if it alone proves nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class CollisionTest:
    """The test's result for one round."""

    log2_p: float = 0.0  # of the most improbable collision, or of all together if that is less
    # The most improbable first; no collision has only samples of another one.
    collisions: list[Collision] = field(default_factory=list)
    num_pairs: int = 0  # of samples of one prompt in the round
    num_earlier_pairs: int = 0  # of a sample and a remembered one
    num_untested: int = 0  # samples without log-probabilities
    max_bits: float = 0.0  # of the least probable prefix that two samples of the round share


def collision_test(
    samples: Sequence[SampleRow], memory: PromptMemory | None = None
) -> CollisionTest:
    """Test the samples of one round. Samples of one prompt, in any of its groups, are compared with
    each other and with `memory`, which does not change."""
    by_prompt: dict[str, list[SampleRow]] = {}
    for sample in sorted(samples, key=lambda s: s.sample_id):
        if known_logprobs(sample) is not None:
            by_prompt.setdefault(sample.fingerprint, []).append(sample)
    prompts = [
        _PromptSamples(own, memory.earlier(fingerprint) if memory else [])
        for fingerprint, own in by_prompt.items()
    ]
    correction = Correction([(len(p.samples), len(p.earlier)) for p in prompts])
    collisions = [collision for prompt in prompts for collision in prompt.collisions(correction)]
    collisions.sort(key=lambda collision: collision.log2_p)
    log2_p = min([0.0, *(collision.log2_p for collision in collisions[:1])])
    fisher_log2_p = log2_fisher([p for prompt in prompts for p in prompt.sample_log2_ps()]) + 1
    named: dict[frozenset[SampleId], Collision] = {}
    for collision in collisions:
        # Keep improbable collisions; if only all together are improbable, keep all.
        is_evidence = collision.log2_p < 0 or (log2_p == 0 and fisher_log2_p < 0)
        if not is_evidence or len(named) == MAX_COLLISIONS:
            break
        members = frozenset(s.sample_id for s in (*collision.samples, *collision.earlier))
        if not any(members <= others for others in named):
            named[members] = collision
    return CollisionTest(
        log2_p=min(log2_p, fisher_log2_p),
        collisions=[*named.values()],
        num_pairs=correction.num_sets(1, "shared"),
        num_earlier_pairs=correction.num_sets(1, "frozen"),
        num_untested=len(samples) - sum(map(len, by_prompt.values())),
        max_bits=max((c.bits for c in collisions if len(c.samples) > 1), default=0.0),
    )


class PromptMemory:
    """Keeps the beginnings of earlier rounds' completions by prompt, to detect frozen noise.
    Prompts that were used least recently are dropped first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._prompts: LRUCache[str, list[SampleRow]] = LRUCache(
            max_bytes,
            getsizeof=lambda kept: sum(BYTES_OF_SAMPLE + 4 * len(s.token_ids) for s in kept),
        )

    def earlier(self, fingerprint: str) -> list[SampleRow]:
        """Return the kept completions of a prompt, oldest first."""
        return self._prompts.get(fingerprint, [])

    def remember(self, samples: Iterable[SampleRow]) -> None:
        """Keep the samples of a round that is over."""
        by_prompt: dict[str, list[SampleRow]] = {}
        for sample in samples:
            bits = np.cumsum(surprisal_bits(sample)[:MAX_PREFIX_TOKENS])
            end = min(int(np.searchsorted(bits, MAX_KEPT_BITS)) + 1, MAX_PREFIX_TOKENS)
            beginning: Any = np.array(sample.token_ids[:end], np.int32)  # a copy
            kept = replace(sample, token_ids=beginning, logprobs=None, mask=None, text="")
            kept = replace(kept, prompt="", media=(), pictures=None, columns=None)
            by_prompt.setdefault(sample.fingerprint, []).append(kept)
        for fingerprint, new in by_prompt.items():
            self._prompts[fingerprint] = [*self.earlier(fingerprint), *new][-MAX_PER_PROMPT:]


class Correction:
    """The weighted Bonferroni correction. `sizes` has the number of samples of each prompt, and the
    number of its remembered samples."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self._sizes = Counter(sizes)
        self._num_families = 2 if any(earlier for _, earlier in sizes) else 1

    def log2_p(self, e: int, bits: float, kind: Kind) -> float:
        """Return log2 of the corrected p-value of a set with e coincidences; may be above 0."""
        log2_share = -2.0 - log2(max(e * (e - 1), 1) * self._num_families)
        return log2(self.num_sets(e, kind)) - e * bits - log2_share

    def num_sets(self, e: int, kind: Kind) -> int:
        return sum(
            num_prompts * (comb(n, e + 1) if kind == "shared" else comb(n, e) * earlier)
            for (n, earlier), num_prompts in self._sizes.items()
        )


class _PromptSamples:
    """The samples of a round that have the same prompt, and the remembered ones."""

    def __init__(self, samples: Sequence[SampleRow], earlier: Sequence[SampleRow]) -> None:
        self.samples, self.earlier = samples, earlier
        self._tokens = [
            np.asarray(s.token_ids[:MAX_PREFIX_TOKENS], np.int32) for s in (*samples, *earlier)
        ]
        self._prefixes = list(shared_prefixes(self._tokens))
        longest = max((prefix.length for prefix in self._prefixes), default=0)
        # By sample, the surprisal of each of its prefixes, from the empty one on.
        self._bits = [
            np.cumsum(np.append(0.0, surprisal_bits(sample)[:longest])) for sample in samples
        ]

    def collisions(self, correction: Correction) -> Iterator[Collision]:
        """Yield the most improbable set of each shared prefix."""
        for prefix in self._prefixes:
            is_new = prefix.members < len(self.samples)
            new, old = prefix.members[is_new], prefix.members[~is_new] - len(self.samples)
            if not len(new):
                continue
            least = min(float(self._bits[i][prefix.length]) for i in new)
            # Try one coincidence, and all of them: with groups of one size log2 p is concave in
            # their number, as binomials are, so its minimum is at one end.
            sizes: list[tuple[Kind, int]] = [("frozen", e) for e in {1, len(new)} if len(old)]
            sizes += [("shared", e) for e in {1, len(new) - 1} if len(new) > 1]
            log2_p, kind = min((correction.log2_p(e, least, kind), kind) for kind, e in sizes)
            yield Collision(
                kind=kind,
                samples=tuple(self.samples[i] for i in new),
                earlier=tuple(self.earlier[i] for i in old) if kind == "frozen" else (),
                num_tokens=prefix.length,
                bits=least,
                log2_p=log2_p,
            )

    def sample_log2_ps(self) -> list[float]:
        """Return log2 of p_i (see the module) of each sample that has earlier ones."""
        shared = np.zeros(len(self.samples), np.int64)
        for prefix in self._prefixes:  # longer ones, which are inner, come first
            new = np.sort(prefix.members[prefix.members < len(self.samples)])
            if len(new) == len(prefix.members):
                new = new[1:]  # no other came before the first
            shared[new] = np.maximum(shared[new], prefix.length)
        before = {ids.tobytes() for ids in self._tokens[len(self.samples) :]}
        log2_ps = []
        for number in range(len(self.samples)):
            if before:
                bits = float(self._bits[number][shared[number]])
                log2_ps.append(min(0.0, log2(len(before)) - bits))
            before.add(self._tokens[number].tobytes())
        return log2_ps


def log2_fisher(log2_ps: Sequence[float]) -> float:
    """Return log2 of Fisher's combination (1932) of n p-values, each valid given those before it.
    It is the probability that a Poisson variable of mean -(sum of ln p) is below n, or
    P(chi-squared with 2 n degrees of freedom >= -2 x sum of ln p)."""
    mean = -log(2) * sum(log2_ps)
    if mean <= len(log2_ps):
        return 0.0
    ks = np.arange(len(log2_ps))
    # No float holds the tail: sum in logarithms.
    # As `scipy.stats.poisson.logpmf`; that module takes 60 MB and two seconds to import.
    logpmf = scipy.special.xlogy(ks, mean) - scipy.special.gammaln(ks + 1) - mean
    return float(scipy.special.logsumexp(logpmf) / log(2))


def format_p(log10_p: float) -> str:
    """Write 10^log10_p as `3.2e-8`, also if a float cannot hold it."""
    return f"{Decimal(10) ** Decimal(log10_p):.2g}"


# --- sequences that share prefixes: the inner nodes of their trie ---


class SharedPrefix(NamedTuple):
    """A prefix, and all sequences (two or more) that begin with it; they share no longer one."""

    members: Ints  # indices of the sequences
    length: int  # of the prefix in tokens, 1 or more


def shared_prefixes(sequences: Sequence[Ints]) -> Iterator[SharedPrefix]:
    """Yield each longest prefix that two or more sequences share, inner (longer) ones first."""
    # Sorting brings these sequences next to each other: only neighbours are compared.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    lengths = []
    for a, b in pairwise(order):
        num_compared = min(len(sequences[a]), len(sequences[b]))
        is_equal = sequences[a][:num_compared] == sequences[b][:num_compared]
        lengths.append(int(np.append(is_equal, False).argmin()))
    members = np.array(order, np.int64)
    is_open: list[tuple[int, int]] = []  # a prefix's length, and the first member that has it
    for number, length in enumerate([*lengths, 0]):
        first = number
        while is_open and is_open[-1][0] > length:
            closed, first = is_open.pop()
            yield SharedPrefix(members[first : number + 1], closed)
        if length > (is_open[-1][0] if is_open else 0):
            is_open.append((length, first))
