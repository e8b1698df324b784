"""`swift-grpo-ext audit FILE`: do rollouts that a framework dumped share noise? Pure.

**With log-probabilities and token ids** the collision test (`diversity.collision`) looks at every
step, and at earlier steps of the same prompt. It needs the engine's log-probabilities.

**Without** them equal completions may come from a policy that has collapsed. But if their noise is
independent, no position in a group is special, and two tests ask whether one is:

- *shared*: given how many pairs of a group are equal, all pairs of positions are equally likely to
  be among them. The number of groups that are equal at positions (i, j) is a sum of n independent
  trials with mean p, and P(at least s) <= exp(-n KL(s/n || p)) (Hoeffding 1963, theorem 1).
- *frozen*: a prompt comes again. Of the n samples of its group, m occur once in both groups. If all
  orders are equally likely, P(k of these at their old position) <= C(m, k) (n - k)! / n! (Markov).
  Prompts are combined by Fisher's method.

Noise that all samples of a group share looks like collapse to these: only log-probabilities tell.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from swift_grpo_ext.diversity.collision import PromptMemory, collision_test, format_p, log2_fisher
from swift_grpo_ext.diversity.record import read_json_lines
from swift_grpo_ext.diversity.sample import Group, Origin, Sample, group_samples
from swift_grpo_ext.sampling.seeding import SampleId

COLUMNS = {
    "phase": ("phase",),  # this project's record: rounds have three columns
    "number": ("number",),
    "step": ("step", "gen_step", "global_step", "global_steps", "rollout_id", "iteration"),
    "group": ("group_index", "group_id", "group", "uid", "prompt_id"),
    "prompt": ("prompt", "input", "prompts", "messages", "question", "query"),
    "completion": ("completion", "output", "response", "completions", "responses", "text"),
    "token_ids": ("token_ids", "completion_ids", "response_ids", "output_ids", "tokens"),
    "logprobs": ("rollout_log_probs", "rollout_logprobs", "logprobs", "completion_logprobs"),
}
"""The names that TRL, verl, slime, ms-swift and this project give to columns, likeliest first."""

ALARM_P = 1e-6
"""The p-value of independent noise below which the verdict is shared noise."""

COLLAPSED_SHARE = 0.1
"""The share of groups with equal completions from which on the verdict is collapse."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result, as `--json` prints it."""

    verdict: Literal["shared noise", "collapse", "healthy"]
    num_steps: int
    num_groups: int
    """Groups of two samples or more."""

    num_samples: int
    num_with_logprobs: int
    num_groups_with_copies: int
    log10_p: float
    """The p-value of independent noise, corrected for the number of tests; at most 0."""

    evidence: list[str]
    """What speaks for shared noise, the strongest first."""


def read_dump(paths: Sequence[Path], names: Mapping[str, str]) -> tuple[list[list[Sample]], bool]:
    """Read the samples of each step, in the order of the files.

    Args:
        paths: `.parquet` or `.jsonl` files, in the order of the training.
        names: columns by the keys of `COLUMNS`, where their names are others.

    Returns:
        The samples of each step, and whether the files repeat rows of earlier steps.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file's format is unknown, or a column is missing; names it.
    """
    rows: list[dict[str, Any]] = []
    repeats = False
    for path in paths:
        if path.suffix == ".parquet":
            try:
                rows += pq.read_table(path).to_pylist()
            except pa.ArrowInvalid as e:
                raise ValueError(f"{path} cannot be read as Parquet ({e}).") from e
            continue
        if path.suffix != ".jsonl" or not path.is_file():
            raise ValueError(f"{path}: expected an existing file, .parquet or .jsonl.")
        for line in read_json_lines(path, dict):
            if not isinstance(line.get("step"), list):
                rows.append(line)
                continue
            # ms-swift's `completions.jsonl`: a list for each column, of the last
            # generation_batch_size samples, those of earlier steps included (grpo_trainer.py,
            # `_logs`).
            repeats = True
            for values in zip_longest(*line.values()):
                rows.append(dict(zip(line, values, strict=True)))
    columns = _find_columns({name for row in rows for name in row}, names)
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        named = {key: row.get(name) for key, name in columns.items()}
        steps[str([named.get(key) for key in ("phase", "step", "number")])].append(named)
    return [_to_samples(number, of_step) for number, of_step in enumerate(steps.values())], repeats


