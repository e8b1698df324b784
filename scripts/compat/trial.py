"""What is tested in an environment, and how it went."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compat.environment import Environment, run

UNIT_TESTS = ("-m", "not stack", "--ignore=tests/test_compatibility.py")
"""All but those that hold the table against the rest: they pass when it is written."""

TRAINING = (
    *("tests/stack/test_training.py", "tests/stack/test_servers.py"),
    *("-k", "trained_weights and (full or one-replica) or without_vllm"),
)
"""Steps with a colocated engine, against a server, and without vLLM."""


@dataclass(frozen=True)
class Counts:
    """Of tests."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def are_good(self) -> bool:
        return self.passed > 0 and self.failed == 0


@dataclass(frozen=True)
class Trial:
    """How one release of ms-swift did; None where something was not tried."""

    versions: dict[str, str]
    """Of what was installed, by package."""

    pins_held: int
    pins_wrong: list[str] = field(default_factory=list)
    pins_unseen: int = 0
    """Which cannot be looked at without vLLM."""

    refusal: str | None = None
    """The plugin's own words."""

    vllm_clashes: list[str] = field(default_factory=list)
    unit: Counts | None = None
    training: Counts | None = None

    @property
    def works(self) -> bool:
        tested = [counts for counts in (self.unit, self.training) if counts is not None]
        is_clean = not (self.pins_wrong or self.pins_unseen or self.refusal)
        return is_clean and bool(tested) and all(counts.are_good for counts in tested)


def try_out(environment: Environment, *, trains: bool) -> Trial:
    """Look at the pins; where the plugin takes this ms-swift, run the tests too."""
    looked = json.loads(environment.output("-m", "compat.pins", env={"PYTHONPATH": "scripts"}))
    is_taken = looked["refusal"] is None
    return Trial(
        versions=environment.versions(),
        pins_held=looked["held"],
        pins_wrong=looked["wrong"],
        pins_unseen=looked["unseen"],
        refusal=looked["refusal"],
        vllm_clashes=environment.vllm_clashes,
        unit=_test(environment, "unit tests", UNIT_TESTS) if is_taken else None,
        training=_test(environment, "training", TRAINING) if is_taken and trains else None,
    )


def _test(environment: Environment, what: str, arguments: Sequence[str]) -> Counts:
    """Run pytest on the same examples in every environment."""
    result = environment.folder / f"{what.replace(' ', '_')}.xml"
    result.unlink(missing_ok=True)
    argv = [
        *(str(environment.python), "-m", "pytest", "-p", "no:cacheprovider"),
        *("--hypothesis-seed=0", f"--junitxml={result}", *arguments),
    ]
    examples = {"HYPOTHESIS_STORAGE_DIRECTORY": str(environment.folder / "hypothesis")}
    status = run(what, argv, environment, env=examples, may_fail=True)
    counts = read_counts(result) if result.is_file() else Counts()
    # An exit status of its own: pytest could not even start, or ended early.
    return counts if status in (0, 1) else Counts(counts.passed, counts.failed + 1, counts.skipped)


def read_counts(junit: Path) -> Counts:
    """From pytest's `--junitxml`."""
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return Counts(total - failed - skipped, failed, skipped)


def make_assets(environment: Environment, assets: Path) -> None:
    """The tiny model and the digits, unless they are there, by this environment's Python."""
    command = ["bash", "-c", "source scripts/common.sh && make_assets"]
    sample_ids = {"VENV": str(environment.folder), "ASSETS": str(assets)}
    run("digits and tiny model", command, environment, env=sample_ids)
