"""Run the real `swift rlhf` or `swift rollout`, with the plugin, up to a point.

- `begin` stops after template and data. It loads no weights, and writes nothing.
- `with_trainer` goes on to the point where training would begin.

`run_child` runs a module that does any of this in a process of its own, and yields its results:
lines of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO
from unittest.mock import create_autospec, patch

import psutil

from swift_grpo_ext.checks.finding import Finding, SettingsError, collected, error, skipped
from swift_grpo_ext.tools.sources import COMMANDS, Source

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.arguments import RLHFArguments, RolloutArguments
    from swift.template import Template

    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

Report = Callable[[Finding], None]

# The last line of a traceback, also of a rank's, and the line of a `SettingsError`. torchrun's own
# errors have no text.
ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:error|[\w.]*(?:Error|Exception)): .+)", re.MULTILINE)

MOST_SECONDS = 1800.0  # of a child: a large model loads for minutes


# --- in the parent ---


class ChildError(RuntimeError):
    """A child has failed; the message has the reason."""


def run_child(
    module: str, job: object, env: Mapping[str, str], log: Path | None = None, ranks: int = 1
) -> Iterator[dict[str, Any]]:
    """Run `python -m MODULE JOB_AS_JSON` (by torchrun for several ranks), with its standard error
    in `log`. Yield its results as they come, and raise `ChildError` after them if it fails."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        with socket.create_server(("", 0)) as any_free:
            port = any_free.getsockname()[1]
        command += ["torch.distributed.run", "--nproc_per_node", str(ranks)]
        command += ["--master_port", str(port), "-m"]
    command += [module, json.dumps(job)]
    with tempfile.TemporaryDirectory() as folder:
        # A file: a process that the child leaves behind would keep a pipe open.
        out, log = Path(folder, "out"), log or Path(folder, "log")
        with out.open("wb") as stdout, log.open("wb") as stderr:
            files: dict[str, Any] = {"stdin": DEVNULL, "stdout": stdout, "stderr": stderr}
            child = psutil.Popen(command, env=dict(env), start_new_session=True, **files)
        deadline, rest = time.monotonic() + MOST_SECONDS, b""
        status: int | None = None
        try:
            with out.open("rb") as reader:
                while status is None and time.monotonic() < deadline:
                    with suppress(psutil.TimeoutExpired):
                        status = child.wait(0.2)
                    *lines, rest = (rest + reader.read()).split(b"\n")
                    yield from (json.loads(line) for line in lines if line.startswith(b"{"))
        finally:
            _kill(child)
        if status is None:
            raise ChildError(f"did not end within {MOST_SECONDS:g} seconds")
        if status:
            raise ChildError(f"ended with {status}: {last_error(log)}")


def findings_of(module: str, job: object, env: Mapping[str, str]) -> Iterator[Finding]:
    """Run a module in a child. Yield its findings, and an error if it fails."""
    try:
        for found in run_child(module, job, env):
            yield Finding(**found)
    except ChildError as e:
        yield error("The start", str(e))


def _kill(child: psutil.Popen) -> None:
    """End a child and its processes."""
    # Ranks and engines have sessions of their own, and are found as children.
    with suppress(psutil.NoSuchProcess):
        for process in [*child.children(recursive=True), child]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    # Processes that lost their parent are in the child's session.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def last_error(log: Path) -> str:
    """Return the last exception that a log names, or its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [match[1].strip() for match in ERROR.finditer(text)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return errors[-1] if errors else " | ".join(lines[-3:])


# --- in the child ---


@contextmanager
def standard_output() -> Iterator[TextIO]:
    """Reserve standard output for the block."""
    # ms-swift, vLLM and their processes write to descriptor 1, which is standard error meanwhile.
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(own, "w", encoding="utf-8", closefd=False) as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


@contextmanager
def result_writer() -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes a result, which is a dataclass, for `run_child`."""
    with standard_output() as out:
        yield lambda found: print(json.dumps(asdict(found)), file=out, flush=True)


class StartResult(NamedTuple):
    """The result of `begin`."""

    args: RLHFArguments | RolloutArguments
    template: Template
    datasets: Sequence[Dataset | None] = ()  # of a training: to train on, and to evaluate with


class NotHereError(Exception):
    """A model, a data set or a device is not on this machine."""


def begin(
    source: Source, report: Report, *, ranks: int | None = None, servers: Source | None = None
) -> StartResult | None:
    """Start a side up to its template and data, and `report` each finding; return None if it ended
    before.

    Args:
        ranks: training processes over all nodes; None means NPROC_PER_NODE x NNODES, else 1.
        servers: the settings of a training's servers, if known.
    """
    for name, value in source.env.items():  # the shell overrides it, as in ms-swift
        os.environ.setdefault(name, value)
    try:
        # Findings are reported and not raised, so that one run finds several errors.
        with collected(report), ExitStack() as stack:
            stack.enter_context(patch.object(ArgumentParser, "error", _refuse))
            _use_local_hubs(stack)
            if source.side == "rollout":
                return _begin_rollout(source.argv)
            _fake_other_ranks(ranks)
            _fake_servers(stack, servers)
            return _begin_training(stack, source.argv, report)
    except NotHereError as e:
        remedy = f"modelscope download {str(e).partition(' ')[2]} --exclude '*.safetensors'"
        text = "is not on this machine, so template and rows were not looked at. Without weights:"
        report(skipped(str(e), text, remedy))
    except Exception as e:  # ms-swift's own refusals, and those of a user's plugin
        name, _, text = str(e).removeprefix("--").partition(": ")
        command = f"`{COMMANDS[source.side]}`"
        if isinstance(e, SettingsError):
            report(error(name, text) if text else error(command, str(e)))
        else:
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:600]
            report(error(command, f"ends with {reason}"))
    return None


