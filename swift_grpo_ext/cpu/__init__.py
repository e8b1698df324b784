"""Patches that make vLLM, ms-swift and gloo work without an accelerator; unused with one."""

from swift_grpo_ext.upstream import patches
from swift_grpo_ext.upstream.patches import PatchPhase

MODULES = {  # as in `upstream/patches.py`
    PatchPhase.REGISTRATION: ("cpu.settings",),
    PatchPhase.TRAINING: ("cpu.settings",),
    PatchPhase.TRAINER: ("cpu.gloo", "cpu.engines"),
    PatchPhase.ENGINE: ("cpu.engines",),
    PatchPhase.WORKER: ("cpu.gloo", "cpu.engines"),
}


def register() -> None:
    """Add the repairs of this package to each phase."""
    # Each module once: every parse of arguments registers, and so does a worker.
    for phase, modules in MODULES.items():
        known = patches.MODULES.get(phase, ())
        patches.MODULES[phase] = tuple(dict.fromkeys((*known, *modules)))
