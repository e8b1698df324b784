"""Measure the parts of whole GRPO steps, of ms-swift alone and with the plugin.

    python scripts/bench/step.py --model .assets/tiny_vlm --output step.json
    python scripts/bench/step.py --size 3b --output 3b.json      on a machine with a GPU
    python scripts/bench/step.py --family qwen3_5 --size 2b --output 2b.json

Real trainings with vLLM in their process run in turns, with the same model, rows, group size,
lengths and rewards. The plugin `timed_steps.py` saves the log's `time/*`, which are the columns.
The first two steps of a run are left out: they touch memory for the first time, and the first batch
is computed both ways. Weights are random unless `--model` names a folder, and the vision tower is
frozen. Without a GPU, Qwen3.5 uses bfloat16, because vLLM's CPU kernel of gated delta nets requires
it; the other families use float32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import TEMPERATURE, case_name, make_photo, make_row
from common import ROOT, Results, as_markdown, free_port, make_rows
from swift.model import get_processor
from swift.template import get_template
from tiny_vlm.families import FAMILIES, make_family, sized

from scripts.bench.measure import Measures, Turn, interleave
from swift_grpo_ext.cpu.settings import CPU_ENVIRONMENT, KEEP_FREED_MEMORY
from swift_grpo_ext.timing.step_clock import PARTS, ROLLOUT_PARTS

WAYS: dict[str, list[str]] = {
    "ms-swift": [],
    "ours": [],
    "ours, prompts again": ["--logps_shared_prompt", "false"],
}
"""Additional arguments of each way."""

FAMILIES_OF_SIZES = ("qwen2_5_vl", "qwen3_5", "gemma3")
SMALL, LARGE = ("195m",), ("2b", "3b", "7b")
"""Large sizes have the widths of published models and need a GPU."""

GROUP_SIZE = 8
WARM_UP = 2  # steps of a run that are left out


class Device(NamedTuple):
    """Settings that depend on the device."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    image_sides: tuple[int, ...]
    max_tokens: tuple[int, ...]
    repetitions: int


CPU = Device(
    argv=(
        *("--use_cpu", "true", "--fp16", "false", "--bf16", "false"),
        *("--gradient_checkpointing", "false", "--vllm_enforce_eager", "true"),
        *("--vllm_max_model_len", "2048"),
        *("--vllm_engine_kwargs", f'{{"kv_cache_memory_bytes": {2**28}}}'),
    ),
    environment=CPU_ENVIRONMENT | {n: str(value) for n, (_, value) in KEEP_FREED_MEMORY.items()},
    image_sides=(0, 256, 1024),
    max_tokens=(16,),
    repetitions=2,
)
GPU = Device(
    argv=(
        *("--torch_dtype", "bfloat16", "--attn_impl", "sdpa", "--gradient_checkpointing", "true"),
        *("--sleep_level", "1", "--vllm_gpu_memory_utilization", "0.3"),
        *("--vllm_max_model_len", "4096"),
    ),
    environment={},
    image_sides=(1024,),
    max_tokens=(256, 1024),
    repetitions=1,
)


def graphs(num_samples: int) -> list[str]:
    """Return arguments for CUDA graphs without compilation, for up to `num_samples` samples."""
    config = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(range(8, num_samples + 1, 8)),
    }
    return ["--vllm_engine_kwargs", json.dumps({"compilation_config": config})]


def main() -> None:
    device = GPU if torch.cuda.is_available() else CPU
    options = parse(device)
    results = Results(options.output)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = make_random(options, Path(folder) / "model")
        cases = product(options.image_sides, options.max_tokens)
        for number, (side, max_tokens) in enumerate(cases):
            results.add(run_case(options, device, side, max_tokens, Path(folder) / f"{number}"))
    names = ("case", "prompt_tokens", "max_tokens", "way")
    parts = (PARTS[0], *ROLLOUT_PARTS, *PARTS[1:])
    print(as_markdown(results.rows, names, ("step", *parts, "peak GB", "to the first step")))


