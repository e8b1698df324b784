"""The trainer: ms-swift's GRPO trainer with our rollouts, and weight updates that work on CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swift.rlhf_trainers import GRPOConfig, GRPOTrainer
from swift.utils import get_logger

from swift_grpo_ext.arguments import ExtFlags
from swift_grpo_ext.logits.logps import LogpsMixin
from swift_grpo_ext.rollout.placeholders import mask_placeholders, placeholder_ids
from swift_grpo_ext.sampling.rounds import RoundNames
from swift_grpo_ext.stops.templates import check_template_stops
from swift_grpo_ext.training.batch import RolloutBatch, switch_off_dropout
from swift_grpo_ext.training.checkpoints import WholeCheckpoints
from swift_grpo_ext.training.prompts import RolloutPrompts
from swift_grpo_ext.training.rollouts import RolloutRounds
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import Pin, verify
from swift_grpo_ext.weights.updates import RolloutWeights

PINS = (
    Pin("swift.rlhf_trainers", "GRPOConfig"),
    Pin("swift.rlhf_trainers", "GRPOTrainer",
        ("model", "ref_model", "reward_model", "reward_funcs", "_args", "kwargs")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_vllm", ("self",)),
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_vllm_engine", ("self",)),
)  # fmt: skip
verify(PINS)

logger = get_logger()


@dataclass
class RolloutGRPOConfig(ExtFlags, GRPOConfig):
    """ms-swift's training arguments for GRPO with our flags."""

    new_special_tokens: list[str] = field(default_factory=list)
    """ms-swift's own flag; servers must have been given the same tokens."""


class RolloutGRPOTrainer(
    LogpsMixin,
    RolloutPrompts,
    RolloutRounds,
    RolloutBatch,
    RolloutWeights,
    WholeCheckpoints,
    GRPOTrainer,
):
    """GRPO with the rollouts of `swift_grpo_ext`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        client = kwargs.get("vllm_client")
        if client is not None and not has_accelerator():
            from swift_grpo_ext.upstream.weight_sync import connect_client

            connect_client(client)
        check_template_stops(kwargs["args"], kwargs["template"])
        self.sample_listeners = []  # callbacks are made in the next line
        super().__init__(*args, **kwargs)
        self._round_names = RoundNames(self._round_clock())
        for model in filter(None, (self.model, self.ref_model)):
            mask_placeholders(model, placeholder_ids(self.template))
        if dropouts := switch_off_dropout(self.model):
            logger.warning(
                f"Dropout is switched off in {dropouts} places of the model (--lora_dropout is "
                "ignored): with it, importance ratios would differ from 1 at equal weights."
            )
        if not self.args.use_vllm and self.args.rollout_seed_mode == "sample":
            logger.warning(
                "--rollout_seed_mode sample and --rollout_group_requests have no effect with "
                "--use_vllm false: transformers draws all samples of a rank with one generator, "
                "which --seed sets at the start."
            )

    # --- engines ---

    def _prepare_vllm(self) -> None:
        super()._prepare_vllm()
        if not self.args.use_vllm:
            from swift_grpo_ext.stops.transformers_engine import RolloutTransformersEngine

            upstream: Any = vars(self)["engine"]
            self.engine = RolloutTransformersEngine(
                self.model, template=upstream.template, max_batch_size=0
            )

    def _prepare_vllm_engine(self) -> Any:
        from swift_grpo_ext.rollout import engine

        engine.install()
        return super()._prepare_vllm_engine()
