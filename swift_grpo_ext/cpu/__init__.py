"""Patches that make vLLM, ms-swift and gloo work without an accelerator; unused with one."""

from swift_grpo_ext.upstream import patches
from swift_grpo_ext.upstream.patches import Moment

MODULES = {  # as in `upstream/patches.py`
    Moment.REGISTRATION: ("cpu.settings",),
    Moment.TRAINING: ("cpu.settings",),
    Moment.TRAINER: ("cpu.gloo", "cpu.engines"),
    Moment.ENGINE: ("cpu.engines",),
    Moment.WORKER: ("cpu.gloo", "cpu.engines"),
}


def register() -> None:
    """Add the repairs of this package to each moment."""
    for moment, modules in MODULES.items():
        known = patches.MODULES.get(moment, ())
        patches.MODULES[moment] = tuple(dict.fromkeys((*known, *modules)))
