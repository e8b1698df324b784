"""What is tried where: the settings of each process, from the user's. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift_grpo_ext.tools.check.settings import Run
from swift_grpo_ext.tools.check.share import PLUGIN_FILE
from swift_grpo_ext.tools.selftest.worker import ALL, COMPARE, INVARIANT

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
OF_ENGINES = (
    *("vllm_max_model_len", "vllm_enforce_eager", "vllm_engine_kwargs", "vllm_limit_mm_per_prompt"),
    *("vllm_gpu_memory_utilization", "vllm_max_num_seqs", "vllm_enable_prefix_caching"),
)
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
    """What to run, in this order; first, without a check, one process that takes the settings.

    Args:
        run: the settings as they were parsed.
        settings: the training's, as its file has them.
        served: those of the file of `swift rollout`, if there is one.
        output_dir: of the trainings.
        num_devices: accelerators, or cores.
        device: what these are, in words: `cpu`, `cuda`.
        address: HOST:PORT of a server that runs already.
    """
    env = {
        name: str(value)
        for name, value in (settings.get("ENV") or {}).items()
        if name not in OF_LAUNCHERS
    }

    def settings_for(ranks: int, left_out: Sequence[str], **own: Any) -> dict[str, Any]:
        kept = {k: v for k, v in _settings(run, settings, ranks).items() if k not in left_out}
        return {**kept, "output_dir": str(output_dir), **own}

    # What only the server was told of its engine.
    engine = {name: value for name, value in (served or {}).items() if name in OF_ENGINES}

    def colocated(ranks: int, tensor_parallel: int, checks: Sequence[str]) -> Part:
        own = {"vllm_mode": "colocate", "vllm_tensor_parallel_size": tensor_parallel, **engine}
        obstacle = f"{ranks} devices are needed, and {num_devices} are there ({device})"
        return Part(
            topology=f"colocate, {ranks} rank{'s' * (ranks > 1)}"
            + f", tensor parallel {tensor_parallel}" * (tensor_parallel > 1),
            checks=checks,
            settings=settings_for(ranks, OF_SERVERS, **own),
            ranks=ranks,
            env=env,
            obstacle=obstacle * (num_devices < ranks),
        )

    size = int(run.train("vllm_tensor_parallel_size") or 1)
    ranks = size if num_devices >= size else 1
    is_served = run.has_servers or served is not None or address is not None
    alone = colocated(ranks, ranks, (COMPARE,) if is_served else ALL)
    others = [colocated(n, m, (COMPARE,)) for n, m in sorted({(2, 1), (2, 2), (max(size, 2),) * 2})]
    kernels = replace(
        alone,
        topology="VLLM_BATCH_INVARIANT=1",
        checks=(INVARIANT,),
        env={**env, "VLLM_BATCH_INVARIANT": "1"},
        obstacle="vLLM's batch-invariant kernels need a GPU" * (device == "cpu"),
    )
    first = colocated(1, 1, ())
    found = [alone, *(part for part in others if part.topology != alone.topology), kernels]
    if is_served:
        host, port = _address(run, served, address)
        own = {"vllm_mode": "server", "vllm_server_host": [host], "vllm_server_port": [port]}
        left_out = ("vllm_server_base_url", "vllm_tensor_parallel_size", "sleep_level")
        start = None if address or served is None else dict(served)
        remote = settings_for(1, left_out, **own)
        server = Part(topology="server", checks=ALL, settings=remote, env=env, server=start)
        found.insert(0, server)
        first = replace(server, checks=(), server=None)
    return [replace(first, topology="settings", obstacle=""), *found]


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
