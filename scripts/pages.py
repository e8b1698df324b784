"""Write generated tables into pages, between the marks `<!-- NAME: begin -->` and `end`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "docs/support.md"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, f"{'|---' * len(head)}|", *others])


def today() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


def commit() -> str:
    """Return the commit that is checked out, with `-dirty` if files were changed."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def read_from(page: Path, name: str) -> str:
    """Return the text between a table's marks; raise `ValueError` if they are missing."""
    return _parts(page, name)[1].strip()


def write_into(page: Path, name: str, table: str) -> None:
    """Replace the text between a table's marks; raise `ValueError` if they are missing."""
    before, _, after = _parts(page, name)
    page.write_text(f"{before}\n\n{table}\n\n{after}", encoding="utf-8")
    print(f"{page.name}: written")


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    inside, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"{page}: expected the marks {begin} and {end} around the table")
    return before + begin, inside, end + after
