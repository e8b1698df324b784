"""Whether training and rollout saw the same prompt, in whatever notation (SPEC M3). Pure.

Templates of ms-swift write media in one way for training and in another for vLLM. What differs in
notation alone is no difference: a placeholder may be a negative number in training, and whitespace
beside a media item may be cut into other tokens that spell the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from swift_grpo_ext.training.agreement import DisagreementError

Decode = Callable[[list[int]], str]
Span = tuple[bool, list[int]]
"""Whether these tokens are placeholders, and the tokens."""

SHOWN = 5
"""Tokens that a message shows of each side."""

SHARED = 4
"""How many tokens more or fewer the same whitespace may take."""


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


def _spans(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Runs of placeholders and of text, beginning with text."""
    runs = groupby(ids, key=lambda i: i < 0 or i in placeholders)
    spans = [(is_media, list(run)) for is_media, run in runs]
    return spans if spans and not spans[0][0] else [(False, []), *spans]


def _same(rollout: Span, training: Span, decode: Decode, *, is_last: bool) -> bool:
    (is_media, ours), (_, theirs) = rollout, training
    if is_media:
        # Negative numbers stand for a whole item, however many tokens it takes.
        return ours == theirs or min(theirs) < 0
    if ours == (theirs[: len(ours)] if is_last else theirs):
        return True
    if not is_last:
        return _spelled_alike(ours, theirs, decode)
    # The completion follows; the same prompt may take some tokens more or fewer.
    around = range(max(len(ours) - SHARED, 0), len(ours) + SHARED + 1)
    return any(_spelled_alike(ours, theirs[:length], decode) for length in around)


def _spelled_alike(ours: list[int], theirs: list[int], decode: Decode) -> bool:
    """Whether only tokens at the ends differ, which are whitespace and decode to the same."""
    start = 0
    while start < min(len(ours), len(theirs)) and ours[start] == theirs[start]:
        start += 1
    end = 0
    while end < min(len(ours), len(theirs)) - start and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    a, b = (decode(ids[start : len(ids) - end]) for ids in (ours, theirs))
    return a == b and not a.strip() and bool(a)
