"""Which parts there are on which machine, with which settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from swift_grpo_ext.tools.selftest import command
from swift_grpo_ext.tools.selftest.plan import Part, argv, parts
from swift_grpo_ext.tools.selftest.worker import ALL, COMPARE, INVARIANT

TRAINING: dict[str, Any] = {
    **{"rlhf_type": "grpo", "model": "m", "dataset": ["d.jsonl"], "use_vllm": True},
    **{"vllm_mode": "colocate", "num_generations": 8, "per_device_train_batch_size": 4},
    **{"deepspeed": "zero3", "callbacks": ["diversity"], "max_steps": 500},
    "ENV": {"NPROC_PER_NODE": 6, "MAX_PIXELS": 1000},
}
SERVED = {"model": "m", "port": 8001, "vllm_max_model_len": 512, "vllm_data_parallel_size": 2}


def planned(
    training: dict[str, Any], served: dict[str, Any] | None = None, **machine: Any
) -> list[Part]:
    where = {"output_dir": Path("out"), "num_devices": 1, "device": "cpu"} | machine
    run = command._run_of(training, served)
    settings, *found = parts(run, training, served, **where)  # type: ignore[arg-type]
    assert (settings.topology, settings.checks, settings.ranks) == ("settings", (), 1)
    assert (settings.server, settings.obstacle) == (None, "")
    assert settings.settings["vllm_mode"] == found[0].settings["vllm_mode"]
    assert settings.settings.get("vllm_tensor_parallel_size", 1) == 1
    return found


def test_on_a_cpu_one_colocated_rank_is_checked_and_the_rest_says_why_not() -> None:
    alone, two, tensor, kernels = planned(TRAINING)
    assert (alone.topology, alone.checks, alone.obstacle) == ("colocate, 1 rank", ALL, "")
    assert alone.env == {"MAX_PIXELS": "1000"}
    settings = alone.settings
    assert "deepspeed" not in settings
    assert "callbacks" not in settings
    # As many samples a round as the 6 ranks have.
    assert (settings["steps_per_generation"], settings["gradient_accumulation_steps"]) == (6, 6)
    assert (settings["max_steps"], settings["output_dir"]) == (1, "out")
    assert [two.obstacle, tensor.obstacle] == ["2 devices are needed, and 1 are there (cpu)"] * 2
    assert [two.ranks, tensor.ranks] == [2, 2]
    assert (kernels.checks, kernels.env["VLLM_BATCH_INVARIANT"]) == ((INVARIANT,), "1")
    assert "need a GPU" in kernels.obstacle


def test_with_two_devices_two_ranks_and_tensor_parallel_are_compared() -> None:
    alone, two, tensor, kernels = planned(TRAINING, num_devices=2, device="cuda")
    assert [part.checks for part in (two, tensor)] == [(COMPARE,)] * 2
    assert two.settings["vllm_tensor_parallel_size"] == 1
    assert tensor.settings["vllm_tensor_parallel_size"] == 2
    assert two.settings["steps_per_generation"] == 3
    assert {part.obstacle for part in (alone, two, tensor, kernels)} == {""}


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (4, 4)])
def test_the_engine_has_the_users_tensor_parallel_size_where_it_can(
    devices: int, ranks: int
) -> None:
    training = {**TRAINING, "vllm_tensor_parallel_size": 4}
    alone, *_ = planned(training, num_devices=devices, device="cuda")
    assert (alone.ranks, alone.settings["vllm_tensor_parallel_size"]) == (ranks, ranks)


def test_a_server_is_checked_and_compared_with_a_colocated_engine() -> None:
    training = {**TRAINING, "vllm_mode": "server", "vllm_server_host": ["h"]}
    server, alone, *_ = planned(training, SERVED)
    assert (server.topology, server.checks) == ("server", ALL)
    assert server.server == SERVED
    assert server.settings["vllm_server_port"] == [8001]
    assert server.settings["vllm_server_host"] == ["127.0.0.1"]
    assert alone.checks == (COMPARE,)
    assert alone.settings["vllm_max_model_len"] == 512  # only the server's file had it
    assert "vllm_server_host" not in alone.settings


def test_a_server_that_runs_already_is_not_started() -> None:
    server, *_ = planned(TRAINING, address="10.0.0.1:9000")
    assert server.server is None
    assert server.settings["vllm_server_host"] == ["10.0.0.1"]
    assert server.settings["vllm_server_port"] == [9000]
    with pytest.raises(ValueError, match="--server nowhere: expected HOST:PORT"):
        planned(TRAINING, address="nowhere")


def test_settings_become_words_as_in_swift() -> None:
    given = {"a": [1, "x"], "b": True, "c": {"d": 0.5}}
    assert argv(given) == ["--a", "1", "x", "--b", "True", "--c", '{"d": 0.5}']


def options(**given: Any) -> argparse.Namespace:
    none = {"config": None, "rollout": None, "model": None, "dataset": [], "rest": []}
    return argparse.Namespace(**{**none, **given})


def test_settings_come_from_files_and_the_command_line_wins(tmp_path: Path) -> None:
    for name, settings in (("train", TRAINING), ("rollout", SERVED)):
        (tmp_path / f"run.{name}.yaml").write_text(yaml.safe_dump(settings))
    given = options(config=tmp_path / "run", model="n", rest=["--num-generations", "4"])
    training, served = command.settings_of(given)
    assert training["model"] == "n"
    assert training["num_generations"] == ["4"]
    assert served == {**SERVED, "model": "n"}


def test_a_model_and_a_data_set_are_enough() -> None:
    training, served = command.settings_of(options(model="m", dataset=["d.jsonl"]))
    assert served is None
    assert command._run_of(training, None).generation_batch == 8
    with pytest.raises(ValueError, match="or --model and --dataset"):
        command.settings_of(options(model="m"))


@pytest.mark.parametrize(
    ("rest", "words"),
    [(["--use_vllm", "false"], "use_vllm"), (["--rlhf_type", "dpo"], "rlhf_type")],
)
def test_settings_without_our_rollouts_are_refused(rest: list[str], words: str) -> None:
    given = command.settings_of(options(model="m", dataset=["d"], rest=rest))
    with pytest.raises(ValueError, match=f"{words}.*: "):
        command._run_of(*given)
