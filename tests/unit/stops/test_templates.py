"""Stops with a real template: the text, and the training's encode of a stopped sequence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.model import get_processor
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import encode_sample
from swift.template import StdTemplateInputs, get_template

from swift_grpo_ext.rollout.answers import to_rollout_output
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt
from swift_grpo_ext.stops.rule import Stops, find_ending
from swift_grpo_ext.stops.templates import TemplateStops, check_stop_settings
from swift_grpo_ext.training.encode import encode_whole

SEARCH = [1477, 432, 522, 1836, 1339]  # ` find it</search>` and two line breaks
SEARCH_TEXT = " find it</search>"
END_OF_TURN, LINE_BREAK = 151645, 198
NEW_TOKEN = "<|halt|>"


@pytest.fixture(scope="module")
def template(assets: Path) -> Any:
    processor = get_processor(
        str(assets / "tiny_vlm"),
        model_type="qwen2_5_vl",
        torch_dtype=torch.float32,
        new_special_tokens=[NEW_TOKEN],
    )
    return get_template(processor, template_type="qwen2_5_vl")


@pytest.fixture
def trained(template: Any) -> Any:
    """The template as the trainer has it."""
    mode = template.mode
    template.set_mode("train")
    yield template
    template.set_mode(mode)


# --- training (T2, T4) ---


@pytest.mark.parametrize(("finish_reason", "reason"), [("stop", "</search>"), ("length", None)])
def test_training_sees_the_sampled_tokens_and_no_end_of_turn(
    trained: Any, finish_reason: str, reason: str | None
) -> None:
    completion = Completion(
        text=SEARCH_TEXT,
        token_ids=SEARCH,
        logprobs=[-0.5] * len(SEARCH),
        finish_reason=finish_reason,
        stop_reason=reason,
    )
    sample = OnPolicySample(messages=[{"role": "user", "content": "Which </search>?"}])
    answer = Answer([completion], Prompt([1, 2, 3]))
    sample.apply_rollout_output(rollout_output=to_rollout_output(answer))
    encoded = encode_sample(sample, trained)
    assert encoded["input_ids"][-len(SEARCH) :] == SEARCH
    assert labels_of(encoded) == SEARCH
    assert sample.is_truncated == (finish_reason == "length")
    row = sample.to_reward_row()
    assert row["rollout_infos"]["stop_reason"] == reason
    assert row["messages"][-1]["content"] == SEARCH_TEXT


@pytest.mark.parametrize("first", [SEARCH, [*SEARCH, END_OF_TURN]])
def test_the_end_of_a_turn_is_trained_on_where_it_was_sampled(
    trained: Any, first: list[int]
) -> None:
    """A template adds it to the turn in any case, before another message."""
    answer = [5, 6, END_OF_TURN]
    messages = [{"role": role, "content": "?"} for role in ("user", "assistant") * 2]
    sample = RolloutSample.from_row({"messages": messages})
    sample.response_token_ids = [first, answer]
    encoded = encode_whole(sample, trained, None)
    ids = encoded["input_ids"]
    start = next(i for i in range(len(ids)) if ids[i : i + len(SEARCH)] == SEARCH)
    ends = ids[start + len(SEARCH) : ids.index(LINE_BREAK, start)]
    assert ends == [END_OF_TURN]
    assert labels_of(encoded) == [*first, *answer]


def labels_of(encoded: dict[str, Any]) -> list[int]:
    return [label for label in encoded["labels"] if label != -100]


# --- texts (T3) ---


@pytest.mark.parametrize(
    ("token_ids", "words", "fields", "text", "reason"),
    [
        # The end of the turn never shows,
        ([*SEARCH, END_OF_TURN], [], {}, f"{SEARCH_TEXT}\n\n", "<|im_end|>"),
        ([*SEARCH, END_OF_TURN], [], {"include": False}, f"{SEARCH_TEXT}\n\n", "<|im_end|>"),
        # but as the end of a stop string.
        ([*SEARCH[:4], END_OF_TURN], ["search<|im_end|>"], {}, " find it</search<|im_end|>",
         "search<|im_end|>"),
        # The template's prefix stands before the text, and is not searched.
        (SEARCH, ["</search>"], {"prefix": "</search>\n"}, f"</search>\n{SEARCH_TEXT}",
         "</search>"),
    ],
)  # fmt: skip
def test_texts(
    template: Any, token_ids: list[int], words: list[str], fields: dict[str, Any], text: str,
    reason: str,
) -> None:  # fmt: skip
    prefix = {"response_prefix": fields.pop("prefix", "")}
    inputs = StdTemplateInputs(messages=[], chat_template_kwargs=prefix)
    stops = TemplateStops(template)
    asked = stops.stops([*words, *template.template_meta.stop_words], **fields)
    ending = find_ending(token_ids, stops.decode, asked)
    assert (stops.text(token_ids, ending, inputs), ending.reason) == (text, reason)


def test_special_tokens_are_known_by_their_ids(template: Any) -> None:
    stops = TemplateStops(template)
    ids = stops.special_ids
    assert (ids["<|im_end|>"], ids["<|box_start|>"], ids[NEW_TOKEN]) == (151645, 151648, 151665)
    assert "</tool_call>" not in ids  # added, yet text
    assert stops.end_ids == {END_OF_TURN}
    settings = stops.stops([NEW_TOKEN, "</a>", "</tool_call>", "</a>"], [7, 151665])
    tokens = {151665: NEW_TOKEN, 7: 7, END_OF_TURN: END_OF_TURN}
    assert settings == Stops(
        strings=("</a>", "</tool_call>"), tokens=tokens, invisible=frozenset({END_OF_TURN})
    )
    assert list(settings.tokens) == list(tokens)
    assert not stops.stops([], include=False).include


@pytest.mark.parametrize(
    ("suffix", "ids"),
    [
        ("<|box_end|>", {END_OF_TURN, 151649}),
        ([151649], {END_OF_TURN, 151649}),
        ("</tool_call>", {END_OF_TURN, 151658}),
        ("\n### Human", {END_OF_TURN}),  # its last token is a word like another
        ([151649, 198], {END_OF_TURN}),
        (None, {END_OF_TURN}),
    ],
)
def test_the_end_of_a_turn_is_one_token(
    template: Any, monkeypatch: pytest.MonkeyPatch, suffix: Any, ids: set[int]
) -> None:
    monkeypatch.setattr(template.template_meta, "suffix_stop", suffix)
    assert TemplateStops(template).end_ids == ids


# --- settings (T5) ---


@pytest.mark.parametrize(
    ("words", "token_ids", "message"),
    [
        (["</a>", ""], [], "--stop_words holds an empty string.*leave it out"),
        (
            ["think"],
            [],
            r"--stop_words 'think' occurs in '<think>\\n\\n'.*Take another stop string",
        ),
        ([], [7, 151666], r"--stop_token_ids 7 151666: 151666 is no.* 0 to 151665.*Ask it for"),
        ([], [-1], r"--stop_token_ids -1: -1 is no token"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    template: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], token_ids: list[int],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(template, "response_prefix", "<think>\n\n")
    with pytest.raises(ValueError, match=message):
        check_stop_settings(SimpleNamespace(stop_words=words, stop_token_ids=token_ids), template)
    sound = SimpleNamespace(stop_words=["</think>", " ", "\n\n\n"], stop_token_ids=[0, 151665])
    check_stop_settings(sound, template)
    monkeypatch.setattr(template, "response_prefix", "")
    check_stop_settings(SimpleNamespace(stop_words=["<think>"], stop_token_ids=[]), template)
    check_stop_settings(SimpleNamespace(stop_words=None, stop_token_ids=[]), template)
