"""A plugin for tests: what the first round of a training says of its family of models.

Loaded after `recorder.py`. Writes a line for each rank into `family.jsonl` in
`RECORD_DIR`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from recorder import RecordingTrainer
from swift.rlhf_trainers.utils import encode_sample
from swift.trainers import TrainerFactory

from swift_grpo_ext.logits.shim import base_model, output_embedding
from swift_grpo_ext.media.encode import before_collating
from swift_grpo_ext.rollout.placeholders import placeholder_ids
from swift_grpo_ext.training import trainer as trainer_module
from swift_grpo_ext.training.batch import rollouts_own_prompts
from swift_grpo_ext.upstream.encoding import only_sampled_tokens


class FamilyTrainer(RecordingTrainer):
    _has_written = False

    def _prepare_batch_inputs(self, samples: Any) -> Any:
        if self._has_written:
            return super()._prepare_batch_inputs(samples)
        self._has_written = True
        of_rollout, end_round = Counter(self._media.counts), self._media.end_round
        media: Counter[str] = Counter()

        def counted() -> dict[str, float]:
            media.update(self._media.counts - of_rollout)
            return end_round()

        self._media.end_round = counted
        head = output_embedding(base_model(self.model))
        ids = torch.tensor(placeholder_ids(self.template), dtype=torch.long)
        wanted: list[torch.Tensor] = []

        def look(module: Any, args: Any) -> None:
            logits = torch.nn.functional.linear(args[0].detach(), module.weight, module.bias)
            wanted.append(torch.isin(logits.argmax(-1), ids).float().flatten())

        encoded: dict[int, dict[str, Any]] = {}

        @contextmanager
        def noted(template: Any, samples: Any) -> Iterator[None]:
            def note(batch: list[dict[str, Any]]) -> None:
                encoded.update((id(one), dict(one)) for one in batch)  # collating takes entries out

            with before_collating(template, note), rollouts_own_prompts(template, samples):
                yield

        hook = head.register_forward_pre_hook(look)
        trainer_module.rollouts_own_prompts = noted
        try:
            batches = super()._prepare_batch_inputs(samples)
        finally:
            hook.remove()
            self._media.end_round = end_round
            trainer_module.rollouts_own_prompts = rollouts_own_prompts
        record = {
            "ways": self._logps.ways,
            "media_asked": media.total(),
            "media_made": media.total() - media["reused"],
            "media_equal": all(self._is_own(s, encoded[id(s.encoded)]) for s in samples),
            "placeholders": ids.tolist(),
            "wanted": float(torch.cat(wanted).mean()),
        }
        with (Path(os.environ["RECORD_DIR"]) / "family.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        return batches

    def _is_own(self, sample: Any, encoded: dict[str, Any]) -> bool:
        """Whether each tensor that was collated is, bit for bit, that of the sample alone."""
        template = self.template
        with self._template_context(template), only_sampled_tokens(template, [sample]):
            own = encode_sample(sample, template)
        tensors = {k: v for k, v in own.items() if isinstance(v, torch.Tensor)}
        assert tensors or not (sample.images or sample.videos or sample.audios)
        return all(torch.equal(tensor, encoded[name]) for name, tensor in tensors.items())


TrainerFactory.TRAINER_MAPPING["grpo"] = "family_recorder.FamilyTrainer"
