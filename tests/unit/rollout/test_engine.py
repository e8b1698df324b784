"""The rollout engine with ms-swift's own code, over a stand-in for vLLM that records requests."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
from swift.infer_engine.infer_engine import InferEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
    serialize_ndarray,
)
from swift.model import get_processor
from swift.pipelines.infer.rollout import WeightSyncWorkerExtension
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template import get_template
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.sampling_params import RequestOutputKind

from swift_grpo_ext.checks.rows import RowError
from swift_grpo_ext.rollout import engine as engine_module
from swift_grpo_ext.rollout import served as served_module
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.conversation import read_turns
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.scheduler import watch
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.upstream import vllm_repairs

RUN_SEED = 42
EOS, END_OF_TEXT, IMAGE, VIDEO = 151645, 151643, 151655, 151656
BIAS = {IMAGE: float("-inf"), VIDEO: float("-inf")}
ID = SampleId(phase="train", step=0, number=0, group=0, index=0)
OTHERS = {"as_arrays": False, "stop_token_ids": None}  # a server's for clients without metadata


def ids_of(text: str) -> list[int]:
    """Return a token for each character, as Qwen's first tokens are bytes; "." ends a turn."""
    return [EOS if c == "." else ord(c) - 33 if c != "\n" else 198 for c in text]


@pytest.fixture(scope="module")
def template(assets: Path) -> Any:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    made = get_template(processor, template_type="qwen2_5_vl")
    made.set_mode("vllm")
    return made


