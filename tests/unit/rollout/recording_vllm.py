"""A stand-in for vLLM below the real rollout engine: records requests, gives known answers."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import AsyncMock

from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.rollout.agent_loop import run_multi_turn
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.generate import begin_turn
from swift_grpo_ext.rollout.scheduler import watch
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId

T = TypeVar("T")

RUN_SEED, ROOM = 42, 512
EOS = 151645
ID = SampleId(phase="train", step=0, number=0, group=0, index=0)


def ids_of(text: str) -> list[int]:
    """Return a token for each character, as Qwen's first tokens are bytes; "." ends a turn."""
    return [EOS if c == "." else ord(c) - 33 if c != "\n" else 198 for c in text]


class RecordingVllm:
    """Keeps the parameters of each request, and answers with the texts of `says`, in order."""

    engine_core = None  # it has no processes of its own
    renderer = SimpleNamespace(clear_mm_cache=lambda: None, clear_mm_cache_async=AsyncMock())

    def __init__(self, says: str | list[str], finish_reason: str = "stop") -> None:
        self.params: list[SamplingParams] = []
        self.inputs: list[Any] = []
        self.ranks: list[int | None] = []
        self.experts: Any = None
        self.answers: asyncio.Event | None = None  # answers wait for it
        self._says, self._finish_reason = iter(says), finish_reason
        self._waiting: list[RequestOutput] = []

    def add_request(self, request_id: str, inputs: Any, params: SamplingParams) -> None:
        if len(inputs["prompt_token_ids"]) > ROOM:
            raise ValueError("longer than the maximum model length")
        self.params.append(params)
        self.inputs.append(inputs)
        outputs = [self._output(k, next(self._says), params) for k in range(params.n)]
        ids = list(inputs["prompt_token_ids"])
        self._waiting.append(RequestOutput(request_id, None, ids, None, outputs, finished=True))

    def _output(self, index: int, text: str, params: SamplingParams) -> CompletionOutput:
        ids = ids_of(text)
        flat: Any = FlatLogprobs() if params.flat_logprobs else []
        for position, token in enumerate(ids):
            flat.append({token: Logprob(-float(position), 1, "")})
        settings = {"routed_experts": self.experts, "finish_reason": self._finish_reason}
        return CompletionOutput(index, "", ids, None, flat, **settings)

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[RequestOutput]:
        waiting, self._waiting = self._waiting, []
        return list(reversed(waiting))

    async def generate(
        self,
        inputs: Any,
        params: SamplingParams,
        request_id: str,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        self.ranks.append(data_parallel_rank)
        self.add_request(request_id, inputs, params)
        answer = self._waiting.pop()
        if self.answers is not None:
            await self.answers.wait()
        yield answer


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


def run_alone(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: concurrent requests of ms-swift 4.6 (`infer_async`)
    leave their thread in inference mode."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def infer(engine: Any, asked: list[RolloutInferRequest], **settings: Any) -> Any:
    """Return the outputs of a sync or async engine."""
    if engine.use_async_engine:
        return run_alone(engine.async_infer(asked, config(**settings), use_tqdm=False))
    return engine.infer(asked, config(**settings), use_tqdm=False)


def ask(engine: Any, metadata: RequestMetadata | None, **settings: Any) -> Any:
    [output] = infer(engine, [request(metadata)], **settings)
    return output


def lead(
    engine: Any,
    cls: type[MultiTurnScheduler],
    *asked: RolloutInferRequest,
    timeout: float | None = 30.0,
    max_turns: int | None = None,
) -> Any:
    """Return what ms-swift's loop of a server's replica, or of the training, returns with a user's
    scheduler. Without a timeout, the scheduler is not watched."""
    multi_turns["one"] = cls
    if timeout is not None:
        watch("one", timeout)
    if engine.serves:
        scheduler = multi_turns["one"](engine, max_turns)
        return run_alone(scheduler.async_infer([*asked], config(), use_tqdm=False))

    def rollout(requests: list[RolloutInferRequest], _: RequestConfig) -> list[RolloutOutput]:
        for later in requests:
            begin_turn(later, "one")
        outputs: list[RolloutOutput] = infer(engine, requests)
        return outputs

    return run_multi_turn(
        requests=[*asked],
        first_turn_outputs=infer(engine, [*asked]),
        scheduler=multi_turns["one"](None, max_turns, tokenizer=engine.template.tokenizer),
        rollout_fn=rollout,
        request_config=config(),
        max_turns=max_turns,
    )
