"""Makes the table of ms-swift's GRPO options in docs/support.md: what was tried of each.

    python scripts/recipes.py --write

The options are the fields of ms-swift's argument classes, as installed. What trains with one is
found in the stack tests' own text, where flags stand as `--name`, and in the preset that all of
them start from. What is refused, has no effect, or belongs to other algorithms stands below, with
its test or reason.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import yaml
from compat.table import write_into

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
PAGE = ROOT / "docs/support.md"
PRESET = ROOT / "examples/digits/grpo.yaml"
NO_TRAININGS = ("refusals", "preset_arguments", "distribution", "launch")
"""Stack tests that give flags to something else, or to all at once."""

PREFLIGHT = "tests/checks/test_preflight.py"
REFUSED = {
    "streaming": f"{PREFLIGHT}::test_arguments",
    "vllm_reasoning_parser": "ms-swift",
    "cached_dataset": "ms-swift",
    "cached_val_dataset": "ms-swift",
}
REFUSED_ON_CPU = {
    "sleep_level": f"{PREFLIGHT}::test_sharding_and_sleep_need_an_accelerator",
}
"""Each stands with who refuses it, or with the test that holds it."""

NO_EFFECT = {
    "remove_unused_columns": "ms-swift: always false, and says so",
    "dataloader_drop_last": "ms-swift: true",
    **dict.fromkeys(
        (
            *("vllm_pipeline_parallel_size", "vllm_enable_expert_parallel", "vllm_quantization"),
            *("vllm_disable_custom_all_reduce", "vllm_speculative_config", "vllm_max_lora_rank"),
        ),
        f"{PREFLIGHT}::test_flags_that_nobody_reads",
    ),
}
"""What ms-swift's GRPO puts in its place, or the test of our warning."""

NEEDS = {
    "wandb_log_unique_prompts": (
        "wandb, of whose tables alone it drops rows (grpo_trainer.py:1926)"
    ),
}
"""What a training with the option would need that no test has."""

OTHER_ALGORITHMS = frozenset(
    [
        *("label_smoothing", "rpo_alpha", "ld_alpha", "discopop_tau", "loss_weights", "cpo_alpha"),
        *("simpo_gamma", "desirable_weight", "undesirable_weight", "center_rewards_coefficient"),
        *("sft_alpha", "lmbda", "seq_kd", "gkd_logits_topk", "num_ppo_epochs", "whiten_rewards"),
        *("kl_coef", "cliprange", "vf_coef", "cliprange_value", "gamma", "lam", "num_mini_batches"),
        *("local_rollout_forward_batch_size", "num_sample_generations", "response_length"),
        "missing_eos_penalty",
    ]
)
"""GRPO does not read these options of DPO, KTO, PPO and the like."""


OWN = (
    *("GRPOArguments", "GRPOArgumentsMixin", "RLHFArguments", "RolloutTrainerArgumentsMixin"),
    *("TeacherModelArguments", "VllmArguments", "PPOArguments", "RewardModelArguments"),
)
"""Classes whose options are those of reinforcement learning."""


class Option(NamedTuple):
    """An option is a field of ms-swift's arguments, and what is known of it with the plugin."""

    name: str
    is_own: bool
    """It is true where one of the classes of `OWN` declares the option."""

    tests: list[str]
    """Files that train with it, those that give the fewest options first."""

    @property
    def verdict(self) -> str:
        """Return what the table says of it."""
        if self.name in REFUSED:
            return "refused"
        if self.name in REFUSED_ON_CPU:
            return "refused on CPU; not tried elsewhere"
        if self.tests:
            return "tested"
        if self.name in NO_EFFECT:
            return "no effect"
        if self.name in NEEDS:
            return "not tried, needs"
        return "not GRPO's" if self.name in OTHER_ALGORITHMS else "not tried"


def options() -> list[Option]:
    """Return all options of `swift rlhf`."""
    from swift.arguments import RLHFArguments

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


def made() -> str:
    """Return the Markdown between the marks of the page."""
    reasons = {**NO_EFFECT, **NEEDS, **REFUSED, **REFUSED_ON_CPU}
    rows: dict[tuple[str, str], list[str]] = {}
    num_left = 0
    for option in options():
        if not option.is_own and option.verdict == "not tried":
            num_left += 1
            continue
        is_tested = option.verdict == "tested"
        where = option.tests[0] if is_tested else reasons.get(option.name, "")
        where = f"`{where}`" if is_tested or "::" in where else where
        rows.setdefault((option.verdict, where), []).append(f"`{option.name}`")
    lines = ["| | where | options |", "|---|---|---|"]
    for (verdict, where), names in sorted(rows.items(), reverse=True):
        lines.append(f"| {verdict} | {where} | {', '.join(names)} |")
    lines.append(
        f"\n{num_left} more options of `swift rlhf` were not tried (data sets, reporters, other "
        "tuners and the like); `python scripts/recipes.py --not-tried` lists them."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/support.md")
    parser.add_argument("--not-tried", action="store_true", help="list what is left of the others")
    arguments = parser.parse_args()
    if arguments.not_tried:
        print("\n".join(o.name for o in options() if not o.is_own and o.verdict == "not tried"))
    elif arguments.write:
        write_into(PAGE, made(), BEGIN, END)
    else:
        print(made())


if __name__ == "__main__":
    main()
