"""Whole trainings with servers whose replicas are processes that echo, and a fault in each phase.

All but the model is real: ms-swift's client, routes and workers' loop, our pipes and locks, and
weight updates over gloo. The tokens of a replica are the seeds of its samples and its weights, so
stale weights and shifted answers show.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
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
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import client
from swift_grpo_ext.server.client import connect_servers
from swift_grpo_ext.server.lease import Leaseholder
from swift_grpo_ext.server.replicas import Restarts
from swift_grpo_ext.upstream.patches import PatchPhase, apply
from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous
from swift_grpo_ext.weights.sync import WeightSync
from tests.rig.processes import free_port
from tests.rig.server.served import Deployed, drawn_by, listening, output_of

ROUNDS = ((0, "train"), (1, "train"), (1, "eval"), (2, "train"))
GROUPS = 6
GROUP_SIZE = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
OF_CONNECTIONS = ("cut", "lose")

Outcome = list[list[int]] | str  # the tokens of the samples, or the error that ended the training


@dataclass(frozen=True)
class Fault:
    """A fault of one replica, or of a connection to its server."""

    # kill, stop, corrupt: a fault of the replica. cut, lose: the connection breaks before the
    # server has the request, or before the client has the answer.
    action: str
    method: str  # of the replica, at which it happens; for connections a route; `idle`: in no call
    call: int = 1  # the number of the call at which it happens
    replica: int = 0
    server: int = 0


# --- a replica's process ---


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
        metadatas: list[Any] = [wire.read_metadata(one["data_dict"]) for one in infer_requests]
        is_corrupt = self._meet(f"infer {metadatas[0].sample_id.phase}")
        weights = [int(w.sum()) for _, w in sorted(self._worker.model.named_parameters())]
        outputs = []
        for metadata in metadatas:
            tokens = [[metadata.seed_of(k) % 2**31, *weights] for k in range(metadata.count)]
            answer = drawn_by(metadata, f"{os.getpid()}", tokens)
            outputs.append(output_of({wire.KEY: answer}))
        return outputs[:-1] if is_corrupt else outputs

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

    def __init__(self, num_replicas: int, timeout: float, fault: Fault | None) -> None:
        super().__init__(timeout=timeout)
        vars(self.args).update(
            vllm_tensor_parallel_size=1,
            vllm_data_parallel_size=num_replicas,
            get_template=lambda: None,
            _import_external_plugins=lambda: None,
            fork=self.fork,
        )
        self.every_process: list[Any] = []
        self.fault = fault
        self.num_connections, self.master_port = num_replicas, 0
        self._start_data_parallel_workers()
        self.restarts = Restarts(self, 0)
        for connection in self.connections:
            assert connection.recv() == {"status": "ready"}

    def fork(self, target: Any, args: Any) -> Any:
        """Make the process of a replica, with this process's imports; ms-swift's would spawn."""
        replica, fault = args[1], self.fault
        is_hit = fault and fault.replica == replica and fault.action not in OF_CONNECTIONS
        own = fault if is_hit else None
        made = get_context("fork").Process(target=run_echo, args=(own, target, *args), daemon=True)
        self.every_process.append(made)
        return made


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
    replicas: Sequence[int], timeout: float, fault: Fault | None
) -> Iterator[tuple[list[EchoServer], list[str]]]:
    """Run servers with these numbers of replicas; yield them and their URLs. Replicas are forked
    before there are threads."""
    apply(PatchPhase.SERVER)
    servers: list[EchoServer] = []

    def end_replicas() -> None:
        for process in (process for server in servers for process in server.every_process):
            process.kill()
            process.join()

    with ExitStack() as stack:
        # Closing a group collects garbage: a replica would wait for the threads of an earlier
        # training's groups, and copy the pages of all objects.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(rollout, "Process", lambda target, args: args[0].fork(target, args))
        patch.setattr(Leaseholder, "keep", lambda _: None)  # a thread would outlive the test
        patch.setattr(client, "TRIES", client.TRIES.new(backoff_factor=0.01))
        patch.setattr(client, "SECONDS_BETWEEN_LOOKS", 0.02)
        stack.callback(end_replicas)  # also replicas that were started by a server's last answer
        for number, count in enumerate(replicas):
            own = fault if fault and fault.server == number else None
            servers.append(EchoServer(count, timeout, own))
        urls = []
        for server in servers:
            settings: dict[str, Any] = {}
            if server.fault and server.fault.action in OF_CONNECTIONS:
                # uvloop's connections cannot be changed.
                settings = {"http": breaking(server.fault), "loop": "asyncio"}
            urls.append(stack.enter_context(listening(server, **settings)))
        stack.callback(end_replicas)
        yield servers, urls


# --- a training ---


def metadatas_of(step: int, phase: Any) -> list[RequestMetadata]:
    """Return the requests of a round's groups."""
    names = [
        SampleId(phase=phase, step=step, number=0, group=group, index=0) for group in range(GROUPS)
    ]
    return [
        RequestMetadata(sample_id=name, count=GROUP_SIZE, run_seed=42, as_arrays=True)
        for name in names
    ]


def undisturbed() -> Outcome:
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


# --- each fault in each phase: some cells are in `tests/stack`, all others in `tests/extra` ---

