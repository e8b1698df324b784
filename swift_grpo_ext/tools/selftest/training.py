"""What the rollout drew is what training sees: prompts, stops, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch

from swift_grpo_ext.checks.rows import encoding_error
from swift_grpo_ext.rollout.placeholders import placeholder_ids
from swift_grpo_ext.stops.rule import find
from swift_grpo_ext.tools.selftest.flips import flips
from swift_grpo_ext.tools.selftest.result import Result, judged, untried
from swift_grpo_ext.tools.selftest.rig import Rig
from swift_grpo_ext.training.agreement import DisagreementError, Gap, gap_limit
from swift_grpo_ext.training.batch import check_prompt_of, logprobs_of, trained_ids
from swift_grpo_ext.training.canary import encoded_batch, probe_config, sample_gap

NUM_HARDEST = 3
T = TypeVar("T")

# --- prompts ---


def check_prompts(rig: Rig) -> Result:
    """Rollout and training ids of the user's rows: the longest, and those with most media."""
    trainer = rig.trainer
    placeholders = placeholder_ids(trainer.template)
    refused, faults, lengths, num_media = 0, [], [], 0
    for name, row in rig.hardest_prompts(NUM_HARDEST):
        if encoding_error(trainer.template, row):
            refused += 1
            continue
        [sample] = rig.drawn_samples([row], rig.ids(0, 1, 1), config=rig.config(1))
        encoded_batch(trainer, [sample])
        lengths.append(len(sample.rollout_prompt_ids))
        num_media = max(num_media, len(sample.images) + len(sample.videos) + len(sample.audios))
        try:
            check_prompt_of(sample, trainer.template, placeholders)
        except DisagreementError as e:
            faults.append(f"{name}: {str(e).partition(': ')[2].strip()}")
    values = {
        "prompts": len(lengths),
        "that differ": len(faults),
        "longest (tokens)": max(lengths, default=0),
        "most media": num_media,
        "refused by the template": refused,
    }
    if not lengths:
        return untried("the template refuses every prompt that was looked at", values=values)
    remedy = (
        "Give both sides the same --template, --system, --max_length, MAX_PIXELS and the like "
        "(docs/families.md has what ms-swift's templates write differently)."
    )
    return judged(values, faults[:1], remedy)


# --- stops ---

DEFAULT_STOP = "</answer>"
"""Tried where the settings name no stop string."""

BEFORE, BEHIND = "It is 7. ", " Then more."


def check_stops(rig: Rig) -> Result:
    """Each stop string, forced by a grammar that goes on behind it: where does the sample end?"""
    trainer = rig.trainer
    tokenizer = trainer.template.tokenizer
    own = list(trainer.args.stop_words)
    special = [word for word in own if word in tokenizer.get_added_vocab()]
    words = [word for word in own if word not in special] or [DEFAULT_STOP]
    faults: list[str] = []
    row = rig.prompts[0]
    for word in words:
        faults += _stop_faults(rig, word, _forced(rig, row, word))
    values = {
        "stop strings": len(words),
        "of the settings": len(own) - len(special),
        **({"special tokens, which no grammar forces": len(special)} if special else {}),
    }
    remedy = "Report it with this page: completions go on behind, or end before, their stops."
    return judged(values, faults, remedy)


def _forced(rig: Rig, row: dict[str, Any], word: str) -> Any:
    config = rig.config(len(BEFORE + word + BEHIND) + 8)
    config.stop = list(dict.fromkeys([*(config.stop or ()), word]))
    config.temperature = config.temperature or 1.0
    # Grammars of vLLM's backends have no word for some escapes that Python writes.
    config.structured_outputs_regex = "".join(
        f"\\{c}" if c in r".^$*+?{}[]\|()" else c for c in BEFORE + word + BEHIND
    )
    [sample] = rig.drawn_samples([row], rig.ids(0, 1, 1), config=config)
    return sample


def _stop_faults(rig: Rig, word: str, sample: Any) -> Iterator[str]:
    """What is wrong with a completion that a grammar made spell `word` and more."""
    trainer = rig.trainer
    decode = trainer.template.tokenizer.decode
    ids = trained_ids(sample)
    text, spelled = sample.messages[-1]["content"], decode(ids)
    found = find(spelled, [*trainer.args.stop_words, word])
    if found is None:
        yield f"{word!r} was forced and is not in {spelled!r}"
        return
    word = found.string
    includes = trainer.args.include_stop_str_in_output
    expected = spelled[: found.end if includes else found.start]
    if text != expected:
        yield f"{word!r}: the text is {text!r}, expected {expected!r}"
    if word in decode(ids[:-1]):
        yield f"{word!r}: tokens go on behind the one that completes it ({spelled!r})"
    if sample.finish_reason != "stop":
        yield f"{word!r}: finish_reason is {sample.finish_reason!r}, expected 'stop'"
    reason = sample.rollout_infos.get("stop_reason")
    if reason != word:
        yield f"{word!r}: stop_reason is {reason!r}"
    logprobs = logprobs_of(sample)
    if len(logprobs) != len(ids):
        yield f"{word!r}: {len(ids)} tokens have {len(logprobs)} log-probabilities"
    _, batch = encoded_batch(trainer, [sample])
    trained = int(batch.completion_mask.sum())
    if trained != len(ids):
        yield f"{word!r}: {len(ids)} tokens were sampled, and {trained} would be trained on"


