"""Measure calibration, power and cost of the collision test, and the cost of the metrics.

    python scripts/bench/diversity.py >scripts/bench/results/diversity.md
    python scripts/bench/diversity.py --cost-only >>scripts/bench/results/diversity.md

Policies are simulated by random logits of 128 tokens at each position, with 0.01 to 6 bits for each
token. Sampling follows vLLM with `logprobs_mode="processed_logprobs"`: temperature, top-k and
top-p, then float32 log-probabilities of the remaining tokens. It takes minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from common import command, environment, markdown
from numpy.typing import NDArray
from record import make_sample
from tqdm import tqdm

from swift_grpo_ext.diversity.collision import CollisionTest, PromptMemory, collision_test
from swift_grpo_ext.diversity.metrics import group_samples, outcome_metrics, round_metrics
from swift_grpo_ext.record.tables import SampleRow

VOCABULARY = 128
END = 0

LEVELS = (0.5, 0.1, 1e-2, 1e-3, 1e-6)
ALARM_P = 1e-6
GROUP_SIZES = (2, 4, 8, 16, 64)
LENGTHS = (4, 32, 256)
NUM_POLICIES = 5000
ROUNDS_OF_POLICY = 4
REGIMES = ("below 0.1", "0.1 to 1", "1 to 3", "above 3")

POWER_BITS = (0.1, 0.3, 1.0, 3.0)
POWER_LENGTHS = (8, 32, 128, 512)
POWER_ROUNDS = 30
POWER_GROUPS = 16
POWER_GROUP_SIZE = 8

COST_CASES = (
    (10_240, 1000, 8, False),
    (10_240, 1000, 64, False),
    (1024, 2048, 8, False),
    (1024, 2048, 8, True),
    (1024, 2048, 64, False),
    (1024, 2048, 1024, False),
    (64, 32_768, 8, False),
    (64, 8, 8, False),
)
"""Samples, tokens of each, samples of a group, and whether all have the same tokens."""

Array = NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cost-only", action="store_true", help="print only the costs (a minute)")
    options = parser.parse_args()
    env = environment()
    if not options.cost_only:
        print("# The collision test: calibration, power, cost\n")
    print(f"`{command()}`, {env['date']}, {env['cores']} cores of {env['cpu']}, ", end="")
    print(f"Python {env['python']}.\n")
    print(cost() if options.cost_only else f"{calibration()}\n\n{power()}\n")


# --- simulated policies ---


def random_logits(rng: np.random.Generator, length: int, scale: float, end_rate: float) -> Array:
    """Draw logits [position, token]; a larger `scale` lowers the entropy."""
    logits = rng.normal(size=(length, VOCABULARY)) * scale
    others = np.log(np.exp(logits[:, 1:]).sum(axis=1))
    logits[:, END] = others + np.log(end_rate / (1 - end_rate)) if end_rate else -np.inf
    return logits


def probabilities(logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Array:
    """Return the sampling distribution [position, token]; a `top_k` of 0 keeps all tokens."""
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    kept = np.cumsum(ranked, axis=1) - ranked < top_p
    if top_k:
        kept[:, top_k:] = False
    p[np.arange(len(p))[:, None], order] = np.where(kept, ranked, 0.0)
    return p / p.sum(axis=1, keepdims=True)


def entropy_per_token(p: Array) -> float:
    """Return the mean entropy over positions, in bits."""
    logs = np.log2(p, where=p > 0, out=np.zeros_like(p))
    return float(-(p * logs).sum(axis=1).mean())


def make_round(p: Array, noise: Array, group_size: int, step: int) -> list[SampleRow]:
    """Make a round in which group g has prompt g.

    Args:
        p: sampling distribution [position, token].
        noise: uniform random numbers [sample, position]; samples with equal noise are equal.
    """
    cumulative = np.cumsum(p, axis=1)
    columns = (np.searchsorted(c, noise[:, t] * c[-1], "right") for t, c in enumerate(cumulative))
    ids = np.minimum(np.stack(list(columns), axis=1), VOCABULARY - 1).astype(np.int32)
    logprobs = np.log(p[np.arange(len(p)), ids]).astype(np.float32)
    ends = np.where((ids == END).any(axis=1), (ids == END).argmax(axis=1) + 1, len(p))
    rng, samples = np.random.default_rng(step), []
    for number, end in enumerate(ends):
        completion = (ids[number, :end], logprobs[number, :end], "")
        samples.append(make_sample(rng, step, number, completion, group_size))
    return samples


# --- healthy rounds, and faults ---


def calibration() -> str:
    """Return a table of the number of healthy rounds with a p-value below each level."""
    p_values: dict[str, list[float]] = {kind: [] for kind in ("all", *REGIMES)}
    for seed in tqdm(np.random.SeedSequence(0).spawn(NUM_POLICIES), "Healthy"):
        for regime, log2_p in healthy_rounds(seed):
            p_values["all"].append(log2_p)
            p_values[regime].append(log2_p)
    rows = []
    for kind, values in p_values.items():
        below = [str((np.array(values) < np.log2(level)).sum()) for level in LEVELS]
        label = kind if kind == "all" else f"{kind} bits a token"
        rows.append([label, str(len(values)), *below])
    head = ["rounds", "number", *(f"below {level:g}" for level in LEVELS)]
    return (
        "## False alarms\n\nNumber of healthy rounds with a p-value below each level. Each policy "
        f"changes a little between its {ROUNDS_OF_POLICY} rounds, which are compared with each "
        "other. The bound is level x rounds; completions are discrete, so the test stays below "
        f"it.\n\n{markdown(head, rows)}"
    )


def healthy_rounds(seed: np.random.SeedSequence) -> list[tuple[str, float]]:
    """Return regime and log2 of the p-value of a few rounds of one slowly changing policy."""
    rng = np.random.default_rng(seed)
    group_size, length = int(rng.choice(GROUP_SIZES)), int(rng.choice(LENGTHS))
    num_groups = int(rng.integers(1, max(128 // group_size, 1) + 1))
    scale, end_rate = np.exp(rng.uniform(-1, 3.5)), rng.choice([0.0, 0.02, 0.2])
    logits = random_logits(rng, length, scale, end_rate)
    temperature = float(rng.choice([0.3, 0.7, 1.0, 1.5]))
    top_k = int(rng.choice([0, 1, 5, 20])) if rng.random() < 0.5 else 0
    top_p = float(rng.choice([1.0, 0.95, 0.7]))
    memory, results = PromptMemory(), []
    for step in range(ROUNDS_OF_POLICY):
        p = probabilities(logits, temperature, top_k, top_p)
        noise = rng.random((num_groups * group_size, length))
        samples = make_round(p, noise, group_size, step)
        test = collision_test(samples, memory)
        memory.remember(samples)
        regime = REGIMES[int(np.searchsorted([0.1, 1.0, 3.0], entropy_per_token(p), "right"))]
        results.append((regime, test.log2_p))
        logits = logits + rng.normal(size=logits.shape) * 0.05
    return results


def power() -> str:
    """Return a table of how often the test detects each fault."""
    rows: list[Sequence[str]] = []
    head: list[str] = []
    for bits, length in tqdm(list(product(POWER_BITS, POWER_LENGTHS)), "Faults"):
        rng = np.random.default_rng([POWER_GROUP_SIZE, int(bits * 10), length])
        p = policy_with_entropy(rng, length, bits)
        alarms: dict[str, list[bool]] = {}
        for _ in range(POWER_ROUNDS):
            for fault, test in faulty_tests(rng, p, length).items():
                alarms.setdefault(fault, []).append(test.log2_p < np.log2(ALARM_P))
        head = ["bits a token", "tokens", *alarms]
        shares = (f"{np.mean(values):.0%}" for values in alarms.values())
        rows.append([f"{entropy_per_token(p):.2g}", str(length), *shares])
    return (
        f"## Power\n\nShare of rounds of {POWER_GROUPS} groups of {POWER_GROUP_SIZE} with an alarm "
        f"(p < {ALARM_P:g}). *One pair*: two samples of one group share their noise. *Two "
        "replicas, one seed*: the second half of each group copies the first. *Whole groups*: all "
        "samples of a group share their noise. *Frozen*: the round repeats the noise of the round "
        f"before, with the same weights.\n\n{markdown(head, rows)}"
    )


def policy_with_entropy(rng: np.random.Generator, length: int, bits: float) -> Array:
    """Return a policy with `bits` of entropy for each token, by a search for the temperature."""
    logits, low, high = random_logits(rng, length, 1.0, 0.0), 0.01, 10.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        p = probabilities(logits, middle)
        low, high = (middle, high) if entropy_per_token(p) < bits else (low, middle)
    return p


def faulty_tests(rng: np.random.Generator, p: Array, length: int) -> dict[str, CollisionTest]:
    """Test one round with each fault."""
    healthy = rng.random((POWER_GROUPS * POWER_GROUP_SIZE, length))
    one_pair = healthy.copy()
    one_pair[1] = one_pair[0]
    replicas = healthy.reshape(POWER_GROUPS, 2, POWER_GROUP_SIZE // 2, length).copy()
    replicas[:, 1] = replicas[:, 0]
    copies = np.repeat(healthy[::POWER_GROUP_SIZE], POWER_GROUP_SIZE, axis=0)
    make = partial(make_round, p, group_size=POWER_GROUP_SIZE)
    memory = PromptMemory()
    memory.remember(make(noise=healthy, step=0))
    return {
        "one pair": collision_test(make(noise=one_pair, step=1)),
        "two replicas, one seed": collision_test(make(noise=replicas.reshape(-1, length), step=1)),
        "whole groups": collision_test(make(noise=copies, step=1)),
        "frozen": collision_test(make(noise=healthy, step=1), memory),
    }


# --- cost ---


def random_rows(
    rng: np.random.Generator, num_samples: int, length: int, group_size: int, step: int
) -> list[SampleRow]:
    """Make rows of the record with token ids of Zipf's distribution."""
    rows = []
    for number in range(num_samples):
        ids = (rng.zipf(1.3, length) % 50_000).astype(np.int32)
        text = f"{'so it must be ' * (length // 8)}<answer>{number % 7}</answer>"
        completion = (ids, -rng.exponential(0.5, length).astype(np.float32), text)
        rows.append(make_sample(rng, step, number, completion, group_size))
    return rows


