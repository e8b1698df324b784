"""Makes the tables of docs/support.md: options, families of models, and conversations.

    python scripts/support.py --write                  the tables, from what was found
    python scripts/support.py --run qwen3_vl --write   trains a family first (minutes); `families`:
                                                       all; `conversations`: all pairs (hours)
    python scripts/support.py --not-tried              options that nobody tried

What trains with an option of ms-swift's is found in the stack tests' own text, where flags stand as
`--name`, and in the preset that all of them start from. What is refused, has no effect, or belongs
to other algorithms stands below, with its test or reason. What trainings found, the stack tests
`test_families.py`, `test_router_replay.py` and `test_pairs.py` note in `scripts/bench/results`.
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
from tiny_vlm.families import FAMILIES, Family

# --- options ---

PRESET = ROOT / "examples/digits/grpo.yaml"
NO_TRAININGS = ("check", "refusals", "preset_arguments", "distribution", "launch")
"""Stack tests that give flags to something else, or to all at once."""

PREFLIGHT = "tests/checks/test_preflight.py"
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
"""Lists by verdict the options that no test trains with: who refuses them, the test that holds it,
or what ms-swift's GRPO puts in their place. The last ones are DPO's, KTO's, PPO's and the like."""

OWN = (
    *("GRPOArguments", "GRPOArgumentsMixin", "RLHFArguments", "RolloutTrainerArgumentsMixin"),
    *("TeacherModelArguments", "VllmArguments", "PPOArguments", "RewardModelArguments"),
)
"""Classes whose options are those of reinforcement learning."""


class Option(NamedTuple):
    """An option is a field of ms-swift's arguments, and what is known of it with the plugin."""

    name: str
    is_own: bool  # it is true where one of the classes of `OWN` declares the option
    tests: list[str]  # files that train with it, those that give the fewest options first

    @property
    def verdict(self) -> tuple[str, str]:
        """Return what the table says of it, and where that is to be seen."""
        for verdict, reasons in REASONS.items():
            if self.name in reasons and (verdict.startswith("refused") or not self.tests):
                return verdict, reasons[self.name]
        return ("tested", self.tests[0]) if self.tests else ("not tried", "")

    @property
    def is_left(self) -> bool:
        """Return whether it is one of the others' that nobody tried."""
        return not self.is_own and self.verdict[0] == "not tried"


def options() -> list[Option]:
    """Return all options of `swift rlhf`."""
    owners = {
        name: base.__name__
        for base in RLHFArguments.__mro__  # the last base that declares a field owns it
        for name in vars(base).get("__annotations__", {})
    }
    tests = tests_by_option()
    names = sorted(field.name for field in fields(RLHFArguments) if field.init)
    return [Option(name, owners[name] in OWN, tests.get(name, [])) for name in names]


def tests_by_option() -> dict[str, list[str]]:
    """Return the stack tests, and the preset, that give each option."""
    files = [*ROOT.glob("tests/stack/test_*.py"), ROOT / "tests/stack/rounds.py"]
    files.append(ROOT / "scripts/tiny_vlm/families.yaml")
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
    """Return what was tried of each option of ms-swift."""
    known = options()
    names: dict[tuple[str, str], list[str]] = {}
    for option in known:
        verdict, where = option.verdict
        where = f"`{where}`" if verdict == "tested" or "::" in where else where
        if not option.is_left:
            names.setdefault((verdict, where), []).append(f"`{option.name}`")
    rows = [(*found, ", ".join(names[found])) for found in sorted(names, reverse=True)]
    return (
        f"{markdown(('', 'where', 'options'), rows)}\n\n{sum(o.is_left for o in known)} more "
        "options of `swift rlhf` were not tried (data sets, reporters, other tuners and the like); "
        "`python scripts/support.py --not-tried` lists them."
    )


# --- families ---

FOUND_AT = ROOT / "scripts/bench/results/found_at.json"
"""Date and commit of the newest result, of families and of conversations."""

FOUND_OF_FAMILIES = ROOT / "scripts/bench/results/families.json"

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
"""ms-swift's names of model types, and why there is no run."""

OTHER_RUNS = ("lora", "served", "videos", "audio")
"""The runs of `test_families.py`, beside that of all weights."""


