"""Time whole GRPO steps of ms-swift alone and with the plugin, the prompt read once or not.

    python scripts/bench/step.py --output scripts/bench/results/step.json

Real trainings with vLLM in their process, in turns: the same model, rows, G, lengths and rewards.
`timed_steps.py` is their plugin, which writes down the phases of each step. Qwen3.5 computes in
bfloat16, which vLLM's CPU kernel of gated delta nets asks for, and the other families in float32
(bfloat16 where there is a GPU).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from cases import make_photo, make_row, name_of
from common import (
    ROOT,
    SWIFT,
    Results,
    as_markdown,
    free_port,
    make_rows,
)
from swift.model import get_processor
from swift.template import get_template
from timed_steps import PHASES
from tiny_vlm.families import FAMILIES, make_family, sized

from scripts.bench.measure import Measures, Turn, interleave
from swift_grpo_ext.upstream.cpu import CPU_ENVIRONMENT, KEEP_FREED_MEMORY

WAYS: dict[str, list[str]] = {
    "ms-swift": [],
    "ours": [],
    "ours, prompt once": ["--logps_shared_prompt", "true"],
}
"""Further arguments of each way."""

GROUP_SIZE = 8
TEMPERATURE = 2.0
"""So hot that hardly a completion of the tiny model ends before its length limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--family", choices=("qwen2_5_vl", "qwen3_5", "gemma3"), default="qwen2_5_vl")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="its folder; else one with random weights")
    model.add_argument("--layers", type=int, help="of a wide one: 195 million with 16 (Gemma3: 18)")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--image-sides", type=int, nargs="+", default=[0, 256, 1024], help="pixels; 0: text alone")
    add("--prompt-tokens", type=int, default=0, help="fill shorter prompts up with text")
    add("--num-prompts", type=int, default=4, help="of a step, each with 8 completions")
    add("--max-tokens", type=int, default=16, help="of a completion")
    add("--steps", type=int, default=3, help="of a run; the first warms up")
    add("--repetitions", type=int, default=2, help="runs of each way and case")
    add("--output", type=Path, help="write rows and environment there, as JSON")
    add("swift", nargs="*", help="further arguments for `swift rlhf`, after --")
    options = parser.parse_args()
    results = Results(options.output)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model, layers = Path(folder) / "model", options.layers
            options.model.mkdir()
            family = sized(options.family, "195m", layers) if layers else FAMILIES[options.family]
            make_family(family, options.model, seed=0)
        for side in options.image_sides:
            results.add(run_case(options, side, Path(folder)))
    names = ("case", "prompt_tokens", "way")
    print(as_markdown(results.rows, names, ("step", *PHASES, "peak GB", "to the first step")))


def run_case(options: argparse.Namespace, side: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each way, with lists of the repetitions' values."""
    rows_file, lengths = write_rows(folder / f"{side}", side, options)
    case = {"case": name_of(side), "num_prompts": options.num_prompts}
    case |= {"family": options.family, "prompt_tokens": round(fmean(lengths))}
    turns: dict[str, Turn] = {way: partial(run, way, options, rows_file) for way in options.ways}
    label = str(case["case"])
    return make_rows(case, interleave(turns, options.repetitions, label, warms_up=False))


def write_rows(folder: Path, side: int, options: argparse.Namespace) -> tuple[Path, list[int]]:
    """Write the prompts of a run in ms-swift's form, with an image each unless `side` is 0; return
    their lengths too, in tokens."""
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
            image = folder / f"{number}.png"
            image.write_bytes(make_photo(side, number))
            row["images"] = [str(image)]
        missing = max(options.prompt_tokens - num_tokens(row), 0)
        # Digits that no other prompt has, of about so many tokens.
        digits = np.random.default_rng(number).integers(0, 10, missing)
        ids = template.tokenizer.encode(f" {''.join(map(str, digits))}")
        row["messages"][0]["content"] += template.tokenizer.decode(ids[:missing])
        lines.append(json.dumps(row))
        lengths.append(num_tokens(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, lengths


def run(way: str, options: argparse.Namespace, rows: Path, _: int) -> Measures:
    """Train with a way, and return what its steps took.

    Raises:
        SystemExit: the training failed; with the end of its log.
    """
    on_cpu = not torch.accelerator.is_available()
    own = {name: str(value) for name, (_, value) in KEEP_FREED_MEMORY.items()} | CPU_ENVIRONMENT
    log = ROOT / "output" / "bench" / f"step-{way}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as output:
        times = Path(output) / "times.jsonl"
        environment = {"STEP_TIMES": str(times), "MASTER_PORT": str(free_port())}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, **(own if on_cpu else {}), **environment}
        argv = swift_argv(way, options, rows, output, on_cpu)
        with log.open("wb") as f:
            done = subprocess.run(argv, cwd=ROOT, env=env, stdout=f, stderr=subprocess.STDOUT)
        if done.returncode:
            end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemExit(f"{way} ended with {done.returncode}:\n{end}")
        first, *steps = map(json.loads, times.read_text(encoding="utf-8").splitlines())
    return {
        "step": median(sum(step["phases"].values()) for step in steps),
        **{phase: median(step["phases"][phase] for step in steps) for phase in PHASES},
        "peak GB": max(step["peak_gb"] for step in steps),
        "to the first step": first["since_start"],
    }


def swift_argv(
    way: str, options: argparse.Namespace, rows: Path, output: str, on_cpu: bool
) -> list[str]:
    plugin = [] if way == "ms-swift" else ["plugins/grpo_ext.py"]
    cpu = ["--use_cpu", "true", "--fp16", "false", "--bf16", "false"] if on_cpu else []
    return [
        *(str(SWIFT), "rlhf", "--rlhf_type", "grpo", "--model", str(options.model.resolve())),
        *("--external_plugins", *plugin, "scripts/bench/timed_steps.py"),
        *("--callbacks", "step_clock", "--reward_funcs", "vowels", "--dataset", str(rows)),
        *(*FAMILIES[options.family].swift_argv, "--check_model", "false", "--tuner_type", "full"),
        *(cpu if on_cpu else ("--torch_dtype", "bfloat16")),
        *("--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_len", "2048"),
        *("--vllm_enforce_eager", "true"),
        *("--vllm_engine_kwargs", f'{{"kv_cache_memory_bytes": {2**28}}}'),
        *("--num_generations", str(GROUP_SIZE), "--temperature", str(TEMPERATURE), "--beta", "0"),
        *("--max_completion_length", str(options.max_tokens), "--learning_rate", "1e-6"),
        *("--per_device_train_batch_size", str(GROUP_SIZE), "--max_steps", str(options.steps)),
        *("--gradient_accumulation_steps", str(options.num_prompts), "--logging_steps", "1"),
        *("--gradient_checkpointing", "false", "--lazy_tokenize", "true"),
        *("--save_strategy", "no", "--eval_strategy", "no", "--split_dataset_ratio", "0"),
        *("--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--report_to", "none"),
        *("--output_dir", output, *WAYS[way], *options.swift),
    ]


if __name__ == "__main__":
    main()
