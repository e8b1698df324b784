"""Sharded weights, sharded teachers, positions that ranks share, and resumed sharded runs have the
numbers of plain data parallelism, within float error (R2), with logits in chunks of 16 positions
(L4)."""

import itertools
import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_rewards
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

COLOCATED = ("--vllm_mode", "colocate", "--temperature", "1.0")
"""At a higher temperature no completion would end before its length limit."""

CUT = ("--max_length", "45", "--truncation_strategy", "left", "--move_model_batches", "2")
"""A rank with cut rows alone has none to compare. The other one may not wait for it. Updates reach
vLLM in parts of the weights."""

FULL = ("--padding_side", "right")
# The tower is frozen, as by default in ms-swift, so each image of a call is encoded once.
ADAPTED = (
    *(*LORA, "--lora_dropout", "0", "--gradient_checkpointing", "true", "--freeze_vit", "true"),
    *("--padding_side", "left"),
)
KINDS = {
    "full": FULL,
    "LoRA": ADAPTED,
    "full, colocated": (*FULL, *COLOCATED, *CUT),
    "LoRA, served": (*ADAPTED, *COLOCATED),
}
"""Arguments by the trained weights and the place of vLLM, if it generates."""

CELLS = [
    # Without vLLM ms-swift generates in inference mode, which FSDP2's gathered weights refuse.
    *itertools.product(("full", "LoRA"), ("plain", "zero1", "zero3")),
    # ZeRO-1 and ZeRO-2 give vLLM the same weights.
    *itertools.product(("full, colocated", "LoRA, served"), ("zero2", "zero3", "fsdp2")),
]
RESUMED = (("full, colocated", "fsdp2"), ("LoRA, served", "zero2"))
"""Cells that are also resumed before their last step."""

SAVES = ("--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2")

ON_CPU = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "false"}
GENERATES_SHARDED = ("--ds3_gather_for_generation", "false")
"""ZeRO-3 without vLLM needs it. Otherwise TRL 0.29 registers DeepSpeed's hooks again after each
rollout, with other numbers, and DeepSpeed 0.18 looks up the old ones ("pop from an empty
deque")."""


def sharding(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment of a training with these shards."""
    if name == "plain":
        return [], {}
    if name == "fsdp2":
        return ["--fsdp", "fsdp2", "--use_cpu", "false"], ON_CPU
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: bash scripts/setup.sh")
    settings = {
        **{"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True},
        **{"gradient_clipping": "auto", "gradient_accumulation_steps": "auto"},
        **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
    }
    # 0: small weights are sharded too, as large ones are.
    zero = {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config = folder / "deepspeed.json"
    config.write_text(json.dumps({**settings, "zero_optimization": zero}), encoding="utf-8")
    env = {**ON_CPU, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    return ["--deepspeed", str(config), "--use_cpu", "false"], env


def unequal_rows(assets: Path, folder: Path) -> Path:
    """Write rows; every other prompt is longer by half."""
    rows = digits(assets, range(2 * STEPS))
    for row in rows[::2]:
        row["messages"][0]["content"] += " Look closely, and take your time." * 4
    return write_lines(folder / "rows.jsonl", rows)


def training(assets: Path, folder: Path, *argv: str, shards: str = "plain") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sharded, env = sharding(shards, folder)
    run_training(
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
    ).check()
    return folder


def assert_same(found: Path, expected: Path, since: int = 0) -> None:
    """Assert that all tokens are equal from this step on, and numbers within float error."""
    samples = {name: s for name, s in recorded(expected).items() if s["step"] >= since}
    assert token_ids(recorded(found)) == token_ids(samples)
    of_found, of_expected = (logged_steps(folder / "run") for folder in (found, expected))
    for name in ("loss", "grad_norm", "kl"):
        numbers = [step[name] for step in of_expected[since:]]
        assert [step[name] for step in of_found] == pytest.approx(numbers, **CLOSE)
    for step in of_found:
        assert step.get("rollout_gap/max", 0) < SAME


@pytest.mark.parametrize(("kind", "shards"), CELLS)
def test_numbers_are_those_of_plain_ranks(
    kind: str, shards: str, assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The plain training has no logits shim. Ranks have completions of unequal length. A run that
    is resumed before its last step has the same last step."""

    def make(folder: Path) -> None:
        training(assets, folder, *KINDS[kind], "--logits_shim", "off")

    plain = once(tmp_path_factory, f"plain, {kind}", make)
    steps = logged_steps(plain / "run")
    for step in steps:
        assert step["completions/min_length"] < step["completions/max_length"]
    assert all(abs(step["loss"]) > 1e-3 for step in steps[1:]), "0 by construction"
    argv = [*KINDS[kind], "--logits_shim", "strict"]
    with ExitStack() as servers:
        if kind == "LoRA, served":
            server = rollout_server(*server_argv(assets), log=tmp_path / "server.log")
            argv += client_argv(servers.enter_context(server))
        elif shards == "zero3" and "colocated" not in kind:
            argv += GENERATES_SHARDED
        saves = SAVES if (kind, shards) in RESUMED else ()
        sharded = training(assets, tmp_path / "run", *argv, *saves, shards=shards)
        assert_same(sharded, plain)
        steps = logged_steps(sharded / "run")
        assert "," not in kind or all("rollout_gap/max" in step for step in steps)
        if saves:
            argv += ["--resume_from_checkpoint", str(sharded / "run/checkpoint-2")]
            resumed = training(assets, tmp_path / "resumed", *argv, shards=shards)
            assert_same(resumed, sharded, since=2)


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
        distill(
            *(assets, places / "rows.jsonl", tmp_path / shards, *argv, *sharded),
            ranks=2,
            env=env,
            plugins=("plugins/grpo_ext.py", PLUGIN),
        ).check()
        steps = logged_steps(tmp_path / shards / "run")
        results.append([(step["loss"], step["grad_norm"]) for step in steps])
    for expected, found in zip(*results, strict=True):
        assert found == pytest.approx(expected, rel=5e-5)


@pytest.mark.parametrize("length", ["11", "12"])
def test_positions_that_two_ranks_share(length: str, assets: Path, tmp_path: Path) -> None:
    """The model has positions in three dimensions. Rows of odd length are padded."""
    rows, steps = unequal_rows(assets, tmp_path), []
    for name, argv in (("plain", ()), ("run", ("--sequence_parallel_size", "2"))):
        argv = ("--max_completion_length", length, *argv)
        run = tmp_path / name
        run_training(assets, rows, run, *argv, ranks=RANKS, steps=2).check()
        steps.append(logged_steps(run / "run"))
    for plain, shared in zip(*steps, strict=True):
        assert max(plain["rollout_gap/max"], shared["rollout_gap/max"]) < SAME
        assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], **CLOSE)
    gaps = read_rewards(tmp_path / "run/run")["gap_max"].to_pylist()
    assert len(gaps) == 2 * BATCH
    assert max(gaps) < SAME
