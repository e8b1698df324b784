"""Runs `swift rlhf` and `swift rollout` for many command lines: imports once, forks for each.

Reads a JSON list of cases from the file named; writes the list of results beside it. A case is
`{"command": "rlhf" | "rollout", "argv": [...], "env": {...}, "hidden": ["module", ...]}`, a result
`{"status": ..., "output": ..., "args": {...}}`. A case with `ranks` goes as far as its arguments
are parsed: in place of the other ranks there is torch's own fake process group, and servers are not
connected to.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import swift.pipelines
import swift.rlhf_trainers
from swift.cli.main import parse_yaml_args
from swift.rlhf_trainers.vllm_client import VLLMClient
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_grpo_ext.checks import preflight

SECONDS = 60
"""For a case; then it ends with a traceback."""


class UnconnectedClient(VLLMClient):
    """ms-swift's client, which does not look for its servers."""

    def check_server(self, *_: Any, **__: Any) -> None:
        pass

    def close_communicator(self) -> None:
        pass

    def init_communicator(self, device: Any = 0) -> None:
        pass


class Parser:
    """A pipeline as far as its arguments."""

    def __init__(self, pipeline: type[Any]) -> None:
        self.args_class = pipeline.args_class
        self.parse = pipeline._parse_args


def run(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile("r+") as found:
        child = os.fork()
        if child == 0:
            _be(case, output.fileno(), Path(found.name))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        args = json.loads(Path(found.name).read_text(encoding="utf-8") or "{}")
        return {"status": status, "output": output.read(), "args": args}


def _be(case: dict[str, Any], output: int, found: Path) -> None:
    """Become the process of a case; never returns."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        if "ranks" in case:
            args = _parse(case["command"], case["argv"], case["ranks"])
            found.write_text(json.dumps(args, default=str), encoding="utf-8")
        else:
            os.environ.update(case.get("env", {}))
            sys.modules.update(dict.fromkeys(case.get("hidden", ())))  # type: ignore[arg-type]
            sys.argv = ["swift", *case["argv"]]
            getattr(swift.pipelines, f"{case['command']}_main")()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parse(command: str, argv: list[str], ranks: int) -> dict[str, Any]:
    parse_yaml_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if command == "rlhf":
        # Each rank is taken to have a node of its own.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        swift.rlhf_trainers.VLLMClient = UnconnectedClient
        # It is taken to have accelerators: presets of GPU machines let their engines sleep.
        preflight.check_devices = lambda args: iter(())
    sys.argv = ["swift", *argv]
    # A rollout's module tells a server from a training where it is loaded: not before it is needed.
    if command == "rlhf":
        from swift.pipelines.train.rlhf import SwiftRLHF as Pipeline
    else:
        from swift.pipelines.infer.rollout import SwiftRolloutDeploy as Pipeline
    parser: Any = Parser(Pipeline)
    args = parser.parse(parser)
    return {**vars(args), **_batch(args)}


def _batch(args: Any) -> dict[str, Any]:
    training = getattr(args, "training_args", None)
    names = ("generation_batch_size", "steps_per_generation", "world_size")
    return {name: getattr(training, name) for name in names if training is not None}


if __name__ == "__main__":
    cases = Path(sys.argv[1])
    results = [run(case) for case in json.loads(cases.read_text(encoding="utf-8"))]
    cases.with_name("results.json").write_text(json.dumps(results), encoding="utf-8")
