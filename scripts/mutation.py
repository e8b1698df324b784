"""How many small changes of the code do the unit tests notice? A mutation run with mutmut.

    python scripts/mutation.py                         300 mutants at random, about half an hour
    python scripts/mutation.py --only 'swift_grpo_ext.stops.*' --sample 0     all mutants of a room

mutmut changes one expression at a time in a copy of the tree (`mutants/`), and runs the unit tests
that reach the changed function; `[tool.mutmut]` in pyproject.toml says which modules take part.
The stack tier does not run. A mutant that makes a test fail, crash or hang is killed. Not counted:
mutants that only change the words of a message, and those that `tests/equivalent_mutants.toml`
lists, since no test could tell them apart. mutmut leaves decorated functions alone (properties,
cached functions).
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "mutants"
EQUIVALENT = ROOT / "tests/equivalent_mutants.toml"
CHEAP = "swift_grpo_ext.sampling.seeding.x_sample_seed__mutmut_1"
SURVIVED, NO_TESTS = 0, 33
"""Exit codes that mutmut keeps of mutants that live; any other one is a death."""

TEXT = re.compile(r"""(?s)[rfbu]*(['"])(?:\\.|(?!\1).)* (?:\\.|(?!\1).)*\1""")
"""A string literal with a space in it: words for people, no key and no name."""


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


def mutmut(*names: str, children: int) -> None:
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children"]
    log = MUTANTS.with_name("mutants") / "run.log"
    MUTANTS.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as f:
        done = subprocess.run(
            [*command, str(children), *names], cwd=ROOT, stdout=f, stderr=f, check=False
        )
    if done.returncode:
        raise SystemExit(f"mutmut failed; the end of {log}:\n{log.read_text()[-3000:]}")


def results() -> dict[str, int | None]:
    """Each mutant's exit code; None where it was not run."""
    codes: dict[str, int | None] = {}
    for meta in sorted(MUTANTS.rglob("*.meta")):
        codes |= json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def change_of(mutant: str) -> Change:
    command = [str(Path(sys.executable).with_name("mutmut")), "show", mutant]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if line[:3] not in ("---", "+++")]
    removed, added = (
        "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return Change(mutant, removed, added)


def choose(names: Sequence[str], count: int, seed: int) -> list[Change]:
    """`count` mutants (0: all) at random, without those that change words only."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    chosen: list[Change] = []
    with ThreadPoolExecutor(2) as pool:  # of processes: mutmut shows one mutant at a time
        while order and (not count or len(chosen) < count):
            some, order = order[:50], order[50:]
            chosen += [change for change in pool.map(change_of, some) if not change.is_wording]
    return chosen[:count] if count else chosen


def equivalent() -> set[tuple[str, str, str]]:
    if not EQUIVALENT.exists():
        return set()
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    return {(e["function"], e["removed"], e["added"]) for e in entries}


def report(chosen: Sequence[Change], codes: dict[str, int | None]) -> str:
    known = equivalent()
    counted = [c for c in chosen if (c.function, c.removed, c.added) not in known]
    alive = [c for c in counted if codes[c.name] in (SURVIVED, NO_TESTS)]
    rooms = Counter(c.name.split(".")[1] for c in counted)
    lost = Counter(c.name.split(".")[1] for c in alive)
    lines = [
        f"{c.function} ({'no test' if codes[c.name] == NO_TESTS else 'lives'})\n"
        f"  - {c.removed}\n  + {c.added}".replace("\n    ", "\n")
        for c in alive
    ]
    lines += ["", "| room | mutants | killed |", "|---|---|---|"]
    lines += [f"| {room} | {n} | {1 - lost[room] / n:.0%} |" for room, n in sorted(rooms.items())]
    share = 1 - len(alive) / max(len(counted), 1)
    lines.append(f"| all | {len(counted)} | {share:.1%} |")
    lines.append(
        f"\n{len(chosen) - len(counted)} more are equivalent to the code ({EQUIVALENT.name})."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of mutants' names")
    parser.add_argument("--children", type=int, default=2, help="processes side by side")
    options = parser.parse_args()
    start = time.monotonic()
    mutmut(CHEAP, children=options.children)  # makes all mutants, and sees which tests reach what
    names = [n for n in results() if any(fnmatch.fnmatch(n, p) for p in options.only)]
    chosen = choose(names, options.sample, options.seed)
    print(f"{len(names)} mutants, {len(chosen)} of them to run ({time.monotonic() - start:.0f} s)")
    mutmut(*(change.name for change in chosen), children=options.children)
    print(report(chosen, results()))
    print(f"{(time.monotonic() - start) / 60:.0f} minutes with {options.children} processes")


if __name__ == "__main__":
    main()
