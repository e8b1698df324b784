"""Recomputes the log-probabilities of recorded rollouts from checkpoints, by transformers alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from tests.rig.rounds import read_records

SAME = 2 * 151_936 * 2**-24
"""Nats, 0.018: bound on the difference of two log-probabilities at the same weights in float32.
Each side sums the exponentials of 151,936 logits, and each addition may round by 2^-24 of the sum
(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Where one logit leads by 12,
torch's log_softmax errs by 2.4e-4 with AVX-512, and by 6.0e-4 with AVX2, which sums in fewer lanes.
One training step moves log-probabilities by 1 and more."""

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Stands in the model's text where ms-swift writes `<image>`."""


@torch.no_grad()
def max_logprob_gap(checkpoint: Path, base: Path, records: Sequence[dict[str, Any]]) -> float:
    """Return the largest |log-probability of the rollout - of the checkpoint| over all tokens, in
    nats. An adapter is merged into `base`."""
    processor = AutoProcessor.from_pretrained(base)
    has_adapter = (checkpoint / "adapter_config.json").is_file()
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        base if has_adapter else checkpoint, dtype=torch.float32
    )
    if has_adapter:
        model = PeftModel.from_pretrained(model, checkpoint).merge_and_unload()
    model.eval()
    gaps = []
    for record in records:
        text = processor.apply_chat_template(
            record["messages"], tokenize=False, add_generation_prompt=True
        ).replace("<image>", IMAGE)
        images = [Image.open(path) for path in record["images"]]
        inputs = processor(text=[text], images=images, return_tensors="pt")
        completion_T = torch.tensor(record["token_ids"])
        num_prompt = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], completion_T[None]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:  # since transformers 5
            text_T = torch.zeros_like(completion_T)
            types = torch.cat([inputs["mm_token_type_ids"], text_T[None]], dim=1)
            inputs["mm_token_type_ids"] = types
        logits_TV = model(**inputs).logits[0, num_prompt - 1 : -1]
        logprobs_T = logits_TV.double().log_softmax(-1).gather(-1, completion_T[:, None])[:, 0]
        gaps.append((logprobs_T - torch.tensor(record["logprobs"])).abs().max().item())
    return max(gaps)


def assert_sampled_with_trained_weights(folder: Path, base: Path, num_steps: int) -> None:
    """Assert that the rollout of step s has the log-probabilities of checkpoint s, recomputed with
    transformers alone, and that the last rollout no longer has those of the base model."""
    # The record has the hash of an image that was given as content, and no path to open.
    records = [
        record
        for record in read_records(folder / "record")
        if not any(image.startswith("blake2b:") for image in record["images"])
    ]
    for step in range(num_steps):
        rollout = [r for r in records if r["step"] == step]
        assert len(rollout) >= 8
        assert all(len(r["token_ids"]) == len(r["logprobs"]) > 0 for r in rollout)
        trained = folder / f"run/checkpoint-{step}" if step else base
        assert max_logprob_gap(trained, base, rollout) < SAME
    # Otherwise training moved no weight, and the above proves nothing.
    last_rollout = [r for r in records if r["step"] == num_steps - 1]
    assert max_logprob_gap(base, base, last_rollout) > 5 * SAME
