"""Echoing replicas with the real routes, locks and pipes of `swift rollout`."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutOutput, UsageInfo
from swift.pipelines.infer.rollout import SwiftRolloutDeploy

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata, WeightReport
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server.replicas import ReplicaConnection, Restarts, WorkerConnection
from swift_grpo_ext.upstream.patches import PatchPhase, apply


def request(group: int, words: int = 1, **fields: Any) -> dict[str, Any]:
    sample_id = SampleId(phase="train", step=0, number=0, group=group, index=0)
    values: dict[str, Any] = {"count": 4, "run_seed": 42, "as_arrays": True} | fields
    metadata = RequestMetadata(sample_id=sample_id, **values)
    message = {"role": "user", "content": "word " * words}
    data_dict: dict[str, Any] = {}
    wire.write_metadata(data_dict, metadata)
    return {"messages": [message], "data_dict": data_dict}


def body_of(images: list[str]) -> bytes:
    """Return the body of a call with one request."""
    return json.dumps({"infer_requests": [request(0) | {"images": images}]}).encode()


def drawn_by(
    metadata: RequestMetadata, replica: str, tokens: list[list[int]] | None = None
) -> dict[str, Any]:
    """Return a replica's answer. The text of each sample is its group and its number; so are its
    tokens, unless others are given."""
    group, values = metadata.sample_id.group, {"logprobs": None, "finish_reason": None}
    tokens = tokens or [[group, k] for k in range(metadata.count)]
    drawn = [
        Completion(text=f"{group}.{k}", token_ids=ids, replica=replica, **values)  # type: ignore[arg-type]
        for k, ids in enumerate(tokens)
    ]
    return wire.write_answer(Answer(drawn, Prompt([1, 2])))


def output_of(infos: dict[str, Any], choices: Sequence[Any] = ()) -> RolloutOutput:
    response = ChatCompletionResponse("m", list(choices), UsageInfo(1, 1, 2))
    return RolloutOutput(response=response, rollout_infos=infos)


class Replica:
    """A worker at the end of a pipe, which runs ms-swift's loop in a thread. It answers each
    request with its group, or has a fault: `faults`, by method."""

    def __init__(
        self, fault: str = "", *, number: int = 7, child: Any = None, **faults: str
    ) -> None:
        if child is None:
            parent, child = Pipe()
            self.connection = ReplicaConnection(parent, self, number)
        self.name = f"replica {number}"
        self.faults = {"infer": fault} | faults
        self.groups: list[int] = []
        self.requests: list[dict[str, Any]] = []
        # The other methods that the server called, with arguments; without reports.
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.says_to_others: list[Any] = []
        # The reports of its workers; `weight_faults` has the findings of their watches.
        self.reports = [WeightReport({"w": "float32 (1,)"})]
        self.weight_faults: list[str] | None = []
        self.exitcode = -9
        self.goes_on = threading.Event()
        self._child = child
        self._alive = True
        self._ending = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection = WorkerConnection(self._child)
        with suppress(EOFError, OSError):
            while self._alive:
                command = connection.recv()
                kwargs = command.get("kwargs", {})
                method = kwargs.get("method", command["method"])
                fault = self.faults.get(method, "")
                reply = self._reply(method, kwargs, fault)
                if fault == "ends":
                    self.kill()
                if fault in ("hangs", "is late"):
                    self.goes_on.wait(20)
                if fault == "answers another":
                    self._child.send((0, reply))
                elif command["type"] == "call" and fault != "hangs":
                    connection.send(reply)

    def _reply(self, method: str, kwargs: dict[str, Any], fault: str) -> Any:
        if method in ("infer", "async_infer"):
            assert kwargs["use_tqdm"] is False
            outputs = self._outputs(kwargs["infer_requests"])
            failures = {
                "raises": {FAILURE: "OSError: the disk is gone", REQUEST_FAULT: False},
                "cannot encode": {FAILURE: "ValueError: no such image", REQUEST_FAULT: True},
                "answers nothing": None,
                "answers half": outputs[:-1],
            }
            return failures.get(fault, outputs)
        if method == "read_weight_report" and fault != "raises":
            return [asdict(replace(r, faults=self.weight_faults)) for r in self.reports]
        if method == "read_number_bits":
            return [32]
        self.calls.append((method, kwargs.get("args", ())))
        if fault == "raises":
            return None
        replies = {"process_weights_after_loading": [None], "get_state_keys": [["model.w"]]}
        return replies.get(method, True)

    def _outputs(self, requests: list[dict[str, Any]]) -> list[RolloutOutput]:
        self.requests += requests
        outputs = []
        for asked in requests:
            metadata = wire.read_metadata(asked.get("data_dict"))
            # Requests of another client have names from the server.
            is_ours = metadata is not None and not metadata.from_other_client
            self.groups.append(metadata.sample_id.group if metadata and is_ours else -1)
            outputs.append(self._output(self.groups[-1], metadata if is_ours else None))
        return outputs

    def _output(self, group: int, metadata: RequestMetadata | None) -> RolloutOutput:
        drawn = {wire.KEY: drawn_by(metadata, self.name)} if metadata else {}
        return output_of({"group": group, **drawn}, self.says_to_others)

    def says(self, status: dict[str, str]) -> None:
        """Send the status of a start: ready, or why not."""
        self._child.send((None, status))

    # The interface of its process:

    def is_alive(self) -> bool:
        return self._alive

    def kill(self) -> None:
        with self._ending:  # both sides may call it at the same moment
            self._alive = False
            self._child.close()
            self.goes_on.set()

    def join(self, timeout: float | None = None) -> None:
        pass


class Deployed(SwiftRolloutDeploy):
    """ms-swift's server with its routes and these replicas."""

    def __init__(
        self,
        *replicas: Replica,
        timeout: float = 60.0,
        key: str | None = None,
        use_async: bool = False,
        **settings: Any,
    ) -> None:
        apply(PatchPhase.SERVER)
        own: dict[str, Any] = {"new_special_tokens": [], "rollout_seed_mode": "sample"}
        own |= {"sample_log": "none", "vllm_max_model_len": 512}
        self.args = SimpleNamespace(
            api_key=key,
            rollout_timeout=timeout,
            rollout_mismatch="stop",
            watches_weights=True,
            host="127.0.0.1",
            vllm_tensor_parallel_size=2,
            vllm_data_parallel_size=3,
            vllm_enable_lora=False,
            multi_turn_scheduler=None,
            **(own | settings),
        )
        self.app = FastAPI()
        self.use_async_engine, self.use_gym_env = use_async, False
        self.connections = [replica.connection for replica in replicas]
        self.processes = list(replicas)
        self.restarts = Restarts(self, 0)
        self._register_rl_rollout_app()
        self.client = TestClient(self.app)

    def refuse(self, path: str, status: int, words: str, **request: Any) -> None:
        """Assert that a request is refused with this status, and words in the cause."""
        refused = self.client.post(path, **request)
        assert (refused.status_code, words in refused.text) == (status, True), refused.text

    def draw(self, groups: int = 1, **fields: Any) -> Any:
        """Send a request for each group; return the response."""
        asked = [request(group, **fields) for group in range(groups)]
        return self.client.post("/infer/", json={"infer_requests": asked})


@contextmanager
def listening(deployed: SwiftRolloutDeploy, **settings: Any) -> Iterator[str]:
    """Run the server at a free port, with settings of uvicorn; yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(deployed.app, log_level="error", lifespan="off", **settings)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = running.force_exit = True
        thread.join(10)


def groups_of(response: Any) -> list[int]:
    assert response.status_code == 200, response.text
    return [answer["rollout_infos"]["group"] for answer in response.json()]
