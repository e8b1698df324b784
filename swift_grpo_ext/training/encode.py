"""Encodes a group's prompt once and compares it with the rollout's (docs/promises.md, M3).

ms-swift encodes each of the G samples of a group, and reads the same images G times (ms-swift issue
4413). Here the first sample is encoded whole, as in ms-swift. The others reuse its prompt and add
their own token ids. The result equals a whole encoding in all families
(`tests/extra/test_families.py`). If the shortcut does not apply (docs/support.md), each sample is
encoded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers.utils import encode_sample
from swift.utils import get_logger

from swift_grpo_ext.training.group import (
    DisagreementError,
    EncodedSample,
    GroupPrompt,
    flatten,
    rollout_prompts,
)
from swift_grpo_ext.upstream.patches import replaced
from swift_grpo_ext.upstream.placeholders import placeholder_ids

if TYPE_CHECKING:
    from swift.template import Template

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.rollout.sample import RolloutSample
    from swift_grpo_ext.sampling.seeding import SampleId

logger = get_logger()

Decode = Callable[[list[int]], str]
Span = tuple[bool, list[int]]  # whether the tokens are placeholders, and the tokens

SHOWN = 5  # tokens per side quoted in error messages

REMEDY = (
    "Give `swift rollout` the settings of the training: --template, --system, --max_length, "
    "MAX_PIXELS and the like. If --max_length leaves no text between two media of a prompt, "
    "raise it, or have such prompts replaced with --truncation_strategy delete. If ms-swift's "
    "template writes another prompt for vLLM than for training (docs/support.md), "
    "--rollout_mismatch warn trains on its prompt anyway."
)

TURNS_REMEDY = (
    "Training uses the messages and media that the scheduler returns: its `step` must return all "
    "images of a conversation in `rollout_infos['images']` (videos and audios likewise) and must "
    "not change earlier turns; --max_length must hold all turns. "
    "--rollout_mismatch warn trains anyway."
)


class GroupEncoder:
    """Encodes the samples of one round for training."""

    def __init__(
        self, template: Template, args: RolloutGRPOConfig, *, is_conversation: bool = False
    ) -> None:
        self._template, self._args = template, args
        self._is_conversation = is_conversation  # schedulers may change prompts
        self._placeholders = {*placeholder_ids(template)}
        self._max_length = template.max_length
        self._prompts: dict[tuple[SampleId, str], GroupPrompt] = {}
        # The first mismatch, with `--rollout_mismatch stop`. `check_batches` raises on all ranks.
        self.fault = ""

    def encode(self, sample: RolloutSample) -> EncodedSample:
        """Return the encoded sample."""
        key = sample.sample_id.group_id, sample.prompt_hash
        prompts = rollout_prompts(sample)
        rollout = prompts[0].token_ids if prompts else []
        known, response = self._prompts.get(key), self._response(sample)
        if known and response and (not rollout or rollout == known.rollout):
            return known.with_response(*response)
        encoded = EncodedSample(encode_whole(sample, self._template, self._max_length))
        try:
            check_rollout_prompts(sample, encoded, self._template, self._placeholders)
        except DisagreementError as e:
            if self._args.rollout_mismatch == "stop":
                self.fault = self.fault or str(e)
            else:
                warn_of_mismatch(e)
        if self._is_conversation:
            response = self._response_of_turns(encoded)
        prompt = GroupPrompt.of(encoded, response[0], rollout) if response else None
        if prompt and (not known or prompt.entries["input_ids"] == known.entries["input_ids"]):
            encoded.prompt = self._prompts[key] = known or prompt
        return encoded

    def _response(self, sample: RolloutSample) -> tuple[list[int], list[int]] | None:
        """Return a response's tokens and loss weights; None if the sample must be encoded
        whole."""
        turns = sample.response_token_ids or []
        if not turns or self._is_conversation or (isinstance(turns[0], list) and len(turns) > 1):
            return None
        ids = list(flatten(turns))
        weights = list(flatten(sample.response_loss_mask)) or [1] * len(ids)
        if not ids or len(weights) != len(ids) or not self._placeholders.isdisjoint(ids):
            return None
        return ids, weights

    def _response_of_turns(self, encoded: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
        """Return the tokens of a conversation's turns; None if the row has media, which may differ
        even if token ids are equal."""
        ids, labels = encoded["input_ids"], encoded.get("labels") or ()
        start = next((i for i, label in enumerate(labels) if label != -100), None)
        if start is None or any(_is_media(i, self._placeholders) for i in ids):
            return None
        return ids[start:], []


def encode_whole(
    sample: RolloutSample, template: Template, max_length: int | None
) -> dict[str, Any]:
    """Return a sample as ms-swift encodes it, but with the text of its rollout. `max_length` is the
    template's, which ms-swift unsets while it encodes."""
    # ms-swift labels the end of each turn (4.6, template/base.py, `_add_dynamic_eos`). Sampled
    # tokens already have their end; an end that was not sampled has no log-probability.
    has_ids = bool(sample.response_token_ids)
    as_sampled = replaced(template, "_add_dynamic_eos", lambda *_: None)
    with as_sampled if has_ids else nullcontext():
        encoded: dict[str, Any] = encode_sample(sample, template)
    encoded.pop("_extra_kwargs", None)
    # In a conversation each turn has another prompt, which includes earlier answers.
    prompts = rollout_prompts(sample)
    rollout = prompts[0].token_ids if len(prompts) == 1 else ()
    was_cut = 0 < (max_length or 0) <= len(rollout)  # in `_truncate` a medium is one token
    placeholders, decode = placeholder_ids(template), template.tokenizer.decode
    changed = with_text_of(rollout, encoded, placeholders, decode, was_cut=was_cut)
    if changed and not was_cut:
        logger.info_once(
            "Line breaks beside media differ between training and rollout, by ms-swift's template "
            "or vLLM (docs/support.md): training uses those of the rollout.",
            hash_id="line_breaks",
        )
    return encoded | changed


