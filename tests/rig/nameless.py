"""A plugin for tests: a model that names neither its output embedding nor its placeholders, as
remote code may not."""

from __future__ import annotations

from typing import Any

from swift.rlhf_trainers import GRPOTrainer

make = GRPOTrainer.__init__


def forget_names(self: GRPOTrainer, model: Any, *args: Any, **kwargs: Any) -> None:
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            module.get_output_embeddings = lambda: None
    kwargs["template"].placeholder_tokens = []
    kwargs["template"].config = None
    make(self, model, *args, **kwargs)


GRPOTrainer.__init__ = forget_names
