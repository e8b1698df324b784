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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included. Bytes that are no whole character become U+FFFD."""

StopReason = str | int | None
"""What ended a completion: a stop string as it was given, a token id, or nothing of the kind."""

INCOMPLETE = "\ufffd"


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

    min_tokens: int = 0
    """Stop strings that are complete within the text that vLLM has after so many tokens do not
    count; it samples no stop token there."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a completion ends."""

    num_tokens: int
    """Tokens that are kept, and trained on."""

    num_text_tokens: int
    """Tokens that make the text: `num_tokens`, or one less where the last is a stop token that the
    text does not show."""

    trailing_text: str = ""
    """The end of these tokens' text that does not count."""

    reason: StopReason = None
    """What matched; None where nothing did, and all tokens are kept."""

    def text(self, token_ids: Sequence[int], decode: Decode) -> str:
        """Return the text of the completion that ends here."""
        return decode(token_ids[: self.num_text_tokens]).removesuffix(self.trailing_text)


def make_stops(
    words: Iterable[str],
    token_ids: Iterable[int] = (),
    *,
    special_ids: Mapping[str, int],
    end_ids: Iterable[int] = (),
    include: bool = True,
) -> Stops:
    """Sort settings as they are given into what is looked for in text and what by token id.

    Args:
        words: stop strings, the user's first. One that is a special token stands for that token
            (one that spells it in other tokens is not matched), so that nothing has to be decoded.
        token_ids: stop tokens.
        special_ids: the tokenizer's special tokens, by their text.
        end_ids: stop tokens of the template that never show in the text.
    """
    words = list(dict.fromkeys(words))
    end_ids = frozenset(end_ids)
    named = {special_ids[word]: word for word in words if word in special_ids}
    return Stops(
        strings=tuple(word for word in words if word not in special_ids),
        tokens={i: named.get(i, i) for i in (*named, *token_ids, *sorted(end_ids))},
        hidden=end_ids,
        include=include,
    )


def find_ending(token_ids: Sequence[int], decode: Decode, stops: Stops) -> Ending:
    """Find where a completion ends.

    Args:
        token_ids: the sampled tokens. What comes after the end (padding, tokens that an engine
            sampled too many) does not matter.
        decode: gives the text of any first part of `token_ids`.
        stops: what ends it.
    """
    later = range(stops.min_tokens, len(token_ids))
    length = next((i + 1 for i in later if token_ids[i] in stops.tokens), None)
    first = _first_stop_string(token_ids[:length], decode, stops)
    if first is not None:
        num_tokens, match, text = first
        rest = text[match.end if stops.include else match.start :]
        return Ending(num_tokens, num_tokens, trailing_text=rest, reason=match.string)
    if length is None:
        return Ending(len(token_ids), len(token_ids))
    last = token_ids[length - 1]
    if stops.include and last not in stops.hidden:
        return Ending(length, length, reason=stops.tokens[last])
    # The end of a turn is a special token, which completes no character.
    rest = "" if last in stops.hidden else _unfinished(token_ids[:length], decode)
    return Ending(length, length - 1, trailing_text=rest, reason=stops.tokens[last])


class Match(NamedTuple):
    """A stop string in a text, by its characters."""

    string: str
    start: int
    end: int


def find(text: str, strings: Sequence[str], start: int = 0) -> Match | None:
    """Return the stop string that is complete first; None where there is none.

    It must end after `start` characters.
    """
    matches = []
    for string in strings:
        position = text.find(string, max(start - len(string) + 1, 0))
        if position >= 0:
            matches.append(Match(string, position, position + len(string)))
    return min(matches, key=lambda match: match.end, default=None)  # the first of equal ones


def _first_stop_string(
    token_ids: Sequence[int], decode: Decode, stops: Stops
) -> tuple[int, Match, str] | None:
    """Return the number of tokens that first hold a whole stop string, the string, and their
    text. A bisection: longer parts of a completion hold whatever shorter ones hold."""
    if not stops.strings or len(token_ids) <= stops.min_tokens:
        return None
    start = _length_shown(token_ids[: stops.min_tokens], decode)

    def look(num_tokens: int) -> tuple[int, Match, str] | None:
        text = decode(token_ids[:num_tokens])
        match = find(text, stops.strings, start)
        return None if match is None else (num_tokens, match, text)

    first = look(len(token_ids))
    few, enough = stops.min_tokens, len(token_ids)
    middle = enough - 1  # an engine that stopped in time needs no more than this look
    while first is not None and few < middle:
        earlier = look(middle)
        if earlier is None:
            few = middle
        else:
            first, enough = earlier, middle
        middle = (few + enough) // 2
    return first


def _length_shown(token_ids: Sequence[int], decode: Decode) -> int:
    """Count the characters that vLLM has of these tokens: it holds back those tokens that end
    within a character."""
    for number in range(len(token_ids), 0, -1):
        text = decode(token_ids[:number])
        if not text.endswith(INCOMPLETE):
            return len(text)
    return 0


def _unfinished(token_ids: Sequence[int], decode: Decode) -> str:
    """Return the bytes of a character that the last token completes: the text without that token
    ends with them, as U+FFFD, and the text with it does not."""
    before = decode(token_ids[:-1])
    trailing_text = before[len(before.rstrip(INCOMPLETE)) :]
    return "" if not trailing_text or decode(token_ids).startswith(before) else trailing_text


def check_stops(
    words: Sequence[str],
    token_ids: Sequence[int],
    *,
    vocabulary_size: int,
    response_prefix: str = "",
) -> None:
    """Refuse settings that cannot be meant (docs/promises.md, T5).

    Args:
        words: `--stop_words`.
        token_ids: `--stop_token_ids`.
        vocabulary_size: number of the tokenizer's tokens, added ones included.
        response_prefix: the text with which the prompt template begins every response.

    Raises:
        ValueError: names the setting, the value received, what was expected and the remedy.
    """
    for word in words:
        if word == "":
            raise ValueError(
                "--stop_words holds an empty string, which would end every completion before its "
                "first token: leave it out."
            )
        if INCOMPLETE in word:
            raise ValueError(
                f"--stop_words {word!r} holds U+FFFD, which stands for bytes that are no character "
                "and is in no text that a model means: give the characters themselves (is the file "
                "in UTF-8?)."
            )
        if word in response_prefix:
            raise ValueError(
                f"--stop_words {word!r} stands in {response_prefix!r}, with which the template "
                "begins every response: each text would hold it from the start. Take another stop "
                "string, or another --response_prefix or --enable_thinking."
            )
    outside = [i for i in token_ids if not 0 <= i < vocabulary_size]
    if outside:
        raise ValueError(
            f"--stop_token_ids {' '.join(map(str, token_ids))}: {outside[0]} is no token; the "
            f"tokenizer has the ids 0 to {vocabulary_size - 1}. Ask it for the id: "
            "tokenizer.convert_tokens_to_ids('...')."
        )
