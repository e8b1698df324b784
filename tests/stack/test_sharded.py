"""Log-probabilities in chunks, and sharded weights, against plain data parallelism.

Each training has two ranks on CPU. Within float error it has the tokens, losses, log-probabilities
and gradient norms of a plain run without the logits shim (R2, L4). The ranks' completions differ in
length, and chunks have 16 positions (`sharded_recorder.py`). The loss has a KL term with a
reference model. `scripts/setup.sh` installs DeepSpeed.
"""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import read_rewards
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
    read_records,
    run_training,
    server_argv,
    without_vllm,
    write_lines,
)

STEPS = 3
RANKS = 2
WHOLE = ("plain", "zero1", "zero2")
"""Kinds with all weights on each rank."""

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
"""For ZeRO-3 without vLLM. Otherwise TRL 0.29 registers DeepSpeed's hooks again after each rollout,
with other numbers, and DeepSpeed 0.18 looks up the old ones ("pop from an empty deque")."""


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


Training = tuple[list[list[dict[str, Any]]], list[dict[str, float]]]
"""The results of each rank's passes, in order (`sharded_recorder.py`), and the log of each step."""


@pytest.fixture(scope="session")
def unequal_rows(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every other prompt is longer by half."""
    rows = digits(assets, range(2 * STEPS))
    for row in rows[::2]:
        row["messages"][0]["content"] += " Look closely, and take your time." * 4
    return write_lines(tmp_path_factory.mktemp("unequal") / "rows.jsonl", rows)


def training(assets: Path, rows: Path, folder: Path, *argv: str, shards: str = "plain") -> Training:
    folder.mkdir(parents=True, exist_ok=True)
    sharded, env = sharding(shards, folder)
    finished = run_training(
        *(assets, rows, folder, "--per_device_train_batch_size", "4"),
        # Not AdamW, whose first step is the sign of each gradient.
        *("--optim", "sgd", "--learning_rate", "0.5", "--beta", "0.5"),
        *("--lr_scheduler_type", "constant", *sharded, *argv),
        ranks=RANKS,
        steps=STEPS,
        plugins=["tests/rig/sharded_recorder.py"],
        env=env,
        preset=PRESET if "--vllm_mode" in argv else without_vllm(folder),
    )
    assert finished.returncode == 0, finished.cause
    return read(folder)


def read(folder: Path) -> Training:
    """Read the results of a training."""
    passes = [read_records(folder / "record", f"passes{rank}") for rank in range(RANKS)]
    return passes, logged_steps(folder / "run")


def assert_same(found: Training, expected: Training, *, whole: bool) -> None:
    """Assert that all tokens are equal, and numbers within float error.

    Args:
        whole: whether each rank holds all weights, and at most the optimizer's state is sharded.
    """
    for found_of_rank, expected_of_rank in zip(found[0], expected[0], strict=True):
        assert len(found_of_rank) == len(expected_of_rank)
        for f, e in zip(found_of_rank, expected_of_rank, strict=True):
            assert (f["kind"], f["step"]) == (e["kind"], e["step"])
            assert f.get("tokens") == e.get("tokens")
            assert f["value"] == pytest.approx(e["value"], **CLOSE)
            assert f.get("is_sharded", not whole) is not whole
    for name in ("loss", "grad_norm", "kl"):
        assert [s[name] for s in found[1]] == pytest.approx([s[name] for s in expected[1]], **CLOSE)


STRICT = ("--logits_shim", "strict")
COLOCATED = ("--vllm_mode", "colocate")
COOLER = ("--temperature", "1.0")
"""At a higher temperature no completion would end before its length limit."""

SHARDINGS = ("zero1", "zero2", "zero3", "fsdp2")
CORE = (("zero3", "full", "none"), ("fsdp2", "full", "colocate"))
CELLS = [
    # Without vLLM ms-swift generates in inference mode, which FSDP2's gathered weights refuse.
    *itertools.product(("plain", *SHARDINGS[:-1]), TUNINGS, ["none"]),
    *((shards, "full", "colocate") for shards in SHARDINGS),
    *((shards, "lora", "server") for shards in SHARDINGS),
]
"""Shards, trained weights, and the place of vLLM."""


@pytest.mark.parametrize(
    ("shards", "tuning", "vllm"),
    [pytest.param(*cell, marks=() if cell in CORE else pytest.mark.extra) for cell in CELLS],
)
def test_numbers_are_those_of_plain_ranks(
    shards: str,
    tuning: str,
    vllm: str,
    assets: Path,
    unequal_rows: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Updates reach vLLM in parts of the weights, and are verified."""

    def make(folder: Path) -> None:
        own = (*TUNINGS[tuning], *(() if vllm == "none" else (*COLOCATED, *COOLER)))
        training(assets, unequal_rows, folder, *own, "--logits_shim", "off")

    plain = read(once(tmp_path_factory, f"plain-{tuning}-{vllm}", make))
    counts = [[sum(p["counts"]) for p in rank_passes if "counts" in p] for rank_passes in plain[0]]
    assert all(a != b for a, b in zip(*counts, strict=True)), "ranks have as many tokens"
    assert all(abs(step["loss"]) > 1e-3 for step in plain[1][1:]), "losses are 0 by construction"
    argv = (*TUNINGS[tuning], *STRICT)
    with ExitStack() as servers:
        if vllm == "none":
            argv += GENERATES_SHARDED if shards == "zero3" else ()
        elif vllm == "colocate":
            argv += (*COLOCATED, *COOLER, "--move_model_batches", "2")
        else:
            server = rollout_server(*server_argv(assets), log=tmp_path / "server.log")
            argv += (*client_argv(servers.enter_context(server)), *COOLER)
        sharded = training(assets, unequal_rows, tmp_path / "run", *argv, shards=shards)
    if (shards, tuning, vllm) == ("zero3", "lora", "none"):
        # The first pass of each step is the old policy's, which other runs skip.
        steps = [[p for i, p in enumerate(rank_passes) if i % 4] for rank_passes in sharded[0]]
        sharded = steps, sharded[1]
    assert_same(sharded, plain, whole=shards in WHOLE)
    assert vllm == "none" or all(step["rollout_gap/max"] < SAME for step in sharded[1])


@pytest.mark.extra
def test_a_teacher_with_shards_of_its_own(assets: Path, unequal_rows: Path, tmp_path: Path) -> None:
    """The policy is sharded by ZeRO-3, its teacher is not."""
    config = tmp_path / "teacher.json"
    whole = {**DEEPSPEED, "zero_optimization": {"stage": 0}}
    config.write_text(json.dumps(whole), encoding="utf-8")
    teacher = ("--teacher_model", str(assets / "tiny_vlm"), "--teacher_model_type", "qwen2_5_vl")
    argv = (*teacher, "--teacher_kl_coef", "0.5")
    plain = training(assets, unequal_rows, tmp_path / "plain", *argv, "--logits_shim", "off")
    argv += ("--teacher_deepspeed", str(config), *GENERATES_SHARDED, *STRICT)
    sharded = training(assets, unequal_rows, tmp_path / "run", *argv, shards="zero3")
    assert_same(sharded, plain, whole=False)
    kls = [[step["teacher_kl"] for step in steps] for _, steps in (sharded, plain)]
    assert kls[0] == pytest.approx(kls[1], **CLOSE)
    assert abs(kls[1][0]) < 1e-6 < 1e-5 < kls[1][1]


@pytest.mark.extra
@pytest.mark.parametrize(("shards", "tuning"), [("zero2", "lora"), ("fsdp2", "full")])
def test_resumed(
    shards: str, tuning: str, assets: Path, unequal_rows: Path, tmp_path: Path
) -> None:
    """A run that is resumed before its last step has the same last step."""
    saves = ("--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2")
    argv = (*TUNINGS[tuning], *STRICT, *COLOCATED, *COOLER)
    whole, steps = training(assets, unequal_rows, tmp_path / "a", *argv, *saves, shards=shards)
    argv += ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-2"))
    resumed = training(assets, unequal_rows, tmp_path / "b", *argv, shards=shards)
    last = [[p for p in rank_passes if p["step"] == STEPS - 1] for rank_passes in whole]
    assert_same(resumed, (last, steps[-1:]), whole=shards == "zero2")


@pytest.mark.parametrize("shards", ["fsdp2", pytest.param("zero3", marks=pytest.mark.extra)])
def test_rows_that_are_cut_on_one_rank(
    shards: str, assets: Path, unequal_rows: Path, tmp_path: Path
) -> None:
    """No rank waits in a gather of weights for a rank without rows to compare."""
    argv = (*COLOCATED, *COOLER, "--max_length", "45", "--truncation_strategy", "left")
    passes, steps = training(assets, unequal_rows, tmp_path / "run", *argv, shards=shards)
    assert len({len(rank_passes) for rank_passes in passes}) == 1
    assert [step["rollout_gap/max"] < SAME for step in steps] == [True] * STEPS


@pytest.mark.extra
@pytest.mark.parametrize("length", ["11", "12"])
def test_positions_that_two_ranks_share(
    length: str, assets: Path, unequal_rows: Path, tmp_path: Path
) -> None:
    """The model has positions in three dimensions. Rows of odd length are padded."""
    steps = []
    for name, argv in (("plain", ()), ("run", ("--sequence_parallel_size", "2"))):
        argv = (*COLOCATED, "--max_completion_length", length, *argv)
        run = tmp_path / name
        finished = run_training(assets, unequal_rows, run, *argv, ranks=RANKS, steps=2)
        assert finished.returncode == 0, finished.cause
        steps.append(logged_steps(run / "run"))
    for plain, shared in zip(*steps, strict=True):
        assert max(plain["rollout_gap/max"], shared["rollout_gap/max"]) < SAME
        assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], **CLOSE)
    gaps = read_rewards(tmp_path / "run/run")["gap_max"].to_pylist()
    assert len(gaps) == 2 * BATCH
    assert max(gaps) < SAME