def families_table() -> str:
    """Return what was seen of each family of models."""
    results = json.loads(FOUND_OF_FAMILIES.read_text(encoding="utf-8"))
    rows = []
    for name, family in FAMILIES.items():
        runs: Mapping[str, Any] = results.get(name, {})
        if "whole" not in runs:
            rows.append([f"`{name}`", family.dtype, *["not run"] * 8])
            continue
        whole = runs["whole"]
        prompts = "equal: the rollout's line breaks" if whole["line_breaks"] else "equal"
        gaps = [_gap(family, other, runs) for other in OTHER_RUNS]
        stops = f"{whole['stopped']} of {whole['samples']}"
        shapes = ""
        if "shapes" in runs:
            shapes = f"not {', '.join(wrong)}" if (wrong := runs["shapes"]["wrong"]) else "equal"
        row = [f"`{name}`", family.dtype, prompts, f"{whole['gap']:.0e}", *gaps, stops, shapes]
        rows.append(row)
    names = ("all weights", "LoRA, 2 ranks", "server", "videos", "audio", "stops", "shapes")
    trained = markdown(("model type", "in", "prompts", *names), rows)
    no_run = markdown(("model type", "no run"), OTHERS.items())
    return f"{found_at('families')}\n\n{trained}\n\n{no_run}"


def found_at(what: str) -> str:
    """Say how old the results are that a table shows."""
    return f"Newest result: {json.loads(FOUND_AT.read_text(encoding='utf-8'))[what]}."


def experts_table() -> str:
    """Return the table of what replaying a rollout's experts changes."""
    results = json.loads(FOUND_OF_FAMILIES.read_text(encoding="utf-8"))
    rows = []
    for name, runs in results.items():
        for how, label in (("plain", "no"), ("replayed", "yes"), ("served", "yes, from a server")):
            if found := runs.get("replay", {}).get(how):
                share = f"{found['equal']:.1%}" if "equal" in found else ""
                gaps = (f"{found['mean']:.3f}", f"{found['max']:.2f}")
                rows.append((f"`{name}`", label, share, *gaps))
    head = ("model type", "replayed", "equal choices", "mean gap", "largest gap of a token")
    return f"{found_at('families')}\n\n{markdown(head, rows)}"


def _gap(family: Family, run: str, runs: Mapping[str, Any]) -> str:
    """Return a run's gap, behind "equal" where its first round has the tokens of another run."""
    if run == "videos" and family.videos_fail:
        return "ms-swift: images only"
    if run not in runs:
        return "not run" if getattr(family, run, True) else ""
    gap = f"{runs[run]['gap']:.0e}"
    return gap if run in ("videos", "audio") else f"equal, {gap}"


# --- conversations ---

FOUND_OF_PAIRS = ROOT / "scripts/bench/results/conversations.json"
COLUMNS = ("colocated", "one replica", "two replicas", "two servers")


def conversations_table() -> str:
    """Return how many conversations are the same, whoever leads and draws them."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for leader, engine, deployment, ranks, equal, total in json.loads(
        FOUND_OF_PAIRS.read_text("utf-8")
    ):
        cell = f"{equal} of {total}, {ranks} rank{'s' * (ranks > 1)}"
        rows.setdefault((leader, engine), {})[deployment] = cell
    cells = ([*names, *(found.get(c, "") for c in COLUMNS)] for names, found in rows.items())
    table = markdown(("led by", "engine", *COLUMNS), cells)
    return f"{found_at('conversations')}\n\n{table}"


# --- the page ---

TABLES: dict[str, Callable[[], str]] = {
    "options": options_table,
    "families": families_table,
    "experts": experts_table,
    "conversations": conversations_table,
}
"""Each makes what stands between the marks of its name on the page."""


def run(what: str) -> int:
    """Train a family, `families` or `conversations`, and keep what was found."""
    if what == "conversations":
        FOUND_OF_PAIRS.unlink(missing_ok=True)
        tests, found = ["tests/stack/test_pairs.py"], {"CONVERSATIONS": str(FOUND_OF_PAIRS)}
    else:
        tests = ["tests/stack/test_families.py", "tests/stack/test_router_replay.py"]
        found = {"FAMILY_RESULTS": str(FOUND_OF_FAMILIES)}
        if what != "families":
            # A parameter's name stands between brackets, alone or before that of media; another's
            # may begin with it.
            tests += ["-k", f"[{what}] or [{what}-"]
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **found}, check=False).returncode
    dates = json.loads(FOUND_AT.read_text(encoding="utf-8"))
    dates["conversations" if what == "conversations" else "families"] = f"{today()}, {commit()}"
    FOUND_AT.write_text(json.dumps(dates, indent=1) + "\n", encoding="utf-8")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ["families", "conversations", *FAMILIES]
    parser.add_argument("--run", nargs="+", default=[], choices=names, metavar="FAMILY")
    parser.add_argument("--write", action="store_true", help="into docs/support.md")
    parser.add_argument("--not-tried", action="store_true", help="list options that nobody tried")
    arguments = parser.parse_args()
    if arguments.not_tried:
        print("\n".join(option.name for option in options() if option.is_left))
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
