"""Echoing replicas with the real routes, locks and pipes of `swift rollout`."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
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


def metadata_of(
    group: int, phase: Any = "train", step: int = 0, *, count: int = 4, as_arrays: bool = True
) -> RequestMetadata:
    name = SampleId(phase=phase, step=step, number=0, group=group, index=0)
    return RequestMetadata(sample_id=name, count=count, run_seed=42, as_arrays=as_arrays)


def request(group: int, **fields: Any) -> dict[str, Any]:
    data_dict: dict[str, Any] = {}
    wire.write_metadata(data_dict, metadata_of(group, **fields))
    return {"messages": [{"role": "user", "content": "?"}], "data_dict": data_dict}


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

    exitcode = -9

    def __init__(
        self, fault: str = "", *, number: int = 7, child: Any = None, **faults: str
    ) -> None:
        if child is None:
            parent, child = Pipe()
            self.connection = ReplicaConnection(parent, self, number)
        self.name = f"replica {number}"
        self.faults = {"infer": fault} | faults
        self.groups: list[int] = []  # of the requests; -1 for those of other clients
        # The other methods that the server called, with arguments; without reports.
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.says_to_others: list[Any] = []
        self.reports = [WeightReport({"w": "float32 (1,)"}, faults=[])]  # of its workers
        self.goes_on = threading.Event()
        self._child, self._alive = child, True
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
            outputs = [self._output(asked) for asked in kwargs["infer_requests"]]
            failures = {
                "raises": {FAILURE: "OSError: the disk is gone", REQUEST_FAULT: False},
                "cannot encode": {FAILURE: "ValueError: no such image", REQUEST_FAULT: True},
                "answers nothing": None,
                "answers half": outputs[:-1],
            }
            return failures.get(fault, outputs)
        if method == "read_number_bits":
            return [32]
        if method != "read_weight_report":
            self.calls.append((method, kwargs.get("args", ())))
        replies: dict[str, Any] = {
            "read_weight_report": [asdict(report) for report in self.reports],
            "process_weights_after_loading": [None],
            "get_state_keys": [["model.w"]],
        }
        return None if fault == "raises" else replies.get(method, True)

    def _output(self, asked: dict[str, Any]) -> RolloutOutput:
        metadata: Any = wire.read_metadata(asked["data_dict"])  # a server names all requests
        is_ours = not metadata.from_other_client
        self.groups.append(metadata.sample_id.group if is_ours else -1)
        drawn = {wire.KEY: drawn_by(metadata, self.name)} if is_ours else {}
        infos = {"group": self.groups[-1], "seed": metadata.seed_of(0), **drawn}
        return output_of(infos, self.says_to_others)

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
        self, *replicas: Replica, timeout: float = 60.0, use_async: bool = False, **settings: Any
    ) -> None:
        apply(PatchPhase.SERVER)
        self.args = SimpleNamespace(
            rollout_timeout=timeout,
            **dict.fromkeys(("api_key", "multi_turn_scheduler")),
            **{"rollout_mismatch": "stop", "rollout_seed_mode": "sample", "sample_log": "none"},
            **{"watches_weights": True, "new_special_tokens": [], "host": "127.0.0.1"},
            **{"vllm_max_model_len": 512, "vllm_enable_lora": False},
            **{"vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 3},
        )
        vars(self.args).update(settings)
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

    def ask(self, *requests: dict[str, Any], **config: Any) -> Any:
        """Send requests; return the response."""
        body = {"infer_requests": requests, "request_config": config or None}
        return self.client.post("/infer/", json=body)

    def draw(self, groups: int = 1, **fields: Any) -> Any:
        """Send a request for each group; return the response."""
        return self.ask(*(request(group, **fields) for group in range(groups)))


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
