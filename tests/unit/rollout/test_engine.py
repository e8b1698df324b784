"""A group is one request, with its seed and stops, and is answered with all sampled tokens (G2, T1,
T2, T3, T6). Media that cannot be encoded are named with their row, and media that vLLM's cache lost
with the setting that helps (M1, F5)."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.infer_engine import InferEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RolloutInferRequest,
    UsageInfo,
    serialize_ndarray,
)
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.sampling_params import RequestOutputKind

from swift_grpo_ext.checks.rows import RowError
from swift_grpo_ext.rollout import engine as engine_module
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.upstream import vllm_repairs
from tests.unit.rollout.recording_vllm import (
    EOS,
    ID,
    RUN_SEED,
    RecordingVllm,
    ask,
    config,
    ids_of,
    infer,
    metadata_of,
    request,
    run_alone,
)

END_OF_TEXT, IMAGE, VIDEO = 151643, 151655, 151656
OTHERS = {"as_arrays": False, "stop_token_ids": None}  # a server's for clients without metadata


def test_a_group_is_one_request(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops of a single token need no text (T6). A server packs its answer."""
    monkeypatch.setenv("SWIFT_ROLLOUT_DP_RANK", "3")
    vllm = RecordingVllm(["a.", "b.", "c."])
    vllm.experts = np.zeros((2, 1))
    metadata = metadata_of(7, count=3, stop_token_ids=(*ids_of("X"), EOS))
    output = ask(make(vllm, serves=True), metadata)
    [params], response = vllm.params, output.response
    seed = sample_seed(RUN_SEED, metadata.sample_id)
    assert (params.n, params.seed, params.max_tokens) == (3, seed, 16)
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert params.logit_bias == {IMAGE: float("-inf"), VIDEO: float("-inf")}
    assert (params.logprobs, params.flat_logprobs) == (0, True)
    assert sorted(params.stop_token_ids) == [*ids_of("X"), END_OF_TEXT, EOS]
    assert (params.stop, params.detokenize) == ([], False)
    answer = output.rollout_infos[wire.KEY]
    completions, prompt = wire.read_answer(answer, metadata, "server 0")
    for k, completion in enumerate(completions):
        assert (completion.text, completion.seed) == ("abc"[k], seed + k)
        assert completion.token_ids.tolist() == ids_of("abc"[k] + ".")
        assert completion.logprobs.tolist() == [0.0, -1.0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "<|im_end|>")
        assert completion.replica == "server 0 replica 3"
        assert completion.routed_experts == serialize_ndarray(vllm.experts)
    assert prompt.token_ids == vllm.inputs[0]["prompt_token_ids"]
    num_prompt = len(prompt.token_ids)
    assert response.usage == UsageInfo(num_prompt, 6, num_prompt + 6)
    assert (response.model, response.id, response.choices) == ("m", "0", [])
    assert type(response) is ChatCompletionResponse


def test_stop_strings_are_searched_in_all_text(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("metadata", "seed"),
    [(None, 5), (metadata_of(**OTHERS, run_seed=None), 5), (metadata_of(**OTHERS), None)],
)
def test_a_request_without_metadata_is_ms_swifts(make: Any, metadata: Any, seed: Any) -> None:
    """So is a request that a server named; it may get the server's seed, which is reported."""
    vllm = RecordingVllm(["a."])
    output = ask(make(vllm, serves=metadata is not None), metadata, seed=5)
    [params] = vllm.params
    assert (params.n, params.seed) == (1, seed or sample_seed(RUN_SEED, ID))
    assert params.skip_special_tokens is SamplingParams().skip_special_tokens
    infos = {"seed": params.seed, "replica": "replica 0", "stop_reason": None}
    assert output.rollout_infos == (infos if metadata else {})
    assert {"<|endoftext|>", "<|im_end|>"} == set(params.stop)
    assert output.response.choices[0].message.content == "a"


async def draw(engine: Any, vllm: RecordingVllm, *counts: int) -> list[str]:
    """Request groups of these sizes in turn, all before the first one ends; return the replica of
    each."""
    vllm.ranks.clear()
    vllm.answers = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []
    for count in counts:
        asked = [request(metadata_of(count=count))]
        answer = engine.async_infer(asked, config(n=1), use_tqdm=False)
        tasks.append(asyncio.create_task(answer))
        while len(vllm.ranks) < len(tasks):
            await asyncio.sleep(0.001)
    vllm.answers.set()
    outputs = [output for [output] in await asyncio.gather(*tasks)]
    return [output.rollout_infos[wire.KEY]["replica"] for output in outputs]


