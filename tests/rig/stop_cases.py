"""Completions, stop settings and expected ends: one table for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEW_TOKEN = "<|halt|>"
"""A token of `--new_special_tokens`."""

LETTERS = [f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
SEARCH = [" find", " it", "</", "search", ">\n\n", "More"]
CUT_SNOWMAN, SNOWMANS_END = 25125, 225  # ` ` and two of the three bytes of ☃; the third


@dataclass(frozen=True, kw_only=True)
class Case:
    """A completion that the model spells, and how it must end."""

    name: str
    start: str
    """The beginning of the answer, one token in the prompt: it selects the case."""

    pieces: tuple[str | int, ...]
    """What the model says after `start`: texts of tokens, or ids of tokens that are no text."""

    num_tokens: int
    text: str
    bare: str
    """The text with `--include_stop_str_in_output false`."""

    reason: str | int | None
    words: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    max_tokens: int = 40
    question: str = "Which?"

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Return the start and all that the model can say after it, without the end of the turn."""
        return token_ids([self.start, *self.pieces], tokenizer)


def token_ids(pieces: Sequence[str | int], tokenizer: Any) -> list[int]:
    """Return the ids of pieces, each of which is one token, by its text or its id."""
    ids = [
        [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        for piece in pieces
    ]
    assert all(len(of_one) == 1 for of_one in ids), f"{pieces!r} are the tokens {ids}"
    return [int(i) for (i,) in ids]


def case(name: str, start: str, pieces: list[str | int], words: list[str], **fields: Any) -> Case:
    return Case(name=name, start=start, pieces=tuple(pieces), words=tuple(words), **fields)


CASES = [
    case("ends inside a token", "Alice", [*SEARCH], ["</search>"],
         num_tokens=5, text=" find it</search>", bare=" find it", reason="</search>"),
    case("at the last possible token", "Alice", [*SEARCH], ["</search>"], max_tokens=5,
         num_tokens=5, text=" find it</search>", bare=" find it", reason="</search>"),
    case("cut off before it", "Alice", [*SEARCH], ["</search>"], max_tokens=4,
         num_tokens=4, text=" find it</search", bare=" find it</search", reason=None),
    case("a stop token", "Alice", [*SEARCH], [], ids=(1836,),
         num_tokens=4, text=" find it</search", bare=" find it</", reason=1836),
    case("a string before a token", "Alice", [*SEARCH], [">"], ids=(1339,),
         num_tokens=5, text=" find it</search>", bare=" find it</search", reason=">"),
    case("begins inside a token", "Bob", ["list", "]]", "END", "rest"], ["]END"],
         num_tokens=3, text="list]]END", bare="list]", reason="]END"),
    case("spans twenty-six tokens", "Dave", [*LETTERS, "."], ["".join(LETTERS)],
         num_tokens=26, text="".join(LETTERS), bare="", reason="".join(LETTERS)),
    case("a special token", "Frank", ["It", "<|box_start|>", "!"], ["<|box_start|>"],
         num_tokens=2, text="It<|box_start|>", bare="It", reason="<|box_start|>"),
    case("holds a special token", "Grace", ["done", "<|box_end|>", "so"], ["done<|box_end|>"],
         num_tokens=2, text="done<|box_end|>", bare="", reason="done<|box_end|>"),
    case("an added token", "Henry", ["{", "}", "</tool_call>", "and"], ["</tool_call>"],
         num_tokens=3, text="{}</tool_call>", bare="{}", reason="</tool_call>"),
    case("a new special token", "Kevin", ["Then", NEW_TOKEN, "go"], [NEW_TOKEN],
         num_tokens=2, text=f"Then{NEW_TOKEN}", bare="Then", reason=NEW_TOKEN),
    case("an emoji of three tokens", "Peter", ["OK", 9284, 104, 254, "Yes"], ["🫠"],
         num_tokens=4, text="OK🫠", bare="OK", reason="🫠"),
    case("complete within a character", "Tom", ["Result", ":", CUT_SNOWMAN, SNOWMANS_END, "fin"],
         [": "], num_tokens=3, text="Result: ", bare="Result", reason=": "),
    case("several in one token", "Sam", ["call", "(x", "));\n\n", "Never"], ["\n", ";", "))"],
         num_tokens=3, text="call(x))", bare="call(x", reason="))"),
    case("stops in the prompt", "FIN", ["ISH", "ed"], ["FINISH", "</search>"],
         question="FINISH </search> FIN", num_tokens=3, text="ISHed", bare="ISHed",
         reason="<|im_end|>"),
    case("the end of the turn, and no stops", "FIN", ["ISH", "ed"], [],
         num_tokens=3, text="ISHed", bare="ISHed", reason="<|im_end|>"),
]  # fmt: skip


def sequences(tokenizer: Any) -> list[list[int]]:
    """Return the sequences that the model spells, one for each start."""
    by_start = {case.start: case.token_ids(tokenizer) for case in CASES}
    return list(by_start.values())
