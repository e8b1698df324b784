"""Make the tables of docs/support.md: options, families of models, and conversations.

    python scripts/support.py --write                  write the tables from the saved results
    python scripts/support.py --run qwen3_vl --write   train a family first (minutes); `families`
                                                       trains all, `conversations` all pairs (hours)
    python scripts/support.py --not-tried              list options without a test

An option of ms-swift counts as tested if a stack test contains `--name`, or if the preset of all
stack tests sets it. `REASONS` lists the options that are refused, have no effect or belong to other
algorithms. `test_families.py`, `test_router_replay.py` and `test_pairs.py` write their results into
`scripts/bench/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import yaml
from pages import ROOT, SUPPORT, commit, markdown, today, write_into
from swift.arguments import RLHFArguments
from tiny_vlm.families import FAMILIES

# --- options ---

PRESET = ROOT / "examples/digits/grpo.yaml"
NO_TRAININGS = ("check", "distribution", "launch")
"""Stack tests that train nothing with their flags, or give all flags at once."""

PREFLIGHT = "tests/unit/checks/test_preflight.py"
REASONS = {
    "refused": {
        "streaming": f"{PREFLIGHT}::test_arguments",
        "vllm_reasoning_parser": "ms-swift",
        "seq_kd": "ms-swift",
        "cached_dataset": "ms-swift",
        "cached_val_dataset": "ms-swift",
    },
    "refused on CPU; 1 ran on a GPU (docs/benchmarks.md)": {
        "sleep_level": f"{PREFLIGHT}::test_sharding_and_sleep_need_an_accelerator",
    },
    "no effect": {
        "remove_unused_columns": "ms-swift: always false, and says so",
        "dataloader_drop_last": "ms-swift: true",
        **dict.fromkeys(
            (
                *("vllm_pipeline_parallel_size", "vllm_enable_expert_parallel"),
                *("vllm_quantization", "vllm_disable_custom_all_reduce", "vllm_speculative_config"),
            ),
            f"{PREFLIGHT}::test_flags_that_nobody_reads",
        ),
    },
    "not tried, needs": {
        "wandb_log_unique_prompts": "wandb: drops rows of its tables only (grpo_trainer.py:1926)",
    },
    "not GRPO's": dict.fromkeys(
        (
            *("label_smoothing", "rpo_alpha", "ld_alpha", "discopop_tau", "loss_weights"),
            *("cpo_alpha", "simpo_gamma", "desirable_weight", "undesirable_weight"),
            *("center_rewards_coefficient", "kl_coef"),
            *("num_ppo_epochs", "whiten_rewards", "cliprange", "vf_coef", "cliprange_value"),
            *("gamma", "lam", "num_mini_batches", "local_rollout_forward_batch_size"),
            *("num_sample_generations", "response_length", "missing_eos_penalty"),
        ),
        "",
    ),
}
"""Options without a test, by verdict. Each value names the test, or the reason. The last group
belongs to other algorithms, such as DPO, KTO and PPO."""

RL_CLASSES = (
    *("GRPOArguments", "GRPOArgumentsMixin", "RLHFArguments", "RolloutTrainerArgumentsMixin"),
    *("TeacherModelArguments", "VllmArguments", "PPOArguments", "RewardModelArguments"),
)
"""Classes with options of reinforcement learning."""


class Option(NamedTuple):
    """A field of ms-swift's arguments, and the tests that set it."""

    name: str
    is_rl: bool  # declared by one of `RL_CLASSES`
    tests: list[str]  # files that train with it; those with the fewest options come first

    @property
    def verdict(self) -> tuple[str, str]:
        """Return the table's verdict, and the test or reason behind it."""
        for verdict, reasons in REASONS.items():
            if self.name in reasons and (verdict.startswith("refused") or not self.tests):
                return verdict, reasons[self.name]
        return ("tested", self.tests[0]) if self.tests else ("not tried", "")

    @property
    def is_left_out(self) -> bool:
        """Return whether the table leaves it out: neither reinforcement learning nor tested."""
        return not self.is_rl and self.verdict[0] == "not tried"


def options() -> list[Option]:
    """Return all options of `swift rlhf`."""
    owners = {
        name: base.__name__
        for base in RLHFArguments.__mro__  # the last base that declares a field owns it
        for name in vars(base).get("__annotations__", {})
    }
    tests = tests_by_option()
    names = sorted(field.name for field in fields(RLHFArguments) if field.init)
    return [Option(name, owners[name] in RL_CLASSES, tests.get(name, [])) for name in names]


