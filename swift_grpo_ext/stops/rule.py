"""Where a completion ends: stop settings, and cutting token ids and text to them. Pure.

A completion ends with the token that completes a stop string, or with a stop token, whichever comes
first (docs/promises.md, T1). All tokens up to that one are kept (T2); the text ends at the end of
the stop string, or right before it (T3), also where the last token runs past it.

The search covers the text of the sampled tokens, special tokens included. The stop string that is
complete first counts; among those that end at the same character, the first of the settings; and a
string before a stop token. vLLM 0.32 does the same (vllm/v1/engine/detokenizer.py), but it holds a
token's text back while that ends within a character, and then finds a stop string with a later
token. That token is dropped here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Token ids to text, special tokens included. Bytes that are no whole character become U+FFFD.
Decode = Callable[[Sequence[int]], str]

StopReason = str | int | None  # a stop string as it was given, or a token id


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """What ends a completion."""

    strings: tuple[str, ...] = ()  # in the order of their settings
    # Token ids, each with the reason that it gives: itself, or the stop string that is this token.
    tokens: Mapping[int, str | int] = field(default_factory=dict)
    hidden: frozenset[int] = frozenset()  # the text never shows them: the template's end of a turn
    include: bool = True  # the text ends with the stop string or token, or else right before it


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a completion ends."""

    num_tokens: int  # are kept, and trained on
    num_text_tokens: int  # make the text: all kept tokens, or all but a stop token at the end
    trailing_text: str = ""  # the end of that text, which is cut off
    reason: StopReason = None  # the match; without one, all tokens are kept


def find_ending(token_ids: Sequence[int], decode: Decode, stops: Stops) -> Ending:
    """Return where a completion ends; an engine may have sampled tokens after that."""
    length = next((i + 1 for i, token in enumerate(token_ids) if token in stops.tokens), None)
    token_ids = token_ids[:length]
    text = decode(token_ids) if stops.strings else ""  # stop tokens need no text
    match = find(text, stops.strings)
    if match is not None:
        # Drop tokens while the others hold a stop string: none, where the engine stopped in time.
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
    if stops.include and last not in stops.hidden:
        return Ending(length, length, reason=stops.tokens[last])
    # Bytes that the stop token would have made a character show as U+FFFD. The end of a turn is a
    # special token, which completes none.
    before = "" if last in stops.hidden else decode(token_ids[:-1])
    rest = before[len(before.rstrip("\ufffd")) :]
    return Ending(length, length - 1, trailing_text=rest, reason=stops.tokens[last])


def find(text: str, strings: Sequence[str]) -> tuple[str, int] | None:
    """Return the stop string that is complete first, and its start; None where there is none."""
    matches = [(string, text.find(string)) for string in strings if string in text]
    # `min` returns the first of equal ones: the first of the settings.
    return min(matches, key=lambda match: match[1] + len(match[0]), default=None)
