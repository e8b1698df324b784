"""Whole trainings with servers whose replicas are processes that echo.

All but the model is real: ms-swift's client, routes and workers' loop, our pipes and locks, and
weight updates over gloo. The two training ranks are threads. The tokens of a replica are the seeds
of its samples and its weights, so stale weights and shifted answers show.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.rlhf_trainers import vllm_client
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.rlhf_trainers.vllm_client import VLLMClient
from uvicorn.protocols.http.h11_impl import H11Protocol

from swift_grpo_ext.cpu.receiver import CPUWeightSyncWorkerExtension
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.generate import generate
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server.client import connect_servers
from swift_grpo_ext.server.lease import Leaseholder
from swift_grpo_ext.server.replicas import Restarts
from swift_grpo_ext.upstream.patches import PatchPhase, apply
from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous
from swift_grpo_ext.weights.sync import WeightSync
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.rig.server.served import Deployed, listening

RANKS = 2
ROUNDS = 3
GROUPS = 6
GROUP_SIZE = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
OF_CONNECTIONS = ("cut", "lose")

Outcome = list[list[list[int]] | str]
"""For each rank, the tokens of its samples, or the error that ended it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one replica, or of a connection to its server."""

    action: str
    """kill, stop, corrupt: a fault of the replica. cut, lose: the connection breaks before the
    server has the request, or before the client has the answer."""

    method: str
    """The replica's method at which it happens; for connections a route; `idle`: between rounds."""

    call: int = 1
    """The number of the call at which it happens, from 1."""

    replica: int = 0
    server: int = 0

    lives: int = 1
    """The number of the replica's starts in which it happens."""


# --- a replica's process ---


class Model(torch.nn.Module):
    """Two tensors."""

    _swift_moe_weight_loader_patched = True  # otherwise ms-swift imports vLLM's models

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        held = dict(weights)
        self.load_state_dict(held, strict=False)
        return set(held)


class Worker(CPUWeightSyncWorkerExtension):
    """The real weight extension over a small model."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model_runner: Any = self
        cache, model = SimpleNamespace(cache_dtype="auto"), SimpleNamespace(quantization=None)
        self.model, self.model_config = Model(), model
        self.vllm_config: Any = SimpleNamespace(cache_config=cache, model_config=model)
        model.dtype = torch.float32

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights_iterator)


class EchoEngine:
    """The methods of an engine that ms-swift's workers call."""

    def __init__(self, connection: Any, fault: Fault | None) -> None:
        self.engine = self
        self._connection, self._fault = connection, fault
        self._calls: Counter[str] = Counter()
        self._worker = Worker()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        is_corrupt = self._meet(method)
        if is_corrupt and method == "process_weights_after_loading":
            del self._worker.received[0]
        return [getattr(self._worker, method)(*args)]

    def reset_prefix_cache(self) -> bool:
        if self._meet("reset_prefix_cache"):
            self._connection.send((0, True))  # a reply to something else
        return True

    def reset_encoder_cache(self) -> bool:
        return True

    def infer(self, infer_requests: list[Any], request_config: Any, use_tqdm: bool) -> list[Any]:
        metadatas = [wire.read_metadata(request["data_dict"]) for request in infer_requests]
        [phase] = {metadata.sample_id.phase for metadata in metadatas if metadata}
        is_corrupt = self._meet(f"infer {phase}")
        outputs = [self._output(metadata) for metadata in metadatas]
        return outputs[:-1] if is_corrupt else outputs

    def _output(self, metadata: Any) -> RolloutOutput:
        weights = [int(w.sum()) for _, w in sorted(self._worker.model.named_parameters())]
        drawn = [
            Completion(
                text="",
                token_ids=[metadata.seed_of(k) % 2**31, *weights],
                logprobs=None,
                finish_reason=None,
                replica=f"{os.getpid()}",
            )
            for k in range(metadata.count)
        ]
        infos = {wire.KEY: wire.write_answer(Answer(drawn, Prompt([1])))}
        response = ChatCompletionResponse("m", [], UsageInfo(1, 1, 2))
        return RolloutOutput(response=response, rollout_infos=infos)

    def _meet(self, method: str) -> bool:
        """Let the fault happen if it is due; return whether to corrupt something."""
        self._calls[method] += 1
        fault = self._fault
        if fault is None or (fault.method, fault.call) != (method, self._calls[method]):
            return False
        if fault.action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.action])
        return fault.action == "corrupt"


