"""A run's settings as plain values: both sides' YAML files, and how many ranks and GPUs there are.

What is not set has ms-swift's default: `tests/checks/test_presets.py` compares the table with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEFAULTS: Mapping[str, Any] = {
    "rlhf_type": "dpo",
    "num_generations": 8,
    "num_generations_eval": None,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_iterations": 1,
    "max_completion_length": 512,
    "max_length": None,
    "truncation_strategy": None,
    "beta": None,
    "reward_funcs": [],
    "reward_weights": None,
    "reward_model": None,
    "stop_words": [],
    "tuner_type": "lora",
    "lora_rank": 8,
    "torch_dtype": None,
    "deepspeed": None,
    "freeze_vit": True,
    "gradient_checkpointing": True,
    "use_vllm": False,
    "vllm_mode": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_data_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_max_model_len": None,
    "vllm_max_lora_rank": 16,
    "vllm_enable_lora": False,
    "vllm_server_host": None,
    "vllm_server_base_url": None,
    "vllm_server_port": [8000],
    "vllm_server_group_port": None,
    "async_generate": False,
    "sleep_level": 0,
    "offload_model": False,
    "offload_optimizer": False,
    "multi_turn_scheduler": None,
    "max_turns": None,
    "external_plugins": [],
}
"""Of `swift rlhf` 4.6, where a rule looks at a setting."""

# ms-swift sets it itself for GRPO, after parsing (arguments/rlhf_args.py, `_set_default`).
_LATER_DEFAULTS = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "port": 8000}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one run."""

    training: Mapping[str, Any] | None = None
    """Of `swift rlhf`; None where only servers are looked at."""

    rollout: Mapping[str, Any] | None = None
    """Of `swift rollout`; None where the run has no servers, or they are not known."""

    ranks: int | None = None
    """Training processes over all nodes; None: as the training's ENV says (NPROC_PER_NODE x NNODES,
    else 1)."""

    gpu_gib: float = 80
    """Memory of each GPU, in GiB."""

    names: Mapping[str, str] = field(default_factory=dict)
    """How to call the two sides, for messages: usually their files."""

    @property
    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        env = environment(self.training)
        return int(env.get("NPROC_PER_NODE", 1)) * int(env.get("NNODES", 1))

    @property
    def has_servers(self) -> bool:
        return self.train("vllm_mode") == "server"

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches that one round serves, as ms-swift works it out (args_mixin.py)."""
        steps, size = self.train("steps_per_generation"), self.train("generation_batch_size")
        if steps is None and size is not None:
            return max(int(size) // self.global_batch, 1)
        return int(self.train("gradient_accumulation_steps") if steps is None else steps)

    @property
    def global_batch(self) -> int:
        """Samples of one micro-batch, over all ranks."""
        return int(self.train("per_device_train_batch_size")) * self.num_ranks

    @property
    def generation_batch(self) -> int:
        """Samples of one round."""
        size = self.train("generation_batch_size")
        return self.global_batch * self.steps_per_generation if size is None else int(size)

    def train(self, name: str) -> Any:
        """A setting of the training, or its default."""
        return setting(self.training, name)

    def serve(self, name: str) -> Any:
        """A setting of the servers, or its default."""
        return setting(self.rollout, name)

    def name(self, side: str) -> str:
        return self.names.get(side, {"training": "swift rlhf", "rollout": "swift rollout"}[side])


def setting(settings: Mapping[str, Any] | None, name: str) -> Any:
    value = (settings or {}).get(name)
    return DEFAULTS.get(name, _LATER_DEFAULTS.get(name)) if value is None else value


def environment(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The `ENV` block, which ms-swift puts into the environment."""
    return (settings or {}).get("ENV") or {}


def as_list(value: Any) -> list[Any]:
    """A setting that takes several values: YAML may give one, or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def read_run(
    path: str | Path,
    *,
    ranks: int | None = None,
    gpu_gib: float = 80,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """The run of a YAML file: `NAME.train.yaml` and `NAME.rollout.yaml` belong together.

    Args:
        path: one file, or `NAME`, which stands for both.
        ranks: training processes, instead of what ENV says.
        gpu_gib: memory of each GPU.
        model: of both sides, instead of the files'.
        overrides: arguments of `swift rlhf` that win over its file.

    Raises:
        ValueError: a file is missing, is no YAML, or holds no settings.
    """
    training, rollout = files_of(Path(path))
    both = {"model": model} if model else {}
    return Run(
        training={**read_settings(training), **both, **from_arguments(overrides)}
        if training
        else None,
        rollout={**read_settings(rollout), **both} if rollout else None,
        ranks=ranks,
        gpu_gib=gpu_gib,
        names={
            side: file.name for side, file in (("training", training), ("rollout", rollout)) if file
        },
    )


def files_of(path: Path) -> tuple[Path | None, Path | None]:
    """The training's file and the servers' file that belong to a path."""
    stem = path.name
    for suffix in (".train.yaml", ".rollout.yaml"):
        stem = stem.removesuffix(suffix)
    pair = tuple(path.with_name(f"{stem}.{side}.yaml") for side in ("train", "rollout"))
    found = [file if file.is_file() else None for file in pair]
    if stem != path.name and not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    if any(found):
        return found[0], found[1]
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file, nor {pair[0].name} beside it.")
    return path, None


def from_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """`--name value ...` as settings, with values as YAML would have them."""
    settings: dict[str, Any] = {}
    values: list[Any] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            values = [yaml.safe_load(value)] if equals else []
            settings[name.replace("-", "_")] = values
        else:
            values.append(yaml.safe_load(token))
    return {name: v[0] if len(v) == 1 else v for name, v in settings.items() if v}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no YAML file: {e}") from e
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no settings: expected lines such as `num_generations: 8`.")
    return settings