def tests_by_option() -> dict[str, list[str]]:
    """Return the stack tests and their shared code that set each option; the preset comes last."""
    files = [path for tier in ("stack", "extra") for path in ROOT.glob(f"tests/{tier}/test_*.py")]
    files += [*ROOT.glob("tests/rig/*.py"), ROOT / "scripts/tiny_vlm/families.yaml"]
    given: dict[str, list[tuple[int, str]]] = {}
    for path in sorted(files):
        if path.stem.removeprefix("test_") in NO_TRAININGS:
            continue
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]+)", text))
        for name in names:
            given.setdefault(name, []).append((len(names), str(path.relative_to(ROOT))))
    for name in yaml.safe_load(PRESET.read_text(encoding="utf-8")):
        given.setdefault(name, []).append((1000, str(PRESET.relative_to(ROOT))))
    return {name: [where for _, where in sorted(places)] for name, places in given.items()}


def options_table() -> str:
    """Return the options of ms-swift by verdict."""
    known = options()
    names: dict[tuple[str, str], list[str]] = {}
    for option in known:
        verdict, where = option.verdict
        where = f"`{where}`" if verdict == "tested" or "::" in where else where
        if not option.is_left_out:
            names.setdefault((verdict, where), []).append(f"`{option.name}`")
    rows = [(*found, ", ".join(names[found])) for found in sorted(names, reverse=True)]
    return (
        f"{markdown(('', 'where', 'options'), rows)}\n\n{sum(o.is_left_out for o in known)} more "
        "options of `swift rlhf` were not tried (data sets, reporters, other tuners and the like); "
        "`python scripts/support.py --not-tried` lists them."
    )


# --- families ---

RESULTS = ROOT / "scripts/bench/results"
FOUND_AT = RESULTS / "found_at.json"  # date and commit of the newest results
FAMILY_RESULTS = RESULTS / "families.json"

REMOTE_CODE = "not made: its code comes with its checkpoints only"
NOT_MADE = "not made; transformers has its code"
NOT_EXPANDED = "not made: ms-swift's template writes a single token for an image"
OTHER_MODEL = "not made: ms-swift's template is for the code that comes with its checkpoints"
OTHERS = {
    "`minicpmv` to `minicpmv4_5`, `minicpmo`": REMOTE_CODE,
    "`ovis1_6` to `ovis2_5`": REMOTE_CODE,
    "`kimi_vl`": REMOTE_CODE,
    "`molmo`, `molmo2`": REMOTE_CODE,
    "`phi3_vision`": REMOTE_CODE,
    "`internvl_chat`": REMOTE_CODE,
    "`moss_vl`": "not made: its code comes with its checkpoints, for transformers before 5; vLLM "
    "0.32 has none",
    "`qwen4_exp`": "not made; transformers has its code, and vLLM 0.32 has it for GPUs only",
    "`gemma3n`, `llama4`": NOT_MADE,
    "`minicpmv4_7`": NOT_MADE,
    "`llava_llama3_hf`, `llava_next_video_hf`": NOT_EXPANDED,
    "`paddle_ocr`, `hunyuan_ocr`": OTHER_MODEL,
    "`qwen2_audio`": "made, but not loaded: transformers 5.19 saves its text model as "
    "`language_model.model.model`; ms-swift's template, for transformers before 4.49, writes a "
    "single token for a sound",
    "`paddleocr_vl`": "not made: ms-swift's template expects a tensor of image features, and "
    "transformers 5.19 returns a tuple (`templates/baidu.py`, `PaddleOCR1_5Template._post_encode`)",
}
"""ms-swift's model types without a run, and the reason."""


