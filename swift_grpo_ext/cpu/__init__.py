"""This room lets vLLM, ms-swift and gloo work without an accelerator; nothing here runs beside one.

The core meets it at three places: `registry.py` and `command_line.py` (the repairs, the settings),
and the class that an engine's workers are extended with.
"""

from swift_grpo_ext.upstream import patches
from swift_grpo_ext.upstream.patches import Moment

MODULES = {
    Moment.REGISTRATION: ("cpu.settings",),
    Moment.TRAINING: ("cpu.settings",),
    Moment.TRAINER: ("cpu.gloo", "cpu.engines"),
    Moment.ENGINE: ("cpu.engines",),
    Moment.WORKER: ("cpu.gloo", "cpu.engines"),
}
"""Each moment's modules, as in `upstream/patches.py`."""


def register() -> None:
    """Have the repairs of this room made at their moments, with all others."""
    for moment, modules in MODULES.items():
        known = patches.MODULES.get(moment, ())
        patches.MODULES[moment] = tuple(dict.fromkeys((*known, *modules)))