def parse(device: Device, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--family", choices=FAMILIES_OF_SIZES, default="qwen2_5_vl")
    add("--model", type=Path, help="folder of a model (default: random weights)")
    add("--size", choices=SMALL + LARGE, help="size of a random model (default: tiny)")
    add("--layers", type=int, help="instead of the size's own number (195m: 16, Gemma3 18)")
    add("--eager", action="store_true", help="decode without CUDA graphs")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--image-sides", type=int, nargs="+", default=device.image_sides, help="0: text only")
    add("--prompt-tokens", type=int, default=0, help="lengthen shorter prompts with text")
    add("--num-prompts", type=int, default=4, help="prompts of a step, with 8 completions each")
    add("--max-tokens", type=int, nargs="+", default=device.max_tokens, help="of a completion")
    add("--steps", type=int, default=4, help="steps of a run; the first two warm up")
    add("--repetitions", type=int, default=device.repetitions, help="runs of each way and case")
    add("--output", type=Path, help="write rows and environment there, as JSON")
    add("swift", nargs="*", help="additional arguments for `swift rlhf`, after --")
    options = parser.parse_args(argv)
    if options.layers:
        options.size = options.size or "195m"
    if options.model and options.size:
        parser.error("--model has its own size: remove --size and --layers")
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: expected at least {WARM_UP + 1}; two warm up")
    if device is CPU and options.size in LARGE:
        parser.error(f"--size {options.size}: torch finds no GPU. Use --size 195m")
    if options.size and options.size not in (sizes := FAMILIES[options.family].sizes):
        known = [size for size in SMALL + LARGE if size in sizes]
        parser.error(f"--size {options.size}: {options.family} has {' and '.join(known)}")
    return options


def make_random(options: argparse.Namespace, folder: Path) -> Path:
    """Write a random model. A separate process frees the GPU's memory when it ends."""
    family = FAMILIES[options.family]
    if options.size:
        family = sized(options.family, options.size, options.layers)
    folder.mkdir()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        device = "cuda" if options.size in LARGE else ""
        process.submit(make_family, family, folder, 0, device).result()
    return folder


def run_case(
    options: argparse.Namespace, device: Device, side: int, max_tokens: int, folder: Path
) -> list[dict[str, Any]]:
    """Return a row for each way, with lists of the repetitions' values."""
    rows_file, lengths = write_rows(folder, side, options)
    case = {"case": case_name(side), "num_prompts": options.num_prompts, "max_tokens": max_tokens}
    case |= {"family": options.family, "size": options.size, "prompt_tokens": round(fmean(lengths))}
    argv = {way: swift_argv(way, options, device, rows_file, max_tokens) for way in options.ways}
    turns: dict[str, Turn] = {w: partial(run, w, argv[w], device.environment) for w in argv}
    label = f"{case['case']}, {max_tokens} new tokens"
    return make_rows(case, interleave(turns, options.repetitions, label, warms_up=False))


def write_rows(folder: Path, side: int, options: argparse.Namespace) -> tuple[Path, list[int]]:
    """Write the rows of a run; return their file and the prompts' lengths in tokens.

    Each row has an image unless `side` is 0.
    """
    folder.mkdir()
    family = FAMILIES[options.family]
    processor = get_processor(str(options.model), model_type=family.swift_argv[1])
    template = get_template(processor, template_type=family.template)

    def num_tokens(row: dict[str, Any]) -> int:
        return len(template.encode(deepcopy(row))["input_ids"])

    lines, lengths = [], []
    for number in range(options.num_prompts * options.steps):
        row = make_row(side, number)
        if side:
            image = folder / f"{number}.jpg"
            image.write_bytes(make_photo(side, number, "JPEG"))
            row["images"] = [str(image)]
        missing = max(options.prompt_tokens - num_tokens(row), 0)
        # Add about `missing` tokens of digits, different for each prompt.
        digits = np.random.default_rng(number).integers(0, 10, missing)
        ids = template.tokenizer.encode(f" {''.join(map(str, digits))}")
        row["messages"][0]["content"] += template.tokenizer.decode(ids[:missing])
        lines.append(json.dumps(row))
        lengths.append(num_tokens(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, lengths


def run(way: str, argv: Sequence[str], environment: Mapping[str, str], _: int) -> Measures:
    """Train, and return times and peak memory; exit with the end of the log on failure."""
    log = ROOT / "output" / "bench" / f"step-{way}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as output:
        times = Path(output) / "times.jsonl"
        own = {"STEP_TIMES": str(times), "MASTER_PORT": str(free_port())}
        own["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        argv = [*argv, "--output_dir", output]
        with log.open("wb") as f:
            done = subprocess.run(
                argv, cwd=ROOT, env={**os.environ, **environment, **own}, stdout=f, stderr=f
            )
        if done.returncode:
            end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemExit(f"{way} ended with exit status {done.returncode}:\n{end}")
        steps = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    timed = [step["times"] for step in steps[WARM_UP:]]
    return {
        "step": median(sum(times[part] for part in PARTS) for times in timed),
        **{part: median(times[part] for times in timed) for part in (*PARTS, *ROLLOUT_PARTS)},
        "peak GB": max(step["peak_gb"] for step in steps[WARM_UP:]),
        "to the first step": steps[0]["since_start"],
    }


def swift_argv(
    way: str, options: argparse.Namespace, device: Device, rows: Path, max_tokens: int
) -> list[str]:
    """Return the command line of a training, without its output folder."""
    plugin = [] if way == "ms-swift" else ["plugins/grpo_ext.py"]
    decoding: list[str] = []
    if device is GPU:
        num_samples = GROUP_SIZE * options.num_prompts
        decoding = ["--vllm_enforce_eager", "true"] if options.eager else graphs(num_samples)
    return [
        *(sys.executable, "-m", "swift.cli.rlhf", "--rlhf_type", "grpo"),
        *("--model", str(options.model.resolve())),
        *("--external_plugins", *plugin, "scripts/bench/timed_steps.py"),
        *("--callbacks", "step_times", "--reward_funcs", "vowels", "--dataset", str(rows)),
        *(*FAMILIES[options.family].swift_argv, "--check_model", "false", "--tuner_type", "full"),
        *("--use_vllm", "true", "--vllm_mode", "colocate", *device.argv, *decoding),
        *("--num_generations", str(GROUP_SIZE), "--temperature", str(TEMPERATURE), "--beta", "0"),
        *("--max_completion_length", str(max_tokens), "--learning_rate", "1e-6"),
        *("--per_device_train_batch_size", str(GROUP_SIZE), "--max_steps", str(options.steps)),
        *("--gradient_accumulation_steps", str(options.num_prompts), "--logging_steps", "1"),
        *("--lazy_tokenize", "true", "--save_strategy", "no", "--eval_strategy", "no"),
        *("--split_dataset_ratio", "0", "--dataset_num_proc", "1", "--dataloader_num_workers", "0"),
        *("--report_to", "none", *WAYS[way], *options.swift),
    ]


if __name__ == "__main__":
    main()
