"""Makes the tables of ms-swift's GRPO options in docs/recipes.md: what was tried of each.

    python scripts/recipes.py --write

The options are the fields of ms-swift's argument classes, as installed. The trainings that a test
gives an option to are found in the tests' own code: the flags in a test function, in what it names
of its module and of the tests' helpers, and in the preset that all of them start from. What is
refused, has no effect, or belongs to other algorithms stands below, with its test or reason.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from compat.table import write_into

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
PRESET = ROOT / "examples/digits/grpo.yaml"
HELPERS = ("rounds", "conftest", "processes", "stop_engines", "stop_cases")
"""Modules of `tests/stack` whose names tests use."""

NO_TRAININGS = ("refusals", "preset_arguments", "distribution", "old_transformers", "launch")
"""Stack tests that give flags to something else, or to all at once."""

PREFLIGHT = "tests/checks/test_preflight.py"
REFUSED = {
    "streaming": f"{PREFLIGHT}::test_a_stream_cannot_repeat_prompts",
    "vllm_reasoning_parser": "ms-swift",
    "cached_dataset": "ms-swift",
    "cached_val_dataset": "ms-swift",
}
REFUSED_ON_CPU = {
    "sleep_level": f"{PREFLIGHT}::test_sharding_and_sleep_need_an_accelerator",
}
"""By whom, or the test that holds it."""

NO_EFFECT = {
    "remove_unused_columns": "ms-swift: always false, and says so",
    "dataloader_drop_last": "ms-swift: true",
    **dict.fromkeys(
        (
            *("vllm_pipeline_parallel_size", "vllm_enable_expert_parallel", "vllm_quantization"),
            *("vllm_disable_custom_all_reduce", "vllm_speculative_config", "vllm_max_lora_rank"),
        ),
        f"{PREFLIGHT}::test_engine_settings_that_trainings_do_not_read",
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
"""Of DPO, KTO, PPO and the like: GRPO does not read them."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of ms-swift's arguments, and what is known of it with the plugin."""

    name: str

    owner: str
    """The class that declares it."""

    tests: tuple[str, ...] = ()
    """Stack tests that train with it, `file::function`, the nearest first."""

    @property
    def verdict(self) -> str:
        """What the table says of it."""
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
    """All options of `swift rlhf`, those of GRPO's own classes first."""
    from swift.arguments import RLHFArguments

    owners = owners_of(RLHFArguments)
    found = tests_by_option()
    names = [f.name for f in fields(RLHFArguments) if f.init]
    return [
        Option(name=name, owner=owners[name], tests=tuple(found.get(name, ())))
        for name in sorted(names, key=lambda name: (owners[name] not in OWN, owners[name], name))
    ]


OWN = (
    *("GRPOArguments", "GRPOArgumentsMixin", "RLHFArguments", "RolloutTrainerArgumentsMixin"),
    *("TeacherModelArguments", "VllmArguments", "PPOArguments", "RewardModelArguments"),
)
"""Classes whose options are those of reinforcement learning."""


def owners_of(arguments: type[Any]) -> dict[str, str]:
    """The class that declares each field: the last base that does."""
    owners: dict[str, str] = {}
    for base in arguments.__mro__:
        for name in vars(base).get("__annotations__", {}):
            owners[name] = base.__name__
    return owners


# --- tests, read as code ---


def tests_by_option() -> dict[str, list[str]]:
    """`file::function` of the stack tests that give an option, the fewest options first."""
    helpers = [Module(ROOT / f"tests/stack/{name}.py") for name in HELPERS]
    shared: dict[str, ast.AST] = {}
    for helper in helpers:
        shared |= helper.names
    found: dict[str, list[tuple[int, str]]] = {}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        module = Module(path)
        if not module.starts_processes or path.stem.removeprefix("test_") in NO_TRAININGS:
            continue
        for test, given in module.trainings(shared):
            for name in given:
                where = f"{path.relative_to(ROOT / 'tests')}::{test}"
                found.setdefault(name, []).append((len(given), where))
    of_preset = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    for name in of_preset:
        found.setdefault(name, [(0, str(PRESET.relative_to(ROOT)))])
    return {name: [where for _, where in sorted(places)] for name, places in found.items()}


