"""The real `swift rlhf` or `swift rollout`, with the plugin, up to a point.

- `typed` reads the arguments as its parser does, and looks at nothing else.
- `begin` goes on to template and data. No weights are loaded, and nothing is written. What would
  end the start is told in place of raised, so that one look finds more than one error. Stand-ins
  are few: other ranks (torch's own fake group), servers (a client that does not connect), and hubs
  (what is on this machine, and no more).
- `with_trainer` goes on to where it would train.

`run_child` runs a module that does any of this, and yields what it finds: lines of JSON on its
standard output.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from unittest.mock import create_autospec, patch

from swift_grpo_ext.checks.finding import (
    Finding,
    Findings,
    SettingsError,
    collected,
    error,
    note,
    skipped,
)
from swift_grpo_ext.tools.sources import COMMANDS, Side, Source

if TYPE_CHECKING:
    from argparse import Namespace

    from datasets import Dataset
    from swift.arguments import RLHFArguments, RolloutArguments
    from swift.template import Template

    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

Tell = Callable[[Finding], None]

ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:error|[\w.]*(?:Error|Exception)): .+)", re.MULTILINE)
"""The end of a traceback in Python, also of a rank's, and a mistake of the user's, which has none;
torchrun's own errors have no text."""


# --- in the process that asks ---


def run_child(module: str, job: Mapping[str, object], env: Mapping[str, str]) -> Findings:
    """Run `python -m MODULE JOB_AS_JSON`, and yield its findings as they come."""
    command = [sys.executable, "-m", module, json.dumps(job)]
    with tempfile.NamedTemporaryFile() as log:
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                yield Finding(**json.loads(line))
            status = child.wait()
        finally:
            child.kill()
            child.wait()
        if status:
            yield error("The start", f"ended with {status}: {last_error(Path(log.name))}")


def last_error(log: Path) -> str:
    """Return the last exception that a log names, or its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [match[1].strip() for match in ERROR.finditer(text)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return errors[-1] if errors else " | ".join(lines[-3:])


# --- in the child ---


@contextmanager
def told() -> Iterator[Tell]:
    """Give what writes findings to standard output; other output goes to the log."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        yield lambda finding: print(json.dumps(asdict(finding)), file=out, flush=True)


def typed(side: Side, argv: Sequence[str]) -> Namespace:
    """Return what the parser makes of a side's arguments; raise `SettingsError` for what it does
    not take."""
    from swift.arguments import RLHFArguments, RolloutArguments

    from swift_grpo_ext.command_line import EXTENDED, Parser, as_typed

    upstream = RLHFArguments if side == "training" else RolloutArguments
    parser = Parser([EXTENDED[upstream]], allow_abbrev=False)
    values, unknown = parser.parse_known_args(as_typed([*argv]))
    values, unknown = Parser([upstream]).parse_known_args(unknown, values)  # takes abbreviations
    if unknown:
        text = f"{' '.join(unknown)}: left over; a setting of {COMMANDS[side]} is --name"
        raise SettingsError(text)
    return values


class Begun(NamedTuple):
    """A start, as far as it came."""

    args: RLHFArguments | RolloutArguments
    template: Template
    datasets: Sequence[Dataset | None] = ()
    """Of a training: the rows to train on and to evaluate with; none where a hub has them."""


class NotHereError(Exception):
    """A hub has what this machine has not."""


def begin(
    source: Source, tell: Tell, *, ranks: int | None = None, servers: Source | None = None
) -> Begun | None:
    """Start a side up to its template and data, and tell each finding; return None where it ended
    before.

    Args:
        ranks: training processes over all nodes; None: NPROC_PER_NODE x NNODES, else 1.
        servers: those of a training, where they are known.
    """
    found: list[Finding] = []

    def heard(finding: Finding) -> None:
        found.append(finding)
        tell(finding)

    for name, value in source.env.items():  # which gives way to the shell, as in ms-swift
        os.environ.setdefault(name, value)
    try:
        with collected(heard), ExitStack() as stack:
            stack.enter_context(patch.object(ArgumentParser, "error", _refuse))
            _use_local_hubs(stack)
            if source.side == "rollout":
                return _begin_rollout(source.argv)
            _take_ranks(ranks)
            _leave_servers(stack, servers)
            return _begin_training(stack, source.argv, heard)
    except NotHereError as e:
        text = (
            "is not on this machine, nor what follows from it: template and rows. Without weights:"
        )
        name = str(e).partition(" ")[2]
        heard(skipped(str(e), text, f"modelscope download {name} --exclude '*.safetensors'"))
    except Exception as e:  # ms-swift's own refusals, and those of a user's plugin
        name, _, text = str(e).removeprefix("--").partition(": ")
        command = f"`{COMMANDS[source.side]}`"
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:600]
        if isinstance(e, SettingsError):
            heard(error(name, text) if text else error(command, str(e)))
        elif any(finding.level == "error" for finding in found):
            heard(note(command, f"ended here, perhaps for what stands above ({reason})."))
        else:
            heard(error(command, f"ends with {reason}"))
    return None


