"""`swift-grpo-ext check`: is this machine ready, and would this run start?"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator

from swift_grpo_ext.checks.finding import Finding, Findings, error
from swift_grpo_ext.tools.check.glance import check_sources, devices_of
from swift_grpo_ext.tools.check.machine import check_machine
from swift_grpo_ext.tools.check.start import Job, check_start
from swift_grpo_ext.tools.share import DEFAULTS, PLUGIN_FILE
from swift_grpo_ext.tools.sources import Side, Source, read_sources, to_argv

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
    takes a second comes first, and ends it where it is wrong; the start itself comes last."""

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    has_settings = bool(options.config or options.rest)
    subject = options.config or (GIVEN if has_settings else HERE)
    sources: dict[Side, Source] = {}
    if has_settings or options.model or options.dataset:
        found = [*glance(options, sources)]
        yield from ((subject, finding) for finding in found)
        if any(finding.level == "error" for finding in found):
            return
    if not options.settings_only:
        say("loading torch and vLLM ...")
        gpus = options.gpus.split(",") if options.gpus is not None else []
        if options.gpus is None and "CUDA_VISIBLE_DEVICES" not in os.environ:  # which wins over ENV
            gpus = [gpu for source in sources.values() for gpu in devices_of(source)]
        yield from ((HERE, finding) for finding in check_machine(gpus))
    if sources:
        say(f"starting as swift does, without weights ({len(sources)} x 20 s or more) ...")
        job = Job(sources=sources, ranks=options.ranks, settings_only=options.settings_only)
        yield from ((subject, finding) for finding in check_start(job))


def glance(options: argparse.Namespace, sources: dict[Side, Source]) -> Findings:
    """Read the settings as they are written, in a file or not, and add them to `sources`; judge
    what shows at once."""
    rest = [*options.rest, *(["--dataset", *options.dataset] if options.dataset else [])]
    is_pasted = bool(options.rest) and not options.rest[0].startswith("--")
    if (options.model or options.dataset) and not (options.config or is_pasted):
        # Rows want a training, a model alone a server: it asks for nothing else.
        is_training = "--dataset" in rest
        given = DEFAULTS if is_training else {"external_plugins": [str(PLUGIN_FILE)], "port": 0}
        own = [*to_argv(given), "--vllm_enforce_eager", "true"]
        rest = [*([] if is_training else ["rollout"]), *own, *rest]
    try:
        sources |= read_sources(options.config, model=options.model, overrides=rest)
    except ValueError as e:
        yield error("Settings", str(e))
    yield from check_sources(sources, looks_at_files=not options.settings_only)
