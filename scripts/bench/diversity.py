"""Calibration, power and cost of the collision test, and cost of the metrics.

    python scripts/bench/diversity.py --output scripts/bench/results/diversity.json

Writes the JSON and, beside it, the tables as Markdown. Policies are simulated (`simulated.py`):
random Markov chains of 128 tokens, from 0.01 to 6 bits a token, with random temperature, top-k and
top-p. One process takes about ten minutes, most of them simulation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import command, environment
from simulated import Array, Sampling, entropy_per_token, make_round, probabilities, random_logits
from tqdm import tqdm

from swift_grpo_ext.diversity.collision import CollisionTest, PromptMemory, collision_test
from swift_grpo_ext.diversity.metrics import outcome_metrics, round_metrics
from swift_grpo_ext.diversity.sample import group_samples, sample_from_row
from swift_grpo_ext.record.row import SampleRow

LEVELS = (0.5, 0.1, 1e-2, 1e-3, 1e-6)
ALARM_P = 1e-6
GROUP_SIZES = (2, 4, 8, 16, 64)
LENGTHS = (4, 32, 256)
ROUNDS_OF_POLICY = 4
REGIMES = ("below 0.1", "0.1 to 1", "1 to 3", "above 3")

POWER_GROUP_SIZES = (2, 8, 64)
POWER_BITS = (0.1, 0.3, 1.0, 3.0)
POWER_LENGTHS = (8, 32, 128, 512)
POWER_GROUPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="healthy ones, at least")
    parser.add_argument("--power-rounds", type=int, default=30, help="of each fault and case")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost-only", action="store_true", help="print the costs alone; a minute")
    parser.add_argument("--output", type=Path, help="FILE.json; FILE.md is written beside it")
    options = parser.parse_args()
    result: dict[str, Any] = {"command": command(), "environment": environment()}
    result["cost"] = [measure_cost(*case) for case in COST_CASES]
    if options.cost_only:
        print(cost_table(result["cost"]))
        return
    with ProcessPoolExecutor(options.processes) as pool:
        num_policies = -(-options.rounds // ROUNDS_OF_POLICY)
        seeds = np.random.SeedSequence(options.seed).spawn(num_policies)
        runs = tqdm(pool.map(healthy_rounds, seeds, chunksize=8), "Healthy", num_policies)
        healthy = [row for rows in runs for row in rows]
        cases = list(product(POWER_GROUP_SIZES, POWER_BITS, POWER_LENGTHS))
        powers = pool.map(partial(power, num_rounds=options.power_rounds), cases)
        result["power"] = list(tqdm(powers, "Faults", len(cases)))
    result["calibration"] = calibration(healthy)
    markdown = as_markdown(result)
    print(markdown)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(markdown + "\n", encoding="utf-8")


# --- healthy rounds ---


def healthy_rounds(seed: np.random.SeedSequence) -> list[dict[str, Any]]:
    """A few rounds of one policy, whose weights move a little from round to round."""
    rng = np.random.default_rng(seed)
    group_size, length = int(rng.choice(GROUP_SIZES)), int(rng.choice(LENGTHS))
    num_groups = int(rng.integers(1, max(128 // group_size, 1) + 1))
    logits = random_logits(rng, np.exp(rng.uniform(-1, 3.5)), rng.choice([0.0, 0.02, 0.2]))
    sampling = Sampling(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.5])),
        top_k=int(rng.choice([0, 1, 5, 20])) if rng.random() < 0.5 else 0,
        top_p=float(rng.choice([1.0, 0.95, 0.7])),
    )
    memory, found = PromptMemory(), []
    for step in range(ROUNDS_OF_POLICY):
        p = probabilities(logits, sampling)
        noise = rng.random((num_groups * group_size, length))
        samples = make_round(p, noise, group_size, step)
        test = collision_test(samples, memory)
        memory.remember(samples)
        regime = REGIMES[int(np.searchsorted([0.1, 1.0, 3.0], entropy_per_token(p), "right"))]
        kinds = ["all", f"G {group_size}", f"{length} tokens at most", f"{regime} bits a token"]
        found.append({"kinds": kinds, "log2_p": test.log2_p})
        logits = logits + rng.normal(size=logits.shape) * 0.05
    return found


def calibration(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the rounds of each kind, and the p-values of them below each level."""
    kinds = ["all", *(f"G {size}" for size in GROUP_SIZES)]
    kinds += [f"{length} tokens at most" for length in LENGTHS]
    kinds += [f"{regime} bits a token" for regime in REGIMES]
    rows = []
    for kind in kinds:
        log2_p = np.array([r["log2_p"] for r in rounds if kind in r["kinds"]])
        alarms = {str(level): int((log2_p < np.log2(level)).sum()) for level in LEVELS}
        rows.append({"rounds": kind, "number": len(log2_p), "below": alarms})
    return rows


# --- faults ---


def power(case: tuple[int, float, int], num_rounds: int) -> dict[str, Any]:
    """How often each fault is called broken randomness, in rounds of `POWER_GROUPS` groups."""
    group_size, bits, length = case
    rng = np.random.default_rng([group_size, int(bits * 10), length])
    found: dict[str, list[bool]] = {}
    p = policy_of(rng, bits)
    for _ in range(num_rounds):
        for fault, test in faulty_tests(rng, p, group_size, length).items():
            found.setdefault(fault, []).append(test.log2_p < np.log2(ALARM_P))
    return {
        "group_size": group_size,
        "bits_per_token": entropy_per_token(p),
        "length": length,
        "found": {fault: float(np.mean(values)) for fault, values in found.items()},
    }