def _refuse(_: ArgumentParser, message: str) -> NoReturn:
    """Stand for argparse's way to end: it prints five hundred flags, and why."""
    raise SettingsError(f"Settings: {message}")


def _begin_rollout(argv: Sequence[str]) -> Begun:
    # Our plugin knows a server by this module.
    from swift.pipelines.infer.rollout import SwiftRolloutDeploy

    pipeline = SimpleNamespace(args_class=SwiftRolloutDeploy.args_class)
    args = SwiftRolloutDeploy._parse_args(pipeline, [*argv])
    return Begun(args, args.get_template())


def _begin_training(stack: ExitStack, argv: Sequence[str], tell: Tell) -> Begun:
    from swift.arguments.sft_args import SftArguments
    from swift.cli.utils import try_use_single_device_mode
    from swift.pipelines.train.rlhf import SwiftRLHF

    from swift_grpo_ext.command_line import RLHFExtArguments

    add_version, check = SftArguments._add_version, RLHFExtArguments._check_grpo

    def make_no_folder(self: SftArguments) -> None:
        with patch("os.makedirs"):
            add_version(self)

    def check_what_is_here(self: RLHFExtArguments) -> None:
        try:
            check(self)
        except NotHereError as e:  # a data set: the template is still there
            tell(skipped(str(e), "is on a hub, and its rows are not on this machine."))

    stack.enter_context(patch.object(SftArguments, "_add_version", make_no_folder))
    stack.enter_context(patch.object(RLHFExtArguments, "_check_grpo", check_what_is_here))

    class Start(SwiftRLHF):
        def _prepare_model_tokenizer(self) -> None:  # without the weights
            self.model, self.processor = self.args.get_model_processor(load_model=False)

        def run(self) -> Sequence[Dataset | None]:  # and without a file of rows split off
            with suppress(NotHereError):
                return self._get_dataset()
            return ()

    try_use_single_device_mode()
    start = Start([*argv])
    return Begun(start.args, start.template, start.run())


def _use_local_hubs(stack: ExitStack) -> None:
    """Have hubs give what this machine has."""
    import huggingface_hub
    import modelscope
    from swift.hub.hub import HFHub, MSHub

    from swift_grpo_ext.upstream.patches import wrapped

    def download_model(model_id_or_path: str, *_: object, **__: object) -> str:
        for hub in (modelscope, huggingface_hub):
            with suppress(Exception):  # each has a type of its own for what is in no cache
                return str(hub.snapshot_download(model_id_or_path, local_files_only=True))
        raise NotHereError(f"model {model_id_or_path}")

    def load_dataset(load: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if not Path(name).exists():
            raise NotHereError(f"dataset {name}")
        return load(name, *args, **kwargs)  # a folder

    for hub_class in (HFHub, MSHub):
        stack.enter_context(patch.object(hub_class, "download_model", download_model))
        stack.enter_context(wrapped(hub_class, "load_dataset", load_dataset))


def _take_ranks(ranks: int | None) -> None:
    """Be the first of `ranks` ranks; the others are torch's fake group."""
    per_node, nodes = (int(os.environ.get(name, 1)) for name in ("NPROC_PER_NODE", "NNODES"))
    size = ranks or per_node * nodes
    if size == 1:
        return
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Where nothing is known of the nodes, a rank has the devices that a launcher gives it.
    local = size if ranks else per_node
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local))
    # The launcher of several nodes sets these; nothing listens there, or connects.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)


def _leave_servers(stack: ExitStack, servers: Source | None) -> None:
    """Have the client of servers connect to none, and say what is known of them."""
    import swift.rlhf_trainers

    client = swift.rlhf_trainers.VLLMClient
    given = servers.given if servers else {}
    is_apart = given.get("vllm_enable_lora", ["false"])[-1].lower() == "true"
    has_gym = servers is None or bool({"use_gym_env", "gym_env"} & given.keys())

    def get_engine_type(self: Any) -> None:
        self.enable_lora, self.use_gym_env = is_apart, has_gym

    for method in ("check_server", "init_communicator", "close_communicator"):
        # `upstream/pins.py` looks at the parameters of one.
        stand_in = create_autospec(getattr(client, method), return_value=None)
        stack.enter_context(patch.object(client, method, stand_in))
    stack.enter_context(patch.object(client, "get_engine_type", get_engine_type))


# --- up to the trainer ---


def with_trainer(
    given: Sequence[str] | RLHFArguments, use: Callable[[RolloutGRPOTrainer], None]
) -> None:
    """Run `swift rlhf`; `use` is given the trainer instead of training.

    Args:
        given: its arguments, as words or as ms-swift has them.
    """
    from swift.cli.main import parse_yaml_args
    from swift.cli.utils import try_use_single_device_mode

    import swift_grpo_ext

    if isinstance(given, Sequence):
        given = list(given)
        parse_yaml_args(given)
    try_use_single_device_mode()
    swift_grpo_ext.register()
    from swift.pipelines.train.rlhf import SwiftRLHF

    class UpToTraining(SwiftRLHF):
        def train(self, trainer: RolloutGRPOTrainer) -> dict[str, Any]:
            use(trainer)
            return {}

    UpToTraining(given).main()
