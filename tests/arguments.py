"""Training arguments for tests: what ms-swift makes of a real command line, not a stand-in."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from swift_grpo_ext.training import RolloutGRPOConfig

ROOT = Path(__file__).resolve().parents[1]
COMMAND_LINE = [
    *("--rlhf_type", "grpo", "--external_plugins", str(ROOT / "plugins/grpo_ext.py")),
    *("--template", "qwen2_5_vl", "--check_model", "false", "--reward_funcs", "format"),
    *("--use_vllm", "true", "--vllm_mode", "colocate", "--num_generations", "2"),
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"),
    *("--steps_per_generation", "2", "--report_to", "none"),
]


def training_arguments(**changes: Any) -> RolloutGRPOConfig:
    """Return the arguments that ms-swift hands its trainer for `COMMAND_LINE`.

    Args:
        changes: further values, by name. A name that the real object lacks is an error: a fake
            that had `max_length` hid that training arguments have none.
    """
    args = copy.copy(_parsed())
    for name, value in changes.items():
        if not hasattr(args, name):
            raise AttributeError(f"ms-swift's training arguments have no `{name}`")
        setattr(args, name, value)
    return args


@cache
def _parsed() -> RolloutGRPOConfig:
    """Parse in a process of its own: ms-swift sets environment variables and a process group."""
    assets = Path(os.environ.get("ASSETS", ROOT / ".assets")).resolve()
    with tempfile.TemporaryDirectory() as folder:
        data, found = Path(folder) / "rows.jsonl", Path(folder) / "arguments"
        rows = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()
        data.write_text("\n".join(rows[:16]), encoding="utf-8")
        flags = ["--model", str(assets / "tiny_vlm"), "--dataset", str(data)]
        flags += ["--output_dir", str(Path(folder) / "output")]
        child = os.fork()
        if child == 0:
            _parse([*COMMAND_LINE, *flags], found)
        os.waitpid(child, 0)
        assert found.is_file(), "the command line of tests/arguments.py was refused (above)"
        args = pickle.loads(found.read_bytes())
    assert isinstance(args, RolloutGRPOConfig)
    return args


def _parse(argv: list[str], found: Path) -> None:
    """Be the process that parses; never returns."""
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            os.environ.pop(name, None)
        from swift.pipelines.train.rlhf import SwiftRLHF

        class Pipeline:
            args_class = SwiftRLHF.args_class
            parse: Any = SwiftRLHF._parse_args

        found.write_bytes(pickle.dumps(Pipeline().parse(argv).training_args))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)
