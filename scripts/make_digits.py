"""Write scikit-learn's handwritten digits as images and as rows that ms-swift trains on.

    python scripts/make_digits.py --output DIR

`load_digits` ships with scikit-learn, so nothing is downloaded. Each of its 1,797 images of 8 x 8
grey levels becomes one 112 x 112 PNG (16 image tokens of Qwen2.5-VL) and goes into exactly one of
three files, with every digit in the same proportion:

    warmstart.jsonl  1,029 rows  teach the tiny model the answer's form and some of the digits
    train.jsonl        512 rows  GRPO
    heldout.jsonl      256 rows  never trained on

`load.jsonl` is for load tests, not for learning: 24 rows of one to four 1024 x 1024 images each
(1,369 image tokens apiece), drawn from the digits of the training part.

Image paths are absolute, because ms-swift resolves relative ones against the working directory
(or ROOT_IMAGE_DIR). In a folder that was moved or copied, this script mends the paths in place. The
same seed and the same --output give the same bytes.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tiny_vlm.output_folder import claim, finish, read_manifest
from tqdm import tqdm

HELDOUT_SIZE = 256
TRAIN_SIZE = 512
"""Images for GRPO: 8 batches of 64. What the held-out part leaves over goes to the warm start."""

IMAGE_SIDE = 112
"""Pixels. Divisible by 28, so that Qwen2.5-VL's image processor leaves the image as it is."""

LOAD_IMAGE_SIDE = 1024
LOAD_NUM_IMAGES = (1, 2, 1, 3, 1, 4) * 4
"""Number of images of each row of `load.jsonl`: 24 rows, 48 images."""

MAX_GREY = 16
"""`load_digits` counts the inked pixels of 4 x 4 blocks: 0 to 16."""

SINGLE_QUESTION = "Which digit is this? Answer as <answer>d</answer>."


def split_indices(labels: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Indices into `labels` of the parts `warmstart`, `train` and `heldout`, in shuffled order.

    The parts are disjoint, together they are everything, and each is stratified by label.
    """
    from sklearn.model_selection import train_test_split

    everything = np.arange(len(labels))
    rest, heldout = train_test_split(
        everything, test_size=HELDOUT_SIZE, random_state=seed, stratify=labels
    )
    warmstart, train = train_test_split(
        rest, test_size=TRAIN_SIZE, random_state=seed, stratify=labels[rest]
    )
    return {"warmstart": warmstart, "train": train, "heldout": heldout}


def draw(grey_HW: np.ndarray, side: int) -> Image.Image:
    """An RGB image of `side` x `side` pixels, smoothly upscaled from grey levels 0 to 16."""
    pixels_HW = np.round(grey_HW * (255 / MAX_GREY)).astype(np.uint8)
    return Image.fromarray(pixels_HW).resize((side, side), Image.Resampling.BICUBIC).convert("RGB")


def make_row(image_paths: Sequence[Path], digits: Sequence[int]) -> dict[str, Any]:
    """One row in ms-swift's format: the question about the images, and the digits in `solution`."""
    assert len(image_paths) == len(digits) > 0
    if len(digits) == 1:
        question = SINGLE_QUESTION
    else:
        pattern = " ".join("d" * len(digits))
        question = f"Which digits are these, in order? Answer as <answer>{pattern}</answer>."
    return {
        "messages": [{"role": "user", "content": "<image>" * len(digits) + question}],
        "images": [str(path) for path in image_paths],
        "solution": " ".join(str(digit) for digit in digits),
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_images(images_NHW: np.ndarray, folder: Path) -> list[Path]:
    """Write every image, named after its index in `images_NHW`; the paths in that order."""
    paths = [folder / f"{index:04d}.png" for index in range(len(images_NHW))]
    for path, grey_HW in tqdm(
        zip(paths, images_NHW, strict=True), total=len(paths), desc="images", unit="image"
    ):
        draw(grey_HW, IMAGE_SIDE).save(path)
    return paths


def write_load_rows(
    output: Path, images_NHW: np.ndarray, labels_N: np.ndarray, order: np.ndarray
) -> None:
    """Write `load.jsonl` and its large images: the first digits of `order`, each used once."""
    rows = []
    remaining = iter(order)
    for row_index, num_images in enumerate(tqdm(LOAD_NUM_IMAGES, desc="load test", unit="row")):
        indices = [int(next(remaining)) for _ in range(num_images)]
        paths = []
        for position, index in enumerate(indices):
            path = output / "images" / f"load_{row_index:02d}_{position}.png"
            # Level 1 writes in a third of the default's time; decoding costs the same.
            draw(images_NHW[index], LOAD_IMAGE_SIDE).save(path, compress_level=1)
            paths.append(path)
        rows.append(make_row(paths, [int(labels_N[index]) for index in indices]))
    write_rows(output / "load.jsonl", rows)


def make_digits(output: Path, seed: int) -> dict[str, int]:
    """Write all files into the existing folder `output`; the number of rows of each part."""
    from sklearn.datasets import load_digits

    output = output.resolve()
    digits = load_digits()
    (output / "images").mkdir(exist_ok=True)
    paths = write_images(digits.images, output / "images")
    parts = split_indices(digits.target, seed)
    for name, indices in parts.items():
        rows = [make_row([paths[index]], [int(digits.target[index])]) for index in indices]
        write_rows(output / f"{name}.jsonl", rows)
    write_load_rows(output, digits.images, digits.target, parts["train"])
    return {name: len(indices) for name, indices in parts.items()}


def mend_paths(output: Path) -> bool:
    """Point the rows of a complete folder at its own images, if it was made somewhere else."""
    manifest = read_manifest(output)
    if manifest is None or not manifest["complete"]:
        return False
    was, now = manifest["settings"].get("image_folder"), str(output.resolve() / "images")
    if was in (None, now):
        return False
    for path in sorted(output.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row["images"] = [str(Path(now) / Path(image).name) for image in row["images"]]
        write_rows(path, rows)
    finish(output, {**manifest["settings"], "image_folder": now})
    return True


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="decides the split (default: 0)")
    parser.add_argument("--force", action="store_true", help="build again, whatever is there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    settings = {"seed": args.seed, "image_folder": str(args.output.resolve() / "images")}
    try:
        if mend_paths(args.output):
            print(f"{args.output} was moved: its rows name the images where they are now")
        if not claim(args.output, settings, force=args.force):
            print(f"{args.output} is complete already; nothing to do")
            return
    except ValueError as error:
        raise SystemExit(f"make_digits: {error}") from error
    sizes = make_digits(args.output, args.seed)
    finish(args.output, settings)
    summary = ", ".join(f"{size} {name}" for name, size in sizes.items())
    print(f"{args.output}: {summary} rows, {len(LOAD_NUM_IMAGES)} load-test rows")


if __name__ == "__main__":
    main()
