"""Rows encoded on both sides, as `check` does, from settings alone: no training is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swift_grpo_ext.checks.rows import Row, encoding_error
from swift_grpo_ext.tools.check.encoding import (
    EncodedRow,
    EngineEncoder,
    TrainingEncoder,
    check_encoding,
)
from swift_grpo_ext.upstream.patches import Moment, apply

OF_ENGINES = {
    "vllm_max_model_len": None,
    "vllm_limit_mm_per_prompt": None,
    "vllm_engine_kwargs": None,
}
OF_TRAININGS = {
    **{"data_seed": 42, "truncation_strategy": "left", "rollout_mismatch": "stop"},
    "max_completion_length": 512,
}


class BothSides:
    """The encoders of a training and of its engine, or of servers with settings of their own."""

    def __init__(self, rollout: dict[str, Any] | None = None, **settings: Any) -> None:
        self.args, self.template = _start(settings)
        given = (self.args, self.template) if rollout is None else _start(rollout)
        self.ask = EngineEncoder(*given)
        self.training = TrainingEncoder(self.template)
        self.engine, self.core = self.ask.engine, self.ask.core
        self.placeholder_texts = self.training.placeholder_texts

    def refusal(self, row: Row) -> str | None:
        return encoding_error(self.template, row, self.ask([]).max_model_len)

    def encode(self, row: Row) -> EncodedRow:
        prompt = self.ask.encode(self.training.sample(row).to_infer_request())
        return self.training.compare(row, prompt)

    def said(self, rows: list[Row]) -> list[str]:
        found = check_encoding(self.args, self.template, {"dataset": rows}, self.ask)
        return [f"{f.level}: {f.sentence}".replace("--dataset: ", "") for f in found]


def _start(settings: dict[str, Any]) -> tuple[Any, Any]:
    from swift.arguments import BaseArguments

    apply(Moment.TRAINING)
    others = {**OF_ENGINES, **OF_TRAININGS}
    of_template = {n: v for n, v in settings.items() if n not in others}
    if "truncation_strategy" in settings:
        of_template["truncation_strategy"] = settings["truncation_strategy"]
    own = {"load_args": False, "remove_unused_columns": False}  # as trainings have them
    args = BaseArguments(**{"truncation_strategy": "left", **of_template, **own})
    template = args.get_template()
    template.set_mode("train")
    given = {name: settings.get(name, value) for name, value in others.items()}
    return SimpleNamespace(model_dir=args.model_dir, **given), template
