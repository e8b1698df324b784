"""Where a completion ends: stop settings, and cutting token ids and text to them. Pure.

A completion ends with the token that completes a stop string, or with a stop token, whichever comes
first (docs/promises.md, T1). All tokens up to that one are kept (T2); the text ends at the end of
the stop string, or right before it (T3), also where the last token runs past it.

A stop string is looked for in the text of the sampled tokens, special tokens included and never in
the prompt. Of several, the one that is complete first counts; of those that are complete at the
same character, the one that stands first among the settings; and where a string and a stop token
end a completion together, the string. All three as in vLLM 0.32 (`check_stop_strings` and `update`
in vllm/v1/engine/detokenizer.py), with one difference: vLLM holds the text of a token back while it
ends within a character, and so finds a stop string that such a token completes only with a later
token. Here the later tokens are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included. Bytes that are no whole character become U+FFFD."""

StopReason = str | int | None
"""What ended a completion: a stop string as it was given, a token id, or nothing of the kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """What ends a completion."""

    strings: tuple[str, ...] = ()
    """Looked for in the text, in the order of their settings."""

    tokens: Mapping[int, str | int] = field(default_factory=dict)
    """Token ids that end a completion, and what is said to have stopped it then: the id, or the
    stop string that is this special token."""

    hidden: frozenset[int] = frozenset()
    """Stop tokens that the text never shows: the template's own end of a turn."""

    include: bool = True
    """Whether the text ends with what stopped it, or right before it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a completion ends."""

    num_tokens: int
    """Tokens that are kept, and trained on."""

    num_text_tokens: int
    """Tokens that make the text: `num_tokens`, or one less where the last is a stop token that the
    text does not show."""

    trailing_text: str = ""
    """The end of these tokens' text that does not count: what follows a stop string, or begins with
    it."""

    reason: StopReason = None
    """What matched; None where nothing did, and all tokens are kept."""

    def text(self, token_ids: Sequence[int], decode: Decode) -> str:
        """Return the text of the completion that ends here."""
        return decode(token_ids[: self.num_text_tokens]).removesuffix(self.trailing_text)


def find_ending(token_ids: Sequence[int], decode: Decode, stops: Stops) -> Ending:
    """Find where a completion ends.

    Args:
        token_ids: the sampled tokens. What comes after the end (padding, tokens that an engine
            sampled too many) does not matter.
        decode: gives the text of any first part of `token_ids`.
        stops: what ends it.
    """
    length = next((i + 1 for i, token in enumerate(token_ids) if token in stops.tokens), None)
    token_ids = token_ids[:length]
    text = decode(token_ids) if stops.strings else ""  # stop tokens need no text
    match = find(text, stops.strings)
    if match is not None:
        # A bisection for the fewest tokens: longer parts of a completion hold whatever shorter ones
        # hold, so `few` tokens never hold the string, and `enough` always do. It begins with all
        # tokens but one: an engine that stopped in time needs no other look.
        few, enough, middle = 0, len(token_ids), len(token_ids) - 1
        while few < middle:
            earlier_text = decode(token_ids[:middle])
            earlier = find(earlier_text, stops.strings)
            if earlier is None:
                few = middle
            else:
                enough, text, match = middle, earlier_text, earlier
            middle = (few + enough) // 2
        rest = text[match.end if stops.include else match.start :]
        return Ending(enough, enough, trailing_text=rest, reason=match.string)
    if length is None:
        return Ending(len(token_ids), len(token_ids))
    last = token_ids[-1]
    if stops.include and last not in stops.hidden:
        return Ending(length, length, reason=stops.tokens[last])
    # A stop token that completes a character leaves the bytes before it, which show as U+FFFD. The
    # end of a turn is a special token, which completes none.
    before = "" if last in stops.hidden else decode(token_ids[:-1])
    rest = before[len(before.rstrip("\ufffd")) :]
    return Ending(length, length - 1, trailing_text=rest, reason=stops.tokens[last])


class Match(NamedTuple):
    """A stop string in a text, by its characters."""

    string: str
    start: int
    end: int


def find(text: str, strings: Sequence[str]) -> Match | None:
    """Return the stop string that is complete first; None where there is none."""
    places = ((string, text.find(string)) for string in strings)
    matches = [Match(string, i, i + len(string)) for string, i in places if i >= 0]
    # `min` returns the first of equal ones: the one that stands first among the settings.
    return min(matches, key=lambda match: match.end, default=None)
