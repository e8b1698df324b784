"""What the doctor is to look at: from the command line, and from a preset."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from swift_grpo_ext.checks.presets import Run, as_list, environment, read_run

MASTER_PORT = 29500
"""torchrun's, unless MASTER_PORT says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be looked at; what is empty is left out."""

    run: Run | None = None
    """The settings of a YAML file, which are checked as `swift-grpo-ext check` does."""

    model: str | None = None
    model_type: str | None = None
    template: str | None = None
    stop_words: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()

    servers: tuple[str, ...] = ()
    """URLs of rollout servers that have to answer."""

    future_servers: tuple[str, ...] = ()
    """URLs of those that a YAML file names: they may not have been started yet."""

    ports: tuple[int, ...] = (MASTER_PORT,)
    """Of this machine, that have to be free."""


def wanted(options: argparse.Namespace) -> Wanted:
    """What the command line asks for; a value of its own wins over the YAML file's.

    Raises:
        ValueError: there is no such YAML file, or it holds no settings.
    """
    run = read_run(options.config) if options.config else None
    settings = (run and (run.training or run.rollout)) or {}
    port = environment(settings).get("MASTER_PORT", MASTER_PORT)
    datasets = options.dataset or as_list(settings.get("dataset"))
    return Wanted(
        run=run,
        model=options.model or settings.get("model"),
        model_type=options.model_type or settings.get("model_type"),
        template=options.template or settings.get("template"),
        stop_words=tuple(options.stop_words or as_list(settings.get("stop_words"))),
        datasets=tuple(datasets),
        servers=tuple(url(server) for server in options.server),
        future_servers=() if options.server else _servers_of(run),
        ports=tuple(options.port or [int(port)]),
    )


def url(server: str) -> str:
    """`HOST:PORT` as a URL; a URL as it is."""
    return server.rstrip("/") if "://" in server else f"http://{server}"


def _servers_of(run: Run | None) -> tuple[str, ...]:
    if run is None or not run.has_servers:
        return ()
    urls = as_list(run.train("vllm_server_base_url"))
    hosts, ports = as_list(run.train("vllm_server_host")), as_list(run.train("vllm_server_port"))
    pairs = zip(hosts, ports, strict=False)
    return tuple(urls) or tuple(f"http://{host}:{port}" for host, port in pairs)
