"""What the start of a run says: both sides begin, up to their templates and data, and rows are
encoded on both.

    python -m swift_grpo_ext.tools.check.start JOB_AS_JSON

Servers begin in a process of their own, which the training's starts once it has rows for them.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Finding, Findings, error, note, ok, warning
from swift_grpo_ext.tools.harness import Begun, Tell, begin, run_child, told, typed
from swift_grpo_ext.tools.sources import Side, Source

if TYPE_CHECKING:
    from types import SimpleNamespace

    from datasets import Dataset
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift.template import Template

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.tools.check.encoding import Ask, EncodedRequests

MODULE = "swift_grpo_ext.tools.check.start"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be looked at."""

    sources: Mapping[Side, Source]
    ranks: int | None = None
    """Training processes over all nodes; None: as ENV says."""

    settings_only: bool = False
    """Values of settings alone, and nothing of this machine."""

    requests: str = ""
    """A pickle of requests that servers are to encode, in whose place their prompts come."""


def check_start(job: Job) -> Findings:
    """Run the start of a run in a child process, and yield what is found."""
    yield from run_child(MODULE, asdict(job), dict(os.environ))


def run(job: Job, tell: Tell) -> None:
    """Be that process."""
    if job.settings_only:
        for side, source in job.sources.items():
            for finding in check_values(side, source, job.ranks):
                tell(finding)
        return
    shell = dict(os.environ)  # before a side adds its own
    training, rollout = job.sources.get("training"), job.sources.get("rollout")
    if training is None:
        if rollout is not None:
            serve(rollout, job.requests, tell)
        return
    begun = begin(training, tell, ranks=job.ranks, servers=rollout)
    ask = partial(ask_servers, rollout, shell, tell) if rollout else None
    datasets = rows_of(begun) if begun else {}
    try:
        if begun:
            for finding in chain(about(begun), encode(begun, datasets, ask)):
                tell(finding)
    except Exception as e:  # ours, perhaps: nothing is refused for it
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        text = f"the check itself failed ({type(e).__name__}: {e}; {where})."
        tell(warning("A check", text, "Report it, if other lines do not explain it."))
    if ask and not datasets:
        ask([])


def ask_servers(
    source: Source, shell: Mapping[str, str], tell: Tell, requests: list[RolloutInferRequest]
) -> EncodedRequests | None:
    """Begin servers in a process of their own, and have them encode requests."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps(requests))
        # They may be up already: nobody asks whether their port is free.
        source = source._replace(argv=[*source.argv, "--port", "0"])
        job = Job(sources={"rollout": source}, requests=file.name)
        for finding in run_child(MODULE, asdict(job), shell):
            tell(finding)
        found: EncodedRequests | list[RolloutInferRequest] = pickle.loads(
            Path(file.name).read_bytes()
        )
        return None if isinstance(found, list) else found


def serve(source: Source, requests: str, tell: Tell) -> None:
    """Begin a server, and have it encode requests."""
    begun = begin(source, tell)
    if begun is None:
        return
    if not requests:
        tell(describe_template(begun.template))
        return
    from swift_grpo_ext.tools.check.encoding import EngineEncoder

    if asked := pickle.loads(Path(requests).read_bytes()):
        encoded = EngineEncoder(begun.args, begun.template)(asked)
        Path(requests).write_bytes(pickle.dumps(encoded))


def check_values(side: Side, source: Source, ranks: int | None) -> Findings:
    """Say what settings tell alone, wherever they are to be used."""
    from swift_grpo_ext.checks.preflight import check_round, round_of

    try:
        args: Any = typed(side, source.argv)
    except ValueError as e:
        yield error("Settings", str(e))
        return
    if side == "training":
        env = {**source.env, **os.environ}  # the shell wins in ms-swift
        size = ranks or int(env.get("NPROC_PER_NODE", 1)) * int(env.get("NNODES", 1))
        problems = [*check_round(args, size)]
        yield from problems or [describe_round(round_of(args, size))]


def about(begun: Begun) -> Findings:
    """Say what a round is, and what ends a completion."""
    from swift_grpo_ext.stops.templates import check_stop_settings

    args: Any = begun.args
    yield describe_round(args.training_args)
    try:
        check_stop_settings(args, begun.template)  # as its trainer would
    except ValueError as e:
        yield error("template", str(e), "Change --stop_words.")
        return
    yield describe_template(begun.template, args.stop_words)


def describe_round(sizes: RolloutGRPOConfig | SimpleNamespace) -> Finding:
    group = getattr(sizes, "num_generations", 1)
    return note(
        "num_generations",
        f"a round is {sizes.generation_batch_size} samples ({sizes.world_size} ranks x "
        f"per_device_train_batch_size {sizes.per_device_train_batch_size} x "
        f"{sizes.steps_per_generation} steps_per_generation): "
        f"{sizes.generation_batch_size // group} prompts of {group}.",
    )


def describe_template(template: Template, words: Sequence[str] = ()) -> Finding:
    from swift_grpo_ext.stops.templates import TemplateStops

    ends = template.tokenizer.convert_ids_to_tokens(sorted(TemplateStops(template).end_ids))
    return ok(
        "template",
        f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}; stop "
        f"words: {', '.join(map(repr, words)) or 'none'}.",
    )


def rows_of(begun: Begun) -> dict[str, Dataset]:
    """Return a training's data sets, where an engine is to draw for them."""
    pairs = zip(("dataset", "val_dataset"), begun.datasets, strict=False)
    return {name: rows for name, rows in pairs if rows is not None and begun.args.use_vllm}


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
        run(Job(**given), tell)
    os._exit(0)  # all is told; what vLLM and torch leave may hold up an end, or fail in it


if __name__ == "__main__":
    main(sys.argv[1])
