"""Sharded weights, sharded teachers, positions that ranks share, and resumed sharded runs have the
numbers of plain data parallelism, within float error (R2), with logits in chunks of 16 positions
(L4)."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.distillation import LEARNS, distill, prepared, teacher
from tests.rig.fixtures import once
from tests.rig.policy import SAME
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    BATCH,
    LORA,
    PRESET,
    client_argv,
    digits,
    logged_steps,
    recorded,
    run_training,
    server_argv,
    token_ids,
    without_vllm,
    write_lines,
)

PLUGIN = "tests/rig/sharded_on_cpu.py"
STEPS = 3
RANKS = 2
CLOSE = {"rel": 5e-5, "abs": 2e-5}
"""Tolerances: sums have another order, and training steps amplify the difference."""

LEFT = ("--lora_dropout", "0", "--padding_side", "left")
TUNINGS: dict[str, tuple[str, ...]] = {
    "full": ("--padding_side", "right"),
    # The tower is frozen, as by default in ms-swift, so each image of a call is encoded once.
    "lora": (*LORA, "--gradient_checkpointing", "true", "--freeze_vit", "true", *LEFT),
}
DEEPSPEED = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
ON_CPU = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "false"}
GENERATES_SHARDED = ("--ds3_gather_for_generation", "false")
"""ZeRO-3 without vLLM needs it. Otherwise TRL 0.29 registers DeepSpeed's hooks again after each
rollout, with other numbers, and DeepSpeed 0.18 looks up the old ones ("pop from an empty
deque")."""

STRICT = ("--logits_shim", "strict")
COLOCATED = ("--vllm_mode", "colocate", "--temperature", "1.0")
"""At a higher temperature no completion would end before its length limit."""


def sharding(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment of a training with these shards."""
    if name == "plain":
        return [], {}
    if name == "fsdp2":
        return ["--fsdp", "fsdp2", "--use_cpu", "false"], ON_CPU
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: bash scripts/setup.sh")
    # 0: small weights are sharded too, as large ones are.
    zero = {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config = folder / "deepspeed.json"
    config.write_text(json.dumps({**DEEPSPEED, "zero_optimization": zero}), encoding="utf-8")
    env = {**ON_CPU, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    return ["--deepspeed", str(config), "--use_cpu", "false"], env


def unequal_rows(assets: Path, folder: Path) -> Path:
    """Write rows; every other prompt is longer by half."""
    rows = digits(assets, range(2 * STEPS))
    for row in rows[::2]:
        row["messages"][0]["content"] += " Look closely, and take your time." * 4
    return write_lines(folder / "rows.jsonl", rows)


@dataclass
class Trained:
    """The tokens of each sample, by name, and the log of each step."""

    tokens: dict[str, list[int]]
    steps: list[dict[str, Any]]


def read(folder: Path) -> Trained:
    return Trained(token_ids(recorded(folder)), logged_steps(folder / "run"))


def training(assets: Path, folder: Path, *argv: str, shards: str = "plain") -> Trained:
    folder.mkdir(parents=True, exist_ok=True)
    sharded, env = sharding(shards, folder)
    finished = run_training(
        *(assets, unequal_rows(assets, folder), folder),
        # Not AdamW, whose first step is the sign of each gradient.
        *("--optim", "sgd", "--learning_rate", "0.5", "--beta", "0.5"),
        *("--per_device_train_batch_size", "4", "--lr_scheduler_type", "constant"),
        *(*sharded, *argv),
        ranks=RANKS,
        steps=STEPS,
        plugins=[PLUGIN],
        env=env,
        preset=PRESET if "--vllm_mode" in argv else without_vllm(folder),
    )
    assert finished.returncode == 0, finished.cause
    return read(folder)


def assert_same(found: Trained, expected: Trained) -> None:
    """Assert that all tokens are equal, and numbers within float error."""
    assert found.tokens == expected.tokens
    for name in ("loss", "grad_norm", "kl"):
        numbers = [[step[name] for step in one.steps] for one in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], **CLOSE)
    for step in found.steps:
        assert step.get("rollout_gap/max", 0) < SAME


CUT = ("--max_length", "45", "--truncation_strategy", "left", "--move_model_batches", "2")
"""A rank with cut rows alone has none to compare. The other one may not wait for it. Updates reach
vLLM in parts of the weights."""

SHARDINGS = ("zero1", "zero2", "zero3", "fsdp2")
CELLS = [
    # Without vLLM ms-swift generates in inference mode, which FSDP2's gathered weights refuse.
    *itertools.product(("plain", *SHARDINGS[:-1]), TUNINGS, ["none"]),
    *((shards, "full", "colocate") for shards in SHARDINGS),
    *((shards, "lora", "server") for shards in SHARDINGS),
]
"""Shards, trained weights, and the place of vLLM."""


@pytest.mark.parametrize(("shards", "tuning", "vllm"), CELLS)
def test_numbers_are_those_of_plain_ranks(
    shards: str,
    tuning: str,
    vllm: str,
    assets: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The plain training has no logits shim. Ranks have completions of unequal length."""
    places = {"none": (), "server": COLOCATED, "colocate": (*COLOCATED, *CUT)}
    own = (*TUNINGS[tuning], *places[vllm])

    def make(folder: Path) -> None:
        training(assets, folder, *own, "--logits_shim", "off")

    plain = read(once(tmp_path_factory, f"plain-{tuning}-{vllm}", make))
    for step in plain.steps:
        assert step["completions/min_length"] < step["completions/max_length"]
    assert all(abs(step["loss"]) > 1e-3 for step in plain.steps[1:]), "0 by construction"
    argv = (*own, *STRICT)
    with ExitStack() as servers:
        if vllm == "server":
            server = rollout_server(*server_argv(assets), log=tmp_path / "server.log")
            argv += tuple(client_argv(servers.enter_context(server)))
        elif (shards, vllm) == ("zero3", "none"):
            argv += GENERATES_SHARDED
        sharded = training(assets, tmp_path / "run", *argv, shards=shards)
    assert vllm == "none" or all("rollout_gap/max" in step for step in sharded.steps)
    assert_same(sharded, plain)


def test_distillation(
    assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Student and teacher have shards."""
    places = prepared(assets, tmp_path_factory)
    argv = ("--use_vllm", "false", "--top_k", "1", *LEARNS, *teacher(places))
    results = []
    for shards in ("plain", "zero3"):
        sharded, env = sharding(shards, tmp_path)
        if sharded:
            sharded += ("--teacher_deepspeed", sharded[1], *GENERATES_SHARDED)
        finished = distill(
            *(assets, places / "rows.jsonl", tmp_path / shards, *argv, *sharded),
            ranks=2,
            env=env,
            plugins=("plugins/grpo_ext.py", PLUGIN),
        )
        assert finished.returncode == 0, finished.cause
        steps = logged_steps(tmp_path / shards / "run")
        results.append([(step["loss"], step["grad_norm"]) for step in steps])
    for expected, found in zip(*results, strict=True):
        assert found == pytest.approx(expected, rel=5e-5)


@pytest.mark.parametrize(("shards", "tuning"), [("zero2", "lora"), ("fsdp2", "full")])
def test_resumed(shards: str, tuning: str, assets: Path, tmp_path: Path) -> None:
    """A run that is resumed before its last step has the same last step."""
    saves = ("--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2")
    argv = (*TUNINGS[tuning], *STRICT, *COLOCATED)
    whole = training(assets, tmp_path / "a", *argv, *saves, shards=shards)
    argv += ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-2"))
    resumed = training(assets, tmp_path / "b", *argv, shards=shards)
    last = {n: ids for n, ids in whole.tokens.items() if SampleId.parse(n).step == STEPS - 1}
    assert_same(resumed, Trained(last, whole.steps[-1:]))


@pytest.mark.parametrize("length", ["11", "12"])
def test_positions_that_two_ranks_share(length: str, assets: Path, tmp_path: Path) -> None:
    """The model has positions in three dimensions. Rows of odd length are padded."""
    rows, steps = unequal_rows(assets, tmp_path), []
    for name, argv in (("plain", ()), ("run", ("--sequence_parallel_size", "2"))):
        argv = ("--max_completion_length", length, *argv)
        run = tmp_path / name
        finished = run_training(assets, rows, run, *argv, ranks=RANKS, steps=2)
        assert finished.returncode == 0, finished.cause
        steps.append(logged_steps(run / "run"))
    for plain, shared in zip(*steps, strict=True):
        assert max(plain["rollout_gap/max"], shared["rollout_gap/max"]) < SAME
        assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], **CLOSE)
    gaps = read_rewards(tmp_path / "run/run")["gap_max"].to_pylist()
    assert len(gaps) == 2 * BATCH
    assert max(gaps) < SAME
