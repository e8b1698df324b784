"""Trains with TRL's `GRPOTrainer` and vLLM in its process, for `step.py`.

    python scripts/bench/trl_steps.py MODEL ROWS.jsonl SETTINGS

`SETTINGS` is JSON: those of TRL's `GRPOConfig`. Without an accelerator TRL cannot give weights to
vLLM, whose CPU layers hold packed ones: it gets the one repair for it, vLLM's `reload_weights`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from step_clock import StepClock, vowels
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

METHODS = {
    "training_step": "loss",
    "_prepare_inputs": "batch",
    "_generate": "rollout",
    "_calculate_rewards": "scoring",
    "_get_per_token_logps_and_entropies": "log-probabilities",
}


def main(model: Path, rows: Path, settings: dict[str, Any]) -> None:
    if not torch.accelerator.is_available():
        vllm_generation.VLLMGeneration.sync_weights = reload_weights
    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    # TRL leaves the engine's precision to vLLM, which takes 16 bits for models of 32.
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype)
    policy = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype)
    policy.model.visual.requires_grad_(False)  # as ms-swift does
    trainer = GRPOTrainer(
        model=policy,
        processing_class=AutoProcessor.from_pretrained(model, padding_side="left"),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(list(examples(rows))),
    )
    clock = StepClock(trainer, METHODS)
    clock.clock.wrap(trainer.vllm_generation, {"sync_weights": "weights"})
    trainer.add_callback(clock)
    trainer.train()


def examples(rows: Path) -> Iterator[dict[str, Any]]:
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        words = row["messages"][0]["content"].removeprefix("<image>")
        images = [Image.open(path).convert("RGB") for path in row.get("images", ())]
        prompt = [{"role": "user", "content": words}]
        yield {"prompt": prompt, **({"images": images} if images else {})}


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [vowels(completion[0]["content"]) for completion in completions]


def reload_weights(generation: Any) -> None:
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    named = ((name, value.data) for name, value in generation.model.named_parameters())
    runner.reload_weights(weights_iterator=named)
    generation.llm.reset_prefix_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
