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
from typing import NamedTuple

import yaml
from pages import ROOT, SUPPORT, markdown, write_into

TABLE = "options"
PRESET = ROOT / "examples/digits/grpo.yaml"
NO_TRAININGS = ("refusals", "preset_arguments", "distribution", "launch")
"""Stack tests that give flags to something else, or to all at once."""

PREFLIGHT = "tests/checks/test_preflight.py"
REASONS = {
    "refused": {
        "streaming": f"{PREFLIGHT}::test_arguments",
        "vllm_reasoning_parser": "ms-swift",
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
        "wandb_log_unique_prompts": (
            "wandb, of whose tables alone it drops rows (grpo_trainer.py:1926)"
        ),
    },
    "not GRPO's": dict.fromkeys(
        (
            *("label_smoothing", "rpo_alpha", "ld_alpha", "discopop_tau", "loss_weights"),
            *("cpo_alpha", "simpo_gamma", "desirable_weight", "undesirable_weight", "sft_alpha"),
            *("center_rewards_coefficient", "lmbda", "seq_kd", "gkd_logits_topk", "kl_coef"),
            *("num_ppo_epochs", "whiten_rewards", "cliprange", "vf_coef", "cliprange_value"),
            *("gamma", "lam", "num_mini_batches", "local_rollout_forward_batch_size"),
            *("num_sample_generations", "response_length", "missing_eos_penalty"),
        ),
        "",
    ),
}
"""By verdict, options that no test trains with: who refuses them, the test that holds it, or what
ms-swift's GRPO puts in their place. The last ones are DPO's, KTO's, PPO's and the like."""

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
        "`python scripts/recipes.py --not-tried` lists them."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/support.md")
    parser.add_argument("--not-tried", action="store_true", help="list what is left of the others")
    arguments = parser.parse_args()
    if arguments.not_tried:
        print("\n".join(option.name for option in options() if option.is_left))
    elif arguments.write:
        write_into(SUPPORT, TABLE, made())
    else:
        print(made())


if __name__ == "__main__":
    main()
