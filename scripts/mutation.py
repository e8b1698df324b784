"""How many small changes of the code do the unit tests notice? A mutation run with mutmut.

    python scripts/mutation.py                                   300 mutants at random
    python scripts/mutation.py --only training stops --sample 60 --seed 1     60 of two rooms
    python scripts/mutation.py --only 'swift_grpo_ext.stops.rule.*' --sample 0     all of a module

mutmut changes one expression at a time in a copy of the tree (`mutants/`), and runs the unit tests
that reach the changed function; `[tool.mutmut]` in pyproject.toml says which modules take part.
The stack tier does not run. A mutant that makes a test fail or crash is killed; so is one whose
tests hang, which `timeout_multiplier` and `timeout_constant` in pyproject.toml define: the report
says how many these are. Not counted: mutants that only change the words of a message, and those
that `tests/equivalent_mutants.toml` lists, since no test could tell them apart. mutmut leaves
decorated functions alone (properties, cached functions).

Nothing else should change the tree meanwhile: mutmut copies it as it starts.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
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

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "mutants"
EQUIVALENT = ROOT / "tests/equivalent_mutants.toml"
PACKAGE = "swift_grpo_ext"

SURVIVED, NO_TESTS = (0,), (5, 33)
"""Exit codes that mutmut keeps of mutants that live; any other one is a death."""

TIMED_OUT = (24, -24, 36, 152, 255)
"""Those of mutants whose tests were ended (`status_by_exit_code` in mutmut/stats.py)."""

GENERATE = """
import pathlib, sys
from mutmut import __main__ as mutmut
mutmut.set_mutant_under_test("mutant_generation")
pathlib.Path("mutants").mkdir(exist_ok=True)
mutmut.copy_src_dir()
mutmut.copy_also_copy_files()
mutmut.setup_source_paths()
mutmut.create_mutants(int(sys.argv[1]))
"""
"""What `mutmut run` (3.8.1) begins with. It has no command that makes the mutants and runs none."""

SHOW = """
import json, sys
from mutmut.mutation.diff_apply import get_diff_for_mutant
names = json.load(sys.stdin)
print(json.dumps([get_diff_for_mutant(name, path=path) for name, path in names]))
"""

TEXT = re.compile(r"""(?s)[rfbu]*(['"])(?:\\.|(?!\1).)* (?:\\.|(?!\1).)*\1""")
"""A string literal with a space in it: words for people, no key and no name."""

SPINNER = re.compile(r"[\u2800-\u28ff]")
"""With which mutmut's lines of progress begin."""


class Change(NamedTuple):
    """What a mutant changes."""

    name: str
    removed: str
    added: str

    @property
    def is_wording(self) -> bool:
        """Whether nothing but the words of a message differ."""
        return TEXT.sub('" "', self.removed) == TEXT.sub('" "', self.added)

    @property
    def function(self) -> str:
        """As `swift_grpo_ext.sampling.seeding.sample_seed` or `...module.Class.method`."""
        return function_of(self.name)


def function_of(mutant: str) -> str:
    """The function that a mutant of mutmut's naming changes."""
    module, _, mangled = mutant.rpartition("__mutmut_")[0].rpartition(".")
    return f"{module}.{mangled.removeprefix('x').lstrip('_ǁ').replace('ǁ', '.')}"


def generate(children: int) -> None:
    """Write all mutants into `mutants/`."""
    _python(GENERATE, str(children))


def test(names: Sequence[str], children: int) -> None:
    """Run the tests of these mutants; once more, if the tests of the code as it is failed."""
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children"]
    log = MUTANTS / "run.log"
    for attempt in (1, 2):
        with log.open("w", encoding="utf-8") as f:
            done = subprocess.run(
                [*command, str(children), *names], cwd=ROOT, stdout=f, stderr=f, check=False
            )
        if not done.returncode:
            return
        lines = re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace"))
        told = [line for line in lines if not SPINNER.match(line)]
        text = "\n".join(told)[-3000:]
        print(f"mutmut failed (attempt {attempt}); the end of {log}:\n{text}", file=sys.stderr)
    raise SystemExit(1)


def metas() -> dict[str, dict[str, int | None]]:
    """Of each mutated file, as mutmut names it: its mutants' exit codes; None where not run."""
    found = {}
    for meta in sorted((MUTANTS / PACKAGE).rglob("*.meta")):
        file = str(meta.relative_to(MUTANTS).with_suffix(""))
        if (ROOT / file).exists():  # else of a module that was there once
            found[file] = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return found


def results() -> dict[str, int | None]:
    """Each mutant's exit code."""
    return {name: code for codes in metas().values() for name, code in codes.items()}


def changes(names: Sequence[str], file_of: Mapping[str, str]) -> list[Change]:
    shown = json.loads(_python(SHOW, stdin=json.dumps([(name, file_of[name]) for name in names])))
    return [change_of(name, diff) for name, diff in zip(names, shown, strict=True)]


def change_of(mutant: str, diff: str) -> Change:
    lines = [line for line in diff.splitlines() if line[:3] not in ("---", "+++")]
    removed, added = (
        "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return Change(mutant, removed, added)


def _python(code: str, *args: str, stdin: str = "") -> str:
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mutmut failed:\n{done.stderr[-3000:]}")
    return done.stdout


def choose(file_of: Mapping[str, str], count: int, seed: int) -> list[Change]:
    """`count` mutants (0: all) at random, without those that change words only."""
    order = sorted(file_of)
    random.Random(seed).shuffle(order)
    chosen: list[Change] = []
    step = 2 * count or len(order)
    while order and (not count or len(chosen) < count):
        some, order = order[:step], order[step:]
        chosen += [change for change in changes(some, file_of) if not change.is_wording]
    return chosen[:count] if count else chosen


def equivalent() -> set[tuple[str, str, str]]:
    if not EQUIVALENT.exists():
        return set()
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    return {(e["function"], e["removed"], e["added"]) for e in entries}


def report(chosen: Sequence[Change], codes: dict[str, int | None]) -> str:
    known = equivalent()
    counted = [c for c in chosen if (c.function, c.removed, c.added) not in known]
    unknown = [c.name for c in counted if codes[c.name] is None]
    if unknown:
        raise SystemExit(f"mutmut did not run {len(unknown)} mutants, such as {unknown[0]}.")
    alive = [c for c in counted if codes[c.name] in (*SURVIVED, *NO_TESTS)]
    hung = [c.name for c in counted if codes[c.name] in TIMED_OUT]
    rooms = Counter(c.name.split(".")[1] for c in counted)
    lost = Counter(c.name.split(".")[1] for c in alive)
    lines = [
        f"{c.function} ({'no test' if codes[c.name] in NO_TESTS else 'lives'})\n"
        f"  - {c.removed}\n  + {c.added}".replace("\n    ", "\n")
        for c in alive
    ]
    lines += ["", "| room | mutants | killed |", "|---|---|---|"]
    lines += [f"| {room} | {n} | {1 - lost[room] / n:.0%} |" for room, n in sorted(rooms.items())]
    share = 1 - len(alive) / max(len(counted), 1)
    lines.append(f"| all | {len(counted)} | {share:.1%} |")
    lines.append(f"\n{len(counted) - len(alive)} of {len(counted)} are killed.")
    lines.append(f"{len(hung)} of these ran out of time{': ' * bool(hung)}{', '.join(hung)}.")
    lines.append(
        f"{len(chosen) - len(counted)} more are equivalent to the code ({EQUIVALENT.name})."
    )
    return "\n".join(lines)


def is_meant(name: str, only: Sequence[str]) -> bool:
    """Whether a mutant is of one of these rooms, or has a name of one of these patterns."""
    patterns = [p if "." in p or "*" in p else f"{PACKAGE}.{p}.*" for p in only]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", nargs="+", default=["*"], help="rooms, or patterns of names")
    parser.add_argument("--children", type=int, default=2, help="processes side by side")
    options = parser.parse_args()
    start = time.monotonic()
    generate(options.children)
    file_of = {
        name: file
        for file, codes in metas().items()
        for name in codes
        if is_meant(name, options.only)
    }
    chosen = choose(file_of, options.sample, options.seed)
    if not chosen:
        raise SystemExit(f"--only {' '.join(options.only)}: no mutant is meant; expected rooms.")
    print(
        f"{len(file_of)} mutants, {len(chosen)} of them to run ({time.monotonic() - start:.0f} s)"
    )
    test([change.name for change in chosen], options.children)
    print(report(chosen, results()))
    print(f"{(time.monotonic() - start) / 60:.0f} minutes with {options.children} processes")


if __name__ == "__main__":
    main()
