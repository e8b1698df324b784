"""A run with LoRA, or with a server, that is killed and resumed equals an uninterrupted one, bit
for bit (S4, R9)."""

from pathlib import Path

from tests.rig.fixtures import LEARNED_STEPS
from tests.rig.processes import rollout_server
from tests.rig.resuming import assert_same_killed_and_resumed
from tests.rig.rounds import LEARNING, LORA, client_argv, server_argv, train


def test_lora(assets: Path, learning_rows: Path, learned_lora: Path, tmp_path: Path) -> None:
    argv = (*LEARNING, *LORA)
    assert_same_killed_and_resumed(
        learned_lora, tmp_path, assets, learning_rows, argv=argv, ranks=2
    )


def test_served_by_two_replicas(assets: Path, learning_rows: Path, tmp_path: Path) -> None:
    """The engines take no step before they have all requests of a round."""
    server = server_argv(assets, "--vllm_data_parallel_size", "2")
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    data, whole = (assets, learning_rows), tmp_path / "whole"
    with rollout_server(*server, log=tmp_path / "server.log", env=env) as port:
        argv = (*LEARNING, *client_argv(port))
        train(*data, whole, *argv, ranks=2, steps=LEARNED_STEPS)
        assert_same_killed_and_resumed(whole, tmp_path, *data, argv=argv, ranks=2)
