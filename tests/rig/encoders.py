"""Encodes rows as rollout and training do, and as `check` does, without a training."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest

from swift_grpo_ext.checks.rows import Row, encoding_error
from swift_grpo_ext.tools.check.encoding import (
    RolloutPrompt,
    add_dummy_model,
    check_encoding,
    difference,
    encode_requests,
    engine_of,
    sample_of,
)
from swift_grpo_ext.upstream.patches import PatchPhase, apply
from swift_grpo_ext.upstream.placeholders import placeholder_texts
from tests.rig.checks import said

NO_TEMPLATES: dict[str, Any] = {
    **{"vllm_max_model_len": None, "vllm_limit_mm_per_prompt": None, "vllm_engine_kwargs": None},
    **{"data_seed": 42, "rollout_mismatch": "stop", "max_completion_length": 512},
    "training_args": SimpleNamespace(generation_batch_size=64, num_generations=8),
}
"""Settings of engines and trainings that a template does not have."""


class BothSides:
    """A training's template and its engine."""

    def __init__(self, **settings: Any) -> None:
        self.args, self.template = _start(settings)
        self.engine = engine_of(self.args, self.template)
        self.ask = partial(encode_requests, self.engine)
        self.placeholder_texts = placeholder_texts(self.template)
        add_dummy_model(self.template)

    def refusal(self, row: Row) -> str | None:
        return encoding_error(self.template, row, self.ask([]).max_model_len)

    def process(self, request: RolloutInferRequest) -> Any:
        """Return the request that vLLM's core would get."""
        [inputs], _ = self.engine._batch_encode([request], strict=True)
        config = self.engine._prepare_generation_config(RequestConfig(max_tokens=1))
        return self.engine._add_request(inputs, config, "1")

    def encode(self, row: Row) -> tuple[RolloutPrompt, str]:
        """Return the engine's prompt, and how the training's prompt differs from it."""
        [prompt] = self.ask([sample_of(self.template, row).to_infer_request()]).prompts
        if isinstance(prompt, str):
            raise ValueError(prompt)
        return prompt, difference(self.template, sample_of(self.template, row), prompt)

    def check(self, rows: list[Row]) -> list[str]:
        found = check_encoding(self.args, self.template, [rows], self.ask)
        return [sentence.replace("--dataset: ", "") for sentence in said(found)]


def _start(settings: dict[str, Any]) -> tuple[Any, Any]:
    from swift.arguments import BaseArguments

    apply(PatchPhase.TRAINING)
    own = {"load_args": False, "remove_unused_columns": False}  # as trainings have them
    of_template = {n: v for n, v in settings.items() if n not in NO_TEMPLATES}
    args = BaseArguments(**{"truncation_strategy": "left", **of_template, **own})
    template = args.get_template()
    template.set_mode("train")
    # vLLM and transformers copy it again and again: ten seconds for a vocabulary of 150,000 words.
    kind, shared = type(template.tokenizer), {"__deepcopy__": lambda tokenizer, _: tokenizer}
    template.tokenizer.__class__ = type(kind.__name__, (kind,), shared)
    others = {name: settings.get(name, value) for name, value in NO_TEMPLATES.items()}
    others["truncation_strategy"] = settings.get("truncation_strategy", "left")
    return SimpleNamespace(model_dir=args.model_dir, **others), template
