"""A plugin for tests: writes each rollout's samples and step to the folder `RECORD_DIR`, a variable
of the environment. It is loaded after `plugins/grpo_ext.py`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import swift.template.base
from swift.trainers import TrainerFactory
from transformers import TrainerCallback
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from swift_grpo_ext.media.pictures import media_name
from swift_grpo_ext.training import RolloutGRPOTrainer
from swift_grpo_ext.upstream.rows import read_row


class StepEnds(TrainerCallback):
    """Writes the end of each step by its own clock."""

    def __init__(self, trainer: RecordingTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._write("ends", seconds=time.perf_counter())

    on_step_end = on_train_begin


class RecordingTrainer(RolloutGRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(StepEnds(self))

    def _prepare_vllm_engine(self) -> Any:
        engine = super()._prepare_vllm_engine()
        _count_work(engine, Path(os.environ["RECORD_DIR"]) / "engine.jsonl")
        return engine

    def _postprocess_rollout_outputs(self, samples: Any, outputs: Any) -> Any:
        # With --async_generate the main rank generates and records for all ranks.
        for sample, output in zip(samples, outputs, strict=True) if outputs else ():
            choice = output.response.choices[0]
            self._write(
                "rank",
                name=sample.request_id,
                infos=output.rollout_infos,
                weights=self._last_loaded_step,
                step=self.state.global_step,
                messages=sample.messages,
                **{f"{kind}s": _names(sample, kind) for kind in ("image", "video", "audio")},
                solution=sample.extra.get("solution"),
                token_ids=choice.token_ids,
                turns=output.response_token_ids,
                logprobs=_logprobs(output),
            )
        return super()._postprocess_rollout_outputs(samples, outputs)

    def _postprocess_batch(self, samples: Any, batches: Any) -> None:
        super()._postprocess_batch(samples, batches)
        for sample in samples:
            advantage = float(sample.advantages)
            self._write("advantages", name=sample.request_id, advantage=advantage)

    def _write(self, kind: str, **record: Any) -> None:
        path = Path(os.environ["RECORD_DIR"]) / f"{kind}{self.accelerator.process_index}.jsonl"
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(record, ensure_ascii=False) + "\n")


def _count_work(engine: Any, path: Path) -> None:
    """Record each request to vLLM and the images that its vision tower encodes; also, of rollout
    and training, each decoded image and each call of Qwen-VL's processor."""
    add_request, model = engine.engine.add_request, engine.inner_model
    embed_multimodal = getattr(model, "embed_multimodal", None)  # text models have none

    def write(record: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")

    def counted_request(name: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        images = prompt.get("multi_modal_data", {}).get("image", [])
        num_images = len(images) if isinstance(images, list) else 1
        write({"samples": params.n, "images": num_images})
        return add_request(name, prompt, params, *args, **kwargs)

    def counted_embed(**kwargs: Any) -> Any:
        write({"encoded": len(kwargs.get("image_grid_thw", ()))})
        return embed_multimodal(**kwargs)

    def count(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            write({label: 1})
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    count(swift.template.base, "load_image", "decoded")
    count(Qwen2VLImageProcessor, "preprocess", "processed")
    engine.engine.add_request = counted_request
    if embed_multimodal is not None:
        model.embed_multimodal = counted_embed


def _names(sample: Any, kind: Any) -> list[str]:
    return [media_name(media.value) for media in read_row(sample).shown_as(kind)]


def _logprobs(output: Any) -> list[float]:
    """Return the log-probabilities of our flat form, or of ms-swift's dictionary for each token."""
    if output.rollout_logprobs:
        return [p for turn in output.rollout_logprobs for p in turn]
    tokens = output.response.choices[0].logprobs or {"content": []}  # none without vLLM
    return [token["logprob"] for token in tokens["content"]]


TrainerFactory.TRAINER_MAPPING["grpo"] = "recorder.RecordingTrainer"
