"""`--rlhf_type gkd` in real processes: samples depend on `--seed` alone (S2), and a teacher's
server has to read images as the student does."""

from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.rig.distillation import (
    COLOCATED,
    ON_VLLM,
    STEPS,
    distill,
    prepared,
    recorded_tokens,
    teacher,
    teacher_server,
)
from tests.rig.processes import rollout_server
from tests.rig.rounds import BATCH, LORA, client_argv, logged_steps, server_argv

SEED = 42  # ms-swift's default


@pytest.fixture(scope="module")
def places(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(assets, tmp_path_factory)


def test_samples_follow_from_the_seed_alone(assets: Path, places: Path, tmp_path: Path) -> None:
    """All samples are equal over one rank, and three ranks with a server of two replicas. Each has
    its own noise."""
    data = (assets, places / "rows.jsonl")
    # Room for four images: vLLM's cache of media turns over in each round (ms-swift issue 7965).
    argv = (*COLOCATED, "--vllm_mm_processor_cache_gb", "0.0003", *teacher(places))
    distill(*data, tmp_path / "colocated", *argv).check()
    replicas = server_argv(assets, "--vllm_data_parallel_size", "2")
    with rollout_server(*replicas, log=tmp_path / "server.log") as port:
        argv = (*ON_VLLM, *client_argv(port), *teacher(places))
        distill(*data, tmp_path / "served", *argv, ranks=3).check()

    expected = recorded_tokens(tmp_path / "colocated")
    assert len(expected) == BATCH * STEPS
    assert recorded_tokens(tmp_path / "served") == expected
    for name, (seed, _) in expected.items():
        assert seed == sample_seed(SEED, SampleId.parse(name))
    assert len({seed for seed, _ in expected.values()}) == len(expected)
    assert len({tuple(tokens) for _, tokens in expected.values()}) > BATCH
    for run in ("colocated", "served"):
        for log in logged_steps(tmp_path / run / "run"):
            assert log["rollout_gap/mean"] < 0.001
            assert "time/rollout" in log


def test_a_teachers_server(assets: Path, places: Path, tmp_path: Path) -> None:
    """The teacher has the student's first weights, so the first loss is 0. A server that reads
    images differently is refused on every rank before the first step."""
    data = (assets, places / "rows.jsonl")
    with teacher_server(assets, tmp_path / "teacher.log") as port:
        served = ("--teacher_model_server", f"http://127.0.0.1:{port}", "--gkd_logits_topk", "20")
        argv = (*served, *COLOCATED, *LORA, "--learning_rate", "2e-3")
        distill(*data, tmp_path / "served", *argv, ranks=2).check()
        larger = {"MIN_PIXELS": str(140 * 140)}
        refused = distill(*data, tmp_path / "larger", *argv, ranks=2, env=larger)
    first, *later = (step["loss"] for step in logged_steps(tmp_path / "served/run"))
    assert abs(first) < 1e-5 < min(later)
    assert refused.returncode != 0
    assert "the teacher's server scored" in refused.cause
    assert logged_steps(tmp_path / "larger/run") == []
