"""Real `swift` and `python` command lines without their imports: a process that has imported torch,
transformers, vLLM and ms-swift once, and forks for each.

    python -m tests.stack.zygote NAME PID

listens on the abstract Unix socket NAME until process PID ends. A request is one line of JSON,
`{"argv": [...], "env": {...}, "cwd": ...}`, and comes with file descriptors for both outputs. The
answer is a line with the process id, and one with the exit status when it ends.

A forked command line behaves as the real one: session, environment, working directory, output,
signals, exit status, and `multiprocessing`'s spawned processes, which are forked from a process
without plugins. Four things differ: `/proc/PID/environ` and `/proc/PID/cmdline` are the zygote's;
hash seeds are the same in all processes; nothing is read from the environment at import; and with
`NPROC_PER_NODE` this module ends ranks by torchrun's rule. `test_launch.py` starts the real thing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]

PRELOADED = (
    "swift.pipelines.train.rlhf",
    "swift.rlhf_trainers.grpo_trainer",
    "vllm.v1.worker.cpu_worker",
    "transformers.tokenization_mistral_common",
    "deepspeed",
)
"""They bring all that takes longer than 0.05 s to import. `swift.pipelines.infer.rollout` is not
among them: whether it is loaded tells a server from a training."""

SECONDS_TO_END = 30
"""Which torchrun gives the other ranks when one has failed."""


# --- the zygote ---


def serve(name: str, owner: int) -> list[str]:
    """Fork for each request; returns in a forked process, with what it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(64)
        owner_ends = os.pidfd_open(owner)
        given = _preload()
        started: list[int] = []
        while True:
            ready, _, _ = select.select([listener, owner_ends], [], [])
            if owner_ends in ready:
                for pid in started:
                    _end_session(pid)
                os._exit(0)
            client, _ = listener.accept()
            pid = os.fork()
            if pid:
                started.append(pid)
                client.close()
                continue
            listener.close()
            os.close(owner_ends)
            return _become(client, given)


def _preload() -> dict[str, str]:
    """Import; returns what that has put into the environment."""
    before = dict(os.environ)
    for module in PRELOADED:
        with contextlib.suppress(ImportError):  # of another release; it is slower then
            importlib.import_module(module)
    # What a compiler is asked in each process that samples: a minute beside torch's CUDA build.
    importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
    _spawn_by_forking()
    gc.collect()
    gc.freeze()  # pages stay shared
    return {k: v for k, v in os.environ.items() if before.get(k) != v}


def _end_session(leader: int) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


# --- a forked command line: its first process stands where `swift` or torchrun would ---


def _become(client: socket.socket, given: Mapping[str, str]) -> list[str]:
    """Start what is asked for and report its end; returns in the processes that are to run it."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    message, outputs, _, _ = socket.recv_fds(client, 2**20, 2)
    while not message.endswith(b"\n"):
        message += client.recv(2**20)
    request = json.loads(message)
    os.setsid()
    os.environ.clear()
    os.environ.update({**given, **request["env"]})
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, *outputs)):
        os.dup2(source, target)
        os.close(source)
    client.sendall(b"%d\n" % os.getpid())
    if _is_forked_for_spawned(client):
        return []  # its server has ended
    argv: list[str] = request["argv"]
    try:
        if Path(argv[0]).name == "swift":
            argv = _command_of_swift(argv)
        argv, envs = _ranks_of(argv)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return _report(client, 1)
    ranks: dict[int, int] = {}
    for rank, env in enumerate(envs):
        pid = os.fork()
        if not pid:
            client.close()
            os.environ.update(env)
            return argv
        ranks[pid] = rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the others have it too, and end
    return _report(client, _wait(ranks))


def _report(client: socket.socket, status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    client.sendall(b"%d\n" % status)
    os._exit(0)


def _is_forked_for_spawned(client: socket.socket) -> bool:
    """Fork `multiprocessing`'s own fork server, before a plugin is imported.

    From then on a process that is spawned is forked from it: with arguments that were pickled, and
    the environment and the main module of who spawns it. True in the fork server, when it ends.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0swift-grpo-ext-spawned-{os.getpid()}")
    listener.listen()
    alive_r, alive_w = os.pipe()
    if not os.fork():
        client.close()
        os.close(alive_w)
        with contextlib.suppress(SystemExit):
            forkserver.main(listener.detach(), alive_r, preload=[])
        return True
    server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), alive_w
    listener.close()
    os.close(alive_r)
    return False


