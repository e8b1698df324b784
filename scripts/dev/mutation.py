"""How many small changes of the code do the unit tests notice? A mutation run with mutmut.

    python scripts/dev/mutation.py              300 mutants at random, of all rooms
    python scripts/dev/mutation.py --only sampling --sample 60    60 of a room, by its own tests
    python scripts/dev/mutation.py --only 'swift_grpo_ext.stops.rule.*' --sample 0    of a module

mutmut changes one expression at a time in a copy of the tree (`mutants/`), and runs the unit tests
that reach the changed function. `[tool.mutmut]` in pyproject.toml lists rooms and tests; `--only`
leaves those of the rooms that it names. A mutant that makes a test fail, crash or hang is killed.
Not counted are mutants that only change the words of a message, and those that
`tests/equivalent_mutants.toml` lists, since no test could tell them apart. mutmut leaves decorated
functions alone. Nothing else should change the tree meanwhile: mutmut copies it as it starts.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "mutants"
EQUIVALENT = ROOT / "tests/equivalent_mutants.toml"
PACKAGE = "swift_grpo_ext"

SURVIVED, NO_TESTS = (0,), (5, 33)
"""Exit codes that mutmut keeps of mutants that live; any other one is a death."""

ONLY_ROOMS = """
import os, pathlib, sys, types
import pytest
from mutmut import __main__ as mutmut
from mutmut.configuration import config
if rooms := sys.argv.pop(1).split():
    config().only_mutate = [f"swift_grpo_ext/{room}/*" for room in rooms]
    config().pytest_add_cli_args_test_selection = [f"tests/{room}" for room in rooms]
"""
"""What a process of mutmut's begins with: its own settings, or a few rooms and their tests."""

GENERATE = """
mutmut.set_mutant_under_test("mutant_generation")
pathlib.Path("mutants").mkdir(exist_ok=True)
mutmut.copy_src_dir()
mutmut.copy_also_copy_files()
mutmut.setup_source_paths()
mutmut.create_mutants(int(sys.argv[1]))
"""
"""What `mutmut run` (3.8.1) begins with. It has no command that makes the mutants and runs none."""

RUN = """
from mutmut.runners import harness
from mutmut.state import state

class Children:
    def __init__(self):
        self.file = pathlib.Path("called_by_children").absolute()
        self.called = {}
        os.register_at_fork(after_in_child=self.begin_child)
    def begin_child(self):
        names = set()
        def add(name):
            if name not in names:
                names.add(name)
                with self.file.open("a") as f:
                    f.write(name + chr(10))
        state()._stats = types.SimpleNamespace(add=add)
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item):
        called = self.called.setdefault(item.path, set())
        if self.file.exists():
            called.update(self.file.read_text().split())
            self.file.unlink()
        state()._stats |= called
    def pytest_runtest_makereport(self, item, call):
        if call.when == "setup":
            state().duration_by_test[item.nodeid] += call.duration

run_pytest = harness.PytestRunner.execute_pytest

def execute_pytest(self, params, plugins=()):
    return run_pytest(self, params, plugins=[*plugins, Children()] if plugins else [])

harness.PytestRunner.execute_pytest = execute_pytest
mutmut.cli(["run", *sys.argv[1:]])
"""
"""This code runs the tests.

mutmut knows of a test's calls in its own process alone: with this also of those of forked children
(a whole training), of which all tests of that file may tell. The seconds of a fixture count too,
or its tests would seem to hang.
"""

SHOW = """
import json, sys
from mutmut.mutation.diff_apply import get_diff_for_mutant
names = json.load(sys.stdin)
print(json.dumps([get_diff_for_mutant(name, path=path) for name, path in names]))
"""

STRING = re.compile(r"""(?s)[rfbu]*(['"])((?:\\.|(?!\1).)*)\1""")
"""A string literal; with a space in it, it is words for people, and no key or name."""


class Change(NamedTuple):
    """What a mutant changes: lines of the diff without their signs."""

    name: str
    removed: str
    added: str

    @property
    def function(self) -> str:
        """As `swift_grpo_ext.sampling.seeding.sample_seed` or `...module.Class.method`."""
        module, _, mangled = self.name.rpartition("__mutmut_")[0].rpartition(".")
        name = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        return f"{module}.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", nargs="+", default=["*"], help="rooms, or patterns of names")
    parser.add_argument("--children", type=int, default=2, help="processes side by side")
    options = parser.parse_args()
    start = time.monotonic()
    patterns = [p if "." in p or "*" in p else f"{PACKAGE}.{p}.*" for p in options.only]
    rooms = "" if "*" in patterns else " ".join(dict.fromkeys(p.split(".")[1] for p in patterns))
    run_python(ONLY_ROOMS + GENERATE, rooms, str(options.children))
    file_of = {
        name: file
        for file, codes in exit_codes().items()
        for name in codes
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    chosen = choose(file_of, options.sample, options.seed)
    if not chosen:
        raise SystemExit(f"--only {' '.join(options.only)}: no mutant is meant; expected rooms.")
    seconds = time.monotonic() - start
    print(f"{len(file_of)} mutants, {len(chosen)} of them to run ({seconds:.0f} s)", flush=True)
    run_tests([change.name for change in chosen], rooms, options.children)
    print(report(chosen, {n: c for codes in exit_codes().values() for n, c in codes.items()}))
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.0f} minutes with {options.children} processes")