def test_an_async_engine_balances_replicas(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
        failed = infer(engine, [request(metadata_of(count=2))])
        assert failed[FAILURE] == "ZeroDivisionError: division by zero"
    assert run_alone(draw(engine, vllm, 1)) == ["replica 0"]
    alone = make(single := RecordingVllm(["a."]), serves=True, use_async=True)
    assert run_alone(draw(alone, single, 1)) == ["replica 0"]
    assert (single.ranks, heard) == ([None], [vllm])


def test_workers_of_a_server_get_our_extension(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("VERIFIED", "CPU"):
        monkeypatch.setattr(engine_module, "has_accelerator", lambda p=place: p == "VERIFIED")
        extension = getattr(engine_module, f"{place}_EXTENSION")
        assert issubclass(resolve_name(extension), WeightSyncWorkerExtension)
        served = make(RecordingVllm([]), serves=True)
        assert served.engine_kwargs == {"worker_extension_cls": extension}


@pytest.fixture(params=[(False, False), (False, True), (True, False), (True, True)], ids=str)
def refused(request: pytest.FixtureRequest, make: Any) -> Callable[..., str]:
    """Returns the error of requests, colocated or served, of a sync or async engine."""
    serves, use_async = request.param

    def refused(*asked: RolloutInferRequest, is_fault: bool = True, add: Any = None) -> str:
        vllm: Any = RecordingVllm("aa")
        if add is not None:
            vllm.add_request = add
        engine = make(vllm, serves=serves, use_async=use_async)
        if serves:
            reply = infer(engine, [*asked])
            assert reply[REQUEST_FAULT] is is_fault
            return str(reply[FAILURE])
        with pytest.raises((RowError, RuntimeError)) as raised:
            infer(engine, [*asked])
        return f"{raised.typename}: {raised.value}"

    return refused


@pytest.mark.parametrize("metadata", [metadata_of(), None])
def test_what_cannot_be_encoded_is_named(
    refused: Callable[..., str], metadata: Any, assets: Path, tmp_path: Path
) -> None:
    """A truncated file has a whole header, and neither ms-swift nor vLLM names its row. A file that
    is absent here may exist on another machine, so it is no fault of the request."""
    digit = sorted((assets / "digits").rglob("*.png"))[0]
    Image.open(digit).convert("RGB").save(whole := tmp_path / "whole.jpg")
    (cut := tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:-200])
    good, bad = request(metadata, str(whole)), request(metadata, str(whole), str(cut))
    text = refused(good, bad)
    assert text.startswith("RowError: ")
    assert f"'Hi' cannot be encoded (images[1]: {str(cut)!r} is not an image that can" in text
    assert text.endswith("or have such prompts replaced with --truncation_strategy delete.")
    absent = request(metadata, "absent.png")  # ms-swift takes some longer names for base64
    assert "(images[0]: 'absent.png' does not exist)" in refused(absent, is_fault=False)

    def refuse(*_: Any) -> None:
        raise ValueError("The decoder prompt (length 600) is longer than the maximum")

    text = refused(request(metadata_of(), str(whole)), add=refuse)
    assert "(ValueError: The decoder prompt (length 600)" in text


def caches() -> list[Any]:
    """Return vLLM's caches of media in the process that prepares prompts, and in the engine's."""
    lru = pytest.importorskip("vllm.multimodal.cache.lru")
    model = SimpleNamespace(get_multimodal_config=MultiModalConfig)
    return [lru.LruKeyReplicatedSenderCache(model), lru.LruKeyReplicatedReceiverCache(model)]


@pytest.mark.parametrize("side", [0, 1])
def test_media_that_vllms_cache_lost(refused: Callable[..., str], side: int, make: Any) -> None:
    """Another replica may draw the request. vLLM 0.32 may end it with an error and no text."""
    cache = caches()[side]

    def lose(*_: Any) -> None:
        cache.get_and_update_item(None, "4f2a")

    error = refused(request(metadata_of()), is_fault=False, add=lose)
    assert "4f2a" in error
    assert "Set --vllm_mm_processor_cache_gb in this engine's command to 0" in error
    with pytest.raises(RuntimeError, match="--vllm_mm_processor_cache_gb"):
        ask(make(RecordingVllm([""], finish_reason="error")), metadata_of())


@pytest.mark.parametrize("use_async", [False, True])
def test_media_of_a_refused_turn_are_sent_again(make: Any, use_async: bool) -> None:
    """vLLM finds out that a prompt is too long once its image is in the sender's cache."""
    sender, receiver = caches()
    refusals = iter([True])

    vllm: Any = RecordingVllm(["a.", "a."])
    clear, add = sender.clear_cache, vllm.add_request
    vllm.renderer = SimpleNamespace(
        clear_mm_cache=clear, clear_mm_cache_async=AsyncMock(wraps=clear)
    )

    def add_request(request_id: str, inputs: Any, params: SamplingParams) -> None:
        if len(inputs["prompt_token_ids"]) > 1:  # not what stands for a refused turn
            item, _ = sender.get_and_update_item((MultiModalKwargsItem.dummy(), []), "4f2a")
            if next(refusals, False):
                raise ValueError("longer than the maximum model length")
            receiver.get_and_update_item(item, "4f2a")
        add(request_id, inputs, params)

    vllm.add_request = add_request
    engine = make(vllm, use_async=use_async)
    for reason in ("length", "stop"):
        [completion] = ask(engine, metadata_of().next_turn()).response.answer.completions
        assert completion.finish_reason == reason
