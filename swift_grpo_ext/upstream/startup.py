"""The dumps that ms-swift makes at the start of a training go to a file.

Symptom: a training prints about 720 lines before its second step, 650 of them four dumps: its
arguments, the model's configuration, its generation settings and its modules.
Upstream: ms-swift 4.6, pipelines/base.py and pipelines/train/sft.py: `logger.info`.
Can go when ms-swift writes them to a file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swift.arguments import RLHFArguments
from swift.utils import get_logger

DUMPS = ("args", "model_info", "model.generation_config", "model")
FILE = "startup.log"


class Fold(logging.Filter):
    """Append a training's dumps to `startup.log` in its output folder, and log a line instead."""

    def __init__(self, args: RLHFArguments) -> None:
        super().__init__()
        self._args = args  # `output_dir` is known when there is something to write

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        name, _, _ = text.partition(": ")
        num_lines = text.count("\n") + 1
        if num_lines == 1 or name not in DUMPS:
            return True
        path = Path(self._args.output_dir) / FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as f:
                f.write(f"{text}\n")
        except OSError:  # it is printed then
            return True
        record.msg = f"{name}: {num_lines} lines, in {path}"
        return True


def fold_dumps(args: RLHFArguments) -> None:
    """Fold the dumps of this training from now on; `LOG_LEVEL=DEBUG` prints them as before."""
    logger = get_logger()
    for earlier in [f for f in logger.filters if isinstance(f, Fold)]:  # another run's
        logger.removeFilter(earlier)
    if not logger.isEnabledFor(logging.DEBUG):
        logger.addFilter(Fold(args))
