"""The collision test: were samples drawn with noise that they share? Pure.

**Null hypothesis.** Every sample of a round is drawn, token by token, from the distribution q(token
| prompt, tokens before) under which its log-probabilities are given, with noise that is independent
of the noise of every other sample, of this round and of earlier ones. Nothing is assumed about q.

**The bound.** Hold a sample Y against a completion y that is given. Let b bits be the surprisal,
-log2 q, of their longest common prefix. Then P(b >= c) <= 2^-c: along y, prefixes become less
probable, so there is one shortest prefix of y with q(prefix) <= 2^-c; b >= c only if Y begins with
it; and that has probability q(prefix). It holds

- under any temperature, top-k, top-p, min-p, penalty, grammar or mask, since q is what is left
  after them. Such a token as a grammar forces has probability 1 and adds 0 bits;
- for completions of any length: the end-of-sequence token is a token, and one that was cut off, by
  a limit or by a stop string, only has a prefix that is shorter;
- for y from another policy (an earlier round, other weights), since y is given and only Y is drawn
  anew. Of an earlier round's completions no log-probabilities are needed;
- for k samples and y: independent draws multiply, P <= 2^-(k c). So n samples that all share a
  prefix of b bits have probability <= 2^-((n - 1) b), any of them taken as given; their number of
  *coincidences* is e = n - 1, or e = n against a completion of an earlier round.

**Many pairs.** `log2_p` of a round is corrected by a weighted Bonferroni bound over all that the
round is searched for, so that a round of independent samples alarms with a probability below the
alarm level: *per round* (per batch, in evaluation). Over R rounds expect at most R times the level:
0.01 false alarms in 10,000 rounds at 1e-6. The shares of the level:

- half: *one improbable set*. All sets of n samples of one prompt, for each n, and all sets of n
  samples with one completion of an earlier round. Sets with e coincidences get the share 1/2 of it
  (e = 1: pairs) or 1 / (2 e (e - 1)), which add up to 1; with remembered completions the two
  families get half each. For pairs alone, p = 4 x (number of pairs) x 2^-b: 34 bits in a round of
  128 groups of 8 are an alarm at 1e-6.
- half: *many sets, none improbable alone*, as when a whole round is frozen and each sample has 10
  bits. Take the samples in the order of their places, and hold each against the D different
  completions of its prompt that came before, remembered ones included: p_i = min(1, D x 2^-b_i) is
  a p-value whatever came before, by the bound and the union over D. -2 x (sum of ln p_i) is then
  stochastically below chi-squared with 2 degrees of freedom for each sample (Fisher 1932;
  dependence on what came before does no harm, since each p_i is a p-value given it).

**Which log-probabilities.** They must be those of q. ms-swift 4.6 starts vLLM with
`logprobs_mode="processed_logprobs"`, colocated (rlhf_trainers/rollout_mixin.py) and as a server
(pipelines/infer/rollout.py): vLLM then takes the log-softmax after temperature, top-k and top-p
(v1/sample/ops/topk_topp_sampler.py), the grammar's mask and penalties being in the logits before.
Those of a vLLM before 0.10.2 are raw: a token that top-k makes certain would seem to carry bits.
Where samples share a prefix but disagree about its surprisal (kernels that depend on the batch;
replicas with other weights), the least counts.

**What it cannot see.**
- Greedy decoding: equal completions are then right, and vLLM's log-probabilities those of
  temperature 1. The caller says so (`monitor` reads the temperature), and nothing is tested.
- Completions without log-probabilities (`--use_vllm false`). They are counted, not tested. A token
  whose log-probability is missing or NaN adds 0 bits.
- Grammars of engines that mask after the log-probabilities are taken (vLLM 0.32 masks before).
- Shared noise of completions that are nearly certain: 8 samples of 3 bits look alike anyway. The
  table of `scripts/bench/results/diversity.md` says from how many bits on it sees what.
- That a prefix is shared on purpose, by a scheduler that branches one completion into several: it
  is called shared noise, which to the group it is.
- Noise shared between different prompts, or shared only after the completions have parted.
- Seeds that differ and give correlated noise, short of equal tokens.

Completions are compared to `MAX_PREFIX_TOKENS` tokens; longer ones can only hide bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from scipy.special import chdtrc, gammaln, logsumexp

from swift_grpo_ext.diversity.drawn import DrawnSample, Floats, Origin, surprisals
from swift_grpo_ext.diversity.memory import PromptMemory, Remembered
from swift_grpo_ext.diversity.prefixes import SharedPrefix, shared_prefixes

MAX_PREFIX_TOKENS = 4096
MAX_SHARINGS = 16
"""Kept of a round, the most improbable."""

Kind = Literal["shared", "frozen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Samples of one prompt that share a prefix, and how improbable that is."""

    kind: Kind
    """`shared`: samples of the round with each other; `frozen`: with an earlier round's."""

    samples: tuple[Origin, ...]
    """Of this round."""

    earlier: tuple[Origin, ...]
    """Of earlier rounds; empty unless `frozen`."""

    num_tokens: int
    """Of the common prefix."""

    bits: float
    """Its surprisal."""

    log2_p: float
    """Corrected for all that the round was searched for; above 0 where it proves nothing alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollisionTest:
    """What the test found in one round."""

    log2_p: float = 0.0
    """Of the round: of its most improbable sharing, or of all together; at most 0."""

    sharings: list[Sharing] = field(default_factory=list)
    """The most improbable first, none within another."""

    num_pairs: int = 0
    """Of samples of one prompt in the round."""

    num_earlier_pairs: int = 0
    """Of a sample and an earlier round's."""

    num_untested: int = 0
    """Samples without log-probabilities."""

    max_bits: float = 0.0
    """Surprisal of the least probable prefix that two samples of the round share."""

    @property
    def is_tested(self) -> bool:
        return self.num_pairs + self.num_earlier_pairs > 0