def _let_go_of_files(but: int) -> None:
    """Close the parent's connections, but keep the numbers of all its files in use: otherwise a
    socket of the replica could get the number of a log file, and its lines."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (int(file.name) for file in Path("/proc/self/fd").iterdir()):
        if number > 2 and number != but:
            os.dup2(nowhere, number)


def run_echo(
    fault: Fault | None, worker: Any, args: Any, rank: int, port: int, connection: Any
) -> None:
    """Run a worker of ms-swift with an echoing engine, in a forked process."""
    _let_go_of_files(but=connection.connection.fileno())
    rollout.get_world_group = lambda: SimpleNamespace(rank=0)
    SwiftRolloutDeploy.get_infer_engine = lambda *_, **__: EchoEngine(connection.connection, fault)
    rollout.get_rollout_engine_type = lambda _, engine: engine
    worker(args, rank, port, connection)


# --- servers ---


class EchoServer(Deployed):
    """ms-swift's server with echoing replicas, which are forked and not spawned."""

    def __init__(
        self, num_replicas: int, timeout: float, restarts: int, fault: Fault | None
    ) -> None:
        super().__init__(timeout=timeout)
        vars(self.args).update(
            vllm_tensor_parallel_size=1,
            vllm_data_parallel_size=num_replicas,
            get_template=lambda: None,
            _import_external_plugins=lambda: None,
            started_by=self,
        )
        self.every_process: list[Any] = []
        self._starts: Counter[int] = Counter()
        self._fault = fault
        self.num_connections, self.master_port = num_replicas, 0
        self._start_data_parallel_workers()
        self.restarts = Restarts(self, restarts)
        for connection in self.connections:
            assert connection.recv() == {"status": "ready"}

    def fault_of_next_start(self, replica: int) -> Fault | None:
        self._starts[replica] += 1
        fault = self._fault
        if fault is None or fault.action in OF_CONNECTIONS or fault.replica != replica:
            return None
        return fault if self._starts[replica] <= fault.lives else None


def breaking(fault: Fault) -> type[H11Protocol]:
    """Return a protocol of HTTP connections, one of which breaks."""
    seen: Counter[bytes] = Counter()

    class Breaking(H11Protocol):
        def data_received(self, data: bytes) -> None:
            path = data.split(b" ")[1] if data[:4] in (b"POST", b"GET ") else b""
            seen[path] += 1
            is_due = path.strip(b"/").decode() == fault.method and seen[path] == fault.call
            if is_due and fault.action == "cut":
                self.transport.abort()
                return
            if is_due:
                vars(self.transport)["write"] = lambda _: self.transport.abort()
            super().data_received(data)

    return Breaking


@contextmanager
def deployed(
    replicas: Sequence[int], timeout: float, fault: Fault | None, restarts: int
) -> Iterator[tuple[list[EchoServer], list[str]]]:
    """Run servers with these numbers of replicas; yield them and their URLs. Replicas are forked
    before there are threads."""
    gc.collect()  # a replica that collected an earlier training's groups would wait for threads
    faults = [fault if fault and fault.server == s else None for s in range(len(replicas))]
    servers = [
        EchoServer(count, timeout, restarts, own)
        for count, own in zip(replicas, faults, strict=True)
    ]

    def end_replicas() -> None:
        for process in (process for server in servers for process in server.every_process):
            process.kill()
            process.join()

    with ExitStack() as stack:
        stack.callback(end_replicas)  # also replicas that were started by a server's last answer
        urls = []
        for server, own in zip(servers, faults, strict=True):
            settings: dict[str, Any] = {}
            if own and own.action in OF_CONNECTIONS:
                # uvloop's connections cannot be changed.
                settings = {"http": breaking(own), "loop": "asyncio"}
            urls.append(stack.enter_context(listening(server, **settings)))
        stack.callback(end_replicas)
        yield servers, urls


# --- a training ---


