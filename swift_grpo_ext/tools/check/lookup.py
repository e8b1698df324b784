"""What a run's settings name, looked up on this machine: model, data, plugins, packages, GPUs.

Only `swift-grpo-ext check` and `doctor` ask, in a process that ends with it: plugin files are
imported as `swift` imports them, so that names they register are known.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from swift_grpo_ext.checks import preflight
from swift_grpo_ext.checks.finding import Findings, did_you_mean, divisors, error, note, words
from swift_grpo_ext.tools.check.rules import PLUGIN
from swift_grpo_ext.tools.check.settings import Run, devices_of, environment

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")

PACKAGES: Mapping[str, Mapping[str, str]] = {
    "reward_funcs": {"accuracy": "math_verify", "cosine": "math_verify", "toolbench": "rouge"},
    "report_to": {name: name for name in ("tensorboard", "wandb", "swanlab")},
    "attn_impl": {"flash_attn": "flash_attn", "flash_attention_2": "flash_attn"},
    "quant_method": {"bnb": "bitsandbytes"},
}
"""Modules that a value of a setting needs, which ms-swift does not bring along."""

HEADS = {"3B": (16, 16), "7B": (28, 16), "32B": (40, 16), "72B": (64, 16)}
"""Attention heads of Qwen2.5-VL's language model and vision tower, where no config.json is here."""


def look_up(run: Run, gpus: Sequence[str] | None = None) -> Findings:
    """
    Args:
        run: the settings.
        gpus: those of this machine that processes will use; None: as the settings' ENV says.
    """
    from swift.utils import get_device_count

    for side, given in run.sides:
        yield from preflight.check_arguments(run.arguments(side), given)
        yield from check_heads(run.arguments(side))
    for look in (check_data, check_names, check_packages):
        yield from look(run)
    yield from check_gpus(run, gpus, int(get_device_count()))


# --- model and data ---


