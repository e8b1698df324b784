"""The checks: each is a function of a `Rig`, and returns measured values and faults.

A check raises `NotTriedError` if the settings or rows leave nothing to test. `DisagreementError`
from `Rig.encode` is a fault: rollout and training disagree about a sample.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from math import log2, log10
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from swift_grpo_ext.diversity.collision import (
    PromptMemory,
    collision_test,
    format_p,
    surprisal_bits,
)
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shim import base_model, output_embedding
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.stops.rule import find
from swift_grpo_ext.tools.selftest.outcome import LEAST_P, NotTriedError, flips
from swift_grpo_ext.tools.selftest.rig import MAX_TOKENS, Rig
from swift_grpo_ext.training.gap import Gap, gaps_between
from swift_grpo_ext.training.group import kind_of_row, trained_ids
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.patches import replaced

Finding = tuple[dict[str, Any], list[str]]  # measured values, and faults
Check = Callable[[Rig], Finding]
T = TypeVar("T")


# --- prompts ---

NUM_HARDEST = 3


def check_prompts(rig: Rig) -> Finding:
    """Compare the prompts of rollout and training for the longest rows, and for the rows with
    most media."""
    lengths = []
    for row in rig.hardest_prompts(NUM_HARDEST):
        [sample] = rig.generate([row], rig.ids(0, 1, 1), rig.config(1))
        rig.encode([sample], mismatch="stop")
        lengths.append(len(sample.rollout_prompts[0].token_ids))
    return {"prompts": len(lengths), "longest (tokens)": max(lengths)}, []


# --- seeds ---

NUM_COLLISION_SAMPLES = 256
LEAST_BITS = 64.0  # surprisal of all samples; with less, equal completions prove nothing


def check_seeds(rig: Rig) -> Finding:
    """Generate the same samples in other requests and batches, which must give the same tokens;
    test all other samples for shared noise."""
    trainer = rig.trainer
    if not trainer.temperature:
        raise NotTriedError("--temperature 0 samples without noise")
    ids = rig.ids(0, len(rig.prompts))
    singly = []
    for index in range(max(sample_id.index for sample_id in ids) + 1):
        singly += rig.generate_tokens([i for i in ids if i.index == index])
    # Every other group, the last first: requests come in another order, with other neighbours.
    other_order = [
        i for group in range(0, len(rig.prompts), 2)[::-1] for i in ids if i.group == group
    ]
    same = {
        "other neighbours, in another order": flips(
            rig.first_round, rig.generate_tokens(other_order)
        ),
        "singly instead of as groups": flips(rig.first_round, singly),
    }
    faults = [f"{variant}: {result}" for variant, result in same.items() if not result.is_rounding]
    rounds = [rig.first_round]
    while (len(rounds) + 1) * len(ids) < NUM_COLLISION_SAMPLES:
        rounds.append(rig.generate_tokens(rig.ids(len(rounds), len(rig.prompts))))
    rounds.append(rig.generate_tokens(ids, run_seed=trainer.args.seed + 1))
    log10_p, bits = shared_noise(rounds)
    if log10_p < log10(LEAST_P):
        faults.append(f"samples share noise that should differ (p = {format_p(log10_p)})")
    if bits < LEAST_BITS and not faults:
        raise NotTriedError(
            f"completions are nearly certain ({bits:.0f} bits in all), so that equal ones prove "
            "nothing: give rows or a --temperature with which completions differ"
        )
    values = {
        "samples": len(rounds) * len(ids),
        "surprisal of all (bits)": round(bits),
        "p of independent noise": format_p(log10_p),
        **{variant: str(result) for variant, result in same.items()},
    }
    return values, faults


def shared_noise(rounds: Sequence[Sequence[SampleRow]]) -> tuple[float, float]:
    """Return log10 of the least p-value of the rounds' collision tests, corrected for the number of
    rounds, and the surprisal of all samples in bits."""
    memory, log2_p, bits = PromptMemory(), 0.0, 0.0
    for number, samples in enumerate(rounds):
        # The last round has the ids of the first (with another --seed): rounds are numbered.
        named = [replace(s, sample_id=replace(s.sample_id, step=number)) for s in samples]
        log2_p = min(log2_p, collision_test(named, memory).log2_p)
        memory.remember(named)
        bits += sum(float(surprisal_bits(sample).sum()) for sample in named)
    return min(log2_p + log2(len(rounds)), 0.0) * log10(2), bits


def check_same_tokens(rig: Rig, path: Path) -> Finding:
    """Compare round 0 with the first topology's, which `path` holds."""
    first, result = rig.first_round[0], flips(rig.first_round, pickle.loads(path.read_bytes()))
    values = {"compared": str(result), f"seed of {first.sample_id}": first.seed}
    return values, [] if result.is_rounding else [f"{result}: more than rounding explains"]


