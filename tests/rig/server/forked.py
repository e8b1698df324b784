"""Whole trainings with servers whose replicas are processes that echo, and a fault in each phase.

All but the model is real: ms-swift's client, routes and workers' loop, our pipes and locks, and
weight updates over gloo. The tokens of a replica are the seeds of its samples and its weights, so
stale weights and shifted answers show.
"""

import atexit
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.rlhf_trainers import vllm_client
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.rlhf_trainers.vllm_client import VLLMClient
from uvicorn.protocols.http.h11_impl import H11Protocol

from swift_grpo_ext.cpu.receiver import CPUWeightSyncWorkerExtension
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.server import client
from swift_grpo_ext.server.client import connect_servers
from swift_grpo_ext.server.lease import Leaseholder
from swift_grpo_ext.server.replicas import start_replica
from swift_grpo_ext.upstream.patches import PatchPhase, apply
from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous
from swift_grpo_ext.weights.sync import WeightSync
from tests.rig.processes import free_port
from tests.rig.server.served import Deployed, drawn_by, listening, metadata_of, output_of

ROUNDS = ((0, "train"), (1, "train"), (1, "eval"), (2, "train"))
GROUPS = 6
GROUP_SIZE = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fault(NamedTuple):
    """A fault of one replica, or of a connection to its server, in a phase of a training."""

    # kill, stop: the replica ends, or hangs. cut, lose: the connection breaks before the server has
    # the request, or before the client has the answer.
    action: str
    phase: str
    method: str  # of the replica, at which it happens; for connections a route
    call: int  # the number of the call at which it happens
    replicas: tuple[int, ...]  # of each server
    server: int  # the one with the fault
    replica: int


class Worker(CPUWeightSyncWorkerExtension):
    """The real weight extension over two tensors."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model_runner: Any = self
        self.model: Any = torch.nn.ParameterDict({name: torch.zeros(3) for name in "ab"})
        self.model._swift_moe_weight_loader_patched = True  # or ms-swift imports vLLM's models
        self.model.load_weights = self._load_weights
        self.model_config = SimpleNamespace(quantization=None, dtype=torch.float32)
        cache = SimpleNamespace(cache_dtype="auto")
        self.vllm_config: Any = SimpleNamespace(cache_config=cache, model_config=self.model_config)

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        held = dict(weights)
        self.model.load_state_dict(held, strict=False)
        return set(held)

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights_iterator)


class EchoEngine:
    """The methods of an engine that ms-swift's workers call."""

    def __init__(self, fault: Fault | None) -> None:
        self.engine, self._worker = self, Worker()
        self._fault, self._calls = fault, Counter[str]()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self._meet(method)
        return [getattr(self._worker, method)(*args)]

    def reset_prefix_cache(self) -> bool:
        self._meet("reset_prefix_cache")
        return True

    def reset_encoder_cache(self) -> bool:
        return True

    def infer(self, infer_requests: list[Any], request_config: Any, use_tqdm: bool) -> list[Any]:
        metadatas: list[Any] = [wire.read_metadata(one["data_dict"]) for one in infer_requests]
        self._meet(f"infer {metadatas[0].sample_id.phase}")
        weights = [int(w.sum()) for _, w in sorted(self._worker.model.named_parameters())]
        tokens = [[[m.seed_of(k) % 2**31, *weights] for k in range(m.count)] for m in metadatas]
        answers = map(drawn_by, metadatas, repeat("replica"), tokens)
        return [output_of({wire.KEY: answer}) for answer in answers]

    def _meet(self, method: str) -> None:
        """Let the fault happen if it is due."""
        self._calls[method] += 1
        fault = self._fault
        if fault and (fault.method, fault.call) == (method, self._calls[method]):
            os.kill(os.getpid(), SIGNALS[fault.action])


def run_echo(worker: Any, args: Any, rank: int, port: int, connection: Any) -> None:
    """Run a worker of ms-swift with an echoing engine, in a forked process."""
    fault = args.fault
    is_hit = fault and fault.action in SIGNALS and fault.replica == rank
    rollout.get_world_group = lambda: SimpleNamespace(rank=0)
    SwiftRolloutDeploy.get_infer_engine = lambda *_, **__: EchoEngine(fault if is_hit else None)
    rollout.get_rollout_engine_type = lambda _, engine: engine
    worker(args, rank, port, connection)


def fork(target: Any, args: Any) -> Any:
    """Make the process of a replica, with this process's imports; ms-swift's would spawn."""
    return get_context("fork").Process(target=run_echo, args=(target, *args), daemon=True)


class EchoServer(Deployed):
    """ms-swift's server with echoing replicas, which are forked and not spawned."""

    def __init__(self, num_replicas: int, timeout: float, fault: Fault | None) -> None:
        super().__init__(
            timeout=timeout,
            vllm_tensor_parallel_size=1,
            get_template=lambda: None,
            _import_external_plugins=lambda: None,
            fault=fault,
        )
        self.master_port = 0
        self.connections = [start_replica(self, number) for number in range(num_replicas)]
        for connection in self.connections:
            assert connection.recv() == {"status": "ready"}

    def run(self) -> AbstractContextManager[str]:
        """Run the server; yield its URL."""
        fault = self.args.fault
        if fault is None or fault.action in SIGNALS:
            return listening(self)
        # uvloop's connections cannot be changed.
        return listening(self, http=breaking(fault), loop="asyncio")


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


def metadatas_of(step: int, phase: Any) -> list[RequestMetadata]:
    """Return the requests of a round's groups."""
    return [metadata_of(group, phase, step, count=GROUP_SIZE) for group in range(GROUPS)]


