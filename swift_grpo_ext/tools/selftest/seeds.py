"""Seeds, batch invariance, and the same tokens on another topology."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.collision import PromptMemory, collision_test, format_p
from swift_grpo_ext.diversity.sample import Origin, Sample, surprisal_bits
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.tools.selftest.flips import Drawn, Flips, flips
from swift_grpo_ext.tools.selftest.result import Result, judged, untried
from swift_grpo_ext.tools.selftest.rig import Rig

NUM_COLLISION_SAMPLES = 256
ALARM_P = 1e-6
LEAST_BITS = 64.0
"""Surprisal of all samples together, below which shared noise could not be told from certainty."""

OTHER_NOISE = (
    "Samples get other noise than their seeds say. Report it with this page; until then, "
    "one replica tells where."
)


def check_seeds(rig: Rig) -> Result:
    """The same samples are equal, in whatever request or batch; all others have their own noise."""
    trainer = rig.trainer
    if trainer._settings.run_seed is None:
        return untried("the settings leave seeds to the engine", "--rollout_seed_mode sample")
    if not trainer.temperature:
        return untried("--temperature 0 draws without noise")
    same = {
        "the same round drawn again": flips(rig.base, rig.draw_round()),
        "other neighbours, in another order": flips(rig.base, _among_others(rig)),
        "singly instead of as groups": flips(rig.base, rig.draw_round(grouped=False)),
    }
    faults = [
        f"{what}: {found.count} samples differ, after {found.num_tokens} tokens that agree within "
        f"{found.largest:.2g} nats: more than rounding explains"
        for what, found in same.items()
        if not found.is_rounding
    ]
    rounds, other = _other_rounds(rig), rig.draw_round(run_seed=trainer.args.seed + 1)
    log10_p, bits = shared_noise(rig.base, rounds, other)
    if log10_p < np.log10(ALARM_P):
        faults.append(f"samples share noise that should differ (p = {format_p(log10_p)})")
    if bits < LEAST_BITS and not faults:
        return untried(
            f"completions are nearly certain ({bits:.0f} bits in all): equal ones prove nothing",
            "Give rows or a --temperature with which completions differ.",
        )
    values = {
        "samples": len(rig.base) + len(other) + sum(map(len, rounds)),
        "surprisal of all (bits)": round(bits),
        "p of independent noise": format_p(log10_p),
        **{what: f"{f.count} of {len(rig.base)} differ" for what, f in same.items()},
        "another --seed": f"{flips(rig.base, other).count} of {len(other)} differ",
    }
    return judged(values, faults, OTHER_NOISE)


def _among_others(rig: Rig) -> list[Drawn]:
    """Every other group of round 0, the last first."""
    groups = range(0, len(rig.prompts), 2)[::-1]
    ids = [i for group in groups for i in rig.ids(0, len(rig.prompts)) if i.group == group]
    return rig.draw([rig.prompts[i.group] for i in ids], ids)


def _other_rounds(rig: Rig) -> list[list[Drawn]]:
    """Of the same prompts, until there are enough samples for the collision test."""
    rounds: list[list[Drawn]] = []
    while (len(rounds) + 2) * len(rig.base) < NUM_COLLISION_SAMPLES and not rig.is_over:
        rounds.append(rig.draw_round(step=len(rounds) + 1))
    return rounds


def shared_noise(
    base: Sequence[Drawn], rounds: Sequence[Sequence[Drawn]], other: Sequence[Drawn]
) -> tuple[float, float]:
    """log10 of the collision test's least p-value over rounds, and the surprisal of all in bits.

    Args:
        other: round 0 with another `--seed`, of which no sample may be one of `base`'s.
    """
    moved = [replace(d, sample_id=replace(d.sample_id, number=1)) for d in other]
    memory, log2_p, bits = PromptMemory(), 0.0, 0.0
    tests = [base, *rounds, moved]
    for drawn in tests:
        samples = [_sample(d) for d in drawn]
        log2_p = min(log2_p, collision_test(samples, memory).log2_p)
        memory.remember(samples)
        bits += sum(float(surprisal_bits(sample).sum()) for sample in samples)
    corrected = min(log2_p + float(np.log2(len(tests))), 0.0)
    return corrected * float(np.log10(2)), bits


def _sample(drawn: Drawn) -> Sample:
    logprobs = np.asarray(drawn.logprobs, np.float32) if drawn.logprobs else None
    return Sample(
        origin=Origin(sample_id=drawn.sample_id, seed=None, rank=0, replica=""),
        prompt_hash=str(drawn.prompt_ids),
        token_ids=np.asarray(drawn.token_ids, np.int32),
        logprobs=logprobs if len(drawn.logprobs) == len(drawn.token_ids) else None,
        text=drawn.text,
    )


# --- batch invariance ---


def check_invariance(rig: Rig) -> Result:
    """How often the batch changes a token, where first, and whether its candidates nearly tied."""
    if not rig.trainer.temperature:
        return untried("--temperature 0 draws without noise")
    found = flips(rig.base, rig.draw_round(grouped=False)) + flips(rig.base, _among_others(rig))
    for drawn in rig.base[:: rig.group_size]:
        alone = rig.draw([rig.prompts[drawn.sample_id.group]], [drawn.sample_id])
        found += flips([drawn], alone)
    faults = []
    if not found.is_rounding:
        faults.append(f"{found.count} flips in {found.num_tokens} tokens are no rounding")
    return judged(found.values(), faults, OTHER_NOISE)


def check_invariant_kernels(rig: Rig) -> Result:
    """The same with `VLLM_BATCH_INVARIANT=1`, under which there must be no flip at all."""
    result = check_invariance(rig)
    if result.status == "holds" and result.values["flips"]:
        remedy = "Is the model one that vLLM tested with its batch-invariant kernels?"
        return judged(result.values, ["tokens depend on the batch all the same"], remedy)
    return result


# --- other topologies ---


def save_round(rig: Rig, path: Path) -> None:
    """Keep round 0 for other topologies."""
    drawn = [{**asdict(d), "sample_id": asdict(d.sample_id)} for d in rig.base]
    path.write_text(json.dumps(drawn), encoding="utf-8")


def check_same_tokens(rig: Rig, path: Path) -> Result:
    """Round 0 here against that of the topology which saved it."""
    if not path.exists():
        return untried("the first topology has drawn no round")
    saved: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    others = [Drawn(**{**d, "sample_id": SampleId(**d["sample_id"])}) for d in saved]
    found: Flips = flips(rig.base, others)
    seed = rig.trainer._settings.run_seed
    if found.num_tokens == 0 or seed is None:
        return untried("no sample is drawn on both topologies")
    faults = [] if found.is_rounding else ["tokens differ more than rounding explains"]
    first = rig.base[0].sample_id
    values = {f"seed of {first}": sample_seed(seed, first), **found.values()}
    return judged(values, faults, OTHER_NOISE)
