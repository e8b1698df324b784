"""Whether training and rollout saw the same prompt, in whatever notation (SPEC M3). Pure.

Templates of ms-swift write media in one way for training and in another for vLLM. What differs in
notation alone is no difference: a placeholder may be a negative number in training, and whitespace
beside a media item may be cut into other tokens that spell the same. Where line breaks differ, or
the rollout's prompt was cut, training is given that of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, groupby
from typing import Any

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


def with_text_of(
    rollout: Sequence[int],
    encoded: Mapping[str, Any],
    placeholders: Collection[int] = (),
    decode: Decode = str,
) -> dict[str, Any]:
    """What changes of an encoded sample so that it has the text of the rollout's prompt.

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
    """Whether two parts of a prompt are the same, or have the same text but for line breaks."""
    (is_media, ours), (_, theirs) = rollout, training
    if ours == theirs:
        return True
    if is_media:
        return _same_item(ours, theirs)
    return decode(ours).replace("\n", "") == decode(theirs).replace("\n", "")


def _spans(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Runs of placeholders and of text, beginning with text."""
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
    """Whether two runs of placeholders differ in notation at most.

    Negative numbers stand for a whole item, however many tokens it takes. InternVL's frames are
    `<video>` to vLLM and `<IMG_CONTEXT>` to training, as many of the one as of the other.
    """
    alike = len(ours) == len(theirs) and len({*ours}) == len({*theirs}) == 1
    return ours == theirs or alike or min(theirs) < 0


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
