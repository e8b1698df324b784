"""`swift-grpo-ext check`: is this machine ready, and would this run start?

    python -m swift_grpo_ext.tools.check.command JOB_AS_JSON

starts a run: each side begins, up to its template and data, and rows are encoded on both. Servers
begin in a process of their own, which the training's process starts once it has rows for them.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Finding, Findings, error, note, ok, skipped, warning
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.glance import check_sources, devices_of
from swift_grpo_ext.tools.harness import (
    NotHereError,
    Report,
    StartResult,
    begin,
    findings_of,
    result_writer,
)
from swift_grpo_ext.tools.sources import Side, Source, sources_of

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_grpo_ext.tools.check.encoding import EncodedRequests, Encoder

MODULE = "swift_grpo_ext.tools.check.command"


def run(options: argparse.Namespace) -> int:
    """Print each finding as soon as it is known, and a verdict. Return 1 if there is an error, else
    0; raises ValueError if the settings cannot be read."""
    found = list[Finding]()
    for finding in examine(options):
        found.append(finding)
        if not options.quiet or finding.level in ("error", "warning"):
            print(f"{finding.level}: {finding.sentence}", flush=True)
    if not options.quiet:
        print(verdict(options, found))
    return int(any(finding.level == "error" for finding in found))


def verdict(options: argparse.Namespace, found: list[Finding]) -> str:
    """Return a summary of all findings, and a list of all that was not checked."""
    counts = Counter(finding.level for finding in found)
    warnings = f"warnings: {counts['warning']}"
    if counts["error"]:
        return f"Not ready (errors: {counts['error']}, {warnings})."
    unseen = [finding.setting for finding in found if finding.level == "skipped"]
    if options.settings_only:
        unseen.append("values, this machine, files, plugins, rewards, model, data")
    unseen.append("weights, and the memory that they need")
    return f"Ready ({warnings}). Not looked at: {'; '.join(dict.fromkeys(unseen))}."


def examine(options: argparse.Namespace) -> Findings:
    """Yield the findings."""
    # Checks that take a second come first; an error among them ends the check.
    sources = sources_of(options)
    found = [*check_sources(sources, looks_at_files=not options.settings_only)]
    yield from found
    if options.settings_only or any(finding.level == "error" for finding in found):
        return
    print("loading torch, vLLM, ms-swift: 20 s a side or more ...", file=sys.stderr, flush=True)
    gpus = options.gpus.split(",") if options.gpus is not None else []
    if options.gpus is None and "CUDA_VISIBLE_DEVICES" not in os.environ:  # which wins over ENV
        gpus = [gpu for source in sources.values() for gpu in devices_of(source)]
    # In a process of its own, which a broken build may end.
    yield from findings_of(machine.__name__, {"gpus": gpus}, os.environ)
    if sources:
        job = {"sources": sources, "ranks": options.ranks}
        yield from findings_of(MODULE, job, os.environ)


# --- the start of a run ---


def begin_run(
    sources: Mapping[Side, Source], report: Report, *, ranks: int | None = None, requests: str = ""
) -> None:
    """Start both sides, or only servers. `ranks` counts the training processes of all nodes; None
    means the number in ENV. Servers replace the pickled `requests` in a file by their prompts."""
    shell = dict(os.environ)  # before a side adds its own
    training, rollout = sources.get("training"), sources.get("rollout")
    if training is None:
        serve(sources["rollout"], requests, report)
        return
    encode: Encoder | None = partial(encode_by_servers, rollout, shell, report) if rollout else None
    started = begin(training, report, ranks=ranks, servers=rollout)
    datasets = list[Any]()
    if started:
        for finding in describe_rounds(started):
            report(finding)
        if started.args.use_vllm:
            datasets = [rows for rows in started.datasets if rows is not None]
    if started and datasets:
        from swift_grpo_ext.tools.check.encoding import check_encoding, encode_requests, engine_of

        encode = encode or partial(encode_requests, engine_of(started.args, started.template))
        for finding in check_encoding(started.args, started.template, datasets, encode):
            report(finding)
    elif encode:
        encode([])


def encode_by_servers(
    source: Source, shell: Mapping[str, str], report: Report, requests: list[RolloutInferRequest]
) -> EncodedRequests | None:
    """Start servers in a process of their own, and return their encoded requests; None if the start
    fails."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(pickle.dumps(requests))
        # Servers may run already: port 0 is never in use.
        source = source._replace(argv=[*source.argv, "--port", "0"])
        job = {"sources": {"rollout": source}, "requests": file.name}
        for finding in findings_of(MODULE, job, shell):
            report(finding)
        found: EncodedRequests | list[RolloutInferRequest] = pickle.loads(path.read_bytes())
        return None if isinstance(found, list) else found


def serve(source: Source, requests: str, report: Report) -> None:
    """Start a server, and replace the file `requests` by the encoded requests."""
    started = begin(source, report)
    unencoded = pickle.loads(Path(requests).read_bytes()) if requests else []
    if started and unencoded:
        from swift_grpo_ext.tools.check.encoding import encode_requests, engine_of

        encoded = encode_requests(engine_of(started.args, started.template), unencoded)
        Path(requests).write_bytes(pickle.dumps(encoded))


def describe_rounds(started: StartResult) -> Findings:
    """Describe a training's rounds, and the tokens and words that end a completion."""
    from swift_grpo_ext.stops.templates import TemplateStops, check_stop_settings

    args: Any = started.args
    template, sizes = started.template, args.training_args
    group = getattr(sizes, "num_generations", 1)  # GKD has none
    yield note(
        "num_generations",
        f"a round is {sizes.generation_batch_size} samples ({sizes.world_size} ranks x "
        f"per_device_train_batch_size {sizes.per_device_train_batch_size} x "
        f"{sizes.steps_per_generation} steps_per_generation): "
        f"{sizes.generation_batch_size // group} prompts of {group}.",
    )
    try:
        check_stop_settings(args, template)  # as its trainer would
    except ValueError as e:
        yield error("template", str(e), "Change --stop_words.")
        return
    ends = template.tokenizer.convert_ids_to_tokens(sorted(TemplateStops(template).end_ids))
    yield ok(
        "template",
        f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}; stop "
        f"words: {', '.join(map(repr, args.stop_words)) or 'none'}.",
    )


def main(text: str) -> None:
    job = json.loads(text)
    sources = {side: Source(*source) for side, source in job.pop("sources").items()}
    with result_writer() as report:
        try:
            begin_run(sources, report, **job)
        except NotHereError as e:
            report(skipped("Prompts of a rollout", f"{e}."))
        except Exception as e:  # perhaps a fault of the check: only warn
            traceback.print_exc()
            text = f"the check itself failed ({type(e).__name__}: {e})."
            report(warning("A check", text, "Report it, if other lines do not explain it."))
        os._exit(0)  # threads of vLLM and torch may delay the exit, or fail in it


if __name__ == "__main__":
    main(sys.argv[1])
