"""The stop rule: finds where a completion's tokens and text end. Pure.

A completion ends with the token that completes a stop string, or with a stop token, whichever comes
first (docs/promises.md, T1). All tokens up to that one are kept (T2). The text ends with the stop
string or right before it (T3), even if the last token runs past the string.

The search covers the text of the sampled tokens, special tokens included. The stop string that is
complete first wins; of several that end at the same character, the first in the settings. A stop
string wins over a stop token. vLLM 0.32 does the same (vllm/v1/engine/detokenizer.py), but holds
back text that ends within a character: it then finds a stop string one token late. That token is
dropped here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Decodes token ids, special tokens included. Incomplete characters become U+FFFD.
Decode = Callable[[Sequence[int]], str]

StopReason = str | int | None  # a stop string as it was given, or a token id


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """The stop strings and tokens of a request."""

    strings: tuple[str, ...] = ()  # in the order of their settings
    # Maps a token id to the reported stop reason: the id, or the stop string that is this token.
    tokens: Mapping[int, str | int] = field(default_factory=dict)
    invisible: frozenset[int] = frozenset()  # ids never shown in the text: the end of a turn
    include: bool = True  # whether the text includes the stop string or token


@dataclass(frozen=True, slots=True)
class Ending:
    """The place where a completion ends."""

    num_tokens: int  # kept for training
    num_text_tokens: int  # decoded to the text: without a stop token that the text excludes
    trailing_text: str = ""  # cut off at the end of that text
    reason: StopReason = None  # the matched stop; None: no match, and all tokens are kept


def find_ending(token_ids: Sequence[int], decode: Decode, stops: Stops) -> Ending:
    """Return where a completion ends; the engine may have sampled further tokens."""
    length = next((i + 1 for i, token in enumerate(token_ids) if token in stops.tokens), None)
    token_ids = token_ids[:length]
    text = decode(token_ids) if stops.strings else ""  # stop tokens need no text
    match = find(text, stops.strings)
    if match is not None:
        # Drop the last token as long as the rest still has a stop string (the engine was late).
        for shorter in range(len(token_ids) - 1, 0, -1):
            earlier_text = decode(token_ids[:shorter])
            earlier = find(earlier_text, stops.strings)
            if earlier is None:
                break
            token_ids, text, match = token_ids[:shorter], earlier_text, earlier
        string, start = match
        rest = text[start + len(string) if stops.include else start :]
        num_tokens = len(token_ids)
        return Ending(num_tokens, num_tokens, trailing_text=rest, reason=string)
    if length is None:
        return Ending(len(token_ids), len(token_ids))
    last = token_ids[-1]
    if stops.include and last not in stops.invisible:
        return Ending(length, length, reason=stops.tokens[last])
    # Without the stop token, a character that it completes would show as U+FFFD. The end of a turn
    # is a special token, which completes no character.
    before = "" if last in stops.invisible else decode(token_ids[:-1])
    rest = before[len(before.rstrip("\ufffd")) :]
    return Ending(length, length - 1, trailing_text=rest, reason=stops.tokens[last])


def find(text: str, strings: Sequence[str]) -> tuple[str, int] | None:
    """Return the stop string that is complete first, and its start; None without a match."""
    matches = [(string, text.find(string)) for string in strings if string in text]
    # For equal ends, `min` returns the first in the order of the settings.
    return min(matches, key=lambda match: match[1] + len(match[0]), default=None)