@dataclass
class Training:
    """Rounds of two ranks with servers, as the trainer makes them."""

    urls: list[str]
    group_ports: list[int]
    timeout: float
    between: Callable[[int], None] = field(default=lambda _: None)
    """Called on rank 0 after each round."""

    drew: dict[int, set[int]] = field(default_factory=dict)
    """By round: the process ids of the replicas that generated it."""

    def run(self) -> Outcome:
        client, connected = None, None
        try:
            client = VLLMClient(self.urls, group_ports=self.group_ports, connection_timeout=5.0)
            apply(PatchPhase.TRAINER)
            with bounded_rendezvous(vllm_client, self.timeout):  # ms-swift would wait 300 s
                client.init_communicator(device="cpu")
            args = SimpleNamespace(
                rollout_timeout=self.timeout,
                new_special_tokens=[],
                output_dir="run",
                full_determinism=False,
            )
            connected = connect_servers(client, args)
        except Exception as e:  # no rank has begun
            return [f"{type(e).__name__}: {e}"] * RANKS
        finally:
            if client is not None:
                atexit.unregister(client.close_communicator)
        try:
            return run_rank_groups(RANKS, partial(self._run_rank, client, connected))
        finally:
            client.pynccl_comms = []

    def _run_rank(self, client: Any, connected: Any, ranks: ThreadRanks) -> list[list[int]] | str:
        updates = WeightSync(ranks, connected if ranks.rank == 0 else None)
        tokens: list[list[int]] = []
        try:
            for step in range(ROUNDS):
                updates.update(partial(_move, client, updates, ranks, step))
                tokens += self._draw(connected, ranks, step, "train")
                if step == 1:
                    tokens += self._draw(connected, ranks, step, "eval")
                if ranks.rank == 0:
                    self.between(step)
                ranks.all_gather(None)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return tokens

    def _draw(self, connected: Any, ranks: ThreadRanks, step: int, phase: Any) -> list[list[int]]:
        share = GROUPS // RANKS
        sample_ids = [
            SampleId(phase=phase, step=step, number=0, group=group, index=index)
            for group in range(share * ranks.rank, share * (ranks.rank + 1))
            for index in range(GROUP_SIZE)
        ]

        def call_engine(requests: list[Any], metadatas: Any) -> list[Answer]:
            answers: list[Answer] = connected.infer(
                requests, metadatas, RequestConfig(max_tokens=8)
            )
            names = {c.replica for completions, _ in answers for c in completions}
            self.drew[step] = {int(name.split()[-1]) for name in names}
            return answers

        outputs, _ = generate(
            sample_ids,
            [f"{s.group}" for s in sample_ids],
            make_request=lambda _: RolloutInferRequest(messages=[{"role": "user", "content": "?"}]),
            make_metadata=lambda sample_id, count: RequestMetadata(
                sample_id=sample_id, count=count, run_seed=42, as_arrays=True
            ),
            engine_ranks=ranks,
            call_engine=call_engine,
        )
        return [output.response.choices[0].token_ids for output in outputs]


def _move(client: Any, updates: WeightSync, ranks: ThreadRanks, step: int, _: bool) -> None:
    """Do as ms-swift's `_move_full_model_to_vllm` and `_reset_vllm_cache`, in two gathered
    parts."""

    def load(state_dict: dict[str, torch.Tensor]) -> None:
        if ranks.rank == 0:
            bucket = FlattenedTensorBucket(named_tensors=list(state_dict.items()))
            client.update_flattened_params(bucket.get_metadata(), bucket.get_flattened_tensor())

    for part, name in enumerate("ab"):
        ranks.all_gather(name)
        updates.send({name: torch.full((3,), 10.0 * step + part)}, load)
    if ranks.rank == 0:
        client.process_weights_after_loading()
        client.reset_prefix_cache()
        client.reset_encoder_cache()


def use_fork(monkeypatch: Any) -> None:
    """Let ms-swift's server start its replicas with this process's imports."""

    def process(target: Any, args: Any) -> Any:
        server, replica = args[0].started_by, args[1]
        of_worker = (server.fault_of_next_start(replica), target, *args)
        made = get_context("fork").Process(target=run_echo, args=of_worker, daemon=True)
        server.every_process.append(made)
        return made

    monkeypatch.setattr(rollout, "Process", process)
    monkeypatch.setattr(
        Leaseholder, "keep", lambda _: None
    )  # a thread, which would outlive the test


@contextmanager
def frozen() -> Iterator[None]:
    """Hide existing objects from the garbage collector: closing a group collects, and would copy
    their pages in every forked process."""
    gc.freeze()
    yield
    gc.unfreeze()