def collision_test(
    samples: Sequence[DrawnSample], memory: PromptMemory | None = None
) -> CollisionTest:
    """Test the samples of one round, all groups and ranks, against each other and the memory.

    Args:
        samples: of one round; those of equal prompts are held against each other, in one group or
            in several.
        memory: of earlier rounds; this round is not remembered here.
    """
    by_prompt: dict[str, list[DrawnSample]] = {}
    for sample in sorted(samples, key=lambda s: s.origin.sample_id):
        if sample.logprobs is not None:
            by_prompt.setdefault(sample.fingerprint, []).append(sample)
    prompts = [
        _Prompt(of_prompt, memory.earlier(fingerprint) if memory else [])
        for fingerprint, of_prompt in by_prompt.items()
    ]
    search = _Search([(len(p.samples), len(p.earlier)) for p in prompts])
    found = [sharing for prompt in prompts for sharing in prompt.sharings(search)]
    found.sort(key=lambda sharing: sharing.log2_p)
    together = log2_fisher([log2_p for prompt in prompts for log2_p in prompt.log2_ps()]) + 1
    telling = [sharing for sharing in found if sharing.log2_p < 0]
    return CollisionTest(
        log2_p=min([0.0, together, *(sharing.log2_p for sharing in found[:1])]),
        sharings=_outermost(telling or (found if together < 0 else [])),
        num_pairs=search.num_sets(1, "shared"),
        num_earlier_pairs=search.num_sets(1, "frozen"),
        num_untested=sum(sample.logprobs is None for sample in samples),
        max_bits=max((s.bits for s in found if len(s.samples) > 1), default=0.0),
    )


class _Search:
    """Everything that a round is searched for, and what each find is worth."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Sizes: of each prompt, how many samples, and how many that are remembered."""
        self._sizes = Counter(sizes)
        self._num_families = 2 if any(earlier for _, earlier in sizes) else 1
        self.log2_sets = cache(self._log2_sets)

    def log2_p(self, coincidences: int, bits: float, kind: Kind) -> float:
        """Corrected; may be above 0."""
        e = coincidences
        log2_share = -2.0 - np.log2(max(e * (e - 1), 1) * self._num_families)
        return float(self.log2_sets(e, kind) - e * bits - log2_share)

    def num_sets(self, coincidences: int, kind: Kind) -> int:
        return round(2.0 ** self.log2_sets(coincidences, kind))

    def _log2_sets(self, coincidences: int, kind: Kind) -> float:
        """log2 of the number of sets with so many coincidences, over all prompts."""
        size = coincidences + 1 if kind == "shared" else coincidences
        terms = [
            np.log(num_prompts * (1 if kind == "shared" else earlier)) + _log_binomial(n, size)
            for (n, earlier), num_prompts in self._sizes.items()
            if n >= size and (kind == "shared" or earlier)
        ]
        return float(logsumexp(terms) / np.log(2)) if terms else -np.inf