def _spawn_by_forking() -> None:
    """Have `multiprocessing` fork what it would spawn."""
    preparation_data, prepare = spawn.get_preparation_data, spawn.prepare

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**preparation_data(name), "environment": dict(os.environ)}

    def prepare_with_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data["environment"])
        _as_if_new()
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = get_preparation_data, prepare_with_environment
    forkserver.ForkServer.ensure_running = lambda self: resource_tracker.ensure_running()
    context.SpawnProcess._Popen = staticmethod(popen_forkserver.Popen)  # type: ignore[assignment]


def _as_if_new() -> None:
    """What imports read of the environment, and what is not the same in two processes."""
    from swift.utils.logger import _is_local_master

    level = (os.environ.get("LOG_LEVEL") or "INFO").upper()
    for name in ("swift", "modelscope"):
        logging.getLogger(name).setLevel(level if _is_local_master() else logging.ERROR)
    np.random.seed()


def _command_of_swift(argv: Sequence[str]) -> list[str]:
    """What the `swift` command would start; it reads a YAML file, and sets `ENV` of it."""
    from swift.cli import main

    commands: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    sys.argv = list(argv)
    main.subprocess = SimpleNamespace(run=run)  # type: ignore[assignment]
    main.cli_main()
    return commands[0]


def _ranks_of(argv: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """`python -m torch.distributed.run --name value ... FILE ...` -> `python FILE ...`, and what
    torchrun puts into the environment of each rank. Rank 0 opens the store."""
    if "torch.distributed.run" not in argv:
        return argv, [{}]
    first = 3
    while argv[first].startswith("--"):
        first += 2
    num_ranks = os.environ["NPROC_PER_NODE"]
    shared = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    envs = [{**shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(int(num_ranks))]
    return [argv[0], *argv[first:]], envs


def _wait(ranks: dict[int, int]) -> int:
    """The exit status of all; when one of several fails, the others are ended."""
    several, failed, deadline = len(ranks) > 1, 0, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if pid not in ranks:  # none yet, or the fork server
            time.sleep(0.05)
            if time.monotonic() > deadline:
                _signal(ranks, signal.SIGKILL)
            continue
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed, deadline = code, time.monotonic() + SECONDS_TO_END
            if several:
                print(f"zygote: rank {rank} has ended: {code}", file=sys.stderr, flush=True)
                _signal(ranks, signal.SIGTERM)
    return 1 if several and failed else failed % 256


def _signal(pids: Mapping[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _run(argv: Sequence[str]) -> None:
    """`python FILE ...`, `-m MODULE ...` or `-c CODE ...`, in a process that was forked for it."""
    _as_if_new()
    if argv[1] in ("-m", "-c"):
        sys.argv = list(argv[2:])
        sys.path[0] = str(Path.cwd())
        if argv[1] == "-m":
            runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = "-c"
            exec(argv[2], {"__name__": "__main__"})
    else:
        sys.argv = list(argv[1:])
        sys.path[0] = str(Path(argv[1]).parent)
        runpy.run_path(argv[1], run_name="__main__")


# --- asking for it ---


class Forked:
    """A process as `subprocess.Popen` shows one."""

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], outputs: Sequence[int]
    ) -> None:
        self._connection = _connect()
        request = {"argv": list(map(str, argv)), "env": dict(env), "cwd": str(cwd)}
        message = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._connection, [message], outputs)
        self._connection.sendall(message[sent:])
        self._answers = self._connection.makefile("rb")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
        return self.returncode


def _connect() -> socket.socket:
    """To the zygote of this session of pytest, which the first to ask starts for all workers."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"swift-grpo-ext-zygote-{owner}"
    log = Path(tempfile.gettempdir()) / f"{name}.log"
    deadline = time.monotonic() + SECONDS_TO_END
    is_started = False
    with FileLock(f"{log}.lock"):
        while time.monotonic() < deadline:
            client = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(ConnectionRefusedError):
                client.connect("\0" + name)
                return client
            if not is_started:
                with log.open("wb") as file:
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.stack.zygote", name, str(owner)],
                        cwd=ROOT,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                is_started = True
            time.sleep(0.1)
    raise TimeoutError(f"no zygote; see {log}")


if __name__ == "__main__":
    command_line = serve(sys.argv[1], int(sys.argv[2]))
    if command_line:
        _run(command_line)