# --- log-probabilities ---

NUM_TENSORS = 32
"""That the known change touches, spread over the model."""

FIRST_CHANGE, MOST_TRIES = 0.05, 10
CLEAR = 4.0
"""Limits that the change has to move log-probabilities by, to be told from none."""


def check_agreement(rig: Rig) -> Result:
    """Log-probabilities of rollout and trainer on the same tokens: as they are, after an update of
    a known change, and after it was taken back."""
    limit = gap_limit(rig.bits)
    before, probes = _gap(rig)
    if not before.count:
        return untried("rollout and training see other prompts", "`prompts` says how they differ.")
    with _changed(rig, probes, CLEAR * limit) as moved:
        if moved is None:
            return untried(
                f"no change of the weights moved log-probabilities by {CLEAR * limit:g} nats",
                values={"gap (nats)": before.mean},
            )
        rig.update_weights()
        after, _ = _gap(rig)
    rig.update_weights()
    restored, _ = _gap(rig)
    same = flips(rig.base, rig.draw_round())
    faults = [
        f"{when}: {gap.mean:.3g} nats apart in the mean, above the {limit:g} that numbers of "
        f"{rig.bits} bits explain"
        for when, gap in (
            ("before an update", before),
            ("after an update", after),
            ("after it was taken back", restored),
        )
        if not gap.mean <= limit
    ]
    if not same.is_rounding:
        faults.append("the first weights, given back, draw other tokens than before")
    values = {
        "tokens": before.count,
        **_named("before", before),
        "the change moved them by (nats)": float(f"{moved:.3g}"),
        **_named("after it", after),
        **_named("taken back", restored),
        "limit (nats)": limit,
    }
    remedy = (
        "The engine has other weights, stale caches, another prompt, or other numbers "
        "(quantization, --vllm_engine_kwargs) than the trainer: `weights` and `prompts` say which."
    )
    return judged(values, faults, remedy)


def _named(when: str, gap: Gap) -> dict[str, float]:
    mean, largest = (float(f"{value:.2g}") for value in (gap.mean, gap.largest))
    return {f"{when}: mean gap (nats)": mean, f"{when}: largest": largest}


def _gap(rig: Rig) -> tuple[Gap, list[Any]]:
    """Of two samples of each prompt, and these samples."""
    ids = rig.ids(0, len(rig.prompts), 2)
    config = probe_config(rig.config(), rig.max_tokens)
    drawn = rig.drawn_samples([rig.prompts[i.group] for i in ids], ids, config=config)
    return _trainer_gap(rig, drawn), drawn


def _trainer_gap(rig: Rig, samples: Sequence[Any]) -> Gap:
    return sum((sample_gap(rig.trainer, deepcopy(sample)) for sample in samples), Gap())


@contextmanager
def _changed(rig: Rig, probes: Sequence[Any], least: float) -> Iterator[float | None]:
    """Within the block some of the trained weights are others: by so much that the trainer's
    log-probabilities of `probes` lie `least` nats or more from those drawn. The value is how far,
    or None where no change was enough."""
    some = spread([p for p in rig.trainer.model.parameters() if p.requires_grad])
    kept = [p.detach().clone().cpu() for p in some]
    scale, moved = FIRST_CHANGE, 0.0
    try:
        for _ in range(MOST_TRIES):
            _change(some, kept, scale)
            moved = _trainer_gap(rig, probes).mean
            if moved >= least:
                break
            scale *= 2
        yield moved if moved >= least else None
    finally:
        with torch.no_grad():
            for parameter, value in zip(some, kept, strict=True):
                parameter.copy_(value)


def spread(trained: Sequence[T]) -> Sequence[T]:
    """About `NUM_TENSORS` of them. The stride is odd: an adapter's tensors come in pairs, A and B,
    and no change of A alone changes anything while B is 0."""
    return trained[:: max(len(trained) // NUM_TENSORS, 1) | 1]


def _change(some: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], scale: float) -> None:
    """Add noise of `scale` of each tensor's size, the same on all ranks; adapters begin as 0."""
    with torch.no_grad():
        for number, (parameter, value) in enumerate(zip(some, kept, strict=True)):
            generator = torch.Generator(parameter.device).manual_seed(number)
            size = float(value.float().pow(2).mean().sqrt()) or 0.02
            noise = torch.empty_like(parameter).normal_(generator=generator)
            parameter.copy_(value.to(parameter) + scale * size * noise)
