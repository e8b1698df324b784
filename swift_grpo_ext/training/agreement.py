"""Did a rollout and the training on it see the same? (docs/promises.md, M3 and M5). Pure.

Templates of ms-swift write media in one way for training and in another for vLLM: a placeholder may
be a negative number in training. That is no difference. Where line breaks beside media differ, or
the rollout's prompt was cut, training is given the rollout's text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from typing import Any

Decode = Callable[[list[int]], str]
Span = tuple[bool, list[int]]
"""Placeholders (True) or text, and the tokens."""

SHOWN = 5
"""Tokens that a message shows of each side."""


class DisagreementError(RuntimeError):
    """What a rollout says of a sample is not what training on it sees."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance, in nats, of two log-probabilities of each of some tokens."""

    total: float = 0.0
    """Sum of absolute differences."""

    count: int = 0
    """Number of tokens."""

    largest: float = 0.0

    @property
    def mean(self) -> float:
        """The mean difference in nats; 0 where there was no token."""
        return self.total / self.count if self.count else 0.0

    def __add__(self, other: Gap) -> Gap:
        # NaN is the largest: Python's `max` returns it only where it stands first.
        is_larger = isnan(self.largest) or self.largest > other.largest
        largest = self.largest if is_larger else other.largest
        return Gap(self.total + other.total, self.count + other.count, largest)


def gap_limit(bits: int, temperature: float = 1.0) -> float:
    """Return the mean gap, in nats, above which something is wrong rather than imprecise.

    A log-probability is a difference of logits, of which large models have some around 2^4. A float
    of 16 bits that keeps 8 of them as its mantissa (bfloat16) rounds those to steps of 2^-4, by
    2^-5 at most; layers before add to it, and averaging over tokens takes from it. Twice a step is
    beyond that. 32 bits round to 2^-19 there; their limit is that of kernels that sum in different
    orders, with a wide margin. Other weights, another prompt or dropout lie well above both: with
    LoRA's default dropout of 0.05 single ratios were off by 0.7 to 1 nats.

    Args:
        bits: of the less precise of both sides' numbers.
        temperature: of the sampling. Logits are divided by it, and their rounding with them; one
            above 1 leaves the limit as it is.
    """
    return (0.125 if bits <= 16 else 0.01) / min(temperature or 1.0, 1.0)


# --- prompts ---


def check_prompt(
    name: str,
    rollout: Sequence[int],
    training: Sequence[int],
    remedy: str,
    placeholders: Collection[int] = (),
    decode: Decode = str,
) -> None:
    """Raise `DisagreementError` where training does not begin with the prompt of the rollout.

    Args:
        name: of the sample.
        rollout: token ids of the prompt, as the engine saw it.
        training: token ids of prompt and completion; negative ones stand for media.
        remedy: the message's last sentence.
        placeholders: ids that stand for media.
        decode: the text of token ids.
    """
    ours, theirs = _spans(rollout, placeholders), _spans(training, placeholders)
    if len(ours) <= len(theirs):
        *between, (_, theirs_last) = theirs[: len(ours)]
        # The completion follows the prompt's last text.
        last = (ours[-1][0], theirs_last if ours[-1][0] else theirs_last[: len(ours[-1][1])])
        if all(
            _same_item(own, other) if is_media else own == other
            for (is_media, own), (_, other) in zip(ours, [*between, last], strict=True)
        ):
            return
    pairs = zip(rollout, training, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rollout), len(training)))
    seen, trained = (list(ids[first : first + SHOWN]) for ids in (rollout, training))
    words = [repr(decode([i for i in ids if i >= 0])) for ids in (seen, trained)]
    raise DisagreementError(
        f"{name}: the rollout saw a prompt of {len(rollout)} tokens that training does not begin "
        f"with; they differ from token {first} on ({seen} against {trained}, {words[0]} against "
        f"{words[1]}). {remedy}"
    )


