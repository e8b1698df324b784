"""Loads a checkpoint's weights when a run resumes.

Symptom: a resumed run continues from the base model's weights, with the checkpoint's optimizer and
step. It only logs two warnings about keys (transformers issue 43701, ms-swift issue 7947).
Upstream: `transformers/trainer.py` 5.19, `_load_from_checkpoint` and `_load_best_model` read files
without translating names, and not strictly. Qwen2.5-VL's weights are `visual.*` in files and
`model.visual.*` in memory.
Here: `from_pretrained` reads the files, and every parameter must be in them. Upstream still loads
adapters, and the files of DeepSpeed and FSDP, which have the names used in memory.
Can go when: those two methods translate names (transformers pull request 48822 is open).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.utils import get_logger
from torch import nn
from transformers import Trainer
from transformers.utils import CONFIG_NAME

logger = get_logger()


class WholeCheckpoints(Trainer):
    """Loads checkpoints of whole models, translating the names in their files."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not self._has_loaded(resume_from_checkpoint, model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._has_loaded(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _has_loaded(self, checkpoint: str, model: nn.Module | None = None) -> bool:
        """Load the checkpoint of a whole model; return False if upstream has to load it."""
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if is_sharded or not holds_whole_model(checkpoint):
            return False
        load_whole_model(self.model if model is None else model, checkpoint)
        logger.info(f"The weights of {checkpoint} are loaded.")
        return True


def holds_whole_model(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint has a whole model: one of adapters has no config.json."""
    return Path(checkpoint, CONFIG_NAME).is_file()


def load_whole_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Load a checkpoint's weights into `model`; raise ValueError if a parameter is missing or has
    another shape."""
    try:
        model_class: Any = type(model)
        # Loads onto the CPU: host memory must hold a second copy of the model.
        saved, report = model_class.from_pretrained(checkpoint, output_loading_info=True)
        # transformers only warns about missing keys, and initializes them at random.
        if report["missing_keys"]:
            raise ValueError(f"it has no {', '.join(sorted(report['missing_keys']))}")
        model.load_state_dict(saved.state_dict())  # strict: both use the names in memory
    except (RuntimeError, ValueError, OSError) as e:
        raise ValueError(
            f"{checkpoint} does not hold the weights of the model that is trained "
            f"({type(model).__name__}): {e}. Resume from a checkpoint of the same run, with the "
            "same --model, --tuner_type and --new_special_tokens."
        ) from e
