"""The diversity monitor: `--callbacks diversity` is our name, and refused until it is built."""

from __future__ import annotations

from typing import Any, NoReturn

from swift.callbacks import TrainerCallback

from swift_grpo_ext.version import __version__


def refuse() -> NoReturn:
    raise ValueError(
        f"--callbacks diversity is not in this version ({__version__}) of swift-grpo-ext: leave it "
        "out."
    )


class DiversityMonitor(TrainerCallback):
    """Refuses to be made; `preflight` says so before a model is loaded."""

    def __init__(self, args: Any, trainer: Any) -> None:
        refuse()
