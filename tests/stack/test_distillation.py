"""`--rlhf_type gkd` in real processes: samples depend on `--seed` alone, losses are ms-swift's."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.rig.distillation import (
    BATCH,
    COLOCATED,
    ON_VLLM,
    distill,
    losses,
    recorded_tokens,
    write_rows,
    write_teacher,
)
from tests.rig.fixtures import once
from tests.rig.processes import PLUGIN, rollout_server
from tests.rig.rounds import LORA, client_argv, logged_steps, server_argv
from tests.stack.test_sharded import GENERATES_SHARDED, sharding

SEED = 42  # ms-swift's default
STEPS = 3
LEARNS = ("--learning_rate", "0.05", "--optim", "sgd", "--max_grad_norm", "1000")


@pytest.fixture(scope="session")
def places(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `teacher` and `rows.jsonl`."""

    def make(folder: Path) -> None:
        folder.mkdir()
        write_teacher(assets, folder / "teacher")
        write_rows(assets, folder / "rows.jsonl")

    return once(tmp_path_factory, "distillation", make)


def teacher(places: Path) -> tuple[str, ...]:
    model = str(places / "teacher")
    return ("--teacher_model", model, "--teacher_model_type", "qwen2_5_vl")


def test_samples_follow_from_the_seed_alone(assets: Path, places: Path, tmp_path: Path) -> None:
    """All 36 samples are equal over 1, 2 and 3 ranks and a server with two replicas; each has its
    own noise."""
    rows = places / "rows.jsonl"
    # Room for four images: vLLM's cache of media turns over in each round (ms-swift issue 7965).
    small = ("--vllm_mm_processor_cache_gb", "0.0003")
    for ranks in (1, 2, 3):
        argv = (*COLOCATED, *small, *teacher(places))
        finished = distill(assets, rows, tmp_path / f"{ranks}", *argv, ranks=ranks)
        assert finished.returncode == 0, finished.cause
    replicas = server_argv(assets, "--vllm_data_parallel_size", "2")
    with rollout_server(*replicas, log=tmp_path / "server.log") as port:
        argv = (*ON_VLLM, *client_argv(port), *teacher(places))
        finished = distill(assets, rows, tmp_path / "served", *argv, ranks=2)
    assert finished.returncode == 0, finished.cause

    expected = recorded_tokens(tmp_path / "1")
    assert len(expected) == BATCH * STEPS
    assert recorded_tokens(tmp_path / "2") == recorded_tokens(tmp_path / "3") == expected
    assert recorded_tokens(tmp_path / "served") == expected
    for name, (seed, _) in expected.items():
        assert seed == sample_seed(SEED, SampleId.parse(name))
    assert len({seed for seed, _ in expected.values()}) == len(expected)
    assert len({tuple(tokens) for _, tokens in expected.values()}) > BATCH
    for run in ("1", "2", "3", "served"):
        for log in logged_steps(tmp_path / run / "run"):
            assert log["rollout_gap/mean"] < 0.001
            assert "time/rollout" in log


def test_losses_are_ms_swifts(assets: Path, places: Path, tmp_path: Path) -> None:
    """A run with rounds of both sources, a local teacher's top tokens and a supervised part has the
    same losses with and without the plugin."""
    mixed = (
        *("--use_vllm", "false", "--top_k", "1", "--lmbda", "0.5", "--gkd_logits_topk", "20"),
        *("--sft_alpha", "0.3", "--gradient_accumulation_steps", "2", *LEARNS, *teacher(places)),
        *("--per_device_train_batch_size", "4"),
    )
    ours = ("--rollout_seed_mode", "engine")
    rows = places / "rows.jsonl"
    for name, argv, plugins in (("own", mixed, ()), ("ours", (*mixed, *ours), None)):
        given = {} if plugins is None else {"plugins": plugins}
        finished = distill(assets, rows, tmp_path / name, *argv, steps=4, **given)
        assert finished.returncode == 0, finished.cause
    found, expected = losses(tmp_path / "ours"), losses(tmp_path / "own")
    assert len(expected) == 4
    # A gradient at the head is a sum over 151,936 tokens, most of which cancel: with chunks of 1, 7
    # and 1,024 positions the norms differed by 6e-5 here, with all else in float64 too.
    for (loss, norm), (own_loss, own_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(own_loss, rel=1e-5)
        assert norm == pytest.approx(own_norm, rel=2e-4)
    # Some of the four steps are of each source; those of the student are in the record.
    assert 0 < len({SampleId.parse(name).step for name in recorded_tokens(tmp_path / "ours")}) < 4


def test_a_teachers_server(assets: Path, places: Path, tmp_path: Path) -> None:
    """The teacher has the student's first weights, so the first loss is 0. A server that reads
    images differently is refused on every rank before the first step."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "SWIFT_MEDIA_ALLOWED_DIRS": str(assets),
    }
    argv = [*server_argv(assets), "--infer_backend", "vllm"]
    del argv[2:4]  # without plugins
    log = tmp_path / "teacher.log"
    with rollout_server(*argv, log=log, env=env, command="deploy") as port:
        served = (
            *("--teacher_model_server", f"http://127.0.0.1:{port}", "--gkd_logits_topk", "20"),
            *(*COLOCATED, *LORA, "--learning_rate", "2e-3"),
        )
        rows, run = places / "rows.jsonl", tmp_path / "served"
        finished = distill(assets, rows, run, *served, ranks=2)
        assert finished.returncode == 0, finished.cause
        larger = {"MIN_PIXELS": str(140 * 140)}
        refused = distill(assets, rows, tmp_path / "larger", *served, ranks=2, env=larger)
    first, *later = (loss for loss, _ in losses(run))
    assert abs(first) < 1e-5 < min(later)
    assert refused.returncode != 0
    assert "the teacher's server scored" in refused.cause
    assert logged_steps(tmp_path / "larger/run") == []


@pytest.mark.extra
def test_shards_and_a_teacher_beneath_adapters(assets: Path, places: Path, tmp_path: Path) -> None:
    """ZeRO-3 for student and teacher has the losses of whole weights. A second student learns from
    itself without adapters."""
    rows, results = places / "rows.jsonl", {}
    for shards in ("plain", "zero3"):
        folder = tmp_path / shards
        sharded, env = sharding(shards, tmp_path)
        argv = ("--use_vllm", "false", "--top_k", "1", *LEARNS, *teacher(places), *sharded)
        argv += GENERATES_SHARDED if sharded else ()
        if sharded:
            argv += ("--teacher_deepspeed", str(tmp_path / "deepspeed.json"))
        plugins = (PLUGIN, "tests/rig/sharded_recorder.py")  # shards without an accelerator
        finished = distill(assets, rows, folder, *argv, ranks=2, env=env, plugins=plugins)
        assert finished.returncode == 0, finished.cause
        results[shards] = losses(folder)
    for found, expected in zip(results["zero3"], results["plain"], strict=True):
        assert found == pytest.approx(expected, rel=5e-5)

    itself = ("--teacher_model", str(assets / "tiny_vlm"), "--teacher_model_type", "qwen2_5_vl")
    argv = (*COLOCATED, *LORA, *itself, "--learning_rate", "2e-3")
    finished = distill(assets, rows, tmp_path / "itself", *argv)
    assert finished.returncode == 0, finished.cause
    first, *later = (loss for loss, _ in losses(tmp_path / "itself"))
    assert abs(first) < 1e-6 < min(later)
