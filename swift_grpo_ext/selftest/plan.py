"""What is tried where: the settings of each process, from the user's. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_grpo_ext.checks.settings import Run
from swift_grpo_ext.checks.share import PLUGIN_FILE
from swift_grpo_ext.selftest.worker import ALL, COMPARE, INVARIANT

LEFT_OUT = (
    *("deepspeed", "fsdp", "callbacks", "resume_from_checkpoint", "report_to", "output_dir"),
    *("add_version", "save_strategy", "eval_strategy", "sample_log", "max_steps", "async_generate"),
    *("eval_steps", "load_best_model_at_end", "push_to_hub", "generation_batch_size", "ENV"),
)
"""Settings that have no part in it, or that are other ones here."""

OWN: Mapping[str, Any] = {
    "add_version": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "sample_log": "none",
    "max_steps": 1,
}
OF_SERVERS = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
OF_LAUNCHERS = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

BARE: Mapping[str, Any] = {
    **{"rlhf_type": "grpo", "use_vllm": True, "vllm_mode": "colocate", "num_generations": 8},
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    **{"vllm_gpu_memory_utilization": 0.4, "reward_funcs": ["format"], "lazy_tokenize": True},
}
"""Where only a model and a data set are given."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process, or one process a rank."""

    topology: str
    checks: Sequence[str]
    settings: dict[str, Any]
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    server: dict[str, Any] | None = None
    """Settings of a server to start for it."""

    obstacle: str = ""
    """Why it cannot be tried on this machine."""


def bare_settings(model: str, dataset: Sequence[str]) -> dict[str, Any]:
    """A run of this model and data set."""
    plugins = [str(PLUGIN_FILE)]
    return {**BARE, "external_plugins": plugins, "model": model, "dataset": list(dataset)}


def parts(
    run: Run,
    settings: Mapping[str, Any],
    served: Mapping[str, Any] | None,
    *,
    output_dir: Path,
    num_devices: int,
    device: str,
    address: str | None = None,
) -> list[Part]:
    """What to run, in this order.

    Args:
        run: the settings as they were parsed.
        settings: the training's, as its file has them.
        served: those of the file of `swift rollout`, if there is one.
        output_dir: of the trainings.
        num_devices: accelerators, or 1 for a CPU.
        device: what these are, in words: `cpu`, `cuda`.
        address: HOST:PORT of a server that runs already.
    """
    env = {
        name: str(value)
        for name, value in (settings.get("ENV") or {}).items()
        if name not in OF_LAUNCHERS
    }

    def of(ranks: int, **changes: Any) -> dict[str, Any]:
        return _settings(run, settings, ranks) | {"output_dir": str(output_dir)} | changes

    def short(count: int) -> str:
        if num_devices >= count:
            return ""
        return f"{count} devices are needed, and there is {num_devices} ({device})"

    tensor_parallel = int(run.train("vllm_tensor_parallel_size") or 1)
    ranks = tensor_parallel if num_devices >= tensor_parallel else 1
    colocated = of(ranks, vllm_mode="colocate", vllm_tensor_parallel_size=ranks)
    for name in OF_SERVERS:
        colocated.pop(name, None)
    if served is not None:  # what only the server was told of its engine
        colocated |= {k: v for k, v in served.items() if k.startswith("vllm_") and k in _ENGINE}
    alone = Part(topology=_colocate(ranks, ranks), checks=ALL, settings=colocated, ranks=ranks,
                 env=env)  # fmt: skip
    is_served = run.has_servers or served is not None or address is not None
    found = [alone]
    if is_served:
        host, port = _address(run, served, address)
        remote = of(1, vllm_mode="server", vllm_server_host=[host], vllm_server_port=[port])
        remote.pop("vllm_server_base_url", None)
        for name in ("vllm_tensor_parallel_size", "sleep_level"):
            remote.pop(name, None)
        start = None if address or served is None else dict(served)
        server = Part(topology="server", checks=ALL, settings=remote, env=env, server=start)
        lone = Part(**{**vars(alone), "checks": (COMPARE,)})
        found = [server, lone]
    two = of(2, vllm_mode="colocate", vllm_tensor_parallel_size=1)
    for name in OF_SERVERS:
        two.pop(name, None)
    for topology, changes in (
        (_colocate(2, 1), {}),
        (_colocate(2, 2), {"vllm_tensor_parallel_size": 2}),
    ):
        if topology != alone.topology:
            found.append(Part(topology=topology, checks=(COMPARE,), settings=two | changes,
                              ranks=2, env=env, obstacle=short(2)))  # fmt: skip
    kernels = Part(
        topology="VLLM_BATCH_INVARIANT=1",
        checks=(INVARIANT,),
        settings=colocated,
        ranks=ranks,
        env={**env, "VLLM_BATCH_INVARIANT": "1"},
        obstacle="" if device != "cpu" else "vLLM's batch-invariant kernels need a GPU",
    )
    return [*found, kernels]


_ENGINE = (
    *("vllm_max_model_len", "vllm_enforce_eager", "vllm_engine_kwargs", "vllm_limit_mm_per_prompt"),
    *("vllm_gpu_memory_utilization", "vllm_max_num_seqs", "vllm_enable_prefix_caching"),
)


def _colocate(ranks: int, tensor_parallel: int) -> str:
    words = f"colocate, {ranks} rank{'s' * (ranks > 1)}"
    return f"{words}, tensor parallel {tensor_parallel}" if tensor_parallel > 1 else words


def _settings(run: Run, settings: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The user's settings for so many ranks, with generation batches as large as his."""
    kept = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    share = max(-(-run.num_ranks // ranks), 1)
    kept["gradient_accumulation_steps"] = int(run.train("gradient_accumulation_steps")) * share
    kept["steps_per_generation"] = run.steps_per_generation * share
    return {**kept, **OWN}


def _address(run: Run, served: Mapping[str, Any] | None, address: str | None) -> tuple[str, int]:
    """Raises ValueError: `address` is no HOST:PORT."""
    if address is not None:
        host, colon, port = address.removeprefix("http://").rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(f"--server {address}: expected HOST:PORT.")
        return host, int(port)
    if served is not None:
        return "127.0.0.1", int(served.get("port") or 8000)
    hosts, ports = run.train("vllm_server_host") or ["127.0.0.1"], run.train("vllm_server_port")
    return str(hosts[0]), int((ports or [8000])[0])


def argv(settings: Mapping[str, Any]) -> list[str]:
    """Settings as `swift` takes them on its command line (ms-swift's `parse_yaml_args`)."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            words += [f"--{name}", json.dumps(value, ensure_ascii=False)]
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name}", *map(str, values)]
    return words