def undisturbed() -> list[list[int]]:
    """Return the tokens of a training without a fault: seeds, and sums of the step's weights."""
    return [
        [metadata.seed_of(k) % 2**31, 30 * step, 30 * step + 3]  # type: ignore[operator]
        for step, phase in ROUNDS
        for metadata in metadatas_of(step, phase)
        for k in range(GROUP_SIZE)
    ]


def _move(client: Any, updates: WeightSync, step: int, _: bool) -> None:
    """Do as ms-swift's `_move_full_model_to_vllm` and `_reset_vllm_cache`, in two parts."""

    def load(state_dict: dict[str, torch.Tensor]) -> None:
        bucket = FlattenedTensorBucket(named_tensors=list(state_dict.items()))
        client.update_flattened_params(bucket.get_metadata(), bucket.get_flattened_tensor())

    for part, name in enumerate("ab"):
        updates.send({name: torch.full((3,), 10.0 * step + part)}, load)
    client.process_weights_after_loading()
    client.reset_prefix_cache()
    client.reset_encoder_cache()


def run(fault: Fault, timeout: float) -> list[list[int]]:
    """Make the rounds as rank 0 of a trainer; return the tokens of the samples."""
    apply(PatchPhase.SERVER)
    with ExitStack() as stack:
        # Closing a group collects garbage: a replica would wait for the threads of an earlier
        # training's groups, and copy the pages of all objects.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(rollout, "Process", fork)
        patch.setattr(Leaseholder, "keep", lambda _: None)  # a thread would outlive the test
        patch.setattr(client, "TRIES", client.TRIES.new(backoff_factor=0.01))
        patch.setattr(client, "SECONDS_BETWEEN_LOOKS", 0.02)
        running = [  # replicas are forked before there are threads
            EchoServer(count, timeout, fault if fault.server == number else None)
            for number, count in enumerate(fault.replicas)
        ]
        urls = [stack.enter_context(server.run()) for server in running]

        @stack.callback
        def end_replicas() -> None:
            for process in (process for server in running for process in server.processes):
                process.kill()
                process.join()

        ports = [free_port() for _ in urls]
        trainer: Any = VLLMClient(urls, group_ports=ports, connection_timeout=5.0)
        stack.callback(atexit.unregister, trainer.close_communicator)
        stack.callback(setattr, trainer, "pynccl_comms", [])
        apply(PatchPhase.TRAINER)
        with bounded_rendezvous(vllm_client, timeout):  # ms-swift would wait 300 s
            trainer.init_communicator(device="cpu")
        args: Any = SimpleNamespace(rollout_timeout=timeout, output_dir="run")
        args.new_special_tokens, args.full_determinism = [], False
        servers = connect_servers(trainer, args)
        updates = WeightSync(RankGroup(), servers)
        row = RolloutInferRequest(messages=[{"role": "user", "content": "?"}])
        tokens = []
        for step, phase in ROUNDS:
            if phase == "train":
                updates.update(partial(_move, trainer, updates, step))
            metadatas = metadatas_of(step, phase)
            answers = servers.infer([row] * GROUPS, metadatas, RequestConfig(max_tokens=8))
            tokens += [list(c.token_ids) for completions, _ in answers for c in completions]
            if fault.phase == "idle" and step == 0:
                process = running[fault.server].processes[fault.replica]
                os.kill(process.pid, SIGNALS[fault.action])
    return tokens


TIMEOUT = 5.0
OF_ONE_THAT_STOPS = 1.5
BOUND = 10  # timeouts: a trainer waits three for each failed call
# The method of a replica and the route of a connection, with the number of the call that has the
# fault; `idle`: in no call.
PHASES: dict[str, tuple[Any, Any]] = {
    "connecting": (("join_group", 1), ("init_communicator", 1)),
    "naming itself": (None, ("get_engine_type", 2)),
    "weight update": (("update_flattened_params", 3),) * 2,
    "loading": (("process_weights_after_loading", 2),) * 2,
    "reset of caches": (("reset_prefix_cache", 2),) * 2,
    "round": (("infer train", 2), ("infer", 2)),
    "evaluation": (("infer eval", 1), ("infer", 3)),
    "idle": (("idle", 1), None),
}
# The replicas of each server, then the server and the replica with the fault. The first replica of
# a server hosts the group of its weights.
PLACES = (((2,), 0, 0), ((1, 1), 1, 0), ((1, 1), 0, 0), ((2,), 0, 1))


def faults(*, in_stack: bool) -> Iterator[Fault]:
    """Yield every second fault, or all others. The first half has each phase and each place."""
    cells = [
        (action, phase, *at)
        for action in (*SIGNALS, "cut", "lose")
        for phase, (of_replica, of_connection) in PHASES.items()
        if (at := of_replica if action in SIGNALS else of_connection)
    ]
    for number, cell in enumerate(cells):
        if in_stack == (number % 2 == 0):
            yield Fault(*cell, *PLACES[number // 2 % len(PLACES)])


def check(fault: Fault) -> None:
    """Check that the training has the tokens of an undisturbed one, or that it ends with a named
    cause. Both are within the bound."""
    waits = fault.action == "stop" or fault.phase == "connecting"
    timeout = OF_ONE_THAT_STOPS if waits else TIMEOUT
    began = time.monotonic()
    if fault.phase == "connecting":  # ms-swift's own phase, which it does not repeat
        is_hit = fault.action in SIGNALS
        cause = "timed out|has not answered" if is_hit else "Connection aborted"
        with pytest.raises(Exception, match=cause):
            run(fault, timeout)
    else:
        assert run(fault, timeout) == undisturbed()
    assert time.monotonic() - began < BOUND * timeout
