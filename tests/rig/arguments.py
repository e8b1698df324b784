"""Arguments for tests, parsed by ms-swift from real command lines."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.pipelines.train.rlhf import SwiftRLHF

from swift_grpo_ext.config import RolloutGKDConfig, RolloutGRPOConfig
from swift_grpo_ext.upstream.accelerator import has_accelerator

ROOT = Path(__file__).resolve().parents[2]
BOTH = ["--external_plugins", str(ROOT / "plugins/grpo_ext.py"), "--template", "qwen2_5_vl"]
TRAINING = [
    *("--check_model", "false"),
    *("--report_to", "none", "--use_vllm", "true", "--vllm_mode", "colocate"),
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"),
    *("--steps_per_generation", "2"),
]
TYPES = {
    "rlhf": ["--rlhf_type", "grpo", "--reward_funcs", "format", "--num_generations", "2"],
    "distill": ["--rlhf_type", "gkd"],
}


def training_arguments(**changes: Any) -> RolloutGRPOConfig:
    """Return the arguments of ms-swift's trainer for `TRAINING`, with other values by name. A name
    that the real object lacks is an error: a fake with `max_length` once hid that."""
    args: RolloutGRPOConfig = _changed(_parsed("rlhf").training_args, changes)
    return args


def distillation_arguments(**changes: Any) -> RolloutGKDConfig:
    """Return the trainer's arguments of `--rlhf_type gkd`; `changes` as above."""
    args: RolloutGKDConfig = _changed(_parsed("distill").training_args, changes)
    return args


def command_line_arguments(command: str, **changes: Any) -> Any:
    """Return all arguments of a `swift rlhf` or `swift rollout`; `changes` as above."""
    return _changed(_parsed(command), changes)


def _changed(args: Any, changes: dict[str, Any]) -> Any:
    args = copy.copy(args)
    for name, value in changes.items():
        if not hasattr(args, name):
            raise AttributeError(f"ms-swift's {type(args).__name__} has no `{name}`")
        setattr(args, name, value)
    return args


@cache
def _parsed(command: str) -> Any:
    """Parse once for all of pytest's workers. A child of this process does it, since ms-swift sets
    environment variables and makes a process group; imports of its own would take it a minute."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    file = Path(f"{tempfile.gettempdir()}/swift-grpo-ext-arguments-{run}-{command}")
    if not file.is_file():
        if (child := os.fork()) == 0:
            gc.freeze()  # freed in the child, a database of the parent would join absent threads
            try:
                _parse(command, file)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)
        assert file.is_file(), f"arguments of {command} were not parsed: see the output"
    return pickle.loads(file.read_bytes())


def _parse(command: str, found: Path) -> None:
    """Parse in this process, and write the result to a file."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    # Any free port: another run of the tests may parse at the same time.
    os.environ.update(CUDA_VISIBLE_DEVICES="", MASTER_PORT="0")
    has_accelerator.cache_clear()
    pipeline = SwiftRLHF if command in TYPES else SwiftRolloutDeploy

    class Parser:
        args_class = pipeline.args_class
        parse = pipeline._parse_args

    assets = Path(os.environ.get("ASSETS", ROOT / ".assets")).resolve()
    argv = [*BOTH, "--model", str(assets / "tiny_vlm")]
    with tempfile.TemporaryDirectory() as folder:
        if command in TYPES:
            data = Path(folder) / "rows.jsonl"
            rows = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()
            data.write_text("\n".join(rows[:16]), encoding="utf-8")
            places = ["--dataset", str(data), "--output_dir", f"{folder}/output"]
            argv += [*TYPES[command], *TRAINING, *places]
        parsed = pickle.dumps(Parser().parse(argv))
    unfinished = found.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(parsed)
    unfinished.rename(found)