# --- stops ---

DEFAULT_STOP = "</answer>"  # tried if the settings name no stop string
BEFORE, BEHIND = "It is 7. ", " Then more."


def check_stops(rig: Rig) -> Finding:
    """Force each stop string and text after it by a grammar, and test where the sample ends."""
    trainer = rig.trainer
    # No grammar can force special tokens.
    special = set(trainer.template.tokenizer.get_added_vocab())
    words = [word for word in trainer.args.stop_words if word not in special] or [DEFAULT_STOP]
    faults: list[str] = []
    for word in words:
        forced = BEFORE + word + BEHIND
        config = rig.config()
        config.max_tokens = len(forced) + 8  # a token for each character, for any limit
        config.stop = list(dict.fromkeys([*(config.stop or ()), word]))
        # `re.escape` writes escapes that the grammars of vLLM's backends do not know.
        config.structured_outputs_regex = "".join(
            f"\\{c}" if c in r".^$*+?{}[]\|()" else c for c in forced
        )
        # A stop token could end the text before the stop string.
        with replaced(trainer.args, "stop_token_ids", []):
            [sample] = rig.generate(rig.prompts[:1], rig.ids(0, 1, 1), config)
        faults += _stop_faults(rig, word, sample)
    return {"stop strings": len(words)}, faults


def _stop_faults(rig: Rig, word: str, sample: RolloutSample) -> Iterator[str]:
    """Yield the faults of a completion in which a grammar has forced `word` and more text."""
    trainer = rig.trainer
    decode = trainer.template.tokenizer.decode
    ids = trained_ids(sample)
    spelled = decode(ids)
    match = find(spelled, [*trainer.args.stop_words, word])
    if match is None:
        yield f"{word!r} was forced and is not in {spelled!r}"
        return
    string, start = match
    end = start + len(string) * trainer.args.include_stop_str_in_output
    rig.encode([sample])  # compares the numbers of tokens and log-probabilities
    for name, found, expected in (
        ("the text", sample.messages[-1]["content"], spelled[:end]),
        ("finish_reason", sample.finish_reason, "stop"),
        # Another stop string may begin earlier.
        ("stop_reason", sample.rollout_infos.get("stop_reason"), string),
    ):
        if found != expected:
            yield f"{word!r}: {name} is {found!r}, expected {expected!r}"
    if string in decode(ids[:-1]):
        yield f"{word!r}: tokens go on behind the one that completes it ({spelled!r})"


# --- weights ---

NUM_TENSORS = 32  # that the check changes, spread over the model
FIRST_CHANGE = 0.05  # noise, as a share of a tensor's size; each further try doubles it
# The last noise is 1.6 times as large as the tensor. Engines refuse 3 times (weights/watch.py).
MOST_TRIES = 6
# The change moves log-probabilities by this many limits. No tower moves rows of text.
LEAST_CHANGES = {"an update": 4.0, "an update of the tower": 1.0}


