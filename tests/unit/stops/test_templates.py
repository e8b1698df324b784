"""Texts with stops are the template's, and nonsensical settings are refused (T3, T5)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.model import get_processor
from swift.template import StdTemplateInputs, get_template

from swift_grpo_ext.checks.finding import SettingsError
from swift_grpo_ext.stops.rule import Stops, find_ending
from swift_grpo_ext.stops.templates import TemplateStops, check_stop_settings

SEARCH = [1477, 432, 522, 1836, 1339]  # ` find it</search>` and two line breaks
SEARCH_TEXT = " find it</search>"
END_OF_TURN = 151645
NEW_TOKEN = "<|halt|>"


@pytest.fixture(scope="module")
def template(assets: Path) -> Any:
    model = str(assets / "tiny_vlm")
    processor = get_processor(model, model_type="qwen2_5_vl", new_special_tokens=[NEW_TOKEN])
    return get_template(processor, template_type="qwen2_5_vl")


def test_texts(template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates make images of the tokens."""
    stops = TemplateStops(template)
    for token_ids, word, prefix, expected in (
        # The end of the turn never shows, except as the end of a stop string.
        ([*SEARCH, END_OF_TURN], "x", "", (f"{SEARCH_TEXT}\n\n", "<|im_end|>")),
        ([1836, END_OF_TURN], "h<|im_end|>", "", ("search<|im_end|>", "h<|im_end|>")),
        # The template's prefix stands before the text, and is not searched.
        (SEARCH, "</search>", "</search>\n", (f"</search>\n{SEARCH_TEXT}", "</search>")),
    ):
        inputs = StdTemplateInputs(messages=[], chat_template_kwargs={"response_prefix": prefix})
        asked = stops.stops([word, *template.template_meta.stop_words])
        ending = find_ending(token_ids, stops.decode, asked)
        assert (stops.text(token_ids, ending, inputs), ending.reason) == expected
    monkeypatch.setattr(template, "decode_generate_ids", lambda *_, **__: [b"png"])
    assert stops.text(SEARCH, ending, inputs) == [b"png"]


def test_special_tokens_are_known_by_their_ids(template: Any) -> None:
    """The end of a turn is a stop in any case. An added token may be text."""
    words = [NEW_TOKEN, "</a>", "</tool_call>", "</a>"]
    assert TemplateStops(template).stops(words, [7, 151665], include=False) == Stops(
        strings=("</a>", "</tool_call>"),
        tokens={151665: NEW_TOKEN, 7: 7, END_OF_TURN: END_OF_TURN},
        invisible=frozenset({END_OF_TURN}),
        include=False,
    )


def test_the_end_of_a_turn_is_one_token(template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix, others in (
        ("<|box_end|>", {151649}),
        ([151649], {151649}),
        ("\n", {198}),
        ("\n### Human", set()),  # its last token is a word like another
        (None, set()),
    ):
        monkeypatch.setattr(template.template_meta, "suffix_stop", suffix)
        assert TemplateStops(template).end_ids == {END_OF_TURN, *others}


def test_settings_that_cannot_be_meant_are_refused(
    template: Any, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids are also checked before a model is loaded."""
    model = {"model_dir": assets / "tiny_vlm", "new_special_tokens": [NEW_TOKEN]}

    def check(words: list[str] | None, *ids: int, of: Any = template) -> None:
        args: Any = SimpleNamespace(stop_words=words, stop_token_ids=ids, **model)
        check_stop_settings(args, of)

    check(["<think>"])
    monkeypatch.setattr(template, "response_prefix", "<think>\n\n")
    check(["</think>", " ", "\n\n\n"], 0, 151665)
    check(None)
    check(["X"], of=None)
    for words, ids, message in (
        (["</a>", ""], [], "--stop_words holds an empty string.*leave it out"),
        (["think"], [], r"--stop_words 'think' occurs in '<think>.*Take another stop string"),
        ([], [7, 151666], r"--stop_token_ids 7 151666: 151666 is no.* 0 to 151665.*: tokenizer\.c"),
        ([], [-1], r"--stop_token_ids -1: -1 is no token"),
    ):
        for of in (template, None) if ids else (template,):
            with pytest.raises(SettingsError, match=message):
                check(words, *ids, of=of)