def with_text_of(
    rollout: Sequence[int],
    encoded: Mapping[str, Any],
    placeholders: Collection[int] = (),
    decode: Decode = str,
    *,
    was_cut: bool = False,
) -> dict[str, Any]:
    """Return what changes of an encoded sample so that it has the text of the rollout's prompt.

    The policy was asked with the rollout's prompt: it is trained on that one. Media stay as they
    are encoded. Two prompts come of one row where

    - a template writes a line more beside an image for training (ms-swift's InternVL), or an engine
      merges line breaks (vLLM's Gemma3);
    - ms-swift cuts a prompt to `--max_length` for a rollout, and keeps all media and the last of
      its other tokens (4.6.0, template/base.py, `_truncate`); for training it encodes it whole.

    Args:
        rollout: as `check_prompt`'s.
        encoded: ms-swift's, with `input_ids`, `labels` (-100 in the prompt) and what else has one
            value for each token, as a list or a tensor [tokens].
        was_cut: whether the rollout's prompt may be a cut one.

    Returns:
        New entries; none where the prompts are equal or differ in more than that, or where text
        tokens of the prompt do not share an entry's value.
    """
    ids, labels = encoded["input_ids"], encoded.get("labels")
    if not isinstance(ids, list) or not labels or ids[: len(rollout)] == list(rollout):
        return {}
    num_prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    ours, theirs = _spans(rollout, placeholders), _spans(ids[:num_prompt], placeholders)

    def agree(is_media: bool, own: list[int], other: list[int]) -> bool:
        if is_media:
            return _same_item(own, other)
        if was_cut and own == other[max(len(other) - len(own), 0) :]:
            return True
        # Without media no template writes other line breaks.
        return len(ours) > 1 and _in_one_line(own, decode) == _in_one_line(other, decode)

    # Nor where a cut leaves no text between two media: side by side, transformers takes them for
    # one (5.19, `get_rope_index`: runs of a type).
    if len(ours) != len(theirs) or not all(
        agree(is_media, own, other)
        for (is_media, own), (_, other) in zip(ours, theirs, strict=True)
    ):
        return {}
    text_positions = [at for at, i in enumerate(ids[:num_prompt]) if not _is_media(i, placeholders)]
    new_ids: list[int] = []
    sources: list[int] = []
    """The position in `ids` from which each new token has its other values."""
    start = 0
    for (is_media, own), (_, other) in zip(ours, theirs, strict=True):
        end = start + len(other)
        new_ids += other if is_media else own
        sources += range(start, end) if is_media else text_positions[:1] * len(own)
        start = end
    sources += range(num_prompt, len(ids))
    changed: dict[str, Any] = {"input_ids": [*new_ids, *ids[num_prompt:]]}
    if "length" in encoded:
        changed["length"] = len(sources)
    for name, values in encoded.items():
        is_list = isinstance(values, list) and len(values) == len(ids)
        if name == "input_ids" or not (is_list or getattr(values, "shape", None) == (len(ids),)):
            continue
        if len({float(values[at]) for at in text_positions}) > 1:
            return {}
        changed[name] = [values[at] for at in sources] if is_list else values[sources]
    return changed


def _is_media(token_id: int, placeholders: Collection[int]) -> bool:
    return token_id < 0 or token_id in placeholders


def _spans(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Return the runs of placeholders and of text, beginning with text."""
    runs = groupby(ids, key=lambda i: _is_media(i, placeholders))
    spans = [(is_media, list(run)) for is_media, run in runs]
    return spans if spans and not spans[0][0] else [(False, []), *spans]


def _same_item(ours: list[int], theirs: list[int]) -> bool:
    """Return whether two runs of placeholders differ in notation at most.

    Negative numbers stand for a whole item, however many tokens it takes. InternVL's frames are
    `<video>` to vLLM and `<IMG_CONTEXT>` to training, as many of the one as of the other.
    """
    alike = len(ours) == len(theirs) and len({*ours}) == len({*theirs}) == 1
    return ours == theirs or alike or min(theirs) < 0


def _in_one_line(ids: list[int], decode: Decode) -> str:
    return decode(ids).replace("\n", "")
