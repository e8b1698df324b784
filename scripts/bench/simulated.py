"""Simulated policies for the collision test: random Markov chains, sampled as vLLM samples.

A policy has a random row of logits for each token that may stand before. Sampling divides them by
the temperature and takes top-k and top-p away, and the log-probabilities are those of what is left,
as `logprobs_mode="processed_logprobs"` gives them, in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_grpo_ext.diversity.sample import Origin, Sample
from swift_grpo_ext.sampling.seeding import SampleId

VOCABULARY = 128
END = 0

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """It says how tokens are sampled from logits."""

    temperature: float = 1.0
    top_k: int = 0
    """0: all."""

    top_p: float = 1.0


def random_logits(rng: np.random.Generator, scale: float, end_rate: float) -> Array:
    """Draw logits, [token before, token]: the larger `scale`, the lower the entropy."""
    logits = rng.normal(size=(VOCABULARY, VOCABULARY)) * scale
    others = np.log(np.exp(logits[:, 1:]).sum(axis=1))
    logits[:, END] = others + np.log(end_rate / (1 - end_rate)) if end_rate else -np.inf
    return logits


def probabilities(logits: Array, sampling: Sampling) -> Array:
    """Return what tokens are sampled from, [token before, token]."""
    scaled = logits / sampling.temperature
    p = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    kept = np.cumsum(ranked, axis=1) - ranked < sampling.top_p
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    p[np.arange(len(p))[:, None], order] = np.where(kept, ranked, 0.0)
    return p / p.sum(axis=1, keepdims=True)


def entropy_per_token(p: Array) -> float:
    """Return the bits in the long run of the chain (its stationary mean)."""
    state = np.full(len(p), 1 / len(p))
    for _ in range(100):
        state = state @ p
    logs = np.log2(p, where=p > 0, out=np.zeros_like(p))
    return float(-(state @ (p * logs).sum(axis=1)))


def draw(p: Array, noise: Array, prompts: Array) -> tuple[list[Array], list[Array]]:
    """Draw completions with log-probabilities; equal noise and prompt give equal completions.

    Args:
        p: [token before, token].
        noise: [samples, tokens], uniform: a sample's noise is all that its seed decides.
        prompts: [samples], the token that each completion follows.
    """
    cumulative = np.cumsum(p, axis=1)
    num_samples, length = noise.shape
    ids = np.empty((num_samples, length), np.int32)
    before = prompts
    for step in range(length):
        target = noise[:, step, None] * cumulative[before, -1:]
        before = np.minimum((cumulative[before] <= target).sum(axis=1), VOCABULARY - 1)
        ids[:, step] = before
    previous = np.concatenate([prompts[:, None], ids[:, :-1]], axis=1)
    logprobs = np.log(p[previous, ids]).astype(np.float32)
    has_end = (ids == END).any(axis=1)
    ends = np.where(has_end, (ids == END).argmax(axis=1) + 1, length)
    rows = range(num_samples)
    return [ids[i, : ends[i]] for i in rows], [logprobs[i, : ends[i]] for i in rows]


def make_round(p: Array, noise: Array, group_size: int, step: int) -> list[Sample]:
    """Make a round of groups; group g has prompt g, in every round."""
    groups = np.arange(len(noise)) // group_size
    ids, logprobs = draw(p, noise, 1 + groups % (VOCABULARY - 1))
    return [
        Sample(
            origin=Origin(
                sample_id=SampleId(
                    phase="train",
                    step=step,
                    number=0,
                    group=int(group),
                    index=number % group_size,
                ),
                seed=None,
                rank=0,
                replica="",
            ),
            prompt_hash=f"{group}",
            token_ids=ids[number],
            logprobs=logprobs[number],
            text="",
        )
        for number, group in enumerate(groups)
    ]
