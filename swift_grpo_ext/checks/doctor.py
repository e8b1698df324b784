"""Runs the checks, and shows what they found: as a table, or as JSON for scripts."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from swift_grpo_ext.checks import inputs, machine
from swift_grpo_ext.checks.result import Result, red
from swift_grpo_ext.checks.wanted import Wanted
from swift_grpo_ext.version import __version__

MARKS = {"green": "[green]ok[/]", "yellow": "[yellow]note[/]", "red": "[red]wrong[/]"}


def examine(wanted: Wanted, *, quiet: bool = False) -> list[Result]:
    """Run every check.

    Args:
        wanted: what to look at.
        quiet: show no progress.
    """
    results: list[Result] = []
    checks = [*machine.CHECKS, *inputs.CHECKS]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress, _silence():
        task = progress.add_task("", total=len(checks))
        for check in checks:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            progress.update(task, description=f"looking at {name}", advance=1)
            try:
                found = check(wanted)
                results += [found] if isinstance(found, Result) else list(found or ())
            except ModuleNotFoundError as e:
                text = f"cannot be looked at: {e.name} is not installed"
                results.append(red(name, text, "Install what `versions` says."))
            except Exception as e:  # the others still have something to say
                text = f"the check itself failed ({type(e).__name__}: {e})"
                results.append(red(name, text, "Report it, with this line."))
    return results


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """ms-swift, transformers and vLLM say much that is beside the point."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


def report(results: Sequence[Result], *, as_json: bool = False) -> int:
    """Show the results; returns the exit status: 1 if anything is red."""
    if as_json:
        body = {"version": __version__, "checks": [asdict(result) for result in results]}
        print(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        _show(results)
    return int(any(result.status == "red" for result in results))


def _show(results: Sequence[Result]) -> None:
    table = Table(title=f"swift-grpo-ext {__version__}", title_justify="left")
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for result in results:
        remedy = f"\n[bold]{_plain(result.remedy)}[/]" if result.remedy else ""
        table.add_row(MARKS[result.status], result.check, _plain(result.found) + remedy)
    console = Console()
    console.print(table)
    counts = Counter(result.status for result in results)
    console.print(f"{counts['green']} ok, {counts['yellow']} to note, {counts['red']} wrong")


def _plain(text: str) -> str:
    """Square brackets are rich's markup."""
    return text.replace("[", "\\[")
