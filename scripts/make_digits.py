"""Write scikit-learn's handwritten digits as images and as rows for ms-swift.

    python scripts/make_digits.py --output DIR

`load_digits` ships with scikit-learn, so nothing is downloaded. Each of its 1,797 images of 8 x 8
grey levels becomes one 112 x 112 PNG (16 image tokens of Qwen2.5-VL) and goes into exactly one of
three files, with every digit in the same proportion:

    warmstart.jsonl  1,029 rows  teach the tiny model the answer's form and some of the digits
    train.jsonl        512 rows  for GRPO
    heldout.jsonl      256 rows  for evaluation

Image paths are absolute, because ms-swift resolves relative ones against the working directory (or
ROOT_IMAGE_DIR). If you move the folder, make it again. The same seed and --output give the same
bytes.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from tiny_vlm.output_folder import claim, finish
from tqdm import tqdm

HELDOUT_SIZE = 256
TRAIN_SIZE = 512
"""Images for GRPO: 8 batches of 64. The warm start gets the remaining images."""

IMAGE_SIDE = 112
"""Pixels. Divisible by 28, so Qwen2.5-VL's image processor does not resize the image."""

MAX_GREY = 16  # `load_digits` counts the inked pixels of 4 x 4 blocks: 0 to 16
QUESTION = "Which digit is this? Answer as <answer>d</answer>."


def make_digits(output: Path, seed: int) -> dict[str, int]:
    """Write all files into the existing folder `output`; return each part's number of rows."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    folder = output.resolve() / "images"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{index:04d}.png" for index in range(len(digits.images))]
    for path, grey_HW in zip(tqdm(paths, desc="images"), digits.images, strict=True):
        pixels_HW = np.round(grey_HW * (255 / MAX_GREY)).astype(np.uint8)
        small = Image.fromarray(pixels_HW)
        image = small.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC)
        image.convert("RGB").save(path)
    # Split all images into three parts, each stratified by label.
    labels, everything = digits.target, np.arange(len(digits.target))
    rest, heldout = train_test_split(
        everything, test_size=HELDOUT_SIZE, random_state=seed, stratify=labels
    )
    warmstart, train = train_test_split(
        rest, test_size=TRAIN_SIZE, random_state=seed, stratify=labels[rest]
    )
    parts = {"warmstart": warmstart, "train": train, "heldout": heldout}
    for name, indices in parts.items():
        rows = [
            {
                "messages": [{"role": "user", "content": f"<image>{QUESTION}"}],
                "images": [str(paths[index])],
                "solution": str(labels[index]),
            }
            for index in indices
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (output / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {name: len(indices) for name, indices in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split (default: 0)")
    args = parser.parse_args()
    settings = {"seed": args.seed, "image_folder": str(args.output.resolve() / "images")}
    if claim(args.output, settings):
        sizes = make_digits(args.output, args.seed)
        finish(args.output, settings)
        rows = ", ".join(f"{size} {name}" for name, size in sizes.items())
        print(f"{args.output}: {rows} rows")


if __name__ == "__main__":
    main()
