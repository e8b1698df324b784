"""How much the samples of a group differ: the metrics of a round. Pure.

A metric of a round is the mean over its groups, where nothing else is said; those that compare
samples leave out groups of one sample, and are missing where no other group is left.

Cost is bounded. Metrics that compare completions token by token (distinct-n, edit similarity,
Self-BLEU, Vendi) read the first `MAX_TOKENS` tokens of each. Edit similarity takes `MAX_PAIRS`
pairs of a round at most, evenly spaced over the pairs of each group; Vendi the first
`MAX_VENDI_SAMPLES` samples of a group. Which ones never depends on chance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist
from sacrebleu.metrics.bleu import BLEU

from swift_grpo_ext.diversity.drawn import Group, Ints
from swift_grpo_ext.diversity.ngrams import NgramCounts, count_ngrams

MAX_TOKENS = 512
MAX_PAIRS = 4096
MAX_VENDI_SAMPLES = 128
MIN_PROMPTS = 4
BLEU_ORDER = 4
DISTINCT_ORDERS = (1, 2, 3)
VENDI_ORDERS = (1, 2)

Answer = Callable[[str], str]
T = TypeVar("T")


def round_metrics(groups: Sequence[Group], answer: Answer | None = None) -> dict[str, float]:
    """All metrics of a round, by name; what is not defined is left out.

    Args:
        groups: of one round, over all ranks; none is empty.
        answer: what of a text is its answer; `answer_of` if left out.
    """
    if not groups:
        return {}
    several = [group for group in groups if len(group) > 1]
    found: dict[str, float | None] = {
        "unique_ratio": unique_ratio(groups),
        "groups_with_duplicates": groups_with_duplicates(several),
        "copied_ratio": copied_ratio(groups),
        "common_mode": common_mode(groups),
        "distinct_answers": distinct_answers(groups, answer or answer_of),
        "length_spread": length_spread(several),
        "surprisal": surprisal(groups),
        "edit_similarity": edit_similarity(several),
    }
    counts = ngram_counts(groups)
    for order in DISTINCT_ORDERS:
        found[f"distinct_{order}"] = distinct_ngrams(groups, counts[order - 1])
    found["self_bleu"] = self_bleu(groups, counts)
    found["vendi"] = vendi_score(several)
    return {name: value for name, value in found.items() if value is not None}


# --- whole completions ---


def unique_ratio(groups: Sequence[Group]) -> float:
    """Different completions per sample.

    sum over groups of |{token ids}| / number of samples; 1/G (all equal) to 1 (all differ): higher
    is more diverse. Completions are equal when all their token ids are. Source: the "unique"
    fraction of Holtzman et al. 2020 (The Curious Case of Neural Text Degeneration), on completions.
    """
    return sum(map(num_distinct, groups)) / sum(map(len, groups))


def groups_with_duplicates(groups: Sequence[Group]) -> float | None:
    """Share of groups in which at least two completions are equal, token by token.

    0 to 1: lower is more diverse. Groups of one sample do not count. Source: this project.
    """
    return _mean(float(num_distinct(group) < len(group)) for group in groups)


def copied_ratio(groups: Sequence[Group]) -> float:
    """Samples that repeat another of their group, per sample that could.

    sum of (G - distinct) / sum of (G - 1); 0 (all differ) to 1 (each group is one completion);
    0 where all groups hold one sample. Source: this project; `unique_ratio` freed of G.
    """
    could = sum(len(group) - 1 for group in groups)
    return sum(len(group) - num_distinct(group) for group in groups) / could if could else 0.0


def common_mode(groups: Sequence[Group]) -> float:
    """Share of prompts whose most frequent completion is one and the same.

    0 to 1: lower is more diverse; 1 is a policy that no longer looks at its prompt. A completion
    that comes once is no prompt's most frequent one. Of a prompt's groups the first counts; 0 for
    fewer than `MIN_PROMPTS` prompts. Source: this project.
    """
    first_groups = {group[0].fingerprint: group for group in reversed(groups)}
    if len(first_groups) < MIN_PROMPTS:
        return 0.0
    modes: Counter[bytes] = Counter()
    for group in first_groups.values():
        mode, count = Counter(s.token_ids.tobytes() for s in group).most_common(1)[0]
        modes[mode] += count > 1
    return max(modes.values()) / len(first_groups)


def num_distinct(group: Group) -> int:
    """Different completions in a group, by token ids."""
    return len({sample.token_ids.tobytes() for sample in group})


def distinct_answers(groups: Sequence[Group], answer: Answer) -> float:
    """Different answers in a group, however they are worded around; the mean over groups.

    1 to G: higher is more diverse. Source: the answer clusters of Wang et al. 2023
    (Self-Consistency).
    """
    return float(np.mean([len({answer(sample.text) for sample in group}) for group in groups]))


def answer_of(text: str) -> str:
    """The content of the last `<answer>..</answer>`, else of the last `\\boxed{..}`, else all of
    the text; stripped."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    start = text.rfind(r"\boxed{")
    if start < 0:
        return text.strip()
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return text[start:].strip()  # cut off


def length_spread(groups: Sequence[Group]) -> float | None:
    """Standard deviation of the lengths in a group (population), in tokens; the mean over groups.

    0 upward: higher is more diverse. Source: the standard deviation itself.
    """
    return _mean(float(np.std([len(sample.token_ids) for sample in group])) for group in groups)


def surprisal(groups: Sequence[Group]) -> float | None:
    """Mean of -ln q(token) over all sampled tokens of the round, in nats.

    q is the distribution that the tokens were sampled from, so that this estimates its entropy per
    token (Shannon 1948). 0 upward: higher is more diverse. Tokens of unknown log-probability do not
    count; None where all are unknown.
    """
    known = [s.logprobs for group in groups for s in group if s.logprobs is not None]
    flat = np.concatenate([np.zeros(0, np.float32), *known])
    flat = flat[np.isfinite(flat)]
    return -float(np.mean(flat, dtype=np.float64)) if len(flat) else None


# --- token by token ---


def edit_similarity(groups: Sequence[Group]) -> float | None:
    """Mean over pairs of a group of 1 - Levenshtein(a, b) / max(|a|, |b|), on token ids.

    0 (nothing in common) to 1 (all equal): lower is more diverse; two empty completions are equal.
    Source: Levenshtein 1966, normalized as in rapidfuzz.
    """
    limit = max(MAX_PAIRS // max(len(groups), 1), 1)
    means = []
    for group in groups:
        strings = [as_string(sample.token_ids[:MAX_TOKENS]) for sample in group]
        pairs = evenly(list(combinations(strings, 2)), limit)
        left, right = zip(*pairs, strict=True)
        similarities = cpdist(left, right, scorer=Levenshtein.normalized_similarity, workers=1)
        means.append(float(np.mean(similarities)))
    return _mean(means)


def as_string(token_ids: Ints) -> str:
    """Token ids as a string of as many characters, which rapidfuzz compares fastest."""
    ids = np.asarray(token_ids, np.uint32)
    # Above Unicode's end, which no vocabulary reaches, ids fold; surrogates are characters here.
    return (ids % 0x110000).astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def evenly(items: Sequence[T], limit: int) -> Sequence[T]:
    """At most `limit` items, evenly spaced, in their order."""
    if len(items) <= limit:
        return items
    return [items[number * len(items) // limit] for number in range(limit)]


def ngram_counts(groups: Sequence[Group]) -> list[NgramCounts]:
    """For n = 1 to 4, over the samples of all groups in their order."""
    tokens = [sample.token_ids[:MAX_TOKENS] for group in groups for sample in group]
    group_of = [number for number, group in enumerate(groups) for _ in group]
    return list(count_ngrams(tokens, group_of, BLEU_ORDER))


def distinct_ngrams(groups: Sequence[Group], counts: NgramCounts) -> float | None:
    """distinct-n: different n-grams of a group / n-grams of the group; the mean over groups.

    Above 0 to 1: higher is more diverse; falls with length. Groups without any n-gram do not count.
    Source: Li et al. 2016 (A Diversity-Promoting Objective Function), over a group's samples.
    """
    distinct = counts.distinct_of_groups(len(groups))
    totals = np.bincount(counts.group_of, counts.totals(), len(groups))
    return _mean(distinct[totals > 0] / totals[totals > 0])


def self_bleu(groups: Sequence[Group], counts: Sequence[NgramCounts]) -> float | None:
    """Self-BLEU: BLEU-4 of each sample with the rest of its group as references; the mean over
    samples, on token ids.

    0 to 1: lower is more diverse. Source: Zhu et al. 2018 (Texygen); BLEU as sacrebleu's
    `sentence_score` computes it (exponential smoothing, effective order; closest reference length),
    over 1.
    """
    matches = np.stack([c.clipped_matches() for c in counts], axis=1).astype(int)
    totals = np.stack([c.totals() for c in counts], axis=1)
    scores: list[float] = []
    start = 0
    for group in groups:
        lengths = np.array([min(len(sample.token_ids), MAX_TOKENS) for sample in group])
        for number in range(len(group) if len(group) > 1 else 0):
            bleu = BLEU.compute_bleu(
                matches[start + number].tolist(),
                totals[start + number].tolist(),
                sys_len=int(lengths[number]),
                ref_len=closest_length(np.delete(lengths, number), int(lengths[number])),
                smooth_method="exp",
                effective_order=True,
            )
            scores.append(bleu.score / 100)
        start += len(group)
    return _mean(scores)


def closest_length(references: Ints, length: int) -> int:
    """The reference length that is closest to `length`; the shorter of two."""
    return int(min(references, key=lambda other: (abs(other - length), other)))


def vendi_score(groups: Sequence[Group]) -> float | None:
    """Vendi score: the effective number of different samples; the mean over groups.

    exp(-sum of x ln x) over the eigenvalues x of K / G, with K[i, j] the cosine similarity of the
    samples' n-gram counts, averaged over n = 1 and 2. 1 (all equal) to G (nothing in common):
    higher is more diverse. Source: Friedman and Dieng 2023 (The Vendi Score), with the n-gram
    kernel that they use on text.
    """
    groups = [group[:MAX_VENDI_SAMPLES] for group in groups]
    tokens = [sample.token_ids[:MAX_TOKENS] for group in groups for sample in group]
    group_of = [number for number, group in enumerate(groups) for _ in group]
    vectors = [c.unit_vectors() for c in count_ngrams(tokens, group_of, max(VENDI_ORDERS))]
    scores, start = [], 0
    for group in groups:
        rows = [v[start : start + len(group)] for v in vectors]
        kernel = sum((r @ r.T).toarray() for r in rows) / len(rows)
        eigenvalues = np.linalg.eigvalsh(kernel / len(group))
        eigenvalues = eigenvalues[eigenvalues > 1e-12]
        scores.append(float(np.exp(-np.sum(eigenvalues * np.log(eigenvalues)))))
        start += len(group)
    return _mean(scores)


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None