def exit_codes() -> dict[str, dict[str, int | None]]:
    """Return the mutants' exit codes of each mutated file that is still there; None: not run."""
    codes = {}
    for meta in sorted((MUTANTS / PACKAGE).rglob("*.meta")):
        file = str(meta.relative_to(MUTANTS).with_suffix(""))
        if (ROOT / file).exists():
            codes[file] = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def choose(file_of: Mapping[str, str], count: int, seed: int) -> list[Change]:
    """Return `count` mutants (0: all) at random, without those that change words only."""
    order = sorted(file_of)
    random.Random(seed).shuffle(order)
    chosen: list[Change] = []
    while order and (not count or len(chosen) < count):
        step = 2 * count or len(order)
        some, order = order[:step], order[step:]
        diffs = run_python(SHOW, stdin=json.dumps([(name, file_of[name]) for name in some]))
        for name, diff in zip(some, json.loads(diffs), strict=True):
            lines = [line for line in diff.splitlines() if line[:3] not in ("---", "+++")]
            removed, added = (
                "\n".join(line[1:].strip() for line in lines if line.startswith(sign))
                for sign in "-+"
            )
            if without_words(removed) != without_words(added):
                chosen.append(Change(name, removed, added))
    return chosen[:count] if count else chosen


def without_words(code: str) -> str:
    """Return code with all words for people alike."""
    return STRING.sub(lambda string: '" "' if " " in string[2] else string[0], code)


def run_tests(names: Sequence[str], rooms: str, children: int) -> None:
    """Let mutmut run the tests of these mutants.

    Before that it runs all of them on the code as it is. Where one fails, mutmut says no more than
    "failed to collect stats", since its own process swallows what pytest prints: then the same
    tests run once more here, and the first that fails is named.
    """
    log = MUTANTS / "run.log"
    argv = [sys.executable, "-c", ONLY_ROOMS + RUN, rooms, "--max-children", str(children), *names]
    with log.open("w", encoding="utf-8") as f:
        if subprocess.run(argv, cwd=ROOT, stdout=f, stderr=f, check=False).returncode == 0:
            return
    print(f"mutmut failed ({log}); looking for a test that fails without any mutant", flush=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mutmut = settings["tool"]["mutmut"]
    tests = [f"tests/{room}" for room in rooms.split()]
    tests = tests or mutmut["pytest_add_cli_args_test_selection"]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--rootdir=."]
    pytest += [*mutmut["pytest_add_cli_args"], *tests]
    env = {**os.environ, "MUTANT_UNDER_TEST": "stats", "PY_IGNORE_IMPORTMISMATCH": "1"}
    done = subprocess.run(pytest, cwd=MUTANTS, env=env, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    if failed:
        cause = re.split(r"={3,} (?:FAILURES|ERRORS|warnings summary) =*", done.stdout)[1]
        raise SystemExit(f"{failed[0]}\n{cause[-3000:]}")
    end = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")[-3000:]
    raise SystemExit(f"no test fails; the end of {log}:\n{end}")


def run_python(code: str, *args: str, stdin: str = "") -> str:
    """Run code that uses mutmut's own functions in a process, and return what it prints."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mutmut failed:\n{done.stderr[-3000:]}")
    return done.stdout


def report(chosen: Sequence[Change], codes: Mapping[str, int | None]) -> str:
    """Return the mutants that live, and the share of those killed by room."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    known = {(e["function"], e["removed"], e["added"]) for e in entries}
    counted = [c for c in chosen if (c.function, c.removed, c.added) not in known]
    unknown = [c.name for c in counted if codes[c.name] is None]
    if unknown:
        raise SystemExit(f"mutmut did not run {len(unknown)} mutants, such as {unknown[0]}.")
    alive = [c for c in counted if codes[c.name] in (*SURVIVED, *NO_TESTS)]
    lines = []
    for change in alive:
        kind = "no test" if codes[change.name] in NO_TESTS else "lives"
        lines.append(f"{change.function} ({kind})\n  - {change.removed}\n  + {change.added}")
    rooms = Counter(c.name.split(".")[1] for c in counted)
    lost = Counter(c.name.split(".")[1] for c in alive)
    lines += ["", "| room | mutants | killed |", "|---|---|---|"]
    lines += [f"| {room} | {n} | {1 - lost[room] / n:.0%} |" for room, n in sorted(rooms.items())]
    lines.append(f"| all | {len(counted)} | {1 - len(alive) / max(len(counted), 1):.1%} |")
    lines.append(f"\n{len(chosen) - len(counted)} more are equivalent to the code.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
