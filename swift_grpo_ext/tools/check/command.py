"""`swift-grpo-ext check`: is this machine ready, and would this run start?"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import Finding, Findings, error, warning
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.glance import by_flag, check_files
from swift_grpo_ext.tools.check.settings import Run, Source, parse_run, read_sources
from swift_grpo_ext.tools.streams import redirected

if TYPE_CHECKING:
    from swift_grpo_ext.checks.rows import Row

HERE = "this machine"
GIVEN = "arguments"


def run(options: argparse.Namespace) -> int:
    """Print what each check says as soon as it is known, below what it looked at, and a verdict;
    return the exit status: 1 where something is wrong."""
    shown, found = "", list[Finding]()
    for subject, finding in examine(options):
        found.append(finding)
        if options.quiet and finding.level not in ("error", "warning"):
            continue
        if subject != shown:
            print(subject)
        shown = subject
        print(f"  {finding.level}: {finding.sentence}", flush=True)
    if not options.quiet:
        print(verdict(options, found))
    return int(any(finding.level == "error" for finding in found))


def verdict(options: argparse.Namespace, found: list[Finding]) -> str:
    """Return what all findings come to, and what nobody has looked at."""
    counts = Counter(finding.level for finding in found)
    shown = [
        f"{n} {level}{'s' * (n > 1)}" for level in ("error", "warning") if (n := counts[level])
    ]
    has_settings = bool(options.config or options.rest)
    if counts["error"]:
        fails = "this run would not start" if has_settings else "not ready"
        return f"{', '.join(shown)}: {fails}."
    unseen = [finding.setting for finding in found if finding.level == "skipped"]
    if options.settings_only:
        unseen.append("this machine, plugins, rewards, model, data")
    if has_settings:
        unseen.append("weights, and the memory that they need")
    else:
        unseen.append("settings (give a file, or arguments of swift rlhf behind --)")
    with_warnings = f" ({shown[0]})" if shown else ""
    return f"Ready{with_warnings}. Not looked at: {'; '.join(dict.fromkeys(unseen))}."


def examine(options: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    """Yield the findings, each with what it is about: this machine, or the configuration. What
    takes a fraction of a second comes first, before ms-swift is imported; what takes longest comes
    last."""
    found: list[Finding] = []

    def about(subject: str, *checks: Callable[[], Findings]) -> Iterator[tuple[str, Finding]]:
        for check in checks:
            for finding in quietly(check):
                found.append(finding)
                yield subject, finding

    def tell(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    has_settings = bool(options.config or options.rest)
    subject = options.config or (GIVEN if has_settings else HERE)
    sources: list[Source] = []
    runs: list[Run] = []
    if not options.settings_only:
        yield from about(HERE, machine.check_versions)
    if has_settings or options.model or options.dataset:
        yield from about(subject, partial(glance, options, sources))
        if not sources:
            return
    tell("loading ms-swift ...")
    if not options.settings_only:
        yield from about(HERE, machine.check_shared_memory)
    if sources:
        yield from about(subject, partial(read, sources, options.ranks, runs))
    for run in runs if has_settings else ():
        yield from about(subject, later("rules.check_settings", run))
    if options.settings_only:
        return
    gpus = None if options.gpus is None else [gpu for gpu in options.gpus.split(",") if gpu]
    for run in runs if has_settings else ():
        yield from about(subject, later("lookup.look_up", run, gpus))
    tell("loading vLLM ...")
    yield from about(HERE, machine.check_builds)
    are_plugins_imported = has_settings and not any(
        finding.level == "error" and finding.setting.startswith("external_plugins ")
        for finding in found
    )
    for run in runs:
        loaded: dict[str, list[Row]] = {}
        checks = [later("lookup.check_template", run), later("data.check_data", run, loaded)]
        if are_plugins_imported:
            checks.append(later("data.check_reward_columns", run, loaded))
        yield from about(subject, *checks)
        if loaded and run.templates:
            tell("encoding rows for training and for vLLM ...")
            yield from about(subject, later("encoding.check_encoding", run, loaded))


def glance(options: argparse.Namespace, sources: list[Source]) -> Findings:
    """Read the settings as they are written, in a file or not, and add them to `sources`; look for
    the files that they name."""
    dataset = ["--dataset", *options.dataset] if options.dataset else []
    try:
        sources += read_sources(
            options.config, model=options.model, overrides=[*options.rest, *dataset]
        )
    except ValueError as e:
        yield error("Settings", str(e))
    if not options.settings_only:
        given = [check_files(by_flag(source.argv)) for source in sources]
        yield from dict.fromkeys(finding for findings in given for finding in findings)


def read(sources: Sequence[Source], ranks: int | None, runs: list[Run]) -> Findings:
    """Read the settings with their types, and add what they are to `runs`."""
    try:
        runs.append(parse_run(sources, ranks))
    except ValueError as e:
        yield error("Settings", str(e))


def later(name: str, *given: object) -> Callable[[], Findings]:
    """Return a check whose module is imported when it begins: ms-swift and vLLM take seconds."""
    module, _, function = name.partition(".")

    def check() -> Findings:
        yield from getattr(import_module(f"{__package__}.{module}"), function)(*given)

    return check


def quietly(check: Callable[[], Findings]) -> Findings:
    """Yield what a check finds, and keep the rest of what is said meanwhile off the report."""
    findings: Findings | None = None
    while True:
        try:
            with _silence():
                findings = findings or check()
                finding = next(findings, None)
        except Exception as e:  # ours, perhaps: nothing is refused for it
            last = traceback.extract_tb(e.__traceback__)[-1]
            where = f"{Path(last.filename).name}, line {last.lineno}"
            text = f"the check itself failed ({type(e).__name__}: {e}; {where})."
            yield warning("A check", text, "Report it, if other lines do not explain it.")
            return
        if finding is None:
            return
        yield finding


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep quiet what ms-swift, transformers, vLLM, and the processes that they start, print."""
    logging.disable(logging.CRITICAL)
    try:
        with (
            Path(os.devnull).open("w") as nowhere,
            redirected(1, 2, to=nowhere.fileno()),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