def families_table() -> str:
    """Return the results of each family, and the model types without a run."""
    results = json.loads(FAMILY_RESULTS.read_text(encoding="utf-8"))
    rows = []
    for name, family in FAMILIES.items():
        runs: Mapping[str, Any] = results.get(name, {})
        media = ", ".join(m for m in ("images", "videos", "audio") if getattr(family, m)) or "none"
        media += "; ms-swift fails with videos" if family.videos_fail else ""
        row = [f"`{name}`", family.dtype, media]
        if "whole" not in runs:
            rows.append([*row, *["not run"] * 5])
            continue
        whole = runs["whole"]
        row.append("equal: the rollout's line breaks" if whole["line_breaks"] else "equal")
        row.append(f"{whole['gap']:.0e}")
        lora = runs.get("served")
        row.append(f"equal, {lora['gap']:.0e}" if lora else "not run")
        row[-1] += ", colocated" if lora and lora.get("colocated") else ""
        row.append(f"{whole['stopped']} of {whole['samples']}")
        wrong = runs["shapes"]["wrong"] if family.images else ""
        row.append(f"not {', '.join(wrong)}" if wrong else "equal" * family.images)
        rows.append(row)
    names = ("all weights", "LoRA, 2 ranks, server", "stops", "shapes")
    trained = markdown(("model type", "in", "media", "prompts", *names), rows)
    no_run = markdown(("model type", "no run"), OTHERS.items())
    return f"{found_at('families')}\n\n{trained}\n\n{no_run}"


def found_at(results: str) -> str:
    """Return the line with date and commit of the newest `families` or `conversations`."""
    return f"Newest result: {json.loads(FOUND_AT.read_text(encoding='utf-8'))[results]}."


def experts_table() -> str:
    """Return the effect of replaying a rollout's experts."""
    results = json.loads(FAMILY_RESULTS.read_text(encoding="utf-8"))
    rows = []
    for name, runs in results.items():
        for run, label in (("plain", "no"), ("replayed", "yes"), ("served", "yes, from a server")):
            if found := runs.get("replay", {}).get(run):
                share = f"{found['equal']:.1%}" if "equal" in found else ""
                gaps = (f"{found['mean']:.3f}", f"{found['max']:.2f}")
                rows.append((f"`{name}`", label, share, *gaps))
    head = ("model type", "replayed", "equal choices", "mean gap", "largest gap of a token")
    return f"{found_at('families')}\n\n{markdown(head, rows)}"


# --- conversations ---

CONVERSATION_RESULTS = RESULTS / "conversations.json"


def conversations_table() -> str:
    """Return how many conversations are equal for each leader and engine."""
    results = json.loads(CONVERSATION_RESULTS.read_text("utf-8"))
    rows = [
        (
            *(leader, engine, found["replicas"], str(found["ranks"])),
            f"{found['equal']} of {found['samples']}",
        )
        for leader, engines in results.items()
        for engine, found in engines.items()
    ]
    table = markdown(("led by", "engine", "replicas", "ranks", "equal"), rows)
    return f"{found_at('conversations')}\n\n{table}"


# --- the page ---

TABLES: dict[str, Callable[[], str]] = {
    "options": options_table,
    "families": families_table,
    "experts": experts_table,
    "conversations": conversations_table,
}
"""Functions that make the tables, by the name of their marks on the page."""


def run(name: str) -> int:
    """Run the tests of a family, of all `families` or of `conversations`; return pytest's status.

    The tests write their results into the file that the environment variable `RESULTS` names.
    """
    if name == "conversations":
        results, tests = CONVERSATION_RESULTS, ["tests/extra/test_pairs.py"]
        results.unlink(missing_ok=True)
    else:
        results = FAMILY_RESULTS
        tests = ["tests/extra/test_families.py", "tests/stack/test_router_replay.py"]
        if name != "families":
            # Brackets keep out families with a longer name, such as qwen3_vl_moe for qwen3_vl.
            tests += ["-k", f"[{name}] or [{name}-"]
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    env = {**os.environ, "RESULTS": str(results)}
    status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    dates = json.loads(FOUND_AT.read_text(encoding="utf-8"))
    dates["conversations" if name == "conversations" else "families"] = f"{today()}, {commit()}"
    FOUND_AT.write_text(json.dumps(dates, indent=1) + "\n", encoding="utf-8")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ["families", "conversations", *FAMILIES]
    parser.add_argument("--run", nargs="+", default=[], choices=names, metavar="FAMILY")
    parser.add_argument("--write", action="store_true", help="write into docs/support.md")
    parser.add_argument("--not-tried", action="store_true", help="list options without a test")
    arguments = parser.parse_args()
    if arguments.not_tried:
        print("\n".join(option.name for option in options() if option.is_left_out))
        return 0
    status = max(map(run, arguments.run), default=0)
    for name, table in TABLES.items():
        if arguments.write:
            write_into(SUPPORT, name, table())
        elif not arguments.run:
            print(f"{table()}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
