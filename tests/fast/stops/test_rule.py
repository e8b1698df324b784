"""A completion ends with the token that completes a stop, and its text with the stop or right
before it (T1, T2, T3, T6)."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift_grpo_ext.stops.rule import Ending, Stops, find_ending

EOS, SPECIAL = 0, 1
PIECES: list[bytes] = [
    b"<|end|>",
    b"<|tool|>",
    *(bytes([byte]) for byte in "</a>答😀".encode()),
    *(text.encode() for text in ("a", "</", "a>", ">\n\n", "aa", "</a", "答案", "/a></", ">a")),
    b">\xe7",
    b"\xad\x94a",
    b"\xf0\x9f",
]
"""A vocabulary whose tokens overlap in every way, and split characters."""

STRINGS = ["</a>", "a", ">", "aa", "a></", "答", "答案", "😀", "\n", "a<|tool|>", "<|end|>", ">答a"]


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in token_ids).decode("utf-8", errors="replace")


def text_of(ending: Ending, token_ids: Sequence[int]) -> str:
    return decode(token_ids[: ending.num_text_tokens]).removesuffix(ending.trailing_text)


def ids_of(*pieces: str | bytes) -> list[int]:
    return [PIECES.index(p.encode() if isinstance(p, str) else p) for p in pieces]


completions = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
stop_settings = st.builds(
    Stops,
    strings=st.lists(st.sampled_from(STRINGS), max_size=3, unique=True).map(tuple),
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=2).map(
        lambda ids: {i: str(i) if i == SPECIAL else i for i in ids}
    ),
    invisible=st.sampled_from([frozenset(), frozenset({EOS})]),
    include=st.booleans(),
)


def by_brute_force(token_ids: list[int], stops: Stops) -> tuple[int, str, object]:
    """Return kept tokens, text and reason, by a look at every character of the text after each
    token."""
    for num_tokens in range(1, len(token_ids) + 1):
        text = decode(token_ids[:num_tokens])
        for end in range(1, len(text) + 1):
            for string in stops.strings:
                if text[:end].endswith(string):
                    return num_tokens, text[: end if stops.include else end - len(string)], string
        last = token_ids[num_tokens - 1]
        if last in stops.tokens:
            if stops.include and last not in stops.invisible:
                return num_tokens, text, stops.tokens[last]
            before = decode(token_ids[: num_tokens - 1])
            shown = before if last in stops.invisible else before.rstrip("\ufffd")
            return num_tokens, shown, stops.tokens[last]
    return len(token_ids), decode(token_ids), None


@settings(max_examples=1000)
@given(completions, stop_settings)
@example(ids_of("a", b">\xe7", b"\xad\x94a"), Stops(strings=(">",)))  # complete within a character
@example(ids_of("a", "<", "/", "a", ">\n\n", "a"), Stops(strings=("</a>", "\n", "a></")))
@example(ids_of(b"\xf0\x9f", "a"), Stops(tokens={ids_of("a")[0]: 1}, include=False))
@example(ids_of(b"\xe7", b"\xad\x94a"), Stops(tokens={ids_of(b"\xad\x94a")[0]: 1}, include=False))
def test_a_cut_is_what_brute_force_finds(token_ids: list[int], stops: Stops) -> None:
    found = find_ending(token_ids, decode, stops)
    text = text_of(found, token_ids)
    assert (found.num_tokens, text, found.reason) == by_brute_force(token_ids, stops)
    assert decode(token_ids[: found.num_tokens]).startswith(text)


def test_nothing_is_decoded_to_find_stop_tokens() -> None:
    def refuse(_: Sequence[int]) -> str:
        raise AssertionError("decoded")

    stops = Stops(tokens={5: 5, EOS: EOS}, invisible=frozenset({EOS}))
    assert find_ending([7, 5, 8], refuse, stops) == Ending(2, 2, reason=5)
    assert find_ending([7, EOS], refuse, stops) == Ending(2, 1, reason=EOS)
    assert find_ending([7, 8], refuse, stops) == Ending(2, 2)


def test_a_completion_that_stopped_in_time_is_decoded_twice() -> None:
    lengths = []

    def counting(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    completion = [*ids_of("答案") * 999, *ids_of(">\n\n")]
    assert find_ending(completion, counting, Stops(strings=(">",))).num_tokens == 1000
    assert lengths == [1000, 999]
