"""`--use_vllm false`: ms-swift's engine with a model whose tokens the tests choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.model import get_model_processor
from swift.template import get_template
from torch import Tensor

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.transformers_engine import RolloutTransformersEngine, StopsCriterion
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.stops.rule import Stops

FIRST = SampleId(phase="train", step=0, number=0, group=0, index=0)
SEARCH = [1477, 432, 522, 1836, 1339]  # ` find it</search>` and two line breaks
ALICE, PAD, END_OF_TURN = 61686, 151643, 151645
NEVER = 77
"""A token that no row samples before its end."""


# --- the criterion ---


class Letters:
    """A template whose token ids are letters."""

    @staticmethod
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def done(rows: Sequence[str], prompt: str, stops: Stops) -> list[list[bool]]:
    """Which rows have ended after each token that follows the prompt."""
    criterion = StopsCriterion(Letters(), stops)  # type: ignore[arg-type]
    ids_BT = torch.tensor([[ord(c) for c in prompt + row] for row in rows])
    lengths = range(len(prompt) + 1, ids_BT.shape[1] + 1)
    return [criterion(ids_BT[:, :length], None).tolist() for length in lengths]


def test_each_row_ends_by_itself_and_stays_ended() -> None:
    stops = Stops(strings=("ab",), tokens={ord("!"): 33})
    ends = done(["xabxx", "!abcd", "abxxx", "xxxxx"], "p", stops)
    assert [[row[i] for row in ends] for i in range(4)] == [
        [False, False, True, True, True],
        [True] * 5,
        [False, True, True, True, True],
        [False] * 5,
    ]


def test_the_prompt_is_not_searched() -> None:
    assert done(["bxx"], "ab a", Stops(strings=("ab",))) == [[False]] * 3
    assert done(["bab"], "a", Stops(strings=("ab",))) == [[False], [False], [True]]


@pytest.mark.parametrize("length", [1, 21, 300])
def test_stop_strings_of_any_length_are_found(length: int) -> None:
    """ms-swift looks at 20 tokens."""
    word = "a" * (length - 1) + "b"
    ends = done([f"xx{word}"], "p", Stops(strings=(word,)))
    assert ends == [[False]] * (len(ends) - 1) + [[True]]


# --- the engine ---


@pytest.fixture(scope="module")
def engine(assets: Path) -> Any:
    model, processor = get_model_processor(
        str(assets / "tiny_vlm"), model_type="qwen2_5_vl", torch_dtype=torch.float32
    )
    template = get_template(processor, template_type="qwen2_5_vl")
    return RolloutTransformersEngine(model.eval(), template=template, max_batch_size=0)


def infer(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    sampled: Sequence[Sequence[int]],
    *,
    words: Sequence[str] = (),
    has_metadata: bool = True,
    samples_of_request: int = 1,
    **settings: Any,
) -> tuple[list[Any], Tensor]:
    """The engine's answers where the model samples these tokens, and what was generated."""
    generated: list[Tensor] = []

    def generate(model: Any, **kwargs: Any) -> dict[str, Any]:
        ids_BT = kwargs["input_ids"].repeat_interleave(samples_of_request, 0)
        logits = []
        for step in range(max(map(len, sampled))):
            tokens = [row[step] if step < len(row) else NEVER for row in sampled]
            logits_BV = torch.zeros(len(sampled), 151936)
            logits_BV[range(len(sampled)), tokens] = 20.0
            logits.append(logits_BV)
            ids_BT = torch.cat([ids_BT, torch.tensor(tokens)[:, None]], 1)
            criteria = kwargs["stopping_criteria"]
            if torch.stack([c(ids_BT, None) for c in criteria]).any(0).all():
                break
        generated.append(ids_BT[:, kwargs["input_ids"].shape[1] :])
        return {"sequences": ids_BT, "logits": tuple(logits)}

    monkeypatch.setattr(engine.template, "generate", generate)
    config = RequestConfig(
        max_tokens=8, stop=list(words), logprobs=True, return_details=True, n=samples_of_request
    )
    requests = []
    for number in range(len(sampled) // samples_of_request):
        content = "Which one?" + " Tell." * number  # prompts of unequal length
        request = RolloutInferRequest(messages=[{"role": "user", "content": content}])
        if has_metadata:
            metadata = RequestMetadata(
                sample_id=FIRST, count=1, run_seed=None, packed=False, **settings
            )
            wire.write_metadata(request.data_dict, metadata)
        requests.append(request)
    return engine.infer(requests, config, use_tqdm=False), generated[0]


def seen(output: RolloutOutput) -> dict[str, Any]:
    [choice] = output.response.choices
    return {
        "text": choice.message.content,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": output.rollout_infos["stop_reason"],
    }


def test_rows_of_a_batch_each_end_where_they_should(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[*SEARCH, NEVER], [ALICE, PAD, ALICE, END_OF_TURN], [ALICE] * 6]
    outputs, ids_BT = infer(engine, monkeypatch, rows, words=["</search>"])
    assert ids_BT.shape == (3, 6)
    alice = engine.tokenizer.decode([ALICE])
    assert [seen(output) for output in outputs] == [
        {
            "text": " find it</search>",
            "token_ids": SEARCH,
            "finish_reason": "stop",
            "stop_reason": "</search>",
        },
        {
            "text": alice + engine.tokenizer.decode([PAD]),
            "token_ids": [ALICE, PAD],  # it is the padding of rows that ended, too
            "finish_reason": "stop",
            "stop_reason": engine.tokenizer.decode([PAD]),
        },
        {
            "text": alice * 6,
            "token_ids": [ALICE] * 6,
            "finish_reason": "length",
            "stop_reason": None,
        },
    ]
    for output in outputs:
        [choice] = output.response.choices
        logprobs = [token["logprob"] for token in choice.logprobs["content"]]
        assert len(logprobs) == len(choice.token_ids)
        assert max(map(abs, logprobs)) < 0.01


def test_generation_ends_with_the_last_row(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[*SEARCH, ALICE, ALICE], [5, ALICE]]
    outputs, ids_BT = infer(engine, monkeypatch, rows, words=["</search>"], stop_token_ids=(5,))
    assert ids_BT.shape == (2, 5)
    assert [seen(output)["stop_reason"] for output in outputs] == ["</search>", 5]
    assert [seen(output)["token_ids"] for output in outputs] == [SEARCH, [5]]


def test_what_stopped_it_may_be_left_out(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"include_stop_str_in_output": False}
    outputs, _ = infer(engine, monkeypatch, [SEARCH], words=["</search>"], **settings)
    found = seen(outputs[0])
    assert (found["text"], found["token_ids"]) == (" find it", SEARCH)


def test_prompts_and_counts_leave_padding_out(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, _ = infer(engine, monkeypatch, [[ALICE, END_OF_TURN], [ALICE, ALICE, END_OF_TURN]])
    prompts = [output.response.prompt_token_ids for output in outputs]
    assert len(prompts[0]) < len(prompts[1])
    for prompt, output, num_tokens in zip(prompts, outputs, (2, 3), strict=True):
        assert PAD not in prompt
        usage = output.response.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), num_tokens)


