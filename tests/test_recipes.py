"""The tables of `docs/recipes.md` are what `scripts/recipes.py` makes, and name real tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import recipes

from tests.newest import is_newest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not is_newest("swift"), reason="the page is about the newest ms-swift")
@pytest.mark.parametrize("language", recipes.PAGES)
def test_the_page_is_up_to_date(language: str) -> None:
    """Else: `python scripts/recipes.py --write`. Any test that gives the option will do."""
    text = recipes.PAGES[language].read_text(encoding="utf-8")
    made = rows_of(recipes.made(language))
    found = rows_of(text.partition(recipes.BEGIN)[2].partition(recipes.END)[0])
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        name: verdict for name, (verdict, _) in made.items()
    }
    tests = {option.name: option.tests for option in recipes.options()}
    tested = recipes.WORDS[language]["tested"]
    for name, (verdict, where) in found.items():
        assert where.strip("`") in tests[name] if verdict == tested else where == made[name][1]


def rows_of(table: str) -> dict[str, tuple[str, str]]:
    """Verdict and place of each option."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]*) \|$", table, re.M)
    assert len(rows) > 100
    return {name: (verdict, where) for name, verdict, where in rows}


def test_every_option_has_one_verdict() -> None:
    options = {option.name: option.verdict for option in recipes.options()}
    assert set(options.values()) == recipes.WORDS["en"].keys() - {"head", "own", "others", "left"}
    refused = {**recipes.REFUSED, **recipes.REFUSED_ON_CPU}
    listed = [refused.keys(), recipes.NO_EFFECT.keys(), recipes.NEEDS.keys()]
    listed += [recipes.OTHER_ALGORITHMS]
    assert sum(map(len, listed)) == len(set().union(*listed))
    unknown = set().union(*listed) - options.keys()
    assert unknown == set(), "ms-swift has no such option"
    said = {name: verdict for name, verdict in options.items() if name in recipes.NO_EFFECT}
    assert set(said.values()) == {"no effect"}, "a test trains with it"
    needy = {name: verdict for name, verdict in options.items() if name in recipes.NEEDS}
    assert set(needy.values()) == {"needs"}, "a test trains with it"
    own = {o.name for o in recipes.options() if o.owner in recipes.OWN}
    assert {name for name in own if options[name] == "not tried"} == set()
    assert options["loss_type"] == options["vllm_mode"] == "tested"
    assert options["streaming"] == "refused"


def test_named_tests_exist() -> None:
    text = recipes.PAGES["en"].read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", text))
    assert len(named) > 30
    for path, function, case in named:
        code = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert f"def {function}(" in code
        assert not case or f'"{case}"' in code


def test_flags_are_found_in_what_a_test_names(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(
        """
pytestmark = pytest.mark.stack
COLD = ("--temperature", "0.1")
CASES = {"one": ("--beta 0.1 --delta 2",), "two": helper("--top_k 1")}
def argv(*more): return ["--seed", "3", *COLD, *more]
@pytest.mark.parametrize("case", CASES)
def test_cases(case): run(argv(*CASES[case]))
def test_plain(fixture): run("a --flag, in prose", shared)
""",
        encoding="utf-8",
    )
    other = tmp_path / "rounds.py"
    other.write_text('shared = "--max_steps"\ndef fixture(): return "--num_iterations"\n')
    module, helper = recipes.Module(path), recipes.Module(other)
    assert module.starts_processes
    assert not helper.starts_processes
    assert dict(module.trainings(helper.names)) == {
        "test_cases[one]": {"seed", "temperature", "beta", "delta"},
        "test_cases[two]": {"seed", "temperature", "top_k"},
        "test_plain": {"max_steps", "num_iterations"},
    }
