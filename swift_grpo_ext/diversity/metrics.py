"""Measures how much the samples of a group differ, and how much the correct ones differ. Pure.

A metric of a round is the mean over its groups, unless its docstring says otherwise. Metrics that
compare samples leave out groups of one sample, and are missing if no other group is left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from typing import Any, TypeVar

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist
from sacrebleu.metrics.bleu import BLEU
from scipy import sparse

from swift_grpo_ext.diversity.collision import Ints, known_logprobs
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

# ms-swift's accuracy rewards (`rewards/orm.py`) give 1.0 for a right answer and 0.0 for a wrong
# one; with format rewards beside them, a right answer's sum is at least as high.
CORRECT_REWARD = 1.0

# Distinct-n, edit similarity, Self-BLEU and Vendi compare completions token by token: they read
# groups, evenly spaced over the round, of about this many samples in all, and the beginnings of
# groups and samples. 10,240 samples of 1,000 tokens then take 0.5 CPU-seconds
# (scripts/bench/results/diversity.md). Nothing is chosen at random.
MAX_COMPARED_SAMPLES = 1024
MAX_GROUP_SAMPLES = 128
MAX_TOKENS = 512
MAX_PAIRS = 4096  # of a round's edit similarity
MIN_PROMPTS = 4  # of `common_mode`: two or three may well share one right answer
BLEU_ORDER = 4

Group = Sequence[SampleRow]  # the samples of one prompt's occurrence in a round
Scores = Mapping[SampleId, float]  # rewards by sample, of turn 0
T = TypeVar("T")


def group_samples(samples: Iterable[SampleRow]) -> list[list[SampleRow]]:
    """Sort the samples of any rounds into groups, by sample id. Each turn is a group of its own."""
    # Ranks that share a sequence hold the same samples.
    unique = {sample.sample_id: sample for sample in samples}
    groups: dict[tuple[Any, ...], list[SampleRow]] = {}
    for name in sorted(unique):
        groups.setdefault((*name.round, name.group, name.turn), []).append(unique[name])
    return [*groups.values()]


def round_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return all metrics of a round by name, without undefined ones."""
    completions = [Counter(map(token_bytes, group)) for group in groups]
    compared = compared_tokens(groups)
    several = [tokens for tokens in compared if len(tokens) > 1]
    max_pairs = MAX_PAIRS // max(len(several), 1)
    counts = [list(ngram_counts(tokens)) for tokens in compared]
    counts_of_several = [group for group in counts if group[0].shape[0] > 1]
    metrics = {
        "unique_ratio": unique_ratio(completions),
        "groups_with_duplicates": groups_with_duplicates(completions),
        "copied_ratio": copied_ratio(completions),
        "common_mode": common_mode(groups, completions),
        "distinct_answers": mean(map(distinct_answers, groups)),
        "length_spread": mean(length_spread(group) for group in groups if len(group) > 1),
        "surprisal": surprisal(groups),
        "distinct_1": mean(distinct_ngrams(group[0]) for group in counts if group[0].nnz),
        "distinct_2": mean(distinct_ngrams(group[1]) for group in counts if group[1].nnz),
        "distinct_3": mean(distinct_ngrams(group[2]) for group in counts if group[2].nnz),
        "edit_similarity": mean(edit_similarity(tokens, max_pairs) for tokens in several),
        "self_bleu": mean(score for group in counts_of_several for score in self_bleu(group)),
        "vendi": mean(map(vendi_score, counts_of_several)),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def outcome_metrics(groups: Sequence[Group], scores: Scores) -> dict[str, float]:
    """Return the metrics that need rewards by name, without undefined ones. A sample is correct if
    its reward is `CORRECT_REWARD` or more. All turns of a conversation are one sample, with the
    last turn's text and tokens. Samples without a score are left out.

    - `pass_at_1`, `pass_at_2`, `pass_at_4` ...: the chance that one of k samples is correct.
    - `equal_rewards`: the share of groups with equal rewards, from which GRPO learns nothing.
      Groups of one sample do not count.
    - `solved`: the share of groups with equal rewards in which all samples are correct.
    - `correct_answers`, `correct_vendi`: `distinct_answers` and `vendi_score` of the correct
      samples of a group. Groups without a correct sample do not count; one correct sample counts 1.
    """
    in_order = sorted((s for group in groups for s in group), key=lambda s: s.sample_id.turn)
    last_turns = {replace(sample.sample_id, turn=0): sample for sample in in_order}
    scored = sorted(last_turns.keys() & scores.keys())
    by_group = [list(names) for _, names in groupby(scored, key=lambda name: name.group)]
    rewards = [[scores[name] for name in names] for names in by_group]
    correct = [[last_turns[n] for n in names if scores[n] >= CORRECT_REWARD] for names in by_group]
    some_correct = [group for group in correct if group]
    metrics = {
        "equal_rewards": mean(float(min(r) == max(r)) for r in rewards if len(r) > 1),
        "solved": mean(float(is_solved(r)) for r in rewards if len(r) > 1),
        "correct_answers": mean(map(distinct_answers, some_correct)),
        "correct_vendi": mean(
            vendi_score(list(ngram_counts(tokens))) if len(tokens) > 1 else 1.0
            for tokens in compared_tokens(some_correct)
        ),
    }
    largest = max(map(len, rewards), default=0)
    for k in (2**power for power in range(largest.bit_length())):
        counts = ((len(r), len(c)) for r, c in zip(rewards, correct, strict=True))
        metrics[f"pass_at_{k}"] = mean(pass_at_k(n, c, k) for n, c in counts if n >= k)
    return {name: value for name, value in metrics.items() if value is not None}


def is_solved(rewards: Sequence[float]) -> bool:
    return CORRECT_REWARD <= min(rewards, default=0.0) == max(rewards, default=0.0)


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


# --- whole completions; `completions` counts each group's different ones, as bytes


def token_bytes(sample: SampleRow) -> bytes:
    """Return the token ids as bytes, which can be hashed."""
    return np.asarray(sample.token_ids, np.int32).tobytes()


def unique_ratio(completions: Sequence[Counter[bytes]]) -> float:
    """Return the different completions per sample of the round, by token ids. 1/G (all equal) to 1:
    higher is more diverse. Source: the "unique" fraction of Holtzman et al. 2020 (The Curious Case
    of Neural Text Degeneration), on completions."""
    return sum(map(len, completions)) / sum(group.total() for group in completions)


def groups_with_duplicates(completions: Sequence[Counter[bytes]]) -> float | None:
    """Return the share of groups with two equal completions; groups of one sample do not count. 0
    to 1: lower is more diverse. Source: this project."""
    return mean(float(len(group) < group.total()) for group in completions if group.total() > 1)


def copied_ratio(completions: Sequence[Counter[bytes]]) -> float:
    """Return the share of samples that repeat another of their group, among those that could: sum
    of (G - distinct) / sum of (G - 1). 0 (all differ) to 1 (each group is one completion); 0 if all
    groups have one sample. Source: this project; it is `unique_ratio` without its dependence on G.
    """
    could = sum(group.total() - 1 for group in completions)
    return sum(group.total() - len(group) for group in completions) / could if could else 0.0


def common_mode(groups: Sequence[Group], completions: Sequence[Counter[bytes]]) -> float:
    """Return the share of prompts with the same most frequent completion, which occurs twice or
    more. 0 to 1: lower is more diverse; at 1 the policy ignores its prompt. The first group of a
    prompt counts; 0 for fewer than `MIN_PROMPTS` prompts. Source: this project."""
    by_prompt: dict[str, Counter[bytes]] = {}
    for group, counter in zip(groups, completions, strict=True):
        by_prompt.setdefault(group[0].fingerprint, counter)
    if len(by_prompt) < MIN_PROMPTS:
        return 0.0
    modes = [counter.most_common(1)[0] for counter in by_prompt.values()]
    frequent = Counter(completion for completion, count in modes if count > 1)
    return max(frequent.values(), default=0) / len(by_prompt)


def distinct_answers(group: Group) -> float:
    """Return the number of different answers (`extract_answer`) in a group. 1 to G: higher is more
    diverse. Source: the answer clusters of Wang et al. 2023 (Self-Consistency)."""
    return float(len({extract_answer(sample.text) for sample in group}))


def extract_answer(text: str) -> str:
    """Return the content of the last `<answer>..</answer>`, else of the last `\\boxed{..}`, else
    the whole text, stripped."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    _, boxed, content = text.rpartition(r"\boxed{")
    depth = 1
    for end, character in enumerate(content if boxed else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[:end].strip()
    return content.strip()  # without a box, or with one that was cut off


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that one of k samples is correct, if c of n are: 1 - C(n - c, k) /
    C(n, k). Unbiased for n independent samples, n >= k. Source: Chen et al. 2021 (Evaluating Large
    Language Models Trained on Code), equation 1, as the product that they compute."""
    return float(1 - np.prod(1 - k / np.arange(n - c + 1, n + 1))) if n - c >= k else 1.0


def length_spread(group: Group) -> float:
    """Return the population standard deviation of the lengths in a group, in tokens. 0 upward:
    higher is more diverse."""
    return float(np.std([len(sample.token_ids) for sample in group]))


def surprisal(groups: Sequence[Group]) -> float | None:
    """Return the mean of -ln q(token) over all sampled tokens of the round, in nats. It estimates
    the entropy per token of q, the distribution that they were sampled from (Shannon 1948). 0
    upward: higher is more diverse. Unknown log-probabilities do not count; None if all are unknown.
    """
    logprobs = [known_logprobs(sample) for group in groups for sample in group]
    flat = np.concatenate([np.zeros(0, np.float32), *(lp for lp in logprobs if lp is not None)])
    flat = flat[np.isfinite(flat)]
    return -float(np.mean(flat, dtype=np.float64)) if len(flat) else None


# --- token by token; `counts` are those of `ngram_counts`


def compared_tokens(groups: Sequence[Group]) -> list[list[Ints]]:
    """Return the token ids that are compared, by group and sample (`MAX_COMPARED_SAMPLES`)."""
    num_samples = max(sum(min(len(group), MAX_GROUP_SAMPLES) for group in groups), 1)
    return [
        [np.asarray(s.token_ids[:MAX_TOKENS], np.int32) for s in group[:MAX_GROUP_SAMPLES]]
        for group in evenly_spaced(groups, MAX_COMPARED_SAMPLES * len(groups) // num_samples)
    ]


def evenly_spaced(items: Sequence[T], limit: int) -> list[T]:
    count = min(limit, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def edit_similarity(tokens: Sequence[Ints], max_pairs: int) -> float:
    """Return 1 - Levenshtein(a, b) / max(|a|, |b|) on token ids, the mean over pairs of a group; 1
    for two empty completions. 0 (nothing in common) to 1 (all equal): lower is more diverse.
    Source: Levenshtein 1966, normalized as in rapidfuzz."""
    pairs = evenly_spaced(list(combinations([ids.tolist() for ids in tokens], 2)), max_pairs)
    left, right = zip(*pairs, strict=True)
    # One worker: the training needs the other cores.
    return float(np.mean(cpdist(left, right, scorer=Levenshtein.normalized_similarity, workers=1)))


def ngram_counts(tokens: Sequence[Ints]) -> Iterator[sparse.csc_array]:
    """Yield the counts of a group's n-grams of token ids, for n = 1 to 4: [samples, different
    n-grams]."""
    owner = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
    vocabulary, digits = np.unique(np.concatenate(tokens), return_inverse=True)
    # An n-gram is a number of n digits; 64 bits hold 4, since a group has 2^16 tokens at most.
    digits = digits.astype(np.uint64)
    numbers = digits
    for order in range(1, BLEU_ORDER + 1):
        if order > 1:
            numbers = numbers[:-1] * np.uint64(len(vocabulary)) + digits[order - 1 :]
        first = owner[: len(numbers)]
        is_whole = first == owner[order - 1 :]  # all in one sample
        different, column = np.unique(numbers[is_whole], return_inverse=True)
        shape = (len(tokens), len(different))
        yield sparse.csc_array((np.ones(len(column), np.int64), (first[is_whole], column)), shape)


def distinct_ngrams(counts: sparse.csc_array) -> float:
    """Return distinct-n: different n-grams of a group / n-grams of the group. Above 0 to 1: higher
    is more diverse; falls with length. Groups without any n-gram do not count. Source: Li et al.
    2016 (A Diversity-Promoting Objective Function), over a group's samples."""
    return float(counts.shape[1] / counts.sum())


def self_bleu(counts: Sequence[sparse.csc_array]) -> Iterator[float]:
    """Yield Self-BLEU: BLEU-4 of each sample with the rest of its group as references, on token
    ids. A round has the mean over samples. 0 to 1: lower is more diverse. Source: Zhu et al. 2018
    (Texygen); BLEU as sacrebleu's `sentence_score` computes it (exponential smoothing, effective
    order; closest reference length), over 1."""
    matches = np.stack([clipped_matches(c) for c in counts], axis=1)
    totals = np.stack([c.sum(axis=1) for c in counts], axis=1)
    lengths = totals[:, 0]
    for number, length in enumerate(lengths.tolist()):
        others = np.delete(lengths, number).tolist()
        yield BLEU.compute_bleu(
            matches[number].tolist(),
            totals[number].tolist(),
            sys_len=length,
            ref_len=min(others, key=lambda other: (abs(other - length), other)),
            smooth_method="exp",
            effective_order=True,  # for samples with fewer than 4 tokens
        ).score / 100  # fmt: skip


def clipped_matches(counts: sparse.csc_array) -> Ints:
    """Return the number of each sample's n-grams that another one has too, [samples]: BLEU's
    clipped count with the rest of the group as references (Papineni et al. 2002)."""
    # The most that a sample has of each n-gram, a column, and the most that any other one has.
    sizes = np.diff(counts.indptr)
    column = np.repeat(np.arange(len(sizes)), sizes)
    ordered = counts.data[np.lexsort((counts.data, column))]
    last = counts.indptr[1:] - 1
    most, second = ordered[last], np.where(sizes > 1, ordered[last - 1], 0)
    others = np.where(counts.data == most[column], second[column], most[column])
    clipped = np.minimum(counts.data, others)
    return np.bincount(counts.indices, clipped, counts.shape[0]).astype(np.int64)


def vendi_score(counts: Sequence[sparse.csc_array]) -> float:
    """Return the Vendi score, the effective number of different samples of a group: exp(-sum of x
    ln x) over the eigenvalues x of K / G. K[i, j] is the cosine similarity of the samples' n-gram
    counts, averaged over n = 1 and 2; samples without n-grams are alike. 1 (all equal) to G
    (nothing in common): higher is more diverse. Source: Friedman and Dieng 2023 (The Vendi Score),
    with the n-gram kernel that they use on text."""
    kernels = []
    for ngrams in counts[:2]:
        products = (ngrams @ ngrams.T).toarray()
        is_empty = products.diagonal() == 0  # shorter than the n-grams
        products += np.outer(is_empty, is_empty)
        norms = np.sqrt(products.diagonal())
        kernels.append(products / np.outer(norms, norms))
    eigenvalues = np.linalg.eigvalsh(np.mean(kernels, axis=0) / len(kernels[0]))
    eigenvalues = eigenvalues[eigenvalues > 1e-12]  # 0 but for rounding, where x ln x is 0
    return float(np.exp(-np.sum(eigenvalues * np.log(eigenvalues))))