def warn_of_mismatch(error: DisagreementError) -> None:
    logger.warning_once(
        f"{error} Training goes on (--rollout_mismatch warn) with its own prompt; see rollout_gap "
        "for the difference in log-probabilities.",
        hash_id="rollout_mismatch",
    )


# --- the rollout's text ---


def with_text_of(
    rollout: Sequence[int],
    encoded: Mapping[str, Any],
    placeholders: Collection[int],
    decode: Decode,
    *,
    was_cut: bool,
) -> dict[str, Any]:
    """Return the changed entries that give an encoded sample the text of its rollout. Return {} if
    the prompts are equal, or differ in other ways than

    - line breaks beside media: a template writes one more for training (ms-swift's InternVL), or an
      engine merges them (vLLM's Gemma3);
    - text that ms-swift has truncated to `--max_length` for the rollout (`was_cut`; 4.6.0,
      template/base.py, `_truncate`).
    """
    ids, labels = encoded["input_ids"], encoded.get("labels")
    # Ids in a tensor stay as they are; `check_rollout_prompts` compares them.
    if not isinstance(ids, list) or not labels or ids[: len(rollout)] == list(rollout):
        return {}
    num_prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    rollout_spans = spans_of(rollout, placeholders)
    train_spans = spans_of(ids[:num_prompt], placeholders)
    if len(rollout_spans) != len(train_spans):
        return {}
    text_positions = [at for at, i in enumerate(ids[:num_prompt]) if not _is_media(i, placeholders)]
    new_ids: list[int] = []
    sources: list[int] = []  # for each new token, the index in `ids` to take other values from
    start = 0  # index of the span in `ids`
    for (is_media, seen), (_, trained) in zip(rollout_spans, train_spans, strict=True):
        if is_media:
            agree = _same_item(seen, trained)
            new_ids += trained
            sources += range(start, start + len(trained))
        else:
            # Truncation removes tokens on the left.
            is_cut = was_cut and seen == trained[max(len(trained) - len(seen), 0) :]
            has_media = len(rollout_spans) > 1
            agree = is_cut or (has_media and _line(seen, decode) == _line(trained, decode))
            new_ids += seen
            # Any text token serves: below, their values must be equal.
            sources += text_positions[:1] * len(seen)
        if not agree:
            return {}
        start += len(trained)
    sources += range(num_prompt, len(ids))
    changed: dict[str, Any] = {"input_ids": [*new_ids, *ids[num_prompt:]]}
    if "length" in encoded:
        changed["length"] = len(sources)
    for name, values in encoded.items():
        # Entries of another length, such as pixels and grids, stay as they are.
        is_list = isinstance(values, list) and len(values) == len(ids)
        if name == "input_ids" or not (is_list or getattr(values, "shape", None) == (len(ids),)):
            continue
        if len({float(values[at]) for at in text_positions}) > 1:
            return {}  # values such as positions cannot be inferred for an inserted token
        changed[name] = [values[at] for at in sources] if is_list else values[sources]
    return changed


