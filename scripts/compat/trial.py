"""What is tested in a cell, and how it went."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from packaging.utils import canonicalize_name

from compat.environment import PROTECTED, ROOT, Environment, Excluded

PARTS: dict[str, tuple[str, ...]] = {
    # All but those that hold the table against the rest: they pass when it is written.
    "unit": ("-m", "not stack", "--ignore=tests/test_compatibility.py"),
    # 36 of 36 completions on 1, 2 and 3 ranks and on servers
    "seeds": (
        "tests/stack/test_invariance.py::test_seeds_are_unique_and_noise_is_fresh",
        "tests/stack/test_invariance.py::test_two_ranks_and_resuming",
        "tests/stack/test_servers.py::test_servers[two-servers-3]",
    ),
    # stop strings on three engines
    "stops": ("tests/stack/test_stops.py",),
    # an engine that generates with trained adapters
    "LoRA": (
        "tests/stack/test_training.py::test_engine_samples_with_the_trained_weights[learned_lora]",
    ),
    # a checkpoint that is resumed
    "resumed": ("tests/stack/test_resume.py::test_two_steps_and_two_more_are_four[lora]",),
}
"""Each part of a trial gives these arguments to pytest."""

PINS = """import json
from swift_grpo_ext.upstream import contract, pins
print(json.dumps({
    "pins_held": sum(contract.mismatch(pin) is None for pin in pins.ALL),
    "pins_wrong": [text for pin in pins.NEEDED if (text := contract.mismatch(pin))],
    "missing": [n for n, table in pins.OPTIONAL.items() if any(map(contract.mismatch, table))],
}))
"""
"""Prints how many pins of upstream names hold in an environment, what is wrong with those that are
needed, and what its releases go without."""


@dataclass(frozen=True)
class Counts:
    """They say how many tests ended in each way."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def are_good(self) -> bool:
        return self.passed > 0 and self.failed == 0

    def __str__(self) -> str:
        parts = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        return ", ".join(f"{n} {how}" for how, n in parts.items() if n or how == "passed")


@dataclass
class Trial:
    """A trial says how a cell did; what was not tried is empty."""

    cell: str
    date: str = ""
    commit: str = ""
    excluded: str = ""
    """Why there is no such environment."""

    versions: dict[str, str] = field(default_factory=dict)
    """It holds what was installed, by package."""

    would_install: list[str] = field(default_factory=list)
    """What `pip install --dry-run` of the wheel names beside the wheel, as `name-version`."""

    pins_held: int = 0
    pins_wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What this release goes without."""

    tests: dict[str, Counts] = field(default_factory=dict)

    @property
    def changes(self) -> list[str]:
        """Return what of the stack an installation would change."""
        names = self.would_install  # pip writes `ms_swift-4.6.0` as `ms-swift-4.6.0`
        return [name for name in names if canonicalize_name(name.rpartition("-")[0]) in PROTECTED]

    @property
    def left(self) -> list[str]:
        """Return the parts that have not passed yet; none where there is no such environment."""
        parts = () if self.excluded else PARTS
        return [part for part in parts if not self.tests.get(part, Counts()).are_good]

    @property
    def works(self) -> bool:
        return not (self.excluded or self.pins_wrong or self.changes or self.left)

    @property
    def names_hold(self) -> bool:
        """Return whether only names were looked at, and nothing speaks against it."""
        return not (self.tests or self.pins_wrong or self.changes or self.excluded)

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
    trial.would_install = environment.would_install(wheel)
    environment.install("-e", f"{ROOT}[dev]")
    for name, value in json.loads(environment.run(environment.python, "-c", PINS)).items():
        setattr(trial, name, value)
    trial.save(path)
    for part in [] if quick else trial.left:
        trial.tests[part] = run_tests(environment, PARTS[part], assets)
        trial.save(path)
    return trial


def run_tests(environment: Environment, arguments: Sequence[str], assets: Path) -> Counts:
    """Run pytest on the same examples in every environment; return its counts."""
    junit = environment.folder / "tests.xml"
    junit.unlink(missing_ok=True)
    environment.run(
        *(environment.python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={junit}"),
        *("-n", os.environ.get("WORKERS", "2"), "--max-worker-restart", "0"),
        *("--dist", "loadfile", "--no-loadscope-reorder", "--hypothesis-seed=0", *arguments),
        env={
            "ASSETS": str(assets),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(environment.folder / "hypothesis"),
            "VENV": str(environment.folder),
        },
        statuses=(0, 1),  # 1: a test failed
    )
    [suite] = ElementTree.parse(junit).getroot().iter("testsuite")
    tests, errors, failures, skipped = (
        int(suite.attrib[name]) for name in ("tests", "errors", "failures", "skipped")
    )
    failed = errors + failures
    return Counts(passed=tests - failed - skipped, failed=failed, skipped=skipped)