def _log_binomial(n: int, k: int) -> float:
    return float(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


class _Prompt:
    """The samples of a round that have one prompt, and what is remembered of it."""

    def __init__(self, samples: Sequence[DrawnSample], earlier: Sequence[Remembered]) -> None:
        self.samples = samples
        self.earlier = earlier
        self._tokens = [sample.token_ids[:MAX_PREFIX_TOKENS] for sample in samples]
        self._tokens += [kept.token_ids[:MAX_PREFIX_TOKENS] for kept in earlier]
        self._prefixes = list(shared_prefixes(self._tokens))
        longest = max((prefix.length for prefix in self._prefixes), default=0)
        self._bits = np.stack([_bits_to(sample, longest) for sample in samples])

    def sharings(self, search: _Search) -> Iterator[Sharing]:
        """Of each prefix that samples of the round share, what is most improbable about it."""
        for prefix in self._prefixes:
            if sharing := self._sharing(prefix, self._bits, search):
                yield sharing

    def log2_ps(self) -> list[float]:
        """Of each sample that has some before it, how improbable its longest prefix is that one of
        them has, whatever they are."""
        shared = np.zeros(len(self.samples), np.int64)
        for prefix in self._prefixes:  # inner ones, which are longer, first
            new = np.sort(prefix.members[prefix.members < len(self.samples)])
            if len(new) == len(prefix.members):
                new = new[1:]  # the first of them has none before it
            shared[new] = np.maximum(shared[new], prefix.length)
        before = {ids.tobytes() for ids in self._tokens[len(self.samples) :]}
        found = []
        for number in range(len(self.samples)):
            if before:
                bits = float(self._bits[number, shared[number]])
                found.append(min(0.0, float(np.log2(len(before))) - bits))
            before.add(self._tokens[number].tobytes())
        return found

    def _sharing(self, prefix: SharedPrefix, bits: Floats, search: _Search) -> Sharing | None:
        is_new = prefix.members < len(self.samples)
        new, old = prefix.members[is_new], prefix.members[~is_new] - len(self.samples)
        if not len(new):
            return None
        least = float(bits[new, prefix.length].min())
        claims: list[tuple[float, Kind]] = []
        if len(new) > 1:
            claims += [(search.log2_p(e, least, "shared"), "shared") for e in {1, len(new) - 1}]
        if len(old):
            claims += [(search.log2_p(e, least, "frozen"), "frozen") for e in {1, len(new)}]
        log2_p, kind = min(claims)
        return Sharing(
            kind=kind,
            samples=tuple(self.samples[i].origin for i in new),
            earlier=tuple(self.earlier[i].origin for i in old) if kind == "frozen" else (),
            num_tokens=prefix.length,
            bits=least,
            log2_p=log2_p,
        )


def _bits_to(sample: DrawnSample, longest: int) -> Floats:
    """Surprisal of each prefix, [longest + 1]; beyond the end, of the whole."""
    bits = np.cumsum(surprisals(sample)[:longest])
    return np.concatenate([[0.0], bits, np.full(longest - len(bits), bits[-1] if len(bits) else 0)])


def _outermost(found: Sequence[Sharing]) -> list[Sharing]:
    """The first `MAX_SHARINGS` whose samples are not all among those of one before."""
    kept: list[Sharing] = []
    for sharing in found[: 8 * MAX_SHARINGS]:
        members = {*sharing.samples, *sharing.earlier}
        if len(kept) == MAX_SHARINGS:
            break
        if not any(members <= {*other.samples, *other.earlier} for other in kept):
            kept.append(sharing)
    return kept


def log2_fisher(log2_ps: Sequence[float]) -> float:
    """Of p-values, each one whatever those before it are, the p-value together (Fisher 1932)."""
    freedom = 2.0 * len(log2_ps)
    statistic = -2.0 * float(np.log(2)) * sum(log2_ps)
    if statistic <= freedom:
        return 0.0
    exact = float(chdtrc(freedom, statistic))
    # Far out, Chernoff's bound: no float holds the tail itself.
    chernoff = freedom / 2 * np.log(statistic / freedom) + (freedom - statistic) / 2
    return float(np.log2(exact) if exact > 1e-250 else chernoff / np.log(2))


def format_p(log2_p: float) -> str:
    """2^log2_p as people write it, `3e-08`, also where a float cannot hold it."""
    log10 = log2_p * np.log10(2)
    exponent = int(np.floor(log10))
    mantissa = round(10 ** (log10 - exponent))
    if mantissa == 10:
        mantissa, exponent = 1, exponent + 1
    return f"{mantissa}e{exponent:+03d}" if exponent < -2 else f"{2.0**log2_p:.2g}"
