"""Measure what encoding a training batch costs, in ms-swift and with `shared_media`.

    python scripts/bench/training_batch.py --model DIR [--output FILE]

A batch is P prompts x G samples, each prompt with an image of its own. Both ways run ms-swift's
`encode_sample` over the same samples, one after the other in the same process, in alternating
order; `shared_media` begins each time with an empty cache. Before it is timed, every tensor is
compared. Encoded samples are dropped at once, which spares ms-swift the memory of G copies.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from swift.model import get_processor
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.utils import encode_sample
from swift.template import get_template
from tqdm import tqdm

from swift_grpo_ext.media.shared import shared_media

Context = Callable[[], AbstractContextManager[Any]]
PACKAGES = ("ms-swift", "transformers", "torch", "torchvision", "qwen-vl-utils", "pillow")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a processor")
    parser.add_argument("--model-type", default="qwen2_5_vl", help="of ms-swift, as its template")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[4, 8, 16], metavar="G")
    parser.add_argument("--image-side", type=int, default=1024, help="pixels of a square image")
    parser.add_argument("--repetitions", type=int, default=5, help="of which medians are taken")
    parser.add_argument("--output", type=Path, help="write rows and environment as JSON")
    return parser.parse_args()


def make_image(path: Path, side: int, seed: int) -> None:
    """A PNG of `side` x `side` pixels that compresses like a photograph: soft shapes and noise."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    soft = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = soft + random.integers(-4, 5, soft.shape)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path)


def make_samples(images: list[Path], group_size: int) -> list[GRPOSample]:
    """The samples of a batch in the trainer's order; each owns all it holds, as there."""
    return [
        GRPOSample.from_row(
            {
                "messages": [
                    {"role": "user", "content": "<image>What is in the image?"},
                    {"role": "assistant", "content": "Nothing."},
                ],
                "images": [{"bytes": None, "path": str(image)}],
                "response_token_ids": [[index + 10] * 64],
            }
        )
        for image in images
        for index in range(group_size)
    ]


def seconds_to_encode(template: Any, samples: list[GRPOSample], context: Context) -> float:
    start = time.perf_counter()
    with context():
        for sample in samples:
            encode_sample(sample, template)
    return time.perf_counter() - start


def count_differences(template: Any, samples: list[GRPOSample]) -> int:
    """Number of samples of which anything differs between the two ways."""
    num_different = 0
    with shared_media(template):
        shared = [encode_sample(sample, template) for sample in samples]
    for sample, ours in zip(samples, shared, strict=True):
        theirs = encode_sample(sample, template)
        num_different += theirs.keys() != ours.keys() or not all(
            torch.equal(value, ours[key]) if torch.is_tensor(value) else value == ours[key]
            for key, value in theirs.items()
        )
    return num_different


def measure(template: Any, samples: list[GRPOSample], options: argparse.Namespace) -> list[Any]:
    """Seconds of ms-swift and of `shared_media`, one pair per repetition."""
    pairs = []
    for repetition in tqdm(range(options.repetitions), desc=f"{len(samples)} samples"):
        ways: list[Context] = [nullcontext, functools.partial(shared_media, template)]
        order = (0, 1) if repetition % 2 == 0 else (1, 0)
        seconds = {way: seconds_to_encode(template, samples, ways[way]) for way in order}
        pairs.append((seconds[0], seconds[1]))
    return pairs


def make_row(template: Any, images: list[Path], group_size: int, options: Any) -> dict[str, Any]:
    samples = make_samples(images, group_size)
    if num_different := count_differences(template, samples):
        raise SystemExit(f"{num_different} of {len(samples)} samples differ with shared_media.")
    theirs, ours = zip(*measure(template, samples, options), strict=True)
    return {
        "num_prompts": len(images),
        "group_size": group_size,
        "num_samples": len(samples),
        "ms_swift_seconds": statistics.median(theirs),
        "shared_seconds": statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "ratio_range": [min(map(ratio, ours, theirs)), max(map(ratio, ours, theirs))],
        "one_over_group_size": 1 / group_size,
        "samples_that_differ": num_different,
    }


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| prompts x G | ms-swift, s | shared, s | shared / ms-swift (range) | 1/G | speed-up |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ratio_range"]
        lines.append(
            f"| {row['num_prompts']} x {row['group_size']} | {row['ms_swift_seconds']:.3f} "
            f"| {row['shared_seconds']:.3f} | {row['ratio']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {row['one_over_group_size']:.3f} | {1 / row['ratio']:.1f} |"
        )
    return "\n".join(lines)


def describe_environment(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "torch_num_threads": torch.get_num_threads(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "image_side": options.image_side,
        "repetitions": options.repetitions,
        "model_type": options.model_type,
    }


def main() -> None:
    options = parse_arguments()
    processor = get_processor(str(options.model), model_type=options.model_type)
    template = get_template(processor, template_type=options.model_type)
    template.set_mode("train")
    with tempfile.TemporaryDirectory() as folder:
        images = [Path(folder) / f"{index}.png" for index in range(options.num_prompts)]
        for index, image in enumerate(images):
            make_image(image, options.image_side, seed=index)
        rows = [make_row(template, images, size, options) for size in options.group_sizes]
    print(as_markdown(rows))
    if options.output:
        result = {"rows": rows, "environment": describe_environment(options)}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