def check_weights(rig: Rig) -> Finding:
    """Compare log-probabilities of rollout and trainer: before an update, after an update with
    changed weights, after one with a changed vision tower, and with the first weights again."""
    limit, samples = rig.trainer.gap_limit, _probes(rig)
    measured = {"before an update": rig.measure_gaps(samples)}
    if not measured["before an update"]:
        raise NotTriedError(
            "rollout and training see different prompts: `prompts` says how they differ"
        )
    values: dict[str, Any] = {"limit (nats)": limit}
    has_media = any(kind_of_row(sample) != "text" for sample in samples)
    for name, changed in _changes(rig.trainer.model, has_media=has_media).items():
        # The engine meets the images of `samples` again: a cached output of an older tower shows.
        with _changed(rig, samples, LEAST_CHANGES[name] * limit, changed) as moved:
            rig.update_weights()
            measured[f"after {name}"] = rig.measure_gaps(_probes(rig))
        values[f"{name} moved log-probabilities by (nats)"] = float(f"{moved:.3g}")
    rig.update_weights()
    measured["after it was taken back"] = rig.measure_gaps(_probes(rig))
    faults = []
    for when, kinds in measured.items():
        for kind, bounded in kinds.items():
            values[f"{when}: mean gap of rows of {kind}, and their rounding (nats)"] = (
                f"{bounded.gap.mean:.2g}, {bounded.rounding.mean:.2g}"
            )
            # No GPU has run with the closer bound.
            bound = limit if has_accelerator() or limit > 1 else min(limit, bounded.bound)
            if not bounded.gap.mean <= bound:  # NaN is a fault, too
                faults.append(
                    f"{when}: log-probabilities of rows of {kind} lie {bounded.gap.mean:.3g} nats "
                    f"apart in the mean, above the {bound:.2g} that rounding explains"
                )
    least = LEAST_CHANGES["an update"] * limit
    if not faults and values["an update moved log-probabilities by (nats)"] < least:
        raise NotTriedError(f"no change of the weights moved log-probabilities by {least:g}")
    return values, faults


def _probes(rig: Rig) -> list[RolloutSample]:
    """Generate two samples of each prompt, from the whole distribution as in training."""
    ids, config = rig.ids(0, len(rig.prompts), 2), rig.config()
    config.top_p, config.top_k, config.min_p, config.repetition_penalty = 1.0, -1, 0.0, 1.0
    config.structured_outputs_regex = None
    return rig.generate([rig.prompts[sample_id.group] for sample_id in ids], ids, config)