def policy_of(rng: np.random.Generator, bits: float) -> Array:
    """A policy with so much entropy a token: its temperature is searched for."""
    logits, low, high = random_logits(rng, 1.0, 0.0), 0.01, 10.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        p = probabilities(logits, Sampling(temperature=middle))
        low, high = (middle, high) if entropy_per_token(p) < bits else (low, middle)
    return p


def faulty_tests(
    rng: np.random.Generator, p: Array, group_size: int, length: int
) -> dict[str, CollisionTest]:
    """One round with each fault."""
    healthy = rng.random((POWER_GROUPS * group_size, length))
    one_pair = healthy.copy()
    one_pair[1] = one_pair[0]
    half_pair = healthy.copy()
    half_pair[1, : length // 2] = half_pair[0, : length // 2]
    replicas = healthy.reshape(POWER_GROUPS, 2, group_size // 2, length).copy()
    replicas[:, 1] = replicas[:, 0]
    copies = np.repeat(healthy[::group_size], group_size, axis=0)
    draw = partial(make_round, p, group_size=group_size)
    memory = PromptMemory()
    memory.remember(draw(noise=healthy, step=0))
    return {
        "one pair": collision_test(draw(noise=one_pair, step=1)),
        "one pair, first half": collision_test(draw(noise=half_pair, step=1)),
        "two replicas, one seed": collision_test(draw(noise=replicas.reshape(-1, length), step=1)),
        "whole groups": collision_test(draw(noise=copies, step=1)),
        "frozen": collision_test(draw(noise=healthy, step=1), memory),
    }


# --- cost ---

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


def random_rows(
    rng: np.random.Generator, num_samples: int, length: int, group_size: int, step: int
) -> list[SampleRow]:
    """Make rows of the record, whose token ids are spread as words are (Zipf)."""
    made = make_round(np.eye(128), np.zeros((num_samples, 1)), group_size, step)
    return [
        SampleRow(
            sample_id=sample.origin.sample_id,
            seed=None,
            rank=0,
            replica="",
            weight_version=0,
            finish_reason="stop",
            token_ids=(rng.zipf(1.3, length) % 50_000).tolist(),
            logprobs=(-rng.exponential(0.5, length)).tolist(),
            text=f"{'so it must be ' * (length // 8)}<answer>{number % 7}</answer>",
            fingerprint=sample.prompt_hash,
            prompt="",
            media=[],
        )
        for number, sample in enumerate(made)
    ]


def measure_cost(num_samples: int, length: int, group_size: int, same: bool) -> dict[str, Any]:
    """CPU seconds of each part, one thread; the median of five."""
    rng = np.random.default_rng(0)
    rows = random_rows(rng, num_samples, length, group_size, 1)
    if same:
        rows = [replace(row, token_ids=rows[0].token_ids) for row in rows]
    samples = [sample_from_row(row) for row in rows]
    groups = group_samples(samples)
    earlier = random_rows(rng, num_samples, length, group_size, 0)
    memory = PromptMemory()
    memory.remember([sample_from_row(row) for row in earlier])
    scores = {s.origin.sample_id: float(rng.random() < 0.5) for s in samples}
    parts: dict[str, Callable[[], Any]] = {
        "rows to arrays": lambda: group_samples(map(sample_from_row, rows)),
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
    case = {"samples": num_samples, "tokens": length, "group_size": group_size, "copies": same}
    return {**case, "seconds": seconds, "total": sum(seconds.values())}


# --- tables ---


def as_markdown(result: dict[str, Any]) -> str:
    made = result["environment"]
    parts = [
        "# The collision test: calibration, power, cost",
        f"`{result['command']}`, {made['date']}, {made['cores']} cores of {made['cpu']}, Python "
        f"{made['python']}.",
        "## False alarms\n\nHealthy rounds, and how many of them have a p-value below each level "
        f"({ROUNDS_OF_POLICY} rounds of a policy that moves from round to round, held against each "
        "other). The bound promises at most level x rounds; completions are discrete, so that the "
        "test stays below.",
        table(
            ["rounds", "number", *(f"below {level:g}" for level in LEVELS)],
            ([r["rounds"], r["number"], *r["below"].values()] for r in result["calibration"]),
        ),
        f"## Power\n\nShare of rounds of {POWER_GROUPS} groups that are called broken randomness "
        f"at p < {ALARM_P:g}. *One pair*: two samples of one group share their noise, all others "
        "are sound (*first half*: for the first half of the tokens only). *Two replicas, one "
        "seed*: the second half of each group copies the first. *Whole groups*: one seed for each. "
        "*Frozen*: the round before, again, with the same weights.",
        table(
            ["G", "bits a token", "tokens", *result["power"][0]["found"]],
            (
                [r["group_size"], f"{r['bits_per_token']:.2g}", r["length"],
                 *(f"{v:.0%}" for v in r["found"].values())]
                for r in result["power"]
            ),
        ),
        "## Cost\n\nCPU seconds, one thread, medians of five.",
        cost_table(result["cost"]),
    ]  # fmt: skip
    return "\n\n".join(parts)


def cost_table(costs: Sequence[dict[str, Any]]) -> str:
    return table(
        ["samples", "tokens", "G", *costs[0]["seconds"], "all"],
        (
            [r["samples"], r["tokens"], f"{r['group_size']}{', copies' if r['copies'] else ''}",
             *(f"{v:.3f}" for v in r["seconds"].values()), f"{r['total']:.3f}"]
            for r in costs
        ),
    )  # fmt: skip


def table(head: Sequence[str], rows: Iterator[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


if __name__ == "__main__":
    main()