TIMEOUT = 5.0
OF_ONE_THAT_STOPS = 1.5
BOUND = 10  # timeouts: a trainer waits three for each failed call
# The method of a replica, or the route of a connection, and the number of its call with the fault.
UPDATES = {
    "weight update": ("update_flattened_params", 3),
    "loading": ("process_weights_after_loading", 2),
    "reset of caches": ("reset_prefix_cache", 2),
}
REPLICA_PHASES = {
    "connecting": ("join_group", 1),
    **UPDATES,
    "round": ("infer train", 2),
    "evaluation": ("infer eval", 1),
    "idle": ("idle", 1),
}
CONNECTION_PHASES = {
    "connecting": ("init_communicator", 1),
    "naming itself": ("get_engine_type", 2),
    **UPDATES,
    "round": ("infer", 2),
    "evaluation": ("infer", 3),
}
# Phases in which a replica can give another answer, or load other weights.
CORRUPTIBLE = ("loading", "reset of caches", "round", "evaluation")
# The phases of each fault in `tests/stack`: one or two of each kind; each phase is there.
PAIRS = {
    "kill": ("connecting", "weight update", "round"),
    "stop": ("loading", "evaluation", "idle"),
    "corrupt": ("loading", "reset of caches", "round"),
    "cut": ("connecting", "weight update", "loading", "evaluation"),
    "lose": ("naming itself", "reset of caches", "round"),
}
TWICE = ("stop", "weight update")
# The replicas of each server, then the server and the replica with the fault. The first replica of
# a server hosts the group of its weights.
PLACES = (((2,), 0, 0), ((1, 1), 1, 0), ((1, 1), 0, 0), ((2,), 0, 1))


class Cell(NamedTuple):
    phase: str
    fault: Fault
    replicas: tuple[int, ...]
    error: str  # a pattern of the error that ends the run; "" if it goes on

    def __str__(self) -> str:
        place = f"{self.fault.server}.{self.fault.replica}"
        return f"{self.fault.action} {self.phase} {len(self.replicas)}: {place}"


def cells(*, in_pairs: bool) -> Iterator[Cell]:
    """Yield the cells of `PAIRS` or all others: each fault at one place or two in turn."""
    places = cycle(PLACES)
    for action in (*SIGNALS, "corrupt", *OF_CONNECTIONS):
        phases = CONNECTION_PHASES if action in OF_CONNECTIONS else REPLICA_PHASES
        for phase, (method, call) in phases.items():
            if action == "corrupt" and phase not in CORRUPTIBLE:
                continue
            error = ""
            if phase == "connecting":  # ms-swift's own phase, which it does not repeat
                cut = action in OF_CONNECTIONS
                error = "Connection aborted" if cut else "timed out|has not answered"
            elif (action, phase) == ("corrupt", "loading"):
                error = "does not hold the trainer's weights"
            is_once = action not in ("kill", "corrupt") and (action, phase) != TWICE
            for place in range(1 if is_once else 2):
                replicas, server, replica = next(places)
                if in_pairs == (phase in PAIRS[action] and place == 0):
                    where = Fault(action, method, call, replica=replica, server=server)
                    yield Cell(phase, where, replicas, error)


def run(replicas: tuple[int, ...], fault: Fault | None, timeout: float = TIMEOUT) -> Outcome:
    """Make the rounds as rank 0 of a trainer; return the outcome."""
    trainer: Any = None
    tokens = []
    args: Any = SimpleNamespace(rollout_timeout=timeout, output_dir="run")
    args.new_special_tokens, args.full_determinism = [], False
    row = RolloutInferRequest(messages=[{"role": "user", "content": "?"}])
    with deployed(replicas, timeout, fault) as (running, urls):
        try:
            ports = [free_port() for _ in urls]
            trainer = VLLMClient(urls, group_ports=ports, connection_timeout=5.0)
            apply(PatchPhase.TRAINER)
            with bounded_rendezvous(vllm_client, timeout):  # ms-swift would wait 300 s
                trainer.init_communicator(device="cpu")
            servers = connect_servers(trainer, args)
            updates = WeightSync(RankGroup(), servers)
            for step, phase in ROUNDS:
                if phase == "train":
                    updates.update(partial(_move, trainer, updates, step))
                metadatas = metadatas_of(step, phase)
                answers = servers.infer([row] * GROUPS, metadatas, RequestConfig(max_tokens=8))
                tokens += [list(c.token_ids) for completions, _ in answers for c in completions]
                if fault and fault.method == "idle" and step == 0:
                    process = running[fault.server].processes[fault.replica]
                    os.kill(process.pid, SIGNALS[fault.action])
            return tokens
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        finally:
            if trainer is not None:
                atexit.unregister(trainer.close_communicator)
                trainer.pynccl_comms = []


def check(cell: Cell) -> None:
    """Check that the run has the tokens of an undisturbed one, or that it ends with a named
    cause. Both are within the bound."""
    waits = cell.fault.action == "stop" or cell.phase == "connecting"
    timeout = OF_ONE_THAT_STOPS if waits else TIMEOUT
    began = time.monotonic()
    outcome = run(cell.replicas, cell.fault, timeout)
    assert time.monotonic() - began < BOUND * timeout
    if not cell.error:
        assert outcome == undisturbed()
    else:
        assert re.search(cell.error, str(outcome))
