"""Tests this project against releases of ms-swift and prints the documentation's table of them.

    python scripts/compatibility.py --write

Each release gets an environment of its own under --environments, made once (4 minutes and 4.3 GB
each): the pinned set of `requirements-cpu.txt`, and what that ms-swift takes where it excludes a
pin. vLLM is left out where its requirements and ms-swift's exclude each other.

In each, the pins of upstream names are looked at, one by one. Where the plugin takes the release,
all tests run that start no process (4 minutes), and three short trainings (4 minutes, 6 GB).

Exit status 1: a release that pyproject.toml allows does not work.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from compat.environment import ROOT, Environment
from compat.table import put_into, table
from compat.trial import make_assets, try_out

RELEASES = ("4.4", "4.5", "4.6")
PAGES = (ROOT / "docs/compatibility.md", ROOT / "docs/compatibility_CN.md")


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that pip and pytest end too
    trials = []
    for number, release in enumerate(options.versions, start=1):
        environment = Environment(release, options.environments.resolve() / release)
        print(f"== ms-swift {release} ({number} of {len(options.versions)})", flush=True)
        environment.make()
        make_assets(environment, Path(os.environ.setdefault("ASSETS", str(ROOT / ".assets"))))
        trials.append(try_out(environment, trains=options.training))
    made = table(trials)
    print(f"\n{made}")
    if options.write:
        for page in PAGES:
            text = put_into(page.read_text(encoding="utf-8"), made)
            page.write_text(text, encoding="utf-8")
    return int(any(not trial.works for trial in trials if trial.refusal is None))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--versions",
        nargs="+",
        default=list(RELEASES),
        metavar="RELEASE",
        help="`4.5` is the newest 4.5.x (default: %(default)s)",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".compat",
        metavar="DIR",
        help="where environments are kept (default: .compat)",
    )
    parser.add_argument(
        "--training",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train three steps in three ways (default: yes)",
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
