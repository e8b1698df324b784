"""Time rollouts of ms-swift and of the plugin, side by side on one engine.

    python scripts/bench/rollouts.py --output colocate.json            in the training process
    python scripts/bench/rollouts.py --server --output server.json     through `swift rollout`

Both ways use the plugin's engine or server, where a request without its envelope is served just as
ms-swift does. `ms-swift` asks for one completion a request. `ours` does what the trainer's
`_rollout` does: fingerprints of the samples, groups, requests, and one output a sample.

Before each turn, untimed, the samples are made, and vLLM's caches of prefixes, of processed images
and of encoded images are emptied. Loading the model and syncing weights are not timed. With
`--server`, bytes are those of HTTP bodies, and both sides share this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from cases import (
    RUN_SEED,
    Case,
    count_tokens,
    draw_ours,
    draw_theirs,
    make_config,
    make_engine,
    make_samples,
)
from common import Measures, Results, Turn, interleave, make_parser, make_rows, ratios, stopwatch
from server_process import rollout_server
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.rollout.generate import ServedSample, to_rollout_outputs
from swift_grpo_ext.server.client import RolloutServers
from swift_grpo_ext.upstream.cpu import apply_cpu_settings

CACHES = ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache")
Samples = Sequence[OnPolicySample]


def main() -> None:
    parser = make_parser(__doc__ or "", repetitions=5)
    parser.add_argument("--server", action="store_true", help="through a `swift rollout` server")
    options = parser.parse_args()
    results = Results(options.output)
    with served(options) if options.server else colocated(options) as (ways, clear, traffic):
        for side in options.image_sides:
            for size in options.group_sizes:
                case = Case(image_side=side, num_prompts=options.num_prompts, group_size=size)
                turns: dict[str, Turn] = {
                    way: partial(turn, case, generate, clear, traffic)
                    for way, generate in ways.items()
                }
                measures = interleave(turns, options.repetitions, f"{case.name}, G = {size}")
                where = "server" if options.server else "colocate"
                results.add(make_rows({"benchmark": where, **case.columns()}, measures))
    print(as_markdown(results.rows))


def turn(
    case: Case,
    generate: Callable[[Samples], list[Any]],
    clear: Callable[[], None],
    traffic: dict[str, float],
    repetition: int,
) -> Measures:
    """Generate a case's batch once, from empty caches, and return what that took."""
    samples = make_samples(case, repetition)
    clear()
    traffic.update(dict.fromkeys(traffic, 0.0))
    measures: Measures = {}
    with stopwatch(measures):
        outputs = generate(samples)
    return {**measures, **traffic, "tokens": count_tokens(outputs)}


Ways = tuple[dict[str, Callable[[Samples], list[Any]]], Callable[[], None], dict[str, float]]
"""How each way generates, what empties the caches, and the bytes that went over the wire."""


@contextmanager
def colocated(options: argparse.Namespace) -> Iterator[Ways]:
    apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as in ms-swift's training
    config = make_config(options.max_tokens)
    engine = make_engine(options.model, options.num_prompts * max(options.group_sizes))

    def ask(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
        outputs = engine.infer(requests, copy(config), use_tqdm=False)
        pairs = zip(outputs, metadatas, strict=True)
        return [to_rollout_outputs(output, metadata, "rank 0") for output, metadata in pairs]

    def theirs(samples: Samples) -> list[Any]:
        asked = partial(engine.infer, request_config=copy(config), use_tqdm=False)
        return draw_theirs(samples, asked)

    def clear() -> None:
        for cache in CACHES:
            getattr(engine.engine, cache)()

    yield {"ms-swift": theirs, "ours": lambda s: draw_ours(s, RUN_SEED, ask)}, clear, {}


@contextmanager
def served(options: argparse.Namespace) -> Iterator[Ways]:
    config = make_config(options.max_tokens)
    traffic = {"request_bytes": 0.0, "response_bytes": 0.0}
    argv = [
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"),
        *("--torch_dtype", "bfloat16" if torch.cuda.is_available() else "float32"),
        *("--vllm_max_model_len", "8192", "--vllm_enforce_eager", "true"),
        *("--vllm_engine_kwargs", f'{{"kv_cache_memory_bytes": {2**30}}}'),
    ]
    with rollout_server(options.model, argv) as port:
        client = VLLMInferClient(hosts=["127.0.0.1"], server_ports=[port])
        servers = RolloutServers(client, timeout=600)

        def count(response: Any, *_: Any, **__: Any) -> None:
            traffic["request_bytes"] += len(response.request.body or b"")
            traffic["response_bytes"] += len(response.content)

        client.sessions[0].hooks["response"].append(count)

        def ask(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
            answers = servers.infer(requests, metadatas, config)
            return [[ServedSample(c, prompt_ids) for c in cs] for cs, prompt_ids in answers]

        def theirs(samples: Samples) -> list[Any]:
            def asked(requests: list[Any]) -> Any:
                messages = [asdict(request) for request in requests]
                return client.infer(messages, asdict(config), use_tqdm=False)

            return draw_theirs(samples, asked)

        def clear() -> None:
            for cache in CACHES:
                client.sessions[0].post(f"{client.base_urls[0]}/{cache}/").raise_for_status()

        yield {"ms-swift": theirs, "ours": lambda s: draw_ours(s, RUN_SEED, ask)}, clear, traffic


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians of seconds, and of the repetitions' own ratios with the lowest and highest."""
    lines = [
        "| prompts | G | ms-swift s | ours s | ours / ms-swift | bytes sent | bytes answered |",
        "|---|---|---|---|---|---|---|",
    ]
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        of_time = ratios(ours, theirs, "seconds")
        cells = [
            f"{ours['num_prompts']} x {ours['case']}",
            str(ours["group_size"]),
            *(f"{median(row['seconds']):.2f}" for row in (theirs, ours)),
            f"{median(of_time):.2f} ({min(of_time):.2f} to {max(of_time):.2f})",
        ]
        for name in ("request_bytes", "response_bytes"):
            cells.append(f"{median(ratios(ours, theirs, name)):.3f}" if name in ours else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