def _find_columns(present: set[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the columns to read, by the keys of `COLUMNS`."""
    columns = {
        key: next(name for name in known if name in present)
        for key, known in COLUMNS.items()
        if not present.isdisjoint(known)
    }
    for key, name in names.items():
        if name not in present:
            flag = f"--{key.replace('_', '-')}"
            raise ValueError(f"{flag} {name}: expected one of {sorted(present)}.")
        columns[key] = name
    if not columns.keys() & {"completion", "token_ids"}:
        raise ValueError(f"No column of {sorted(present)} holds completions: give --completion.")
    if not columns.keys() & {"prompt", "group"}:
        raise ValueError(f"No column of {sorted(present)} holds prompts: give --prompt.")
    return columns


def _to_samples(step: int, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Convert rows of one step; groups and samples are counted in their order."""
    numbers: dict[str, int] = {}
    sizes = Counter[str]()
    samples = []
    for row in rows:
        prompt = json.dumps(row.get("prompt", row.get("group")), sort_keys=True, default=str)
        group = json.dumps(row.get("group", row.get("prompt")), sort_keys=True, default=str)
        sample_id = SampleId(
            phase="train",
            step=step,
            number=0,
            group=numbers.setdefault(group, len(numbers)),
            index=sizes[group],
        )
        sizes[group] += 1
        text = row.get("completion")
        if not isinstance(text, str):  # a list of messages
            text = json.dumps(text, ensure_ascii=False, default=str)
        token_ids, logprobs = row.get("token_ids"), row.get("logprobs")
        if not token_ids or not logprobs or len(token_ids) < len(logprobs):
            logprobs = None
        else:
            token_ids = token_ids[-len(logprobs) :]  # slime's begin with the prompt's
        samples.append(
            Sample(
                origin=Origin(sample_id=sample_id, seed=None, rank=0, replica=""),
                prompt_hash=prompt,
                # Without token ids the characters of the text stand for them.
                token_ids=np.asarray(token_ids or [*map(ord, text)], np.int32),
                logprobs=None if logprobs is None else np.asarray(logprobs, np.float64),
                text=text,
            )
        )
    return samples


def audit(steps: Sequence[Sequence[Sample]], *, repeats: bool = False) -> Audit:
    """Test all steps; the verdict is shared noise where the p-value is below `ALARM_P`.

    Args:
        repeats: the files repeat rows of earlier steps, so that equal ones there say nothing.
    """
    groups = [[group for group in group_samples(step) if len(group) > 1] for step in steps]
    flat = [group for of_step in groups for group in of_step]
    samples = [sample for step in steps for sample in step]
    num_with_logprobs = sum(sample.logprobs is not None for sample in samples)
    num_copied = sum(len({_content(s) for s in group}) < len(group) for group in flat)
    if num_with_logprobs:
        tests = sorted(_collisions(steps))
    else:
        tests = [_shared_positions(flat), *([] if repeats else [_frozen_positions(groups)])]
        tests.sort()
    log2_p = min(0.0, tests[0][0] + math.log2(len(tests))) if tests else 0.0
    is_shared = log2_p < math.log2(ALARM_P)
    is_collapsed = bool(flat) and num_copied >= COLLAPSED_SHARE * len(flat)
    return Audit(
        verdict="shared noise" if is_shared else "collapse" if is_collapsed else "healthy",
        num_steps=len(steps),
        num_groups=len(flat),
        num_samples=len(samples),
        num_with_logprobs=num_with_logprobs,
        num_groups_with_copies=num_copied,
        log10_p=log2_p * math.log10(2),
        evidence=[words for p, words in tests if p < 0][:5] if is_shared else [],
    )


def _content(sample: Sample) -> bytes:
    return sample.token_ids.tobytes()


def _collisions(steps: Sequence[Sequence[Sample]]) -> list[tuple[float, str]]:
    """Return log2 of each step's p-value, and its strongest evidence."""
    memory = PromptMemory()
    tests = []
    for number, samples in enumerate(steps):
        test = collision_test(samples, memory)
        memory.remember(samples)
        words = f"step {number} (counted from 0): many samples share improbable beginnings"
        if test.collisions:
            best = test.collisions[0]
            indices = ", ".join(str(origin.sample_id.index) for origin in best.samples[:8])
            words = (
                f"step {number} (counted from 0): samples {indices} of group "
                f"{best.samples[0].sample_id.group} begin with the same {best.num_tokens} tokens, "
                f"{best.bits:.0f} bits"
            )
            if best.earlier:
                words += f", as step {best.earlier[0].sample_id.step} had them (frozen noise)"
        tests.append((test.log2_p, words))
    return tests


def _shared_positions(groups: Sequence[Group]) -> tuple[float, str]:
    """Return log2 of the p-value that equal samples favour no pair of positions, and words."""
    means: dict[tuple[int, int], float] = defaultdict(float)
    counts, trials = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for group in groups:
        pairs = list(combinations(range(len(group)), 2))
        equal = [(i, j) for i, j in pairs if _content(group[i]) == _content(group[j])]
        for pair in pairs:
            means[pair] += len(equal) / len(pairs)
        trials.update(pairs)
        counts.update(equal)
    if not counts:
        return 0.0, ""
    bounds = {pair: _log2_tail(counts[pair], means[pair], trials[pair]) for pair in counts}
    pair = min(bounds, key=lambda pair: bounds[pair])
    return min(bounds[pair] + math.log2(len(means)), 0.0), (
        f"samples {pair[0]} and {pair[1]} of their groups are equal in {counts[pair]} groups, and "
        f"{means[pair]:.1f} were expected"
    )


def _log2_tail(count: int, mean: float, num_trials: int) -> float:
    """Return log2 of Hoeffding's bound of P(sum of independent trials >= count)."""
    if count <= mean:
        return 0.0
    share, expected = count / num_trials, mean / num_trials
    divergence = share * math.log(share / expected)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - expected))
    return -num_trials * divergence / math.log(2)