class Module:
    """A test module: its tests, and the flags that each names."""

    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self.names: dict[str, ast.AST] = dict(_definitions(self._tree))

    @property
    def starts_processes(self) -> bool:
        mark = self.names.get("pytestmark")
        return mark is not None and "stack" in ast.unparse(mark)

    def trainings(self, shared: Mapping[str, ast.AST]) -> Iterator[tuple[str, set[str]]]:
        """The tests, each case of a dictionary apart, and the flags that they and what they name,
        here or in `shared`, hold."""
        for test in [name for name in self.names if name.startswith("test_")]:
            known = {**shared, **self.names}
            cases = {name: cases for name in known if (cases := _cases(known[test], known, name))}
            flags = _flags(test, {name: known[name] for name in known.keys() - cases.keys()})
            if not cases:
                yield test, flags
            for case, node in (item for of_name in cases.values() for item in of_name.items()):
                yield f"{test}[{case}]", flags | set(_flags_of(node))


def _cases(test: ast.AST, known: Mapping[str, ast.AST], name: str) -> dict[str, ast.AST]:
    """The entries of the dictionary `name`, where it is what the test is parametrized with."""
    decorators = getattr(test, "decorator_list", [])
    is_used = any(isinstance(d, ast.Call) and name in map(ast.unparse, d.args) for d in decorators)
    value = getattr(known[name], "value", None)
    if not is_used or not isinstance(value, ast.Dict):
        return {}
    pairs = zip(value.keys, value.values, strict=True)
    return {str(key.value): node for key, node in pairs if isinstance(key, ast.Constant)}


def _flags(test: str, known: Mapping[str, ast.AST]) -> set[str]:
    flags: set[str] = set()
    seen, waiting = {test}, [test]
    while waiting:
        node = known[waiting.pop()]
        flags |= set(_flags_of(node))
        named = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        named |= {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}  # fixtures
        new = {name for name in named & known.keys() if not name.startswith("test_")} - seen
        seen |= new
        waiting += new
    return flags


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id, node


def _flags_of(node: ast.AST) -> Iterator[str]:
    for text in ast.walk(node):
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield from re.findall(r"(?<!\S)--([a-z][a-z0-9_]+)(?!\S)", text.value)


# --- the page ---

PAGE = ROOT / "docs/recipes.md"
REASONS = {**NO_EFFECT, **NEEDS, **REFUSED, **REFUSED_ON_CPU}


def made() -> str:
    """Return the Markdown between the marks of the page."""
    every = options()
    own = [o for o in every if o.owner in OWN]
    others = [o for o in every if o.owner not in OWN]
    tried = [o for o in others if o.verdict != "not tried"]
    return "\n".join(
        [
            "### Options of reinforcement learning\n",
            *_table(own),
            "\n### Other options of `swift rlhf` that tests train with\n",
            *_table(tried),
            f"\n{len(others) - len(tried)} more options were not tried (data sets, reporters, "
            "other tuners and the like); `python scripts/recipes.py --not-tried` lists them.",
        ]
    )


def _table(rows: Iterable[Option]) -> list[str]:
    lines = ["| option | | where |", "|---|---|---|"]
    for option in rows:
        tested = option.verdict == "tested"
        where = option.tests[0] if tested else REASONS.get(option.name, "")
        where = f"`{where.removeprefix('tests/')}`" if tested or "::" in where else where
        lines.append(f"| `{option.name}` | {option.verdict} | {where} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/recipes.md")
    parser.add_argument("--not-tried", action="store_true", help="list what is left of the others")
    arguments = parser.parse_args()
    if arguments.not_tried:
        every = options()
        names = [o.name for o in every if o.owner not in OWN and o.verdict == "not tried"]
        print("\n".join(names))
    elif arguments.write:
        write_into(PAGE, made(), BEGIN, END)
    else:
        print(made())
    return 0


if __name__ == "__main__":
    sys.exit(main())
