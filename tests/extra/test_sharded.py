"""Sharded weights, sharded teachers, positions that ranks share, and resumed sharded runs have the
numbers of plain data parallelism, within float error (R2), with logits in chunks of 16 positions
(L4)."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.distillation import LEARNS, distill, prepared, teacher
from tests.rig.policy import SAME
from tests.rig.processes import rollout_server
from tests.rig.rounds import BATCH, client_argv, logged_steps, run_training, server_argv
from tests.rig.sharded import (
    CLOSE,
    COLOCATED,
    GENERATES_SHARDED,
    PLUGIN,
    RANKS,
    STEPS,
    STRICT,
    TUNINGS,
    Trained,
    assert_same,
    plain_training,
    sharding,
    training,
    unequal_rows,
)

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
    """Ranks have completions of unequal length."""
    places = {"none": (), "server": COLOCATED, "colocate": (*COLOCATED, *CUT)}
    own = (*TUNINGS[tuning], *places[vllm])
    plain = plain_training(assets, tmp_path_factory, f"{tuning}-{vllm}", *own)
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