def cached(name: str, kind: Literal["models", "datasets"] = "models") -> Path | None:
    """The folder of a hub id in ModelScope's or Hugging Face's cache; None where it is not here."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from modelscope.utils.file_utils import get_modelscope_cache_dir

    snapshots = Path(HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "snapshots")
    folders = sorted(snapshots.glob("*"), key=lambda folder: folder.stat().st_mtime)
    for spelled in (name, name.replace(".", "___")):  # ModelScope's way with dots
        folders.append(Path(get_modelscope_cache_dir(), kind, spelled))
    return next((folder for folder in reversed(folders) if folder.is_dir()), None)


def model_folder(model: str) -> Path | None:
    """Where a model's files are: its own folder, or a hub's cache."""
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else cached(model)


def check_heads(args: Any) -> Findings:
    """Tensor parallelism divides the attention heads."""
    parallel = args.vllm_tensor_parallel_size
    heads = [number for number in _heads(args.model) if number] if args.model else []
    if parallel > 1 and any(number % parallel for number in heads):
        yield error(
            "vllm_tensor_parallel_size",
            f"{parallel} does not divide the {heads[0]} attention heads of {args.model}"
            + (f" and the {heads[1]} of its vision tower" if heads[1:] else "")
            + f": take one of {words(divisors(math.gcd(*heads), least=1))}.",
        )


def _heads(model: str) -> tuple[int | None, ...]:
    """Of the language model, and of a Qwen2-VL vision tower, which is divided likewise."""
    folder = model_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return next((heads for size, heads in HEADS.items() if f"Qwen2.5-VL-{size}" in model), ())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = {**config, **config.get("text_config", {})}
    is_qwen = str(config.get("model_type")).startswith("qwen2")
    vision = config.get("vision_config", {}) if is_qwen else {}
    return text.get("num_attention_heads"), vision.get("num_heads")


def check_data(run: Run) -> Findings:
    """Files of rows are there; ids of a hub are left to ms-swift."""
    from swift.dataset.dataset_syntax import DatasetSyntax

    for setting in ("dataset", "val_dataset"):
        for given in run.train(setting) or ():
            name = DatasetSyntax.parse(given).dataset
            if Path(name).expanduser().exists():
                continue
            if Path(name).suffix in DATA_SUFFIXES or name.startswith(("/", ".", "~")):
                text = f"there is no such file in {Path.cwd()}, nor folder."
                yield error(f"{setting} {given}", text, "Name a file of rows, or a hub id.")
            elif cached(name, "datasets") is None:
                yield note(f"{setting} {given}", "is no file here, so it is taken for a hub id.")


# --- names that ms-swift and the plugins register ---


def check_names(run: Run) -> Findings:
    """Rewards, schedulers and callbacks that are named are registered."""
    from swift.callbacks import callbacks_map
    from swift.rewards import orms, rm_plugins
    from swift.rollout import multi_turns

    plugins = [p for _, settings in run.sides for p in settings.get("external_plugins") or ()]
    failed = [finding for plugin in dict.fromkeys(plugins) for finding in _import_plugin(plugin)]
    yield from failed
    if failed:  # names may be registered there
        return
    yield from _known(run.train("reward_funcs"), "reward_funcs", orms)
    yield from _known(run.train("reward_model_plugin"), "reward_model_plugin", rm_plugins)
    yield from _known(run.train("callbacks"), "callbacks", [*callbacks_map, "diversity"])
    schedulers = {run.train("multi_turn_scheduler"), run.serve("multi_turn_scheduler")} - {None}
    yield from _known(sorted(schedulers), "multi_turn_scheduler", multi_turns)


def _import_plugin(plugin: str) -> Findings:
    from swift.utils import import_external_file

    path = Path(plugin).expanduser()
    if not path.is_file():
        text = f"there is no such file in {Path.cwd()}."
        yield error(f"external_plugins {plugin}", text, "Start where the path holds.")
    elif path.name != PLUGIN:  # this one is ours, and changes ms-swift
        try:
            import_external_file(plugin)
        except Exception as e:  # a user's code raises anything
            text = f"cannot be imported ({type(e).__name__}: {e})."
            yield error(f"external_plugins {plugin}", text)


def _known(names: Sequence[str] | None, setting: str, registered: Collection[str]) -> Findings:
    for name in names or ():
        if name not in registered:
            near = did_you_mean(name, registered).replace("did", "Did", 1)
            text = "is registered by neither ms-swift nor a file of external_plugins."
            hint = near or f"Known: {words(sorted(registered))}."
            yield error(f"{setting} {name}", text, hint)


# --- packages and GPUs ---


def check_packages(run: Run) -> Findings:
    """Packages that settings need are installed."""
    for setting, module in dict.fromkeys(_needed_modules(run)):
        if importlib.util.find_spec(module) is None:
            text = f"needs the package {module}, which is not installed."
            yield error(setting, text, f"pip install {module}")


def _needed_modules(run: Run) -> Iterator[tuple[str, str]]:
    from swift.rewards import orms

    def is_swifts(reward: Any) -> bool:
        return str(getattr(reward, "__module__", "")).startswith("swift.")

    settings = run.training or {}
    for setting, needs in PACKAGES.items():
        given = settings.get(setting) or ()
        for value in [given] if isinstance(given, str) else given:
            from_user = setting == "reward_funcs" and not is_swifts(orms.get(value))
            if value in needs and not from_user:
                yield f"{setting} {value}", needs[value]
    if settings.get("deepspeed"):
        yield "deepspeed", "deepspeed"
    if settings.get("use_liger_kernel"):
        yield "use_liger_kernel", "liger_kernel"


def check_gpus(run: Run, gpus: Sequence[str] | None, present: int) -> Findings:
    """The GPUs that are named are there, and as many as processes use.

    Args:
        gpus: those that processes will use; None: as ENV says, unless the shell says otherwise.
        present: the number that this machine has.
    """
    if gpus is None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        gpus = [gpu for _, settings in run.sides for gpu in devices_of(settings)]
    absent = [gpu for gpu in gpus or () if not present or (gpu.isdecimal() and int(gpu) >= present)]
    if absent and not present:
        yield error(
            "CUDA_VISIBLE_DEVICES",
            f"GPUs {words(gpus or ())} are to be used, and torch sees none on this machine.",
            "Without GPUs: swift-grpo-ext init cpu-run --preset cpu_2x6, with a tiny model.",
        )
    elif absent:
        text = f"GPUs {words(absent)} are to be used, and this machine has {present} (from 0 on)."
        yield error("CUDA_VISIBLE_DEVICES", text)
    elif present and not gpus:
        env = {**environment(run.training), **os.environ}
        ranks = int(env.get("NPROC_PER_NODE", 1)) if run.training else 0
        serving = run.num_rollout_gpus if run.rollout else 0
        for setting, needed in (("NPROC_PER_NODE", ranks), ("vllm_data_parallel_size", serving)):
            if needed > present:
                yield error(setting, f"{needed} processes, and this machine has {present} GPUs.")