def cost() -> str:
    rows = []
    seconds: dict[str, float] = {}
    for samples, tokens, group_size, same in COST_CASES:
        seconds = measure_cost(samples, tokens, group_size, same)
        case = (str(samples), str(tokens), f"{group_size}{', copies' if same else ''}")
        rows.append([*case, *(f"{value:.3f}" for value in seconds.values())])
    table = markdown(["samples", "tokens", "G", *seconds], rows)
    return f"## Cost\n\nCPU seconds, one thread, medians of five.\n\n{table}"


def measure_cost(num_samples: int, length: int, group_size: int, same: bool) -> dict[str, float]:
    """Return CPU seconds of each part: medians of five, one thread."""
    rng = np.random.default_rng(0)
    samples = random_rows(rng, num_samples, length, group_size, 1)
    if same:
        samples = [replace(row, token_ids=samples[0].token_ids) for row in samples]
    groups = group_samples(samples)
    earlier = random_rows(rng, num_samples, length, group_size, 0)
    memory = PromptMemory()
    memory.remember(earlier)
    scores = {s.sample_id: float(rng.random() < 0.5) for s in samples}
    parts: dict[str, Callable[[], Any]] = {
        "groups": lambda: group_samples(samples),
        "metrics": lambda: round_metrics(groups),
        "correct ones": lambda: outcome_metrics(groups, scores),
        "collision test": lambda: collision_test(samples, memory),
        "remembering": lambda: PromptMemory().remember(samples),
    }
    seconds: dict[str, float] = {}
    for name, part in parts.items():
        times = []
        for _ in range(5):
            start = time.process_time()
            part()
            times.append(time.process_time() - start)
        seconds[name] = float(np.median(times))
    return {**seconds, "all": sum(seconds.values())}


if __name__ == "__main__":
    main()
