"""The tables of releases: made by `scripts/compatibility.py`, true to what the plugin says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from compat.environment import STACKS, SWIFT, Cell, Environment, _reason
from compat.table import BEGIN, END, PAGES, READMES, overview, put_into, summary, table
from compat.trial import STACK_TESTS, Counts, Trial, read_counts
from packaging.requirements import Requirement

from swift_grpo_ext.upstream.contract import TRIED

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
NEEDED_CELLS = (
    *("4.6.0-0.11.0", "4.6.0-0.23.0", "4.6.0-0.25.1", "4.6.0-0.32.0"),
    *("4.4.2-0.23.0", "4.4.2-0.25.1"),
)
"""Those that ms-swift recommends, those of its images, and the pinned set."""


# --- one truth ---


def rows_of(page: Path) -> list[dict[str, str]]:
    made = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    head, _, *lines = [line.strip("| ").split(" | ") for line in made.splitlines() if "|" in line]
    return [dict(zip(head, line, strict=True)) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_plugin_says_what_the_table_says(page: Path) -> None:
    works = [row for row in rows_of(page) if row["works"] == "yes"]
    for package, column in {
        "ms-swift": "ms-swift",
        "vllm": "vLLM",
        "transformers": "transformers",
    }.items():
        assert {row[column] for row in works} <= set(TRIED[package]), package
    cells = {str(Cell(row["ms-swift"], row["vLLM"], row["Python"])) for row in works}
    assert cells >= set(NEEDED_CELLS)


def test_both_languages_have_the_same_tables() -> None:
    for english, chinese in (PAGES, READMES):
        assert rows_of(english) == rows_of(chinese) != []


def test_the_plugin_was_tried_with_releases_of_the_axes() -> None:
    assert set(TRIED["ms-swift"]) <= set(SWIFT)
    assert set(TRIED["vllm"]) <= set(STACKS)


def test_nothing_is_forbidden_that_was_not_seen_to_fail() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounded = [
        requirement.name
        for requirement in map(Requirement, project["dependencies"])
        if any(specifier.operator not in (">=",) for specifier in requirement.specifier)
    ]
    assert bounded == []


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


# --- cells ---


def test_a_cell_has_a_name() -> None:
    for name in ("4.6.0-0.23.0", "4.4.2-0.11.0-3.10"):
        assert str(Cell.of(name)) == name
    assert Cell.of("4.6.0-0.23.0").python == "3.12"
    assert str(Cell.of("4.6.0-0.23.0-3.12")) == "4.6.0-0.23.0"
    for name in ("4.6.0", "4.6.0-0.24.0", "4.6.0-0.23.0-x"):
        with pytest.raises(ValueError, match=f"{name} is no cell; expected MS_SWIFT-VLLM"):
            Cell.of(name)


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    environment = Environment(Cell.of("4.6.0-0.23.0"), tmp_path / "cell")
    argv = [sys.executable, "-c", "print('cause'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"a step: exit status 3\n(.*\n)*cause"):
        environment.run("a step", argv)
    assert environment.run("a step", argv, may_fail=True) == 3


def test_what_excludes_what_is_said_in_one_line() -> None:
    log = (
        "ms-swift==4.4.2: exit status 1\nerror: No solution found when resolving dependencies\n"
        "  cause: Because a==1 depends on b<2\n         and c needs b>2, no.\n(all of it: log)"
    )
    assert _reason(log) == "Because a==1 depends on b<2 and c needs b>2, no."


# --- results ---

GOOD = Trial(
    cell="4.6.0-0.32.0",
    date="2026-11-23",
    commit="abc",
    versions={"ms-swift": "4.6.0", "transformers": "5.19.0", "torch": "2.13.0", "vllm": "0.32.0"},
    would_install=["rapidfuzz-3.14.3"],
    pins_held=153,
    tests={part: Counts(passed=2) for part in ("unit", *STACK_TESTS)},
)


@pytest.mark.parametrize(
    ("changes", "works", "verdict"),
    [
        ({}, True, "Python 3.12"),
        ({"tests": {**GOOD.tests, "unit": Counts(3, 0, 2)}}, True, "Python 3.12"),
        ({"tests": {**GOOD.tests, "stops": Counts(3, 1)}}, False, "not: 3.12"),
        ({"tests": {**GOOD.tests, "LoRA": Counts()}}, False, "not: 3.12"),
        ({"tests": {}}, False, "names only: 3.12"),
        ({"tests": {}, "pins_wrong": ["a.b is missing"]}, False, "not: 3.12"),
        ({"would_install": ["torch-2.14.0"]}, False, "not: 3.12"),
        ({"would_install": ["ms_swift-4.7.0"]}, False, "not: 3.12"),
        ({"excluded": "a needs b", "tests": {}}, False, "excluded by their own requirements"),
    ],
)
def test_it_works_where_nothing_speaks_against_it(
    changes: dict[str, object], works: bool, verdict: str, tmp_path: Path
) -> None:
    trial = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert trial.works == works
    assert verdict in overview([trial])
    trial.save(tmp_path / "cell.json")
    assert Trial.load(tmp_path / "cell.json") == trial


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "works: unit 2 passed, seeds 2 passed"),
        ({"tests": {}}, "153 names hold; nothing was run"),
        ({"excluded": "a needs b", "tests": {}}, "no such environment: a needs b"),
        ({"tests": {"unit": Counts(3, 1)}}, "not all seen to work: unit 3 passed, 1 failed, seeds"),
    ],
)
def test_a_cell_in_a_line(changes: dict[str, object], words: str) -> None:
    assert summary(replace(GOOD, **changes)).startswith(words)  # type: ignore[arg-type]


def test_what_has_not_passed_is_left_to_do() -> None:
    assert GOOD.left == []
    failed = replace(GOOD, tests={**GOOD.tests, "stops": Counts(3, 1), "LoRA": Counts()})
    assert failed.left == ["stops", "LoRA"]
    assert replace(GOOD, tests={}).left == ["unit", *STACK_TESTS]
    assert Trial("4.4.2-0.32.0", excluded="a needs b").left == []


def test_the_table_says_why_not() -> None:
    refused = Trial("4.4.2-0.32.0", excluded="ms-swift needs transformers<5.13")
    older = replace(
        GOOD, cell="4.6.0-0.11.0-3.10", missing=["a saving"], pins_wrong=["a.b is missing"]
    )
    looked_at = replace(GOOD, cell="4.5.3-0.25.1-3.11", tests={})
    refused_too = replace(refused, cell="4.4.2-0.32.0-3.11")
    lines = table([refused, refused_too, older, looked_at, GOOD]).splitlines()
    assert lines[2].startswith(
        "| 4.6.0 | 0.11.0 | 3.10 | 5.19.0 | 2.13.0 | no | 1, none of the stack |"
    )
    assert lines[3].startswith(
        "| 4.6.0 | 0.32.0 | 3.12 | 5.19.0 | 2.13.0 | yes | 1, none of the stack |"
    )
    assert lines[3].endswith("| 2 passed | 2026-11-23, abc |")
    assert lines[5:] == [
        "- Names hold, an installation changes none of the stack, nothing was run: "
        "4.5.3-0.25.1-3.11.",
        "- vLLM 0.11.0 goes without: a saving.",
        "- 4.6.0-0.11.0-3.10: `a.b is missing`.",
        "- 4.4.2-0.32.0, 4.4.2-0.32.0-3.11 cannot be installed: ms-swift needs transformers<5.13",
    ]


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
        '<testsuites><testsuite><testcase classname="tests.stack.test_stops" name="test_a[x]"/>'
        '<testcase classname="tests.stack.test_stops" name="test_b"><failure/></testcase>'
        '<testcase classname="tests.test_seeds" name="test_c"><skipped/></testcase>'
        '<testcase classname="tests.test_seeds" name="test_d"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    parts = {"stops": ("test_stops.py",), "one": ("test_seeds.py::test_c",)}
    assert read_counts(junit, parts) == {"stops": Counts(1, 1), "one": Counts(skipped=1)}
    assert read_counts(junit, {"unit": ()}) == {"unit": Counts(1, 2, 1)}
