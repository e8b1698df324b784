"""Engines hold adapters beside their weights (`--vllm_enable_lora`): they generate with them, or
refuse them by name at the first update. Otherwise rollouts would silently come from the base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import policy
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    LEARNING,
    LORA,
    client_argv,
    logged_steps,
    run_training,
    server_argv,
    train,
)

APART = ("--vllm_enable_lora", "true")
IN_LANGUAGE = (*LORA, "--freeze_vit", "true")


@pytest.fixture(scope="module")
def server(assets: Path, folder: Path) -> Iterator[int]:
    """The port of a server with two replicas and vLLM's default `--vllm_max_lora_rank`, 16."""
    argv = server_argv(assets, *APART, "--vllm_data_parallel_size", "2")
    with rollout_server(*argv, log=folder / "adapters.log") as port:
        yield port


REFUSED = {
    "rank": (
        ("--lora_rank", "64"),
        "LoRA rank 64 is greater than max_lora_rank 16",
        "Give `swift rollout` a --vllm_max_lora_rank that is at least the adapter's rank",
    ),
    "tower": (
        ("--freeze_vit", "false"),
        "vLLM ignores the adapter's parts for 10 modules (visual.blocks.0.attn.proj, ",
        "--freeze_vit true",
    ),
}
"""Arguments, and parts of the error."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_server_refuses_ends_the_run(
    case: str, assets: Path, rows: Path, tmp_path: Path, server: int
) -> None:
    argv, *messages = REFUSED[case]
    client = client_argv(server)
    finished = run_training(assets, rows, tmp_path, *IN_LANGUAGE, *argv, *client, ranks=2)
    assert finished.returncode != 0
    assert f"WeightUpdateError: worker 0 of server 0 (http://127.0.0.1:{server})" in finished.output
    for message in messages:
        assert message in finished.output
    assert not list((tmp_path / "record").glob("rank*.jsonl")), "a round was generated"


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_engines_draw_with_the_adapter(
    mode: str, assets: Path, learning_rows: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Both replicas use the adapter of each step's checkpoint. A colocated engine shares the
    trainer's memory; the adapter that trains on is unchanged."""
    where = client_argv(request.getfixturevalue("server")) if mode == "server" else APART
    train(assets, learning_rows, tmp_path, *LEARNING, *IN_LANGUAGE, *where, ranks=2)
    policy.assert_sampled_with_trained_weights(tmp_path, assets / "tiny_vlm", 3)


def test_what_is_trained_in_full_beside_an_adapter_is_sent(
    assets: Path, learning_rows: Path, tmp_path: Path, server: int
) -> None:
    """`lora_llm` trains the tower too. Later updates sent the adapter alone, and engines kept the
    first tower: a gap of 0.58 nats."""
    argv = ("--tuner_type", "lora_llm", *LEARNING, "--rollout_mismatch", "warn")
    train(assets, learning_rows, tmp_path, *argv, *client_argv(server), steps=2)
    gaps = [float(step["rollout_gap/max"]) for step in logged_steps(tmp_path / "run")]
    assert len(gaps) == 2
    assert max(gaps) < policy.SAME, gaps