def _frozen_positions(steps: Sequence[Sequence[Group]]) -> tuple[float, str]:
    """Return log2 of the p-value that samples do not repeat those that their prompt had before at
    the same position, and words."""
    last: dict[str, list[bytes]] = {}
    log2_ps: list[float] = []
    num_repeated = num_compared = 0
    for group in (group for groups in steps for group in groups):
        now = [_content(sample) for sample in group]
        before = last.get(group[0].prompt_hash, [])
        last[group[0].prompt_hash] = now
        if len(before) == len(now):
            once = {c for c in now if now.count(c) == before.count(c) == 1}
            fixed = sum(a == b and a in once for a, b in zip(now, before, strict=True))
            log2_ps.append(_log2_fixed(len(now), len(once), fixed))
            num_repeated += fixed
            num_compared += len(now)
    return log2_fisher(log2_ps), (
        f"{num_repeated} of {num_compared} samples are those that their prompt had at the same "
        "position the time before (frozen noise)"
    )


def _log2_fixed(size: int, common: int, fixed: int) -> float:
    """Return log2 of a bound of P(at least `fixed` of `common` items keep their position), where
    all orders of `size` items are equally likely."""
    bound = math.comb(common, fixed) * math.factorial(size - fixed) / math.factorial(size)
    return math.log2(min(bound, 1.0))


def run(options: argparse.Namespace) -> int:
    """Print the verdict; return 1 where noise is shared."""
    names = {key: name for key in COLUMNS if (name := getattr(options, key, None))}
    steps, repeats = read_dump(options.file, names)
    result = audit(steps, repeats=repeats)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return int(result.verdict == "shared noise")
    print(
        f"{result.num_samples:,} samples, {result.num_groups:,} groups, {result.num_steps:,} "
        f"steps; {result.num_with_logprobs:,} samples with log-probabilities"
    )
    print(f"groups with equal completions: {result.num_groups_with_copies:,}")
    print(f"p-value of independent noise: {format_p(result.log10_p)}")
    print("\n  ".join([f"verdict: {result.verdict}", *result.evidence]))
    if repeats:
        print("ms-swift repeats rows in such files: steps are not compared.")
    if not result.num_with_logprobs:
        print(
            "The files hold no log-probabilities with token ids: noise that all samples of a group "
            "share cannot be told from collapse (name columns with --logprobs and --token-ids)."
        )
    return int(result.verdict == "shared noise")
