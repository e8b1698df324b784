"""What is tested in a cell, and how it went."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from packaging.utils import canonicalize_name

from compat.environment import PROTECTED, ROOT, Environment, Excluded

UNIT = ("-m", "not stack", "--ignore=tests/test_compatibility.py")
"""All but those that hold the table against the rest: they pass when it is written."""

STACK_TESTS = {
    "seeds": (
        "test_invariance.py::test_seeds_are_unique_and_noise_is_fresh",
        "test_invariance.py::test_two_ranks_and_resuming",
        "test_servers.py::test_servers[two-servers-3]",
    ),
    "stops": ("test_stops.py",),
    "LoRA": ("test_training.py::test_engine_samples_with_the_trained_weights[learned_lora]",),
    "resumed": ("test_resume.py::test_two_steps_and_two_more_are_four[lora]",),
}
"""36 of 36 completions on 1, 2 and 3 ranks and on servers; stop strings; an engine that draws with
trained adapters; a checkpoint resumed."""


PINS = """
import json
from swift_grpo_ext.upstream import contract, pins
print(json.dumps({
    "held": sum(contract.mismatch(pin) is None for pin in pins.ALL),
    "wrong": [text for pin in pins.NEEDED if (text := contract.mismatch(pin))],
    "missing": [n for n, table in pins.OPTIONAL.items() if any(map(contract.mismatch, table))],
}))
"""
"""Prints how many pins of upstream names hold in an environment, what is wrong with those that are
needed, and what its releases go without."""


@dataclass(frozen=True)
class Counts:
    """How many tests ended in each way."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def are_good(self) -> bool:
        return self.passed > 0 and self.failed == 0


@dataclass
class Trial:
    """How a cell did; what was not tried is empty."""

    cell: str
    date: str = ""
    commit: str = ""
    excluded: str = ""
    """Why there is no such environment."""

    versions: dict[str, str] = field(default_factory=dict)
    """Of what was installed, by package."""

    would_install: list[str] | None = None
    """What `pip install --dry-run` of the wheel names beside the wheel, as `name-version`."""

    pins_held: int = 0
    pins_wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What this release goes without."""

    tests: dict[str, Counts] = field(default_factory=dict)

    @property
    def changes(self) -> list[str]:
        """What of the stack an installation would change."""
        named = self.would_install or []  # pip writes `ms_swift-4.6.0` as `ms-swift-4.6.0`
        return [name for name in named if canonicalize_name(name.rpartition("-")[0]) in PROTECTED]

    @property
    def left(self) -> list[str]:
        """The parts that have not passed yet; none where there is no such environment."""
        parts = () if self.excluded else ("unit", *STACK_TESTS)
        return [part for part in parts if not self.tests.get(part, Counts()).are_good]

    @property
    def works(self) -> bool:
        return not (self.excluded or self.pins_wrong or self.changes or self.left)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Trial:
        saved = json.loads(path.read_text(encoding="utf-8"))
        tests = {name: Counts(**counts) for name, counts in saved.pop("tests").items()}
        return cls(**saved, tests=tests)


def try_out(
    environment: Environment, path: Path, wheel: Path, assets: Path, *, quick: bool
) -> Trial:
    """Make a cell's environment, look, and test; what was found so far is in `path` at any time,
    and parts that have passed are not tested again.

    Args:
        quick: look at names and the dry run only.
    """
    before = Trial.load(path) if path.is_file() else Trial(str(environment.cell))
    commit = ["git", "describe", "--always", "--dirty"]
    trial = Trial(
        cell=str(environment.cell),
        tests={part: before.tests[part] for part in before.tests if part not in before.left},
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        commit=subprocess.run(commit, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
    )
    try:
        environment.make()
    except Excluded as e:
        trial.excluded = str(e)
        trial.save(path)
        return trial
    trial.versions = environment.versions()
    trial.would_install = environment.would_change(wheel)
    environment.add_project()
    looked = json.loads(environment.output("-c", PINS))
    trial.pins_held, trial.pins_wrong = looked["held"], looked["wrong"]
    trial.missing = looked["missing"]
    trial.save(path)
    if not quick:
        stack = {part: STACK_TESTS[part] for part in trial.left if part in STACK_TESTS}
        argv = [f"tests/stack/{test}" for tests in stack.values() for test in tests]
        if stack:
            trial.tests |= _test(environment, stack, argv, assets)
            trial.save(path)
        if "unit" in trial.left:
            trial.tests |= _test(environment, {"unit": ()}, UNIT, assets)
    trial.save(path)
    return trial


def _test(
    environment: Environment,
    parts: Mapping[str, Sequence[str]],
    arguments: Sequence[str],
    assets: Path,
) -> dict[str, Counts]:
    """Run pytest on the same examples in every environment; its counts by part."""
    result = environment.folder / "tests.xml"
    result.unlink(missing_ok=True)
    argv = [
        *(environment.python, "-m", "pytest", "-p", "no:cacheprovider"),
        *("-n", os.environ.get("WORKERS", "2"), "--max-worker-restart", "0"),
        *("--dist", "loadfile", "--no-loadscope-reorder", "--hypothesis-seed=0"),
        *(f"--junitxml={result}", *arguments),
    ]
    env = {
        "ASSETS": str(assets),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(environment.folder / "hypothesis"),
        "VENV": str(environment.folder),
    }
    status = environment.run(f"tests: {', '.join(parts)}", argv, env=env, may_fail=True)
    counts = read_counts(result, parts) if result.is_file() else {part: Counts() for part in parts}
    if status not in (0, 1):  # pytest could not even start, or ended early
        return {part: Counts(c.passed, c.failed + 1, c.skipped) for part, c in counts.items()}
    return counts


def read_counts(junit: Path, parts: Mapping[str, Sequence[str]]) -> dict[str, Counts]:
    """From pytest's `--junitxml`, by the part that a test belongs to; one without names has all."""
    counted: dict[str, list[int]] = {part: [0, 0, 0] for part in parts}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        test = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name', '')}"
        tags = {child.tag for child in case}
        kind = 1 if tags & {"failure", "error"} else 2 if "skipped" in tags else 0
        for part, names in parts.items():
            if not names or any(test.startswith(name) for name in names):
                counted[part][kind] += 1
    return {part: Counts(*numbers) for part, numbers in counted.items()}
