"""Arguments for tests, parsed by ms-swift from real command lines."""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from swift_grpo_ext.config import RolloutGKDConfig, RolloutGRPOConfig

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
    """Parse once for all of pytest's workers, in another process: ms-swift sets environment
    variables and makes a process group."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    found = f"{tempfile.gettempdir()}/swift-grpo-ext-arguments-{run}"
    file = Path(f"{found}-{command}")
    with FileLock(f"{found}.lock"):
        if not file.is_file():
            _parse_elsewhere(found)
    return pickle.loads(file.read_bytes())


def _parse_elsewhere(found: str) -> None:
    """Start this module: a fork of pytest would wait for ever for threads that it lacks."""
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in own}
    # Any free port: another run of the tests may parse at the same time.
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "MASTER_PORT": "0"}
    argv = [sys.executable, "-m", "tests.rig.arguments", found]
    finished = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def _parse_all(found: str) -> None:
    """Parse each command in a child of this process: most of the time goes into imports."""
    from swift.pipelines.infer.rollout import SwiftRolloutDeploy
    from swift.pipelines.train.rlhf import SwiftRLHF

    for command in (*TYPES, "rollout"):
        if os.fork() == 0:
            pipeline = SwiftRLHF if command in TYPES else SwiftRolloutDeploy
            _parse(pipeline, command, Path(f"{found}-{command}"))
            os._exit(0)
        os.wait()


def _parse(pipeline: Any, command: str, found: Path) -> None:
    """Parse in this process, and write the result to a file."""

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


if __name__ == "__main__":
    _parse_all(sys.argv[1])
