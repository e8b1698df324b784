"""Time whole GRPO steps of ms-swift alone and with the plugin, the prompt read once or not.

    python scripts/bench/step.py --output scripts/bench/results/step.json

Real trainings with vLLM in their process, in turns: the same model, rows, G, lengths and rewards.
`timed_steps.py` is their plugin, which writes down the phases of each step. Where a way does not
run, its error is part of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cases import make_photo, make_row
from common import DEFAULT_MODEL, ROOT, Results, ratios, rotated
from server_process import SWIFT, free_port
from timed_steps import PHASES
from tqdm import tqdm
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

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
    add("--model", type=Path, default=DEFAULT_MODEL, help="folder of a Qwen2.5-VL")
    add("--layers", type=int, help="take a random model of MODEL's kind, 640 wide; 16: 195 million")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--image-sides", type=int, nargs="+", default=[0, 256, 1024], help="pixels; 0: text alone")
    add("--num-prompts", type=int, default=4, help="of a step, each with 8 completions")
    add("--max-tokens", type=int, default=16, help="of a completion")
    add("--steps", type=int, default=3, help="of a run; the first warms up")
    add("--repetitions", type=int, default=2, help="runs of each way and case")
    add("--output", type=Path, help="write rows and environment there, as JSON")
    options = parser.parse_args()
    results = Results(options.output)
    with tempfile.TemporaryDirectory() as folder:
        if options.layers:
            tiny, options.model = options.model, Path(folder) / "model"
            write_large_model(tiny, options.model, options.layers)
        for side in options.image_sides:
            results.add(run_case(options, side, Path(folder)))
    print(as_markdown(results.rows))


def run_case(options: argparse.Namespace, side: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each way, with lists of the repetitions' values."""
    rows_file = write_rows(folder / f"{side}", side, options.num_prompts * options.steps)
    case = {"case": f"{side} px" if side else "text", "num_prompts": options.num_prompts}
    rows: dict[str, dict[str, Any]] = {way: {**case, "way": way} for way in options.ways}
    turns = [(r, way) for r in range(options.repetitions) for way in rotated(options.ways, r)]
    for repetition, way in tqdm(turns, desc=case["case"], unit="run", dynamic_ncols=True):
        if "error" in rows[way]:
            continue
        times = folder / f"times-{side}-{way}-{repetition}.jsonl"
        error = run(way, options, rows_file, times)
        if error:
            rows[way]["error"] = error
            continue
        first, *steps = map(json.loads, times.read_text(encoding="utf-8").splitlines())
        measured = {
            "first_step_seconds": first["since_start"],
            "peak_gb": max(step["peak_gb"] for step in steps),
            "seconds": median(sum(step["phases"].values()) for step in steps),
            **{phase: median(step["phases"][phase] for step in steps) for phase in PHASES},
        }
        for name, value in measured.items():
            rows[way].setdefault(name, []).append(round(value, 3))
    return list(rows.values())


def write_large_model(tiny: Path, folder: Path, layers: int) -> None:
    """Write a model of the tiny one's architecture and vocabulary, 640 wide, with random weights:
    195 million with 16 layers, 6 million for each. Processor and tokenizer are the tiny one's."""
    weights = shutil.ignore_patterns("*.safetensors", "manifest.json")
    shutil.copytree(tiny, folder, ignore=weights)
    config = AutoConfig.from_pretrained(tiny)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = 640
    text.intermediate_size = 4 * 640
    # Heads of 32 dimensions, as the tiny model's: its rotary sections stay.
    text.num_attention_heads, text.num_key_value_heads = 20, 4
    text.num_hidden_layers, text.layer_types = layers, ["full_attention"] * layers
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def write_rows(folder: Path, side: int, count: int) -> Path:
    """Write prompts in ms-swift's form, with an image each unless `side` is 0."""
    folder.mkdir()
    lines = []
    for number in range(count):
        row = make_row(0, number) if side == 0 else make_row(side, number)
        if side:
            image = folder / f"{number}.png"
            image.write_bytes(make_photo(side, number))
            row["images"] = [str(image)]
        lines.append(json.dumps(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(way: str, options: argparse.Namespace, rows: Path, times: Path) -> str:
    """Train with a way; return the end of its log where it failed, else ''."""
    on_cpu = not torch.accelerator.is_available()
    own = {name: str(value) for name, (_, value) in KEEP_FREED_MEMORY.items()} | CPU_ENVIRONMENT
    environment = {"STEP_TIMES": str(times), "MASTER_PORT": str(free_port())}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as output:
        argv = swift_argv(way, options, rows, output, on_cpu)
        log = ROOT / "output" / "bench" / f"step-{way}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **(own if on_cpu else {}), **environment}
        with log.open("wb") as f:
            done = subprocess.run(argv, cwd=ROOT, env=env, stdout=f, stderr=subprocess.STDOUT)
    if done.returncode == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    error = "\n".join(lines[-40:])
    print(f"{way} ended with {done.returncode}:\n{error}", file=sys.stderr)
    return next((x for x in reversed(lines) if "Error" in x or "error" in x), error[-500:])


def swift_argv(
    way: str, options: argparse.Namespace, rows: Path, output: str, on_cpu: bool
) -> list[str]:
    plugin = [] if way == "ms-swift" else ["plugins/grpo_ext.py"]
    cpu = ["--use_cpu", "true", "--fp16", "false", "--bf16", "false"] if on_cpu else []
    return [
        *(str(SWIFT), "rlhf", "--rlhf_type", "grpo", "--model", str(options.model.resolve())),
        *("--external_plugins", *plugin, "scripts/bench/timed_steps.py"),
        *("--callbacks", "step_clock", "--reward_funcs", "vowels", "--dataset", str(rows)),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--check_model", "false"),
        *("--tuner_type", "full", "--torch_dtype", "float32" if on_cpu else "bfloat16", *cpu),
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
        *("--output_dir", output, *WAYS[way]),
    ]


# --- the report ---


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians over runs, in seconds; ratios to ms-swift's of the same repetition."""
    names = ("prompts", "way", "step", *PHASES, "of ms-swift's step", "to the first step")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        if "seconds" not in row:
            lines.append(f"| {row['case']} | {row['way']} | does not run: `{row['error']}` |")
            continue
        shown = [f"{median(row[name]):.2f}" for name in ("seconds", *PHASES)]
        theirs = next((r for r in rows if (r["case"], r["way"]) == (row["case"], "ms-swift")), {})
        ratio = f"{median(ratios(row, theirs, 'seconds')):.2f}" if "seconds" in theirs else ""
        first = f"{median(row['first_step_seconds']):.0f}"
        lines.append("| " + " | ".join((row["case"], row["way"], *shown, ratio, first)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
