"""`swift-grpo-ext check`: is this machine ready, and would this run start?"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.text import Text

from swift_grpo_ext.checks.finding import Finding, Findings, error, warning
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.lookup import check_template, look_up
from swift_grpo_ext.tools.check.rules import check_settings
from swift_grpo_ext.tools.check.settings import Run, parse, read_run
from swift_grpo_ext.version import __version__

COLORS = {"ok": "green", "note": "", "warning": "yellow", "error": "red"}


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 where something is wrong."""
    # JSON alone goes to stdout then; plain lines are not folded, so that logs can be searched.
    console = Console(quiet=options.json, soft_wrap=True, highlight=False)
    results: list[tuple[str, Finding]] = []
    for subject, finding in examine(options):
        if options.quiet and finding.level in ("ok", "note"):
            continue
        if not results or results[-1][0] != subject:
            console.print(Text(subject))
        results.append((subject, finding))
        level = (finding.level, COLORS[finding.level])
        console.print(Text.assemble("  ", level, f": {finding.sentence}"))
    if options.json:
        checks = [{"of": subject, **asdict(finding)} for subject, finding in results]
        print(json.dumps({"version": __version__, "checks": checks}, indent=2, ensure_ascii=False))
    return int(any(finding.level == "error" for _, finding in results))


def examine(options: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    """Yield what each check says as soon as it is known, with what it looked at: the machine, or a
    configuration."""
    here = "this machine"
    checks: list[tuple[str, Callable[[], Findings]]] = []
    if not options.settings_only:
        checks = [
            (here, machine.check_versions),
            (here, machine.check_shared_memory),
            (here, machine.check_builds),
        ]
    dataset = ["--dataset", *options.dataset] if options.dataset else []
    overrides = [*dataset, *options.rest]
    gpus = None if options.gpus is None else [gpu for gpu in options.gpus.split(",") if gpu]
    for config in options.config:
        try:
            read = read_run(config, ranks=options.ranks, model=options.model, overrides=overrides)
        except ValueError as e:
            checks.append((config, partial(iter, [error("Settings", str(e))])))
            continue
        checks.append((config, partial(check_settings, read)))
        if not options.settings_only:
            checks += [
                (config, partial(look_up, read, gpus)),
                (config, partial(check_template, read)),
                (config, partial(check_data, read)),
            ]
    if not options.config and (options.model or overrides):
        model = ["--model", options.model] if options.model else []
        read = Run(training=parse("training", {}, [*model, *overrides]))
        checks += [(here, partial(check_template, read)), (here, partial(check_data, read))]

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
