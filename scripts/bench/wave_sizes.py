"""A plugin for `waves.py`. It writes a line for each round into the file `WAVE_SIZES`: the number
of groups of each wave. With `WAVES=ms-swift`, waves have ms-swift's size."""

import os
from pathlib import Path

from swift_grpo_ext.sampling.waves import Waves
from swift_grpo_ext.training import resampling


class SavedWaves(Waves):
    def __init__(self, batch: int, unit: int, *, draws_ahead: bool) -> None:
        super().__init__(batch, unit, draws_ahead=draws_ahead and os.environ["WAVES"] == "ours")
        self._lines: list[str] = []

    def first(self) -> int:
        self._lines.append("")
        return super().first()

    def record(self, kept: int, drawn: int, generating: float, scoring: float) -> None:
        self._lines[-1] += f"{drawn} "
        Path(os.environ["WAVE_SIZES"]).write_text("\n".join(self._lines), encoding="utf-8")
        super().record(kept, drawn, generating, scoring)


resampling.Waves = SavedWaves  # type: ignore[misc]
