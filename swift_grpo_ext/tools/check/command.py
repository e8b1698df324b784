"""`swift-grpo-ext check`: is this machine ready, and would this run start?"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial

from swift_grpo_ext.checks.finding import Finding, Findings, error, warning
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.lookup import check_template, look_up
from swift_grpo_ext.tools.check.rules import check_settings
from swift_grpo_ext.tools.check.settings import Run, parse, read_run

HERE = "this machine"


def run(options: argparse.Namespace) -> int:
    """Print what each check says as soon as it is known, below what it looked at; return the exit
    status: 1 where something is wrong."""
    shown, status = "", 0
    for subject, finding in examine(options):
        if options.quiet and finding.level in ("ok", "note"):
            continue
        if subject != shown:
            print(subject)
        shown = subject
        print(f"  {finding.level}: {finding.sentence}", flush=True)
        status |= finding.level == "error"
    return status


def examine(options: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    """Yield the findings, each with what it is about: this machine, or the configuration."""
    checks: list[tuple[str, Callable[[], Findings]]] = []
    if not options.settings_only:
        checks = [
            (HERE, machine.check_versions),
            (HERE, machine.check_shared_memory),
            (HERE, machine.check_builds),
        ]
    subject = options.config or HERE
    model = ["--model", options.model] if options.model else []
    dataset = ["--dataset", *options.dataset] if options.dataset else []
    overrides = [*model, *dataset, *options.rest]
    read: Run | None = None
    try:
        if options.config:
            read = read_run(
                options.config, ranks=options.ranks, model=options.model, overrides=overrides
            )
        elif overrides:
            read = Run(training=parse("training", {}, overrides))
    except ValueError as e:
        checks.append((subject, partial(iter, [error("Settings", str(e))])))
    if read is not None and options.config:
        checks.append((subject, partial(check_settings, read)))
    if read is not None and not options.settings_only:
        if options.config:
            gpus = None if options.gpus is None else [gpu for gpu in options.gpus.split(",") if gpu]
            checks.append((subject, partial(look_up, read, gpus)))
        checks += [(subject, partial(check_template, read)), (subject, partial(check_data, read))]

    for subject, check in checks:
        findings = []
        with _silence():
            try:
                for finding in check():
                    findings.append(finding)
            except Exception as e:  # ours, perhaps: nothing is refused for it
                text = f"the check itself failed ({type(e).__name__}: {e})."
                findings.append(warning("A check", text, "Look at the lines above, or report it."))
        for finding in findings:
            yield subject, finding


def check_data(run: Run) -> Findings:
    """Look at rows, and compare how training and vLLM encode them; imports both."""
    from swift_grpo_ext.tools.check import encoding

    return encoding.check_data(run)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep quiet what ms-swift, transformers and vLLM say, which is beside the point."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)