def test_several_samples_of_a_request(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[ALICE, END_OF_TURN], [5, END_OF_TURN], [6, END_OF_TURN], [7, 8, END_OF_TURN]]
    outputs, _ = infer(engine, monkeypatch, rows, samples_of_request=2)
    choices = [[c.token_ids for c in output.response.choices] for output in outputs]
    assert choices == [rows[:2], rows[2:]]
    assert [[c.index for c in o.response.choices] for o in outputs] == [[0, 1]] * 2
    assert [o.response.usage.completion_tokens for o in outputs] == [4, 5]


def test_requests_of_others_are_ms_swifts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[ALICE, END_OF_TURN]]
    [response], _ = infer(engine, monkeypatch, rows, has_metadata=False)
    assert not isinstance(response, RolloutOutput)
    assert not hasattr(response.choices[0], "stop_reason")


def test_settings_that_differ_in_a_batch_are_refused(engine: Any) -> None:
    requests = []
    for ids in ((5,), (6,)):
        metadata = RequestMetadata(
            sample_id=FIRST, count=1, run_seed=None, packed=False, stop_token_ids=ids
        )
        request = RolloutInferRequest(messages=[{"role": "user", "content": "Which?"}])
        wire.write_metadata(request.data_dict, metadata)
        requests.append(request)
    with pytest.raises(ValueError, match="Requests of one batch have different stop settings"):
        engine.infer(requests, RequestConfig(max_tokens=2), use_tqdm=False)
