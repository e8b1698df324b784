"""A group is one request, with its seed and stops, and is answered with all sampled tokens (G2, T1,
T2, T3, T6)."""

from __future__ import annotations

import asyncio
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
from swift.infer_engine.infer_engine import InferEngine
from swift.infer_engine.protocol import ChatCompletionResponse, UsageInfo, serialize_ndarray
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

from swift_grpo_ext.rollout import engine as engine_module
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import FAILURE
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.upstream import vllm_repairs
from tests.rig.recording_vllm import (
    EOS,
    ID,
    RUN_SEED,
    RecordingVllm,
    ask,
    config,
    ids_of,
    metadata_of,
    request,
    run_alone,
)

END_OF_TEXT, IMAGE, VIDEO = 151643, 151655, 151656
BIAS = {IMAGE: float("-inf"), VIDEO: float("-inf")}
OTHERS = {"as_arrays": False, "stop_token_ids": None}  # a server's for clients without metadata


def test_a_group_is_one_request_with_its_seed_and_stops(make: Any) -> None:
    """Stops of a single token need no text (T6)."""
    vllm = RecordingVllm(["a.", "b.", "c."])
    metadata = metadata_of(7, count=3, stop_token_ids=(*ids_of("X"), EOS))
    response = ask(make(vllm), metadata).response
    [params] = vllm.params
    seed = sample_seed(RUN_SEED, metadata.sample_id)
    assert (params.n, params.seed, params.max_tokens) == (3, seed, 16)
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert params.logit_bias == BIAS
    assert (params.logprobs, params.flat_logprobs) == (0, True)
    assert sorted(params.stop_token_ids) == [*ids_of("X"), END_OF_TEXT, EOS]
    assert params.stop == []
    assert not params.detokenize
    completions, prompt = response.answer
    assert [
        (c.text, c.seed, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason)
        for c in completions
    ] == [
        (text, seed + k, ids_of(f"{text}."), [0.0, -1.0], "stop", "<|im_end|>")
        for k, text in enumerate("abc")
    ]
    assert prompt.token_ids == vllm.inputs[0]["prompt_token_ids"]
    num_prompt = len(prompt.token_ids)
    assert response.usage == UsageInfo(num_prompt, 6, num_prompt + 6)
    assert (response.model, response.id, response.choices) == ("m", "0", [])