class RecordingVllm:
    """Keeps the parameters of each request, and answers with the texts of `says`, in order."""

    engine_core = None  # it has no processes of its own
    renderer = SimpleNamespace(clear_mm_cache=lambda: None, clear_mm_cache_async=AsyncMock())

    def __init__(self, says: list[str], finish_reason: str = "stop") -> None:
        self.params: list[SamplingParams] = []
        self.inputs: list[Any] = []
        self.ranks: list[int | None] = []
        self.experts: Any = None
        self.answers: asyncio.Event | None = None  # answers wait for it
        self.likelier: dict[int, Logprob] = {}  # at each position
        self._says, self._finish_reason = iter(says), finish_reason
        self._waiting: list[Any] = []

    def add_request(self, request_id: str, inputs: Any, params: SamplingParams) -> None:
        self.params.append(params)
        self.inputs.append(inputs)
        outputs = [self._output(k, next(self._says), params) for k in range(params.n)]
        self._waiting.append(
            SimpleNamespace(
                request_id=request_id,
                finished=True,
                prompt_token_ids=tuple(inputs["prompt_token_ids"]),
                prompt_logprobs=None,
                outputs=outputs,
            )
        )

    def _output(self, index: int, text: str, params: SamplingParams) -> Any:
        ids = ids_of(text)
        flat: Any = FlatLogprobs() if params.flat_logprobs else []
        for position, token in enumerate(ids):
            flat.append({**self.likelier, token: Logprob(-float(position), 1, "")})
        return SimpleNamespace(
            index=index,
            token_ids=tuple(ids),
            logprobs=None if params.logprobs is None else flat,
            finish_reason=self._finish_reason,
            routed_experts=self.experts,
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Any]:
        waiting, self._waiting = self._waiting, []
        return list(reversed(waiting))

    async def generate(
        self,
        inputs: Any,
        params: SamplingParams,
        request_id: str,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[Any]:
        self.ranks.append(data_parallel_rank)
        self.add_request(request_id, inputs, params)
        answer = self._waiting.pop()
        if self.answers is not None:
            await self.answers.wait()
        yield answer


@pytest.fixture
def make(template: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a rollout engine over a recording vLLM."""

    def init(self: Any, vllm: Any, *, engine_kwargs: dict[str, Any], use_async: bool) -> None:
        self.engine, self.engine_kwargs, self.template = vllm, engine_kwargs, template
        self.processor = template.processor
        self.use_async_engine, self.enable_lora, self.strict = use_async, False, True
        self.default_adapter_request, self.task_type, self._request_count = None, "causal_lm", 0
        self.max_model_len, self.max_tokens_offset, self.model_name = 512, 0, "m"
        self.generation_config = SamplingParams()
        self.engine_args = SimpleNamespace(tensor_parallel_size=1)

    monkeypatch.setattr(GRPOVllmEngine, "__init__", init)

    def make_engine(
        vllm: Any, *, serves: bool = False, use_async: bool = False, **kwargs: Any
    ) -> Any:
        if serves:
            kwargs["worker_extension_cls"] = engine_module.UPSTREAM_EXTENSION
        return RolloutEngine(vllm, engine_kwargs=kwargs, use_async=use_async)

    return make_engine


def metadata_of(group: int = 0, **fields: Any) -> RequestMetadata:
    values = {"count": 1, "run_seed": RUN_SEED, "as_arrays": True} | fields
    sample_id = SampleId(phase="train", step=0, number=0, group=group, index=0)
    return RequestMetadata(sample_id=sample_id, **values)


def request(metadata: RequestMetadata | None, *images: str) -> RolloutInferRequest:
    made = RolloutInferRequest(messages=[{"role": "user", "content": "Hi"}], images=[*images])
    if metadata is not None:
        wire.write_metadata(made.data_dict, metadata)
    return made


def config(**fields: Any) -> RequestConfig:
    return RequestConfig(**({"max_tokens": 16, "logprobs": True} | fields))


def ask(engine: Any, metadata: RequestMetadata | None, **settings: Any) -> Any:
    [output] = engine.infer([request(metadata)], config(**settings), use_tqdm=False)
    return output


# --- requests ---


def test_a_group_is_one_request_with_its_seed(make: Any) -> None:
    vllm = RecordingVllm(["a.", "b.", "c."])
    response = ask(make(vllm), metadata_of(7, count=3)).response
    completions, prompt = response.answer
    [params] = vllm.params
    seed = sample_seed(RUN_SEED, metadata_of(7).sample_id)
    assert (params.n, params.seed, params.max_tokens) == (3, seed, 16)
    assert params.output_kind == RequestOutputKind.FINAL_ONLY
    assert params.logit_bias == BIAS
    assert (params.logprobs, params.flat_logprobs) == (0, True)
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


@pytest.mark.parametrize("metadata", [metadata_of(), None])
def test_vllm_sees_the_frames_that_training_sees(
    make: Any, template: Any, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does not sample frames again."""
    media: dict[str, Any] = {"videos": [np.zeros((4, 3, 2, 2))]}
    media["mm_processor_kwargs"] = {"fps": [2.0]}
    encode = template.encode
    monkeypatch.setattr(template, "encode", lambda *args, **kw: encode(*args, **kw) | media)
    ask(make(vllm := RecordingVllm(["a."])), metadata)
    seen = vllm.inputs[0]["multi_modal_data"]
    [(video, facts)] = seen["video"]
    assert (video.shape, facts["fps"], facts["do_sample_frames"]) == ((4, 3, 2, 2), 2.0, False)


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_what_cannot_be_encoded_is_named(
    make: Any, serves: bool, use_async: bool, assets: Path, tmp_path: Path
) -> None:
    """A truncated file has a whole header, and neither ms-swift nor vLLM names its row. A file that
    is absent here may exist on another machine, so it is no fault of the request."""
    digit = sorted((assets / "digits").rglob("*.png"))[0]
    Image.open(digit).convert("RGB").save(whole := tmp_path / "whole.jpg")
    (cut := tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:-200])
    vllm = RecordingVllm(["a"] * 4)
    engine = make(vllm, serves=serves, use_async=use_async)

    def refused(asked: list[Any], *, is_fault: bool = True) -> str:
        def infer() -> Any:
            if not use_async:
                return engine.infer(asked, config(), use_tqdm=False)
            return asyncio.run(engine.async_infer(asked, config(), use_tqdm=False))

        # In a thread: concurrent requests of ms-swift leave their thread in inference mode.
        with ThreadPoolExecutor(1) as pool:
            if serves:
                reply = pool.submit(infer).result()
                assert reply[REQUEST_FAULT] is is_fault
                return str(reply[FAILURE])
            with pytest.raises(RowError, match="the row that asks") as raised:
                pool.submit(infer).result()
            return str(raised.value)

    for metadata in (metadata_of(), None):
        good, bad = request(metadata, str(whole)), request(metadata, str(whole), str(cut))
        text = refused([good, bad])
        assert f"'Hi' cannot be encoded (images[1]: {str(cut)!r} is not an image that can" in text
        assert "image file is truncated" in text
        assert text.endswith("or have such prompts replaced with --truncation_strategy delete.")
        absent = request(metadata, "absent.png")  # ms-swift takes some longer names for base64
        assert "(images[0]: 'absent.png' does not exist)" in refused([absent], is_fault=False)
    bad.messages = [{"role": "user", "content": [{"type": "image", "image": str(cut)}]}]
    bad.images = []
    assert f"(messages[0].content[0]: {str(cut)!r} is not an image" in refused([bad])

    def refuse(*_: Any) -> None:
        raise ValueError("The decoder prompt (length 600) is longer than the maximum")

    vllm.add_request = refuse  # type: ignore[method-assign]
    text = refused([request(metadata_of(), str(whole))])
    assert "(ValueError: The decoder prompt (length 600)" in text
    assert f"it shows images[0] {str(whole)!r})" in text


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
    assert params.logit_bias == BIAS
    assert output.response.choices[0].message.content == "a"
    biased = SamplingParams()
    biased.logit_bias = {5: 1.0}
    engine.engine = RecordingVllm(["a"])
    state = engine_module.RequestState()
    engine._add_request({"input_ids": [1], engine_module.STATE: state}, biased, "0")
    assert biased.logit_bias == {5: 1.0} | BIAS


def test_top_logprobs_are_not_flat(make: Any) -> None:
    vllm = RecordingVllm(["ab", "c"])
    response = ask(make(vllm), metadata_of(), top_logprobs=2).response
    assert (vllm.params[0].logprobs, vllm.params[0].flat_logprobs) == (2, False)
    assert response.answer.completions[0].logprobs == [0.0, -1.0]
    response = ask(make(vllm), metadata_of(), logprobs=False).response
    assert response.answer.completions[0].logprobs is None


def test_the_sampled_tokens_count_among_several_of_a_position(make: Any) -> None:
    vllm = RecordingVllm(["ab"])
    vllm.likelier = {1: Logprob(9.0, 1, "")}
    [completion] = ask(make(vllm), metadata_of()).response.answer.completions
    assert completion.logprobs == [0.0, -1.0]


# --- stops ---


def test_single_token_stops_need_no_text(make: Any) -> None:
    vllm = RecordingVllm(["a."])
    ask(make(vllm), metadata_of(stop_token_ids=(65, EOS)))
    [params] = vllm.params
    assert (sorted(params.stop_token_ids), params.stop) == ([65, END_OF_TEXT, EOS], [])
    assert not params.detokenize


def test_stop_strings_are_searched_in_all_text(make: Any) -> None:
    vllm = RecordingVllm(["a</s>\n"], "length")
    metadata = metadata_of(include_stop_str_in_output=False)
    [completion] = ask(make(vllm), metadata, stop=["</s>"]).response.answer.completions
    [params] = vllm.params
    assert params.stop == ["</s>"]
    assert params.detokenize
    assert params.include_stop_str_in_output is False
    assert not params.skip_special_tokens
    assert not params.spaces_between_special_tokens
    assert (completion.text, completion.stop_reason) == ("a", "</s>")
    assert (completion.finish_reason, completion.token_ids) == ("stop", ids_of("a</s>"))
    assert completion.logprobs == [-0.0, -1.0, -2.0, -3.0, -4.0]


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


def test_schedulers_read_ms_swifts_form_with_our_text(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = RecordingVllm(["a</s>\n"], "length")
    engine = make(vllm)
    looked_at: list[str] = []

    def tool_call(self: Any, response: str, template_inputs: Any) -> None:
        looked_at.append(response)

    monkeypatch.setattr(InferEngine, "_get_toolcall", tool_call)
    metadata = metadata_of(as_arrays=False, include_stop_str_in_output=False)
    output = ask(engine, metadata, stop=["</s>"], return_details=True)
    [choice] = output.response.choices
    assert choice.message.content == "a"
    assert (choice.finish_reason, choice.token_ids) == ("stop", ids_of("a</s>"))
    assert len(choice.logprobs["content"]) == 5
    assert not vllm.params[0].flat_logprobs
    assert looked_at == ["a"]  # tools are searched in the text that counts
    assert output.rollout_infos["stop_reason"] == "</s>"


# --- turns ---


def served(cls: type[MultiTurnScheduler], engine: Any, asked: list[Any]) -> Any:
    """Return the reply of a server's replica with a scheduler. It runs in a thread: concurrent
    requests of ms-swift leave their thread in inference mode."""
    multi_turns["one"] = cls
    watch("one", 30.0)
    scheduler = multi_turns["one"](infer_engine=engine)
    with ThreadPoolExecutor(1) as pool:
        answers = scheduler.async_infer(asked, config(), use_tqdm=False)
        return pool.submit(asyncio.run, answers).result()


class OwnRequests(MultiTurnScheduler):
    """Asks questions of its own before and after the sample's, two of them at once."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        async def ask(request: Any) -> Any:
            return await self.infer_engine.infer_async(request, request_config, **kwargs)

        await ask(RolloutInferRequest(messages=[{"role": "user", "content": "own"}]))
        response = await ask(infer_request)
        await asyncio.gather(ask(copy.deepcopy(infer_request)), ask(copy.deepcopy(infer_request)))
        return RolloutOutput(response=response)


@pytest.mark.parametrize("stops", [(7,), None])
def test_what_a_servers_scheduler_asks_by_itself_is_a_turn_of_its_sample(
    make: Any, stops: Any
) -> None:
    """Its own requests have no metadata, and copies of a request share it; each gets a turn. The
    same holds for a client that sends no metadata."""
    vllm = RecordingVllm([*"abcdefgh"])
    engine = make(vllm, use_async=True, serves=True)
    other = replace(ID, index=1)
    first = metadata_of(as_arrays=False, stop_token_ids=stops)
    asked = [first, replace(first, sample_id=other)]
    outputs = served(OwnRequests, engine, [*map(request, asked)])
    assert [len(read_turns(output, RUN_SEED)) for output in outputs] == [4, 4]
    expected = {sample_seed(RUN_SEED, replace(i, turn=t)) for i in (ID, other) for t in range(4)}
    assert len(vllm.params) == 8
    assert {params.seed for params in vllm.params} == expected
    assert all((7 in params.stop_token_ids) is bool(stops) for params in vllm.params)


@pytest.mark.parametrize("side", ["Sender", "Receiver"])
@pytest.mark.parametrize("serves", [False, True])
def test_media_that_vllms_cache_lost_name_the_setting(make: Any, side: str, serves: bool) -> None:
    lru = pytest.importorskip("vllm.multimodal.cache.lru")
    model = SimpleNamespace(get_multimodal_config=MultiModalConfig)
    cache = getattr(lru, f"LruKeyReplicated{side}Cache")(model)
    vllm: Any = RecordingVllm([])
    vllm.add_request = lambda *_: cache.get_and_update_item(None, "4f2a")
    engine = make(vllm, serves=serves)
    if serves:
        reply = engine.infer([request(metadata_of())], config(), use_tqdm=False)
        assert not reply[REQUEST_FAULT]  # another replica may draw it
        error = reply[FAILURE]
    else:
        with pytest.raises(RuntimeError) as caught:
            ask(engine, metadata_of())
        error = str(caught.value)
    assert "4f2a" in error
    assert "Set --vllm_mm_processor_cache_gb in this engine's command to 0" in error


@pytest.mark.parametrize("use_async", [False, True])
def test_media_of_a_refused_turn_are_sent_again(make: Any, use_async: bool) -> None:
    """vLLM finds out that a prompt is too long once its image is in the sender's cache."""
    lru = pytest.importorskip("vllm.multimodal.cache.lru")
    model = SimpleNamespace(get_multimodal_config=MultiModalConfig)
    sender = lru.LruKeyReplicatedSenderCache(model)
    receiver = lru.LruKeyReplicatedReceiverCache(model)

    class CachingVllm(RecordingVllm):
        has_refused = False

        def add_request(self, request_id: str, inputs: Any, params: SamplingParams) -> None:
            if len(inputs["prompt_token_ids"]) > 1:  # not what stands for a refused turn
                item, _ = sender.get_and_update_item((MultiModalKwargsItem.dummy(), []), "4f2a")
                if not self.has_refused:
                    self.has_refused = True
                    raise ValueError("longer than the maximum model length")
                receiver.get_and_update_item(item, "4f2a")
            super().add_request(request_id, inputs, params)

    vllm: Any = CachingVllm(["a.", "a."])
    vllm.renderer = SimpleNamespace(
        clear_mm_cache=sender.clear_cache, clear_mm_cache_async=AsyncMock(wraps=sender.clear_cache)
    )
    engine = make(vllm, use_async=use_async)
    turn = metadata_of().next_turn()
    for reason in ("length", "stop"):
        if use_async:
            [output] = asyncio.run(engine.async_infer([request(turn)], config(), use_tqdm=False))
        else:
            output = ask(engine, turn)
        [completion] = output.response.answer.completions
        assert completion.finish_reason == reason


def test_a_request_that_vllm_ends_with_an_error_is_no_sample(make: Any) -> None:
    """vLLM 0.32 ends a request so if its cache lost an image; the text is empty."""
    engine = make(RecordingVllm([""], finish_reason="error"))
    with pytest.raises(RuntimeError, match="--vllm_mm_processor_cache_gb"):
        ask(engine, metadata_of())


def test_a_scheduler_that_leads_without_run_is_refused(make: Any) -> None:
    """Otherwise its samples would silently get vLLM's seeds."""

    class Alone(MultiTurnScheduler):
        async def async_infer(self, infer_requests: list[Any], *args: Any, **kw: Any) -> Any:
            tasks = [self.infer_engine.infer_async(row, config(n=1)) for row in infer_requests]
            return await self.infer_engine._batch_infer_stream(tasks, False, False, None)

    engine = make(RecordingVllm(["a."]), serves=True, use_async=True)
    reply = served(Alone, engine, [request(None)])
    assert reply[REQUEST_FAULT]
    assert "Alone.async_infer has not called `run` for each request" in reply[FAILURE]


@pytest.mark.parametrize(("is_engines", "named"), [(True, False), (False, True)])
def test_a_conversation_that_fails_is_named(make: Any, is_engines: bool, named: bool) -> None:
    """Failures of the engine itself are not attributed to a conversation."""

    class Fails(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
            await self.infer_engine.infer_async(infer_request, request_config)
            raise KeyError("box")

    vllm = RecordingVllm(["a."])
    if is_engines:
        vllm.generate = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment]
    engine = make(vllm, serves=True, use_async=True)
    reply = served(Fails, engine, [request(metadata_of(as_arrays=False))])
    where = "RuntimeError: train round 0.0, group 0, sample 0 in turn 2: the server's --multi_turn"
    assert reply[FAILURE].startswith(where) is named
    assert ("ZeroDivisionError" in reply[FAILURE]) is is_engines
    assert not reply[REQUEST_FAULT]


def test_conversations_that_nobody_waits_for_end(make: Any) -> None:
    """A conversation whose tool works makes no more requests; one in the engine is aborted."""
    vllm = RecordingVllm(["a."])
    engine = make(vllm, serves=True, use_async=True)
    at_work, is_over, refused = threading.Event(), threading.Event(), list[str]()

    class Waits(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
            if infer_request.data_dict["tool"]:
                at_work.set()
                is_over.wait(20)
            try:
                await self.infer_engine.infer_async(infer_request, request_config)
            except BaseException as e:
                refused.append(type(e).__name__)
                raise

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        at_work.wait(20)
        assert not served_module.go_on(time.monotonic() + 1)  # the engine is silent
        served_module.give_up()
        await asyncio.sleep(20)
        yield

    vllm.generate = generate  # type: ignore[method-assign, assignment]
    asked = [request(metadata_of(as_arrays=False)) for _ in range(2)]
    for number, one in enumerate(asked):
        one.data_dict["tool"] = number == 1
    reply = served(Waits, engine, asked)
    assert reply == {
        FAILURE: "the training that asked for the conversations has left",
        REQUEST_FAULT: True,
    }
    is_over.set()
    deadline = time.monotonic() + 20
    while len(refused) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert refused == ["CancelledError", "RequestError"]
    assert not served_module.go_on(0.0)


def test_several_completions_of_a_schedulers_request_are_refused(make: Any) -> None:
    """They would share seeds with other samples of the group. Another client has no groups."""
    vllm = RecordingVllm([*"ab"])
    engine = make(vllm, use_async=True, serves=True)

    class Several(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
            own = RolloutInferRequest(messages=infer_request.messages)
            return await self.infer_engine.infer_async(own, replace(request_config, n=2))

    reply = served(Several, engine, [request(metadata_of(as_arrays=False))])
    assert "--multi_turn_scheduler: its `run` asked for n=2 completions" in reply[FAILURE]
    [response] = served(Several, engine, [request(metadata_of(**OTHERS))])
    assert [choice.message.content for choice in response.choices] == ["a", "b"]
    assert [params.seed for params in vllm.params] == [sample_seed(RUN_SEED, ID)]


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
    monkeypatch.delenv("SWIFT_ROLLOUT_DP_RANK")
    first = ask(make(RecordingVllm(["a"]), serves=True), metadata_of())
    assert first.rollout_infos[wire.KEY]["replica"] == "replica 0"


def test_an_async_engine_gives_each_group_to_the_replica_that_draws_least(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer names that replica. Requests that have ended or failed do not count."""
    heard: list[Any] = []
    monkeypatch.setattr(vllm_repairs, "collect_rpc_from_all_replicas", heard.append)
    vllm = RecordingVllm(["a."] * 20)
    engine = make(vllm, serves=True, use_async=True, data_parallel_size=2)
    assert heard == [vllm]

    async def draw(engine: Any, vllm: RecordingVllm, *counts: int) -> list[str]:
        """Request groups of these sizes in turn, all before the first one ends; return the names of
        the replicas that generated them."""
        vllm.ranks.clear()
        vllm.answers = asyncio.Event()
        tasks = []
        for count in counts:
            asked = [request(metadata_of(count=count))]
            answer = engine.async_infer(asked, config(n=1), use_tqdm=False)
            tasks.append(asyncio.create_task(answer))
            while len(vllm.ranks) < len(tasks) and not tasks[-1].done():
                await asyncio.sleep(0.001)
        vllm.answers.set()
        answers = await asyncio.gather(*tasks)
        return [
            answer[FAILURE] if FAILURE in answer else answer[0].rollout_infos[wire.KEY]["replica"]
            for answer in answers
        ]

    def drawers(*args: Any) -> list[str]:
        # In a thread: ms-swift 4.6 awaits in inference mode (`VllmEngine.infer_async`), and
        # concurrent requests leave it on.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, draw(*args)).result()

    expected = [0, 1, 1, 1, 0, 1]
    assert drawers(engine, vllm, 3, 1, 1, 1, 1, 1) == [f"replica {k}" for k in expected]
    assert vllm.ranks == expected
    with monkeypatch.context() as broken:
        broken.setattr(RecordingVllm, "generate", lambda *_, **__: 1 / 0)
        assert drawers(engine, vllm, 2) == ["ZeroDivisionError: division by zero"]
    assert drawers(engine, vllm, 1) == ["replica 0"]
    single = RecordingVllm(["a."])
    alone = make(single, serves=True, use_async=True)
    assert drawers(alone, single, 1) == ["replica 0"]
    assert single.ranks == [None]
    assert heard == [vllm]


def test_workers_of_a_server_get_our_extension(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for accelerator, extension in (
        (True, engine_module.VERIFIED_EXTENSION),
        (False, engine_module.CPU_EXTENSION),
    ):
        monkeypatch.setattr(engine_module, "has_accelerator", lambda on=accelerator: on)
        assert issubclass(resolve_name(extension), WeightSyncWorkerExtension)
        served = make(RecordingVllm([]), serves=True)
        assert served.engine_kwargs == {"worker_extension_cls": extension}
    assert make(RecordingVllm([])).engine_kwargs == {}
    own = make(RecordingVllm([]), worker_extension_cls="mine")
    assert own.engine_kwargs == {"worker_extension_cls": "mine"}