def _refuse(_: ArgumentParser, message: str) -> NoReturn:
    # argparse would print five hundred flags before the reason.
    raise SettingsError(f"Settings: {message}")


def _begin_rollout(argv: Sequence[str]) -> StartResult:
    # The plugin recognizes a server by this module.
    from swift.pipelines.infer.rollout import SwiftRolloutDeploy

    pipeline = SimpleNamespace(args_class=SwiftRolloutDeploy.args_class)
    args = SwiftRolloutDeploy._parse_args(pipeline, [*argv])
    return StartResult(args, args.get_template())


def _begin_training(stack: ExitStack, argv: Sequence[str], report: Report) -> StartResult:
    from swift.arguments.sft_args import SftArguments
    from swift.pipelines.train.rlhf import SwiftRLHF

    from swift_grpo_ext.command_line import RLHFExtArguments
    from swift_grpo_ext.upstream.patches import wrapped

    def make_no_folder(add_version: Callable[..., None], args: SftArguments) -> None:
        with patch("os.makedirs"):
            add_version(args)

    def check_local_rows(check: Callable[..., None], args: RLHFExtArguments) -> None:
        try:
            check(args)
        except NotHereError as e:  # a data set: the template is still there
            report(skipped(str(e), "is on a hub, and its rows are not on this machine."))

    stack.enter_context(wrapped(SftArguments, "_add_version", make_no_folder))
    stack.enter_context(wrapped(RLHFExtArguments, "_check_grpo", check_local_rows))

    class Start(SwiftRLHF):
        def _prepare_model_tokenizer(self) -> None:  # without the weights
            self.model, self.processor = self.args.get_model_processor(load_model=False)

    start = Start([*argv])
    datasets: Sequence[Dataset | None] = ()
    with suppress(NotHereError):
        datasets = start._get_dataset()
    return StartResult(start.args, start.template, datasets)


def _use_local_hubs(stack: ExitStack) -> None:
    """Let hubs give only the files that are on this machine."""
    import huggingface_hub
    import modelscope
    from swift.hub.hub import HFHub, MSHub

    from swift_grpo_ext.upstream.patches import wrapped

    def download_model(model_id_or_path: str, *_: object, **__: object) -> str:
        for hub in (modelscope, huggingface_hub):
            with suppress(Exception):  # each has its own error for a model that is in no cache
                return str(hub.snapshot_download(model_id_or_path, local_files_only=True))
        raise NotHereError(f"model {model_id_or_path}")

    def load_dataset(load: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if not Path(name).exists():
            raise NotHereError(f"dataset {name}")
        return load(name, *args, **kwargs)  # a folder

    for hub_class in (HFHub, MSHub):
        stack.enter_context(patch.object(hub_class, "download_model", download_model))
        stack.enter_context(wrapped(hub_class, "load_dataset", load_dataset))


def _fake_other_ranks(ranks: int | None) -> None:
    """Let this process be rank 0 of `ranks`; torch's fake group replaces the others."""
    per_node, nodes = (int(os.environ.get(name, 1)) for name in ("NPROC_PER_NODE", "NNODES"))
    size = ranks or per_node * nodes
    if size == 1:
        return
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # With --ranks the nodes are not known: all ranks count as local ones.
    local = size if ranks else per_node
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local))
    # The launcher of several nodes sets these; nothing listens there, or connects.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)


def _fake_servers(stack: ExitStack, servers: Source | None) -> None:
    """Let the client of servers connect to none; `servers` gives their settings."""
    import swift.rlhf_trainers

    client = swift.rlhf_trainers.VLLMClient
    given = servers.given if servers else {}
    is_apart = given.get("vllm_enable_lora", ["false"])[-1].lower() == "true"
    has_gym = servers is None or bool({"use_gym_env", "gym_env"} & given.keys())

    def get_engine_type(self: Any) -> None:
        self.enable_lora, self.use_gym_env = is_apart, has_gym

    # `upstream/pins.py` compares the parameters of `init_communicator`, also of the stand-in.
    names = ("check_server", "init_communicator", "close_communicator")
    stand_ins = {n: create_autospec(getattr(client, n), return_value=None) for n in names}
    stack.enter_context(patch.multiple(client, get_engine_type=get_engine_type, **stand_ins))


def with_trainer(
    args: list[str] | RLHFArguments, use: Callable[[RolloutGRPOTrainer], None]
) -> None:
    """Run `swift rlhf` with its arguments, as words or parsed, and call `use` with the trainer in
    place of training."""
    from swift.cli.utils import try_use_single_device_mode

    import swift_grpo_ext

    try_use_single_device_mode()
    swift_grpo_ext.register()
    from swift.pipelines.train.rlhf import SwiftRLHF

    class UpToTraining(SwiftRLHF):
        def train(self, trainer: RolloutGRPOTrainer) -> dict[str, Any]:
            use(trainer)
            return {}

    UpToTraining(args).main()
