"""`--use_vllm false`: ms-swift's engine with a model whose tokens the tests choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.model import get_model_processor
from swift.template import get_template
from torch import Tensor

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.transformers_engine import RolloutTransformersEngine, StopsCriterion
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.stops.rule import Ending, Stops, find_ending

FIRST = SampleId(phase="train", step=0, number=0, group=0, index=0)
SEARCH = [1477, 432, 522, 1836, 1339]  # ` find it</search>` and two line breaks
ALICE, PAD, END_OF_TURN = 61686, 151643, 151645
NEVER = 77
"""A token that no row samples before its end."""


# --- the criterion ---


class Letters:
    """A template whose token ids are letters."""

    def find_ending(self, token_ids: Sequence[int], stops: Stops) -> Ending:
        return find_ending(token_ids, lambda ids: "".join(map(chr, ids)), stops)


@pytest.mark.parametrize(
    ("rows", "prompt", "words", "counts"),
    [
        (["xabxx", "!abcd", "abxxx", "xxxxx"], "p", ["ab"], [2, 0, 1, 5]),
        (["bxx"], "ab a", ["ab"], [3]),  # the prompt is not searched
        (["bab"], "a", ["ab"], [2]),
        *(  # ms-swift looks at 20 tokens
            ([f"xx{'a' * length}b"], "p", ["a" * length + "b"], [2 + length])
            for length in (0, 20, 299)
        ),
    ],
)
def test_each_row_ends_by_itself_and_stays_ended(
    rows: list[str], prompt: str, words: list[str], counts: list[int]
) -> None:
    """After so many tokens of each row that do not end it."""
    stops = Stops(strings=tuple(words), tokens={ord("!"): 33})
    criterion = StopsCriterion(Letters(), stops)  # type: ignore[arg-type]
    ids_BT = torch.tensor([[ord(c) for c in prompt + row] for row in rows])
    lengths = range(len(prompt) + 1, ids_BT.shape[1] + 1)
    ends = [criterion(ids_BT[:, :length], None).tolist() for length in lengths]
    for number, count in enumerate(counts):
        of_row = [row[number] for row in ends]
        assert of_row == [False] * count + [True] * (len(ends) - count)


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
    **settings: Any,
) -> tuple[list[Any], Tensor]:
    """The engine's answers where the model samples these tokens, and what was generated."""
    generated: list[Tensor] = []

    def generate(model: Any, **kwargs: Any) -> dict[str, Any]:
        ids_BT = kwargs["input_ids"]
        assert kwargs["generation_config"].max_new_tokens == 8
        criteria = kwargs["stopping_criteria"]
        assert not has_metadata or [*map(type, criteria)] == [StopsCriterion]
        logits = []
        for step in range(max(map(len, sampled))):
            tokens = [row[step] if step < len(row) else NEVER for row in sampled]
            logits_BV = torch.zeros(len(sampled), 151936)
            logits_BV[range(len(sampled)), tokens] = 20.0
            logits.append(logits_BV)
            ids_BT = torch.cat([ids_BT, torch.tensor(tokens)[:, None]], 1)
            if torch.stack([c(ids_BT, None) for c in criteria]).any(0).all():
                break
        generated.append(ids_BT[:, kwargs["input_ids"].shape[1] :])
        return {"sequences": ids_BT, "logits": tuple(logits)}

    monkeypatch.setattr(engine.template, "generate", generate)
    config = RequestConfig(max_tokens=8, stop=list(words), logprobs=True, return_details=True)
    requests = []
    for number in range(len(sampled)):
        content = "Which one?" + " Tell." * number  # prompts of unequal length
        request = RolloutInferRequest(messages=[{"role": "user", "content": content}])
        if has_metadata:
            metadata = RequestMetadata(
                sample_id=FIRST, count=1, run_seed=None, as_arrays=False, **settings
            )
            wire.write_metadata(request.data_dict, metadata)
        requests.append(request)
    return engine.infer(requests, config, use_tqdm=False), generated[0]


def seen(output: Any) -> tuple[Any, ...]:
    [choice] = output.choices
    reasons = (choice.finish_reason, choice.stop_reason)
    return choice.message.content, choice.token_ids, *reasons


def test_rows_of_a_batch_each_end_where_they_should(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[*SEARCH, NEVER], [ALICE, PAD, ALICE, END_OF_TURN], [ALICE] * 6, [5, ALICE]]
    outputs, ids_BT = infer(engine, monkeypatch, rows, words=["</search>"], stop_token_ids=(5,))
    assert ids_BT.shape == (4, 6)
    alice, pad, five = (engine.tokenizer.decode([token]) for token in (ALICE, PAD, 5))
    assert [seen(output) for output in outputs] == [
        (" find it</search>", SEARCH, "stop", "</search>"),
        (alice + pad, [ALICE, PAD], "stop", pad),  # it is the padding of rows that ended, too
        (alice * 6, [ALICE] * 6, "length", None),
        (five, [5], "stop", 5),
    ]
    prompts = [output.prompt_token_ids for output in outputs]
    assert len(prompts[0]) < len(prompts[1])
    for prompt, output in zip(prompts, outputs, strict=True):
        [choice] = output.choices
        logprobs = [token["logprob"] for token in choice.logprobs["content"]]
        assert max(map(abs, logprobs)) < 0.01
        assert PAD not in prompt
        usage = output.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(logprobs))
        assert len(logprobs) == len(choice.token_ids)


def test_generation_ends_with_the_last_row(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, settings = [[*SEARCH, ALICE, ALICE], [5, ALICE]], {"include_stop_str_in_output": False}
    outputs, ids_BT = infer(
        engine, monkeypatch, rows, words=["</search>"], stop_token_ids=(5,), **settings
    )
    assert ids_BT.shape == (2, 5)
    assert [seen(output)[:2] for output in outputs] == [(" find it", SEARCH), ("", [5])]


def test_requests_of_others_are_ms_swifts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[ALICE, END_OF_TURN]]
    [response], _ = infer(engine, monkeypatch, rows, has_metadata=False)
    assert not hasattr(response.choices[0], "stop_reason")
