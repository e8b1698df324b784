"""Makes the table of conversations in docs/support.md: whoever leads and draws them, the same.

    python scripts/conversations.py --run      # all pairs (an hour on two cores)
    python scripts/conversations.py --write    # the table, from what was found

A run is `tests/stack/test_pairs.py`, which notes what it found in `scripts/bench/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from pages import ROOT, SUPPORT, markdown, write_into

TABLE = "conversations"
RESULTS = ROOT / "scripts/bench/results/conversations.json"
COLUMNS = ("colocated", "one replica", "two replicas", "two servers")


def made() -> str:
    """Return the Markdown between the marks of the page."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for leader, engine, deployment, ranks, equal, total in json.loads(RESULTS.read_text("utf-8")):
        cell = f"{equal} of {total}, {ranks} rank{'s' * (ranks > 1)}"
        rows.setdefault((leader, engine), {})[deployment] = cell
    cells = ([*names, *(found.get(c, "") for c in COLUMNS)] for names, found in rows.items())
    return markdown(("led by", "engine", *COLUMNS), cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="train all pairs")
    parser.add_argument("--write", action="store_true", help="into docs/support.md")
    arguments = parser.parse_args()
    status = 0
    if arguments.run:
        RESULTS.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "tests/stack/test_pairs.py", "-m", "stack"]
        env = {**os.environ, "CONVERSATIONS": str(RESULTS)}
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if arguments.write:
        write_into(SUPPORT, TABLE, made())
    return status


if __name__ == "__main__":
    sys.exit(main())