def _changes(model: nn.Module, *, has_media: bool) -> dict[str, list[nn.Parameter]]:
    """Return the weights that each update changes: of the whole model, and of all but its language
    model (towers and projectors)."""
    base = base_model(model)
    language = (base.get_decoder(), base.get_input_embeddings(), output_embedding(base))
    known = {id(p) for module in language if module is not None for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    changes = {
        "an update": trained,
        "an update of the tower": [p for p in trained if has_media and id(p) not in known],
    }
    return {name: [*spread(parameters)] for name, parameters in changes.items() if parameters}


@contextmanager
def _changed(
    rig: Rig, samples: Sequence[RolloutSample], least: float, changed: Sequence[nn.Parameter]
) -> Iterator[float]:
    """Add noise to weights within the block. The trainer's log-probabilities of `samples` then lie
    at least `least` nats from the rollout's in the mean, or as far as the noise moves them; yield
    that mean."""
    kept = [parameter.detach().clone().cpu() for parameter in changed]
    inputs, batch = rig.encode(samples)
    sampled, mask = batch.rollout_per_token_logps, batch.completion_mask.bool()
    try:
        for attempt in range(MOST_TRIES):
            for number, (parameter, value) in enumerate(zip(changed, kept, strict=True)):
                # Seeded, so that all ranks add the same. An adapter's B is 0 at first.
                generator = torch.Generator(parameter.device).manual_seed(number)
                noise = torch.empty_like(parameter.data).normal_(generator=generator)
                size = float(value.float().pow(2).mean().sqrt()) or 0.02
                scale = FIRST_CHANGE * 2**attempt * size
                parameter.data.copy_(value.to(parameter.device) + scale * noise)
            moved = sum(gaps_between(sampled, rig.logps(inputs, batch), mask), Gap()).mean
            if moved >= least:
                break
        yield moved
    finally:
        for parameter, value in zip(changed, kept, strict=True):
            parameter.data.copy_(value)


def spread(trained: Sequence[T]) -> Sequence[T]:
    """Return about `NUM_TENSORS` tensors. An adapter's tensors come in pairs, A and B, and a change
    of A alone has no effect while B is 0: an odd stride takes both kinds."""
    return trained[:: max(len(trained) // NUM_TENSORS, 1) | 1]


# --- log-probabilities ---

TOLERANCES = {16: 0.5, 32: 1e-3}
"""Two passes may differ by this many nats in a token's log-probability, by bits of a number.
bfloat16 rounds logits between 32 and 64 to steps of 2^-2, and passes may lie two steps apart."""


def check_logits(rig: Rig) -> Finding:
    """Compare log-probabilities of ms-swift's own pass with those of the settings' pass, and of
    passes that read each prompt for each sample, or once a group."""
    ways: dict[str, dict[str, Any]] = {
        "the settings": {},
        "--logps_shared_prompt false": {"logits_shim": "auto", "logps_shared_prompt": "false"},
        "--logps_shared_prompt auto": {"logits_shim": "auto", "logps_shared_prompt": "auto"},
    }
    samples = unequal_samples(rig)
    expected = _logps(rig, samples, {"logits_shim": "off"})
    gaps = {
        way: float((_logps(rig, samples, flags) - expected).abs().max())
        for way, flags in ways.items()
    }
    # Logits are divided by the temperature, and their rounding with them.
    bits, temperature = rig.trainer.number_bits, rig.trainer.temperature
    limit = TOLERANCES[16 if bits <= 16 else 32] / min(temperature or 1.0, 1.0)
    faults = [
        f"{way}: log-probabilities lie {gap:.3g} nats from ms-swift's, above {limit:g}"
        for way, gap in gaps.items()
        if not gap <= limit  # NaN is a fault, too
    ]
    lengths = [len(trained_ids(sample)) for sample in samples]
    values = {
        "samples": len(samples),
        "completions (tokens)": f"{min(lengths)} to {max(lengths)}",
        "limit (nats)": limit,
        **{way: float(f"{gap:.2g}") for way, gap in gaps.items()},
    }
    return values, faults


def unequal_samples(rig: Rig) -> list[RolloutSample]:
    """Generate a group; half of its samples get half the length, so that the batch has padding.
    It is one group: with several prompts, ms-swift's pass keeps the logits of all positions behind
    the shortest prompt."""
    [row, *_] = rig.hardest_prompts(1)
    ids, config = rig.ids(0, 1), rig.config()
    half = len(ids) // 2
    samples = rig.generate([row] * half, ids[:half], config)
    config.max_tokens = max((config.max_tokens or MAX_TOKENS) // 2, 1)
    return samples + rig.generate([row] * len(ids[half:]), ids[half:], config)


def _logps(rig: Rig, samples: Sequence[RolloutSample], flags: dict[str, Any]) -> torch.Tensor:
    """Return log-probabilities of all completion tokens in nats, with `flags` in place of the
    settings."""
    trainer = rig.trainer
    args = copy(trainer.args)
    vars(args).update(flags)
    with replaced(trainer, "completion_logps", CompletionLogps(args, trainer.template)):
        inputs, batch = rig.encode(samples)
        rig.logps(inputs, batch)  # --logps_shared_prompt compares its first pass with the plain one
        values = rig.logps(inputs, batch)
    return values[batch.completion_mask.bool()].float().cpu()


CHECKS: dict[str, Check] = {
    "prompts": check_prompts,
    "seeds": check_seeds,
    "stops": check_stops,
    "weights": check_weights,
    "logits": check_logits,
}
"""The first topology runs these checks, in this order."""
