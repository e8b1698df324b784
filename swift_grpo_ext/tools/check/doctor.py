"""`swift-grpo-ext doctor`: every check there is, shown as each is done, as a table or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from requests.utils import get_netrc_auth
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from urllib3 import make_headers

from swift_grpo_ext.checks import preflight
from swift_grpo_ext.checks.finding import Finding, Findings, error, note, ok, warning
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.lookup import check_data, look_up, model_folder
from swift_grpo_ext.tools.check.rules import check
from swift_grpo_ext.tools.check.settings import Run, environment, read_run
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.version import __version__

MASTER_PORT = 29500
"""torchrun's, unless MASTER_PORT says otherwise; a single process takes any free one."""

NUM_ROWS = 32
"""Of a data set, that are looked at."""

SERVER_SECONDS = 5
COLORS = {"ok": "green", "note": "", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be looked at; what is empty is left out."""

    run: Run | None = None
    model: str | None = None
    model_type: str | None = None
    template: str | None = None
    stop_words: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()

    servers: tuple[str, ...] = ()
    """URLs of rollout servers that have to answer."""

    future_servers: tuple[str, ...] = ()
    """URLs of those that a YAML file names: they may not have been started yet."""

    ports: tuple[int, ...] = ()
    """Of this machine, that have to be free."""


def target_of(options: argparse.Namespace) -> Target:
    """What the command line asks for; a value of its own wins over the YAML file's.

    Raises:
        ValueError: there is no such YAML file, or it holds no settings.
    """
    data = ["--dataset", *options.dataset] if options.dataset else []
    config = options.config
    run = read_run(config, model=options.model, overrides=data) if config else None
    settings = (run and (run.training or run.rollout)) or {}
    return Target(
        run=run,
        model=options.model or settings.get("model"),
        model_type=options.model_type or settings.get("model_type"),
        template=options.template or settings.get("template"),
        stop_words=tuple(options.stop_words or settings.get("stop_words") or ()),
        datasets=tuple(options.dataset or settings.get("dataset") or ()),
        servers=tuple(s.rstrip("/") if "://" in s else f"http://{s}" for s in options.server),
        future_servers=() if options.server else _servers_of(run),
        ports=tuple(options.port or _ports_of(run, settings)),
    )


def _ports_of(run: Run | None, settings: Mapping[str, Any]) -> list[int]:
    if named := environment(settings).get("MASTER_PORT"):
        return [int(named)]
    return [MASTER_PORT] if run and run.num_ranks > 1 else []


def _servers_of(run: Run | None) -> tuple[str, ...]:
    if run is None or not run.has_servers:
        return ()
    if run.train("vllm_server_base_url"):
        return tuple(run.train("vllm_server_base_url"))
    hosts, ports = run.train("vllm_server_host") or (), run.train("vllm_server_port")
    return tuple(f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=False))


# --- running and showing ---


def examine(target: Target) -> Findings:
    """Every check's findings, each as soon as it is known."""
    for name, look in CHECKS.items():
        with _silence():
            try:
                findings = list(look(target))
            except ModuleNotFoundError as e:
                missing = f"{e.name} is not installed" if e.name else str(e)
                text = f"cannot be looked at: {missing}"
                findings = [error(name, text, "Install what `versions` says.")]
            except Exception as e:  # the others still have something to say
                text = f"the check itself failed ({type(e).__name__}: {e})"
                findings = [error(name, text, "Report it, with this line.")]
        yield from findings


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """ms-swift, transformers and vLLM say much that is beside the point."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


def report(findings: Iterable[Finding], *, as_json: bool = False) -> int:
    """Show findings as they come; returns the exit status: 1 where one is an error."""
    console, seen = Console(quiet=as_json), []
    console.print(f"swift-grpo-ext {__version__}")
    for finding in findings:
        seen.append(finding)
        console.print(_line(finding))
    counts = Counter[str](finding.level for finding in seen)
    console.print(", ".join(f"{counts[level]} {level}" for level in COLORS))
    if as_json:
        body = {"version": __version__, "checks": [asdict(finding) for finding in seen]}
        print(json.dumps(body, indent=2, ensure_ascii=False))
    return int(counts["error"] > 0)


def _line(finding: Finding) -> Table:
    columns = Column(min_width=8), Column(min_width=16), Column(overflow="fold")
    table = Table.grid(*columns, padding=(0, 1))
    remedy = f"\n[bold]{escape(finding.remedy)}[/]" if finding.remedy else ""
    level = Text(finding.level, COLORS[finding.level])
    table.add_row(level, escape(finding.setting), escape(finding.text) + remedy)
    return table


# --- settings and model ---


def check_settings(target: Target) -> Findings:
    """The YAML file's settings hold together, and what they name is here."""
    if target.run is not None:
        found = [f for f in [*check(target.run), *look_up(target.run)] if f.level != "note"]
        yield from found or [ok("settings", "hold together")]


def check_logits(target: Target) -> Findings:
    """How the model is asked for the logits of completions only."""
    problems = list(preflight.check_model(target)) if target.model else []
    yield from problems
    if target.model is None or problems:
        return
    folder = model_folder(target.model)
    if folder is None:
        text = "is a hub id, and in no cache of this machine: swift downloads it at the start"
        yield note(f"model {target.model}", text)
    else:
        yield logits_keyword(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def logits_keyword(config: dict[str, Any]) -> Finding:
    """What a model's config.json says of its class."""
    import transformers

    from swift_grpo_ext.logits.shim import keyword_of

    name, architecture = "logits", (config.get("architectures") or ["none"])[0]
    if "auto_map" in config:
        return note(name, f"{architecture} brings its own code, which is not run here")
    model_class: Any = getattr(transformers, architecture, None)
    if model_class is None:
        return error(
            name,
            f"transformers {transformers.__version__} has no {architecture}",
            "Install a version that has it, within the versions that work together.",
        )
    if keyword := keyword_of(model_class):
        return ok(name, f"{architecture} takes {keyword}")
    remedy = "--logits_shim auto computes those of completions only, at the model's head."
    return note(name, f"{architecture} takes no keyword for them", remedy)


def check_template(target: Target) -> Findings:
    """What ends a completion, and whether the stop words can be meant."""
    folder = model_folder(target.model) if target.model else None
    if target.model is None or folder is None:
        return
    from swift.model import get_processor
    from swift.model.model_meta import get_matched_model_meta
    from swift.template import get_template

    from swift_grpo_ext.stops.templates import check_template_stops, end_ids

    meta = get_matched_model_meta(target.model)  # by the hub's name, which the cache lacks
    try:
        model_type = target.model_type or (meta and meta.model_type)
        processor = get_processor(str(folder), model_type=model_type)
        template = get_template(processor, template_type=target.template)
    except (ValueError, KeyError, OSError) as e:
        text = " ".join(str(e).split())[:300]
        yield error("template", text, "Give --model_type and --template, as for swift rlhf.")
        return
    try:
        settings = SimpleNamespace(stop_words=target.stop_words, stop_token_ids=[])
        check_template_stops(settings, template)
    except ValueError as e:
        yield error("template", str(e), "Change --stop_words.")
        return
    ends = template.tokenizer.convert_ids_to_tokens(sorted(end_ids(template)))
    words = ", ".join(map(repr, target.stop_words)) or "none"
    text = f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}"
    yield ok("template", f"{text}; stop words: {words}")


# --- data ---


def check_rows(target: Target) -> Findings:
    """The first rows of each data set as ms-swift loads them, with their images."""
    from swift.dataset import load_dataset

    from swift_grpo_ext.checks import rows

    for dataset in target.datasets:
        name = f"dataset {dataset}"
        if found := list(check_data(Run(training={"dataset": [dataset]}))):
            yield from found if target.run is None else ()  # else `settings` says it
            continue
        try:
            loaded, _ = load_dataset([dataset], streaming=True, remove_unused_columns=False)
            first = list(islice(iter(loaded), NUM_ROWS))
        except Exception as e:  # `datasets` and ms-swift raise many kinds
            text = f"cannot be read ({type(e).__name__}: {' '.join(str(e).split())[:200]})"
            remedy = 'Expected rows such as {"messages": [...], "images": ["1.png"], ...}.'
            yield error(name, text, remedy)
            continue
        if not first:
            yield error(name, "holds no rows that ms-swift can use", "Name another file.")
            continue
        bad = list(rows.check_rows(first, setting=name, expects_media=False))
        with_media = sum(any(row.get(key) for key in rows.MEDIA) for row in first)
        text = f"{with_media} of the first {len(first)} rows hold images, videos or audios"
        if not with_media:
            remedy = "Add the column `images`, or map yours with --columns."
            bad.append(warning(name, text, remedy))
        yield from bad or [ok(name, text)]


# --- servers ---


def check_servers(target: Target) -> Findings:
    yield from (plugin_of(server, is_started=True) for server in target.servers)
    yield from (plugin_of(server, is_started=False) for server in target.future_servers)


def plugin_of(server: str, *, is_started: bool) -> Finding:
    """A server answers, and speaks this version of our wire format.

    Args:
        server: its URL.
        is_started: whether it has to be there already.
    """
    from swift_grpo_ext.server.api_key import REMEDY

    name = f"server {server}"
    start = "Start it: swift rollout --external_plugins $(swift-grpo-ext plugin-path) ..."
    too_early = error if is_started else note
    try:
        _ask(f"{server}/health")
    except (OSError, ValueError) as e:
        return too_early(name, f"does not answer ({getattr(e, 'reason', e)})", start)
    try:
        ours = _ask(f"{server}/get_engine_type/", method="POST").get(wire.KEY)
    except HTTPError as e:
        if e.code == 401:
            return too_early(name, "does not get its API key from here", f"{REMEDY}.")
        return error(name, f"answers {e.code} to /get_engine_type/: no swift rollout?", start)
    except (OSError, ValueError) as e:
        return error(name, f"is healthy, but does not say what it is ({e})", start)
    if ours is None:
        return error(name, "runs without swift-grpo-ext", start)
    try:
        wire.check_version(ours, name)
    except wire.WireError as e:
        return error(name, str(e), "Install the same version of swift-grpo-ext on both sides.")
    return ok(name, f"wire format {ours['version']}, {ours['replicas']} replica(s)")


def _ask(url: str, method: str = "GET") -> dict[str, Any]:
    """A JSON answer, past any proxy, with the API key that a training would send."""
    from_netrc = get_netrc_auth(url)
    headers = make_headers(basic_auth=":".join(from_netrc)) if from_netrc else {}
    request = Request(url, method=method, headers=headers)
    with build_opener(ProxyHandler({})).open(request, timeout=SERVER_SECONDS) as response:
        answer = json.loads(response.read() or b"{}")
    if not isinstance(answer, dict):
        raise ValueError(f"{url} answers {answer!r}")
    return answer


# The quick ones first.
CHECKS: dict[str, Callable[[Target], Iterable[Finding]]] = {
    "versions": lambda _: [machine.check_versions()],
    "shared memory": lambda _: [machine.check_shared_memory()],
    "OpenMP": lambda _: machine.spinning_threads(os.environ, has_gpu=has_accelerator()),
    "ports": lambda target: map(machine.check_port, target.ports),
    "servers": check_servers,
    "communication": lambda _: [machine.check_communication()],
    "torchvision": lambda _: [machine.loads("torchvision")],
    "vLLM": lambda _: [machine.check_vllm()],
    "settings": check_settings,
    "logits": check_logits,
    "dataset": check_rows,
    "template": check_template,
}
