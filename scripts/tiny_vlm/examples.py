"""Rows of the digit task as tensors: one shared prompt, and per row its pixels and its digit.

Shape legend: N rows, P patches of an image, D values of a patch, T prompt tokens, C completion
tokens, L = T + C.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2_5_VLProcessor

IMAGE_MARK = "<image>"


@dataclass(frozen=True, kw_only=True)
class Examples:
    """They hold encoded rows, all on the CPU."""

    prompt_ids_T: Tensor
    """Prompt with one id per image token, the same for every row."""

    answer_ids_10C: Tensor
    """The right completion of each digit, `<|im_end|>` included."""

    digit_position: int
    """The one index in a completion where the ten answers differ."""

    pixels_NPD: Tensor
    """Normalized pixels as the image processor gives them, float32."""

    grid_thw: Tensor
    """Patches of one image along time, height and width, shape (1, 3)."""

    digits_N: Tensor
    """The right digit of each row."""

    def __len__(self) -> int:
        return len(self.digits_N)

    @property
    def digit_ids_10(self) -> Tensor:
        """Return the ids of the ten digits."""
        return self.answer_ids_10C[:, self.digit_position]

    def select(self, rows: slice) -> "Examples":
        """Return the given rows alone."""
        return replace(self, pixels_NPD=self.pixels_NPD[rows], digits_N=self.digits_N[rows])

    def input_ids(self, indices: Tensor) -> Tensor:
        """Return prompt and right completion of the given rows, shape (len(indices), L)."""
        prompts = self.prompt_ids_T.expand(len(indices), -1)
        return torch.cat([prompts, self.answer_ids_10C[self.digits_N[indices]]], dim=1)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that `make_digits.py` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_text(processor: Qwen2_5_VLProcessor, content: str) -> str:
    """Return the chat prompt of a user turn, with an image placeholder for each mark."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(IMAGE_MARK)):
        if index > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )


def encode_rows(rows: list[dict[str, Any]], processor: Qwen2_5_VLProcessor) -> Examples:
    """Encode one-image rows that all ask the same question about images of the same size."""
    [content] = {row["messages"][0]["content"] for row in rows}
    text = prompt_text(processor, content)
    pixels, grids = [], []
    for row in tqdm(rows, desc="encode images", unit="image"):
        with Image.open(row["images"][0]) as image:
            encoded = processor.image_processor(images=[image], return_tensors="pt")
        pixels.append(encoded["pixel_values"])
        grids.append(encoded["image_grid_thw"])
    with Image.open(rows[0]["images"][0]) as image:
        prompt = processor(text=[text], images=[image], return_tensors="pt")
    answers = [processor.tokenizer.encode(f"<answer>{d}</answer><|im_end|>") for d in range(10)]
    answer_ids_10C = torch.tensor(answers)
    [digit_position] = (answer_ids_10C != answer_ids_10C[0]).any(dim=0).nonzero().flatten().tolist()
    return Examples(
        prompt_ids_T=prompt["input_ids"][0],
        answer_ids_10C=answer_ids_10C,
        digit_position=digit_position,
        pixels_NPD=torch.stack(pixels),
        grid_thw=grids[0],
        digits_N=torch.tensor([int(row["solution"]) for row in rows]),
    )
