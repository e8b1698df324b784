"""What ms-swift dumps at the start of a training goes to a file; collections skip what is imported.

`fold_dumps`. Symptom: a training prints about 720 lines before its second step, 650 of them four
dumps: its arguments, the model's configuration, its generation settings and its modules.
Upstream: ms-swift 4.6, pipelines/base.py and pipelines/train/sft.py: `logger.info`.
Adaptation: a filter of ms-swift's logger appends these to `startup.log`, and leaves a line that
says so. `LOG_LEVEL=DEBUG` prints them as before.
Can go when ms-swift writes them to a file.

`freeze_heap`. Symptom: vLLM collects garbage three times while it makes a colocated engine, 0.5 s
each, among the 800,000 objects that imports have made and nobody drops.
Upstream: vLLM 0.32, model_executor/model_loader/base_loader.py and utils/gc_utils.py
(`freeze_gc_heap`), which puts the same objects out of the collector's sight at the end.
Adaptation: they are put there once before.
Can go when vLLM freezes before it collects.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

from swift.utils import get_logger

DUMPS = ("args", "model_info", "model.generation_config", "model")
FILE = "startup.log"


class Fold(logging.Filter):
    """Puts dumps of a training into its output folder."""

    def __init__(self, args: Any) -> None:
        """
        Args:
            args: of `swift rlhf`; `output_dir` is read when there is something to write.
        """
        super().__init__()
        self._args = args

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


def fold_dumps(args: Any) -> None:
    """Fold the dumps of this training from now on."""
    logger = get_logger()
    for earlier in [f for f in logger.filters if isinstance(f, Fold)]:  # another run's
        logger.removeFilter(earlier)
    if not logger.isEnabledFor(logging.DEBUG):
        logger.addFilter(Fold(args))


def freeze_heap() -> None:
    """Collect garbage once; later collections do not look at what is left."""
    gc.collect()
    gc.freeze()