def test_stop_strings_are_searched_in_all_text_and_schedulers_read_ms_swifts_form(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    monkeypatch.setattr(
        InferEngine, "_get_toolcall", lambda _, text, template_inputs: looked_at.append(text)
    )
    vllm = RecordingVllm(["a</s>\n"], "length")
    metadata = metadata_of(as_arrays=False, include_stop_str_in_output=False)
    output = ask(make(vllm), metadata, stop=["</s>"], return_details=True)
    [params] = vllm.params
    assert (params.stop, params.detokenize) == (["</s>"], True)
    assert params.include_stop_str_in_output is False
    assert not params.skip_special_tokens
    assert not params.spaces_between_special_tokens
    assert not params.flat_logprobs
    [completion] = output.response.answer.completions
    assert (completion.text, completion.stop_reason) == ("a", "</s>")
    assert completion.logprobs == [-0.0, -1.0, -2.0, -3.0, -4.0]
    [choice] = output.response.choices
    assert choice.message.content == "a"
    assert (choice.finish_reason, choice.token_ids) == ("stop", ids_of("a</s>"))
    assert len(choice.logprobs["content"]) == 5
    assert looked_at == ["a"]  # tools are searched in the text that counts
    assert output.rollout_infos["stop_reason"] == "</s>"


@pytest.mark.parametrize(
    ("said", "finish_reason", "expected"),
    [
        ("abc", "length", ("abc", "length", None)),
        ("aXyz", "length", ("aX", "stop", *ids_of("X"))),  # later tokens are cut off
        # `generation_config.json` may list ends that neither the template nor the user knows.
        ("ab", "stop", ("ab", "stop", *ids_of("b"))),
        ("", "length", ("", "length", None)),
        ("", "stop", ("", "stop", None)),
    ],
)
def test_completions_end_where_a_token_stops_them(
    make: Any, said: str, finish_reason: str, expected: tuple[Any, ...]
) -> None:
    vllm = RecordingVllm([said], finish_reason)
    vllm.experts = np.arange(len(said))
    metadata = metadata_of(stop_token_ids=(*ids_of("X"),))
    [completion] = ask(make(vllm), metadata).response.answer.completions
    assert (completion.text, completion.finish_reason, completion.stop_reason) == expected
    num_tokens = len(expected[0])
    assert completion.token_ids == ids_of(expected[0])
    assert completion.logprobs == [-float(i) for i in range(num_tokens)]
    assert completion.routed_experts.tolist() == list(range(num_tokens))


@pytest.mark.parametrize(("number", "is_flat"), [(0, True), (2, False)])
def test_the_sampled_tokens_count_among_several_of_a_position(
    make: Any, number: int, is_flat: bool
) -> None:
    vllm = RecordingVllm(["ab", "c"])
    vllm.likelier = {1: Logprob(9.0, 1, "")}
    engine = make(vllm)
    [completion] = ask(engine, metadata_of(), top_logprobs=number).response.answer.completions
    assert completion.logprobs == [0.0, -1.0]
    assert (vllm.params[0].logprobs, vllm.params[0].flat_logprobs) == (number, is_flat)
    [completion] = ask(engine, metadata_of(), logprobs=False).response.answer.completions
    assert completion.logprobs is None


@pytest.mark.parametrize(
    ("metadata", "seed"),
    [(None, 5), (metadata_of(**OTHERS, run_seed=None), 5), (metadata_of(**OTHERS), None)],
)
def test_a_request_without_metadata_is_ms_swifts(make: Any, metadata: Any, seed: Any) -> None:
    """So is a request that a server named; it may get the server's seed, which is reported."""
    vllm = RecordingVllm(["a."])
    engine = make(vllm, serves=metadata is not None)
    output = ask(engine, metadata, seed=5)
    [params] = vllm.params
    assert (params.n, params.seed) == (1, seed or sample_seed(RUN_SEED, ID))
    assert params.skip_special_tokens is SamplingParams().skip_special_tokens
    infos = {"seed": params.seed, "replica": "replica 0", "stop_reason": None}
    assert output.rollout_infos == (infos if metadata else {})
    assert {"<|endoftext|>", "<|im_end|>"} == set(params.stop)
    assert params.detokenize
    assert output.response.choices[0].message.content == "a"


def test_a_requests_own_bias_stays_beside_the_placeholders(make: Any) -> None:
    biased = SamplingParams(logit_bias={5: 1.0})
    inputs = {"input_ids": [1], engine_module.STATE: engine_module.RequestState()}
    make(RecordingVllm(["a"]))._add_request(inputs, biased, "0")
    assert biased.logit_bias == {5: 1.0} | BIAS


# --- servers ---


def test_a_server_packs_its_answers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_DP_RANK", "3")
    vllm = RecordingVllm(["ab.", "c."])
    vllm.experts = np.zeros((3, 1))
    output = ask(make(vllm, serves=True), metadata_of(count=2))
    answer = output.rollout_infos[wire.KEY]
    assert answer["replica"] == "replica 3"
    completions, prompt = wire.read_answer(answer, metadata_of(count=2), "server 0")
    assert [c.text for c in completions] == ["ab", "c"]
    assert prompt.token_ids == vllm.inputs[0]["prompt_token_ids"]
    assert completions[0].routed_experts == serialize_ndarray(np.zeros((3, 1)))
    assert (output.response.choices, output.response.id) == ([], "0")
    assert type(output.response) is ChatCompletionResponse


async def draw(engine: Any, vllm: RecordingVllm, *counts: int) -> list[str]:
    """Request groups of these sizes in turn, all before the first one ends; return the replica of
    each, or its failure."""
    vllm.ranks.clear()
    vllm.answers = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []
    for count in counts:
        asked = [request(metadata_of(count=count))]
        answer = engine.async_infer(asked, config(n=1), use_tqdm=False)
        tasks.append(asyncio.create_task(answer))
        while len(vllm.ranks) < len(tasks) and not tasks[-1].done():
            await asyncio.sleep(0.001)
    vllm.answers.set()
    return [
        answer[FAILURE] if FAILURE in answer else answer[0].rollout_infos[wire.KEY]["replica"]
        for answer in await asyncio.gather(*tasks)
    ]


def test_an_async_engine_gives_each_group_to_the_replica_that_draws_least(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer names that replica. Requests that have ended or failed do not count."""
    heard: list[Any] = []
    monkeypatch.setattr(vllm_repairs, "collect_rpc_from_all_replicas", heard.append)
    vllm = RecordingVllm(["a."] * 20)
    engine = make(vllm, serves=True, use_async=True, data_parallel_size=2)
    expected = [0, 1, 1, 1, 0, 1]
    drawers = run_alone(draw(engine, vllm, 3, 1, 1, 1, 1, 1))
    assert drawers == [f"replica {k}" for k in expected]
    assert vllm.ranks == expected
    with monkeypatch.context() as broken:
        broken.setattr(RecordingVllm, "generate", lambda *_, **__: 1 / 0)
        assert run_alone(draw(engine, vllm, 2)) == ["ZeroDivisionError: division by zero"]
    assert run_alone(draw(engine, vllm, 1)) == ["replica 0"]
    single = RecordingVllm(["a."])
    alone = make(single, serves=True, use_async=True)
    assert run_alone(draw(alone, single, 1)) == ["replica 0"]
    assert single.ranks == [None]
    assert heard == [vllm]


@pytest.mark.parametrize(
    ("has_accelerator", "extension"),
    [(True, engine_module.VERIFIED_EXTENSION), (False, engine_module.CPU_EXTENSION)],
)
def test_workers_of_a_server_get_our_extension(
    make: Any, monkeypatch: pytest.MonkeyPatch, has_accelerator: bool, extension: str
) -> None:
    monkeypatch.setattr(engine_module, "has_accelerator", lambda: has_accelerator)
    assert issubclass(resolve_name(extension), WeightSyncWorkerExtension)
    served = make(RecordingVllm([]), serves=True)
    assert served.engine_kwargs == {"worker_extension_cls": extension}
    assert make(RecordingVllm([])).engine_kwargs == {}
    own = make(RecordingVllm([]), worker_extension_cls="mine")
    assert own.engine_kwargs == {"worker_extension_cls": "mine"}
