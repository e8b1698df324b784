"""`--rlhf_type gkd` with vLLM: samples depend on `--seed` alone (S2), and a teacher's server has to
read images as the student does."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.rig.distillation import distill, prepared, recorded_tokens, teacher_server
from tests.rig.rounds import BATCH, LORA, logged_steps

COLOCATED = (
    *("--use_vllm", "true", "--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
    *("--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 134217728}', "--vllm_mode", "colocate"),
    # Room for four images: vLLM's cache of media turns over in each round (ms-swift issue 7965).
    *("--vllm_mm_processor_cache_gb", "0.0003"),
)


def test_a_teachers_server(
    assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The teacher has the student's first weights, so the first loss is 0. A server that reads
    images differently is refused on every rank before the first step."""
    data = (assets, prepared(assets, tmp_path_factory) / "rows.jsonl")
    with teacher_server(assets, tmp_path / "teacher.log") as port:
        served = ("--teacher_model_server", f"http://127.0.0.1:{port}", "--gkd_logits_topk", "20")
        argv = (*served, *COLOCATED, *LORA, "--learning_rate", "2e-3")
        finished = distill(*data, tmp_path / "served", *argv, ranks=2)
        larger = {"MIN_PIXELS": str(140 * 140)}
        refused = distill(*data, tmp_path / "larger", *argv, ranks=2, env=larger)
    assert finished.returncode == 0, finished.cause
    logs = logged_steps(tmp_path / "served/run")
    first, *later = (step["loss"] for step in logs)
    assert abs(first) < 1e-5 < min(later)
    assert max(step["rollout_gap/mean"] for step in logs) < 0.001
    samples = recorded_tokens(tmp_path / "served")
    assert len({seed for seed, _ in samples.values()}) == len(samples) == BATCH * 3
    for name, (seed, _) in samples.items():
        assert seed == sample_seed(42, SampleId.parse(name))  # ms-swift's default --seed
    assert refused.returncode != 0
    assert "the teacher's server scored" in refused.cause
    assert logged_steps(tmp_path / "larger/run") == []
