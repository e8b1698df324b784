"""Did a rollout and the training on it see the same? (docs/promises.md, M3, M5 and M6). Pure.

Templates of ms-swift write media in one way for training and in another for vLLM. What differs in
notation alone is no difference: a placeholder may be a negative number in training, and whitespace
beside a media item may be cut into other tokens that spell the same. Where line breaks differ, or
the rollout's prompt was cut, training is given the rollout's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from math import isnan
from typing import Any

Decode = Callable[[list[int]], str]
Span = tuple[bool, list[int]]
"""Placeholders (True) or text, and the tokens."""

SHOWN = 5
"""Tokens that a message shows of each side."""

SHARED = 4
"""How many tokens more or fewer the same whitespace may take."""


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


def check_counts(name: str, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
    """Raise `DisagreementError` where a sample has another number of log-probabilities."""
    if logprobs and len(logprobs) != len(token_ids):
        raise DisagreementError(
            f"{name}: {len(token_ids)} sampled tokens and {len(logprobs)} log-probabilities came "
            "back from the engine."
        )


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
    if list(training[: len(rollout)]) == list(rollout):
        return
    ours, theirs = _spans(rollout, placeholders), _spans(training, placeholders)
    if all(
        _same(*pair, decode, is_last=i == len(ours) - 1)
        for i, pair in enumerate(zip(ours, theirs, strict=False))
    ) and len(ours) <= len(theirs):
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
) -> dict[str, Any]:
    """Return what changes of an encoded sample so that it has the text of the rollout's prompt.

    Templates that write a line more beside an image for training (ms-swift's InternVL), or engines
    that merge line breaks (vLLM's Gemma3), make two prompts of one row. The policy was asked with
    the rollout's: it is trained on that one. Media stay as they are encoded.

    Args:
        rollout: as `check_prompt`'s.
        encoded: ms-swift's, with `input_ids`, `labels` (-100 in the prompt) and what else has one
            value for each token.

    Returns:
        New entries; none where the prompts are equal or differ in more than line breaks, where
        there is no media, or where text tokens of the prompt do not share an entry's value.
    """
    ids, labels = encoded["input_ids"], encoded.get("labels")
    if not isinstance(ids, list) or not labels or ids[: len(rollout)] == list(rollout):
        return {}
    num_prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    ours, theirs = _spans(rollout, placeholders), _spans(ids[:num_prompt], placeholders)
    pairs = list(zip(ours, theirs, strict=False))
    has_media = len(ours) == len(theirs) > 1
    if not has_media or not all(_differ_in_lines(*pair, decode) for pair in pairs):
        return {}
    ends = list(accumulate(len(their) for _, their in theirs))
    changed: dict[str, Any] = {"length": 0} if "length" in encoded else {}
    for name, values in encoded.items():
        if not isinstance(values, list) or len(values) != len(ids):
            continue
        parts = [
            values[end - len(their) : end] for end, (_, their) in zip(ends, theirs, strict=True)
        ]
        of_text = {
            v for (is_media, _), part in zip(ours, parts, strict=True) if not is_media for v in part
        }
        if name != "input_ids" and len(of_text) != 1:
            return {}
        text = [own if name == "input_ids" else [*of_text] * len(own) for _, own in ours]
        chosen = [
            p if is_media else t for (is_media, _), p, t in zip(ours, parts, text, strict=True)
        ]
        changed[name] = [*chain(*chosen), *values[num_prompt:]]
    if "length" in changed:
        changed["length"] = len(changed["input_ids"])
    return changed


def with_cut_prompt(
    rollout: Sequence[int], encoded: Mapping[str, Any], placeholders: Collection[int] = ()
) -> dict[str, Any]:
    """Return what changes of an encoded sample so that it has a prompt that was cut on the left.

    For rollouts ms-swift cuts a prompt to `--max_length` and keeps all media and the last of its
    other tokens (4.6.0, template/base.py, `_truncate`); for training it encodes prompts whole.

    Args:
        rollout, encoded, placeholders: as `with_text_of`'s; values may be tensors [tokens] too.

    Returns:
        New entries; none where the rollout's prompt is not what such a cut leaves, or where no text
        is left between two media.
    """
    ids, labels = encoded["input_ids"], encoded.get("labels")
    if not isinstance(ids, list) or not labels or ids[: len(rollout)] == list(rollout):
        return {}
    num_prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    is_media = [i < 0 or i in placeholders for i in ids[:num_prompt]]
    text = [at for at, is_medium in enumerate(is_media) if not is_medium]
    num_text = len(rollout) - sum(is_media)
    if not 0 <= num_text < len(text):
        return {}
    dropped = {*text[: len(text) - num_text]}
    kept = [at for at in range(len(ids)) if at not in dropped]
    if [ids[at] for at in kept[: len(rollout)]] != list(rollout):
        return {}
    # Side by side, transformers takes two media for one (5.19, `get_rope_index`: runs of a type).
    if _num_media(rollout, placeholders) != _num_media(ids[:num_prompt], placeholders):
        return {}
    changed: dict[str, Any] = {"length": len(kept)} if "length" in encoded else {}
    for name, values in encoded.items():
        if isinstance(values, list) and len(values) == len(ids):
            changed[name] = [values[at] for at in kept]
        elif getattr(values, "shape", None) == (len(ids),):
            changed[name] = values[kept]
    return changed


def _differ_in_lines(rollout: Span, training: Span, decode: Decode) -> bool:
    """Return whether two parts of a prompt are the same but for line breaks in their text."""
    (is_media, ours), (_, theirs) = rollout, training
    if ours == theirs:
        return True
    if is_media:
        return _same_item(ours, theirs)
    return decode(ours).replace("\n", "") == decode(theirs).replace("\n", "")


def _spans(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Return the runs of placeholders and of text, beginning with text."""
    runs = groupby(ids, key=lambda i: i < 0 or i in placeholders)
    spans = [(is_media, list(run)) for is_media, run in runs]
    return spans if spans and not spans[0][0] else [(False, []), *spans]


def _num_media(ids: Sequence[int], placeholders: Collection[int]) -> int:
    return sum(is_media for is_media, _ in _spans(ids, placeholders))


def _same(rollout: Span, training: Span, decode: Decode, *, is_last: bool) -> bool:
    (is_media, ours), (_, theirs) = rollout, training
    if is_media:
        return _same_item(ours, theirs)
    if ours == (theirs[: len(ours)] if is_last else theirs):
        return True
    if not is_last:
        return _spelled_alike(ours, theirs, decode)
    # The completion follows; the same prompt may take some tokens more or fewer.
    around = range(max(len(ours) - SHARED, 0), len(ours) + SHARED + 1)
    return any(_spelled_alike(ours, theirs[:length], decode) for length in around)


def _same_item(ours: list[int], theirs: list[int]) -> bool:
    """Return whether two runs of placeholders differ in notation at most.

    Negative numbers stand for a whole item, however many tokens it takes. InternVL's frames are
    `<video>` to vLLM and `<IMG_CONTEXT>` to training, as many of the one as of the other.
    """
    alike = len(ours) == len(theirs) and len({*ours}) == len({*theirs}) == 1
    return ours == theirs or alike or min(theirs) < 0


def _spelled_alike(ours: list[int], theirs: list[int], decode: Decode) -> bool:
    """Return whether the tokens that differ are whitespace and decode to the same."""
    start = 0
    while start < min(len(ours), len(theirs)) and ours[start] == theirs[start]:
        start += 1
    end = 0
    while end < min(len(ours), len(theirs)) - start and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    a, b = (decode(ids[start : len(ids) - end]) for ids in (ours, theirs))
    return a == b and not a.strip() and bool(a)
