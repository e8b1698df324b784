"""The prompt of a group is encoded once, and compared with the rollout's (docs/promises.md, M3).

ms-swift encodes each of the G samples of a group, and reads the same images G times (ms-swift issue
4413). Here the first sample is encoded whole, as ms-swift does; the others take its prompt and
their own token ids. The result equals ms-swift's in all families (`tests/stack/test_encodings.py`).
Where the shortcut does not hold (docs/support.md), each sample is encoded whole.
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

SHOWN = 5  # tokens of each side that an error quotes

REMEDY = (
    "Give `swift rollout` the settings of the training: --template, --system, --max_length, "
    "MAX_PIXELS and the like. Where --max_length leaves no text between two media of a prompt, "
    "raise it, or have such prompts replaced with --truncation_strategy delete. Where ms-swift's "
    "template writes another prompt for vLLM than for training (docs/support.md), "
    "--rollout_mismatch warn trains on its prompt all the same."
)

TURNS_REMEDY = (
    "Training sees the messages and media that the scheduler leaves: its `step` has to return all "
    "images of a conversation in `rollout_infos['images']` (videos, audios alike), and to keep "
    "earlier turns as the engine saw them; --max_length must hold all turns. "
    "--rollout_mismatch warn trains all the same."
)


class GroupEncoder:
    """Encodes the samples of one round, as training sees them."""

    def __init__(
        self, template: Template, args: RolloutGRPOConfig, *, is_conversation: bool = False
    ) -> None:
        self._template, self._args = template, args
        self._is_conversation = is_conversation  # schedulers may change prompts
        self._placeholders = {*placeholder_ids(template)}
        self._max_length = template.max_length
        self._prompts: dict[tuple[SampleId, str], GroupPrompt] = {}
        # Names the first prompt that differs, with `--rollout_mismatch stop`. All ranks agree on it
        # before one raises.
        self.fault = ""

    def encode(self, sample: RolloutSample) -> EncodedSample:
        """Return a sample's entries."""
        key = sample.sample_id.group_id, sample.prompt_hash
        prompts = rollout_prompts(sample)
        rollout = prompts[0].token_ids if prompts else []
        known, response = self._prompts.get(key), self._response(sample)
        if known and response and (not rollout or rollout == known.rollout):
            return known.with_response(*response)
        encoded = EncodedSample(encode_whole(sample, self._template, self._max_length))
        try:
            check_rollout_prompts(sample, encoded, self._template, self._placeholders, REMEDY)
        except DisagreementError as e:
            if self._args.rollout_mismatch == "stop":
                self.fault = self.fault or str(e)
            else:
                warn_of_mismatch(e)
        if self._is_conversation:
            response = self._response_of_turns(encoded)
        if response and known is None:
            known = GroupPrompt.of(encoded, response[0], rollout)
        if known and response and known.is_prompt_of(encoded, response[0]):
            encoded.prompt = self._prompts[key] = known
        return encoded

    def _response(self, sample: RolloutSample) -> tuple[list[int], list[int]] | None:
        """Return the tokens of a response and their weights; None for a sample to encode whole."""
        turns = sample.response_token_ids or []
        if not turns or self._is_conversation or (isinstance(turns[0], list) and len(turns) > 1):
            return None
        ids = list(flatten(turns))
        weights = list(flatten(sample.response_loss_mask)) or [1] * len(ids)
        if not ids or len(weights) != len(ids) or not self._placeholders.isdisjoint(ids):
            return None
        return ids, weights

    def _response_of_turns(self, encoded: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
        """Return the tokens of a conversation's turns; None where the row shows media, which may
        differ where token ids do not."""
        ids, labels = encoded["input_ids"], encoded.get("labels") or ()
        start = next((i for i, label in enumerate(labels) if label != -100), None)
        if start is None or any(_is_media(i, self._placeholders) for i in ids):
            return None
        return ids[start:], []


def encode_whole(
    sample: RolloutSample, template: Template, max_length: int | None
) -> dict[str, Any]:
    """Return a sample's entries as ms-swift encodes them, with the text of its rollout.
    `max_length` is the template's, which ms-swift takes away while it encodes."""
    # ms-swift labels the end of each turn, for answers that come as text (4.6, template/base.py,
    # `_add_dynamic_eos`). No policy drew those tokens, and they have no log-probabilities.
    has_ids = bool(sample.response_token_ids)
    adds_eos = replaced(template, "_add_dynamic_eos", lambda *_: None) if has_ids else nullcontext()
    with adds_eos:
        encoded: dict[str, Any] = encode_sample(sample, template)
    encoded.pop("_extra_kwargs", None)
    # In a conversation each turn saw another prompt, which holds what was sampled before.
    prompts = rollout_prompts(sample)
    rollout = prompts[0].token_ids if len(prompts) == 1 else ()
    was_cut = 0 < (max_length or 0) <= len(rollout)  # a medium counts as one token
    placeholders, decode = placeholder_ids(template), template.tokenizer.decode
    changed = with_text_of(rollout, encoded, placeholders, decode, was_cut=was_cut)
    if changed and not was_cut:
        logger.info_once(
            "ms-swift's template writes other line breaks beside media for training than for vLLM, "
            "or vLLM merges them (docs/support.md): training has the rollout's.",
            hash_id="line_breaks",
        )
    return encoded | changed


def warn_of_mismatch(error: DisagreementError) -> None:
    logger.warning_once(
        f"{error} Training goes on (--rollout_mismatch warn); its log-probabilities are of its own "
        "prompt, and rollout_gap says how far they lie apart.",
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
    """Return the entries of an encoded sample that change so that it has the rollout's text, with
    which the policy was asked; none where prompts differ in more than

    - line breaks beside media: a template writes one more for training (ms-swift's InternVL), or an
      engine merges them (vLLM's Gemma3);
    - the text that ms-swift has cut to `--max_length` for a rollout (`was_cut`; 4.6.0,
      template/base.py, `_truncate`).
    """
    ids, labels = encoded["input_ids"], encoded.get("labels")
    # Tensors stay; `check_rollout_prompts` judges them.
    if not isinstance(ids, list) or not labels or ids[: len(rollout)] == list(rollout):
        return {}
    num_prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    ours, theirs = spans_of(rollout, placeholders), spans_of(ids[:num_prompt], placeholders)
    if len(ours) != len(theirs):
        return {}
    text_positions = [at for at, i in enumerate(ids[:num_prompt]) if not _is_media(i, placeholders)]
    new_ids: list[int] = []
    sources: list[int] = []  # for each new token, the one in `ids` that has its other values
    start = 0  # of the span in `ids`
    for (is_media, own), (_, other) in zip(ours, theirs, strict=True):
        if is_media:
            agree = _same_item(own, other)
            new_ids += other
            sources += range(start, start + len(other))
        else:
            # A cut takes tokens from the left.
            is_cut = was_cut and own == other[max(len(other) - len(own), 0) :]
            agree = is_cut or (len(ours) > 1 and _line(own, decode) == _line(other, decode))
            new_ids += own
            sources += text_positions[:1] * len(own)
        if not agree:
            return {}
        start += len(other)
    sources += range(num_prompt, len(ids))
    changed: dict[str, Any] = {"input_ids": [*new_ids, *ids[num_prompt:]]}
    if "length" in encoded:
        changed["length"] = len(sources)
    for name, values in encoded.items():
        # Pixels and grids of media have another length, and stay.
        is_list = isinstance(values, list) and len(values) == len(ids)
        if name == "input_ids" or not (is_list or getattr(values, "shape", None) == (len(ids),)):
            continue
        if len({float(values[at]) for at in text_positions}) > 1:
            return {}  # such as positions: that of a new token is not known
        changed[name] = [values[at] for at in sources] if is_list else values[sources]
    return changed


def _is_media(token_id: int, placeholders: Collection[int]) -> bool:
    return token_id < 0 or token_id in placeholders


def spans_of(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Return the runs of placeholders and of text, beginning with text."""
    runs = groupby(ids, key=lambda i: _is_media(i, placeholders))
    spans = [(is_media, list(run)) for is_media, run in runs]
    return spans if spans and not spans[0][0] else [(False, []), *spans]


def _line(ids: list[int], decode: Decode) -> str:
    return decode(ids).replace("\n", "")


def _same_item(ours: list[int], theirs: list[int]) -> bool:
    """Return whether two runs of placeholders differ in notation at most."""
    # InternVL's frames are `<video>` to vLLM and `<IMG_CONTEXT>` to training, as many of them.
    alike = len(ours) == len(theirs) and len({*ours}) == len({*theirs}) == 1
    # A negative number stands for a whole item, however many tokens it takes.
    return ours == theirs or alike or min(theirs) < 0


# --- prompts that differ ---


def check_rollout_prompts(
    sample: RolloutSample,
    encoded: Mapping[str, Any],
    template: Template,
    placeholders: Collection[int],
    remedy: str = "",
) -> None:
    """Raise `DisagreementError`, which ends with `remedy`, where an encoded sample does not begin
    with the prompt that its rollout saw in each turn, as far as that is known."""
    training: list[int] = torch.as_tensor(encoded["input_ids"]).flatten().tolist()
    spans, decode = spans_of(training, placeholders), template.tokenizer.decode
    prompts = rollout_prompts(sample)
    for turn, prompt in enumerate(prompts, 1):
        rollout = prompt.token_ids
        ours = spans_of(rollout, placeholders)
        agrees = len(spans) >= len(ours)
        for (is_media, own), (_, other) in zip(ours, spans, strict=False):
            if is_media:
                agrees &= _same_item(own, other)
                continue
            is_last = own is ours[-1][1]  # in training, completions follow it in the same span
            if own == (other[: len(own)] if is_last else other):
                continue
            # Training was given a prompt's line breaks beside media, but not those of later turns.
            line, other_line = _line(own, decode), _line(other, decode)
            starts = other_line.startswith(line) if is_last else other_line == line
            agrees &= len(prompts) > 1 and len(ours) > 1 and starts
        if agrees:
            continue
        pairs = zip(rollout, training, strict=False)
        shorter = min(len(rollout), len(training))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        seen, trained = (ids[first : first + SHOWN] for ids in (rollout, training))
        words = [repr(decode([i for i in ids if i >= 0])) for ids in (seen, trained)]
        where = f" in turn {turn}" if len(prompts) > 1 else ""
        advice = TURNS_REMEDY if remedy and where else remedy
        raise DisagreementError(
            f"{sample.sample_id}{where}: the rollout saw a prompt of {len(rollout)} tokens that "
            f"training does not begin with; they differ from token {first} on ({seen} against "
            f"{trained}, {words[0]} against {words[1]}). {advice}"
        )
