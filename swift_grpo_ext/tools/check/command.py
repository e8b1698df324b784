"""`swift-grpo-ext check`: is this machine ready, and would this run start?

    python -m swift_grpo_ext.tools.check.command JOB_AS_JSON

is the start of a run: both sides begin, up to their templates and data, and rows are encoded on
both. Servers begin in a process of their own, which the training's starts once it has rows for
them.
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
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Finding, Findings, error, note, ok, warning
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.glance import check_sources, devices_of
from swift_grpo_ext.tools.harness import Begun, Tell, begin, findings_of, told
from swift_grpo_ext.tools.sources import Side, Source, sources_of

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_grpo_ext.tools.check.encoding import Ask, EncodedRequests

MODULE = "swift_grpo_ext.tools.check.command"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a process."""

    sources: Mapping[Side, Source]
    ranks: int | None = None  # training processes over all nodes; None: as ENV says
    requests: str = ""  # a pickle of requests for servers, which put their prompts in its place


def run(options: argparse.Namespace) -> int:
    """Print each finding as soon as it is known, and a verdict; return 1 where there is an error,
    else 0."""
    found = list[Finding]()
    for finding in examine(options):
        found.append(finding)
        if not options.quiet or finding.level in ("error", "warning"):
            print(f"{finding.level}: {finding.sentence}", flush=True)
    if not options.quiet:
        print(verdict(options, found))
    return int(any(finding.level == "error" for finding in found))


def verdict(options: argparse.Namespace, found: list[Finding]) -> str:
    """Return a summary of all findings, and what was not looked at."""
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
    """Yield the findings. Checks that take a second come first, and end it where one fails; the
    start itself comes last."""
    sources = dict[Side, Source]()
    try:
        sources = sources_of(options)
        found = [*check_sources(sources, looks_at_files=not options.settings_only)]
    except ValueError as e:
        found = [error("Settings", str(e))]
    yield from found
    if options.settings_only or any(finding.level == "error" for finding in found):
        return
    if not options.quiet:
        print("loading torch, vLLM, ms-swift: 20 s a side or more ...", file=sys.stderr, flush=True)
    gpus = options.gpus.split(",") if options.gpus is not None else []
    if options.gpus is None and "CUDA_VISIBLE_DEVICES" not in os.environ:  # which wins over ENV
        gpus = [gpu for source in sources.values() for gpu in devices_of(source)]
    yield from findings_of(machine.__name__, {"gpus": gpus}, os.environ)
    if sources:
        job = Job(sources=sources, ranks=options.ranks)
        yield from findings_of(MODULE, asdict(job), os.environ)


# --- the start of a run ---


def begin_run(job: Job, tell: Tell) -> None:
    """Begin both sides."""
    shell = dict(os.environ)  # before a side adds its own
    training, rollout = job.sources.get("training"), job.sources.get("rollout")
    if training is None:
        if rollout is not None:
            serve(rollout, job.requests, tell)
        return
    begun = begin(training, tell, ranks=job.ranks, servers=rollout)
    ask = partial(ask_servers, rollout, shell, tell) if rollout else None
    datasets: dict[str, Dataset] = {}
    if begun:
        try:
            if begun.args.use_vllm:
                pairs = zip(("dataset", "val_dataset"), begun.datasets, strict=False)
                datasets = {name: rows for name, rows in pairs if rows is not None}
            for finding in chain(about(begun), encode(begun, datasets, ask)):
                tell(finding)
        except Exception as e:  # a fault of the check, perhaps: it refuses nothing
            traceback.print_exc()
            text = f"the check itself failed ({type(e).__name__}: {e})."
            tell(warning("A check", text, "Report it, if other lines do not explain it."))
    if ask and not datasets:
        ask([])


def ask_servers(
    source: Source, shell: Mapping[str, str], tell: Tell, requests: list[RolloutInferRequest]
) -> EncodedRequests | None:
    """Begin servers in a process of their own, and have them encode requests."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(pickle.dumps(requests))
        # Servers may run already: port 0 is never in use.
        source = source._replace(argv=[*source.argv, "--port", "0"])
        job = Job(sources={"rollout": source}, requests=file.name)
        for finding in findings_of(MODULE, asdict(job), shell):
            tell(finding)
        found: EncodedRequests | list[RolloutInferRequest] = pickle.loads(path.read_bytes())
        return None if isinstance(found, list) else found


def serve(source: Source, requests: str, tell: Tell) -> None:
    """Begin a server, and have it encode requests."""
    begun = begin(source, tell)
    if begun is None:
        return
    if not requests:
        tell(describe_template(begun))
        return
    from swift_grpo_ext.tools.check.encoding import EngineEncoder

    if asked := pickle.loads(Path(requests).read_bytes()):
        encoded = EngineEncoder(begun.args, begun.template)(asked)
        Path(requests).write_bytes(pickle.dumps(encoded))


def about(begun: Begun) -> Findings:
    """Describe a training's rounds, and what ends a completion."""
    from swift_grpo_ext.stops.templates import check_stop_settings

    args: Any = begun.args
    sizes = args.training_args
    group = getattr(sizes, "num_generations", 1)  # GKD has none
    yield note(
        "num_generations",
        f"a round is {sizes.generation_batch_size} samples ({sizes.world_size} ranks x "
        f"per_device_train_batch_size {sizes.per_device_train_batch_size} x "
        f"{sizes.steps_per_generation} steps_per_generation): "
        f"{sizes.generation_batch_size // group} prompts of {group}.",
    )
    try:
        check_stop_settings(args, begun.template)  # as its trainer would
    except ValueError as e:
        yield error("template", str(e), "Change --stop_words.")
    else:
        yield describe_template(begun)


def describe_template(begun: Begun) -> Finding:
    from swift_grpo_ext.stops.templates import TemplateStops

    template, words = begun.template, getattr(begun.args, "stop_words", ())
    ends = template.tokenizer.convert_ids_to_tokens(sorted(TemplateStops(template).end_ids))
    return ok(
        "template",
        f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}; stop "
        f"words: {', '.join(map(repr, words)) or 'none'}.",
    )


def encode(begun: Begun, datasets: Mapping[str, Dataset], ask: Ask | None) -> Findings:
    """Compare some rows as training and vLLM encode them."""
    if datasets:
        from swift_grpo_ext.tools.check.encoding import EngineEncoder, check_encoding

        ask = ask or EngineEncoder(begun.args, begun.template)
        yield from check_encoding(begun.args, begun.template, datasets, ask)


def main(text: str) -> None:
    given = json.loads(text)
    given["sources"] = {side: Source(*source) for side, source in given["sources"].items()}
    with told() as tell:
        begin_run(Job(**given), tell)
        os._exit(0)  # threads of vLLM and torch may hold up an end, or fail in it


if __name__ == "__main__":
    main(sys.argv[1])