def _is_media(token_id: int, placeholders: Collection[int]) -> bool:
    return token_id < 0 or token_id in placeholders


def spans_of(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Return alternating runs of text and placeholders, beginning with a run of text."""
    runs = groupby(ids, key=lambda i: _is_media(i, placeholders))
    spans = [(is_media, list(run)) for is_media, run in runs]
    return spans if spans and not spans[0][0] else [(False, []), *spans]


def _line(ids: list[int], decode: Decode) -> str:
    return decode(ids).replace("\n", "")


def _same_item(seen: list[int], trained: list[int]) -> bool:
    """Return whether two runs of placeholders represent the same item."""
    # A frame of InternVL has `<video>` tokens in vLLM, and as many `<IMG_CONTEXT>` in training.
    alike = len(seen) == len(trained) and len({*seen}) == len({*trained}) == 1
    # A negative id represents a whole item, with any number of tokens.
    return seen == trained or alike or min(trained) < 0


# --- prompts that differ ---


def check_rollout_prompts(
    sample: RolloutSample,
    encoded: Mapping[str, Any],
    template: Template,
    placeholders: Collection[int],
) -> None:
    """Raise `DisagreementError` if an encoded sample does not begin with its rollout's prompts."""
    training: list[int] = torch.as_tensor(encoded["input_ids"]).flatten().tolist()
    spans, decode = spans_of(training, placeholders), template.tokenizer.decode
    prompts = rollout_prompts(sample)
    for turn, prompt in enumerate(prompts, 1):
        rollout = prompt.token_ids
        rollout_spans = spans_of(rollout, placeholders)
        agrees = len(spans) >= len(rollout_spans)
        for (is_media, seen), (_, trained) in zip(rollout_spans, spans, strict=False):
            if is_media:
                agrees &= _same_item(seen, trained)
                continue
            is_last = seen is rollout_spans[-1][1]  # training's span goes on with the completion
            if seen == (trained[: len(seen)] if is_last else trained):
                continue
            # `with_text_of` has aligned line breaks in the prompts of single turns only.
            line, trained_line = _line(seen, decode), _line(trained, decode)
            starts = trained_line.startswith(line) if is_last else trained_line == line
            agrees &= len(prompts) > 1 and len(rollout_spans) > 1 and starts
        if agrees:
            continue
        pairs = zip(rollout, training, strict=False)
        shorter = min(len(rollout), len(training))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        seen, trained = (ids[first : first + SHOWN] for ids in (rollout, training))
        words = [repr(decode([i for i in ids if i >= 0])) for ids in (seen, trained)]
        where, remedy = (f" in turn {turn}", TURNS_REMEDY) if len(prompts) > 1 else ("", REMEDY)
        raise DisagreementError(
            f"{sample.sample_id}{where}: the rollout saw a prompt of {len(rollout)} tokens that "
            f"training does not begin with; they differ from token {first} on ({seen} against "
            f"{trained}, {words[0]} against {words[1]}). {remedy}"
        )
