"""Time rollouts through `swift rollout`: ms-swift's client path and ours, on one server process.

    python scripts/bench/rollout_server.py --model DIR --output server.json

The server has this plugin: requests with envelopes take our route, others ms-swift's own. Timed is
what the trainer does between samples and outputs, in a training of one process:

- `ms-swift`: one request a sample, as dictionaries, through `VLLMClient.infer`.
- `ours`: fingerprints, groups, `RolloutServers.infer`, and one output a sample.

Bytes are those of HTTP bodies. CPU time is the client's (this process) and, apart from it, that of
all the server's processes; both sides share this machine. Before each turn, untimed: the samples
are made, and the server's caches of prefixes, processed images and encoded images are emptied.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from cases import RUN_SEED, Case, count_tokens, draw_ours, draw_theirs, make_config, make_samples
from common import Measures, Results, Turn, interleave, make_parser, make_rows, stopwatch
from server_process import ServerProcess, rollout_server
from swift.rlhf_trainers.vllm_client import VLLMInferClient
from tables import as_markdown

from swift_grpo_ext.rollout.generate import ServedSample
from swift_grpo_ext.server.client import RolloutServers

CACHES = ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache")


def main() -> None:
    options = parse_options()
    results = Results(options.output)
    for replicas in options.replicas:
        with rollout_server(options.model, replicas, server_argv()) as server:
            ways = ServerWays(server, options.max_tokens)
            for side in options.image_sides:
                for size in options.group_sizes:
                    case = Case(image_side=side, num_prompts=options.num_prompts, group_size=size)
                    results.add(compare(ways, case, replicas, options.repetitions))
    print(as_markdown(results.rows))


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", repetitions=5)
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1], metavar="N",
        help="one server after the other, with each of these numbers of replicas")  # fmt: skip
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.replicas = 1, options.replicas[:1]
        options.num_prompts, options.group_sizes, options.image_sides = 2, [4], [0, 256]
    return options


def server_argv() -> list[str]:
    return [
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"),
        *("--torch_dtype", "bfloat16" if torch.cuda.is_available() else "float32"),
        *("--vllm_max_model_len", "8192", "--vllm_enforce_eager", "true"),
        *("--vllm_engine_kwargs", f'{{"kv_cache_memory_bytes": {2**30}}}'),
    ]


def compare(ways: ServerWays, case: Case, replicas: int, repetitions: int) -> list[dict[str, Any]]:
    turns: dict[str, Turn] = {
        "ms-swift": partial(ways.turn, case, ways.draw_theirs),
        "ours": partial(ways.turn, case, ways.draw_ours),
    }
    label = f"{case.name}, G = {case.group_size}, {replicas} replica{'s' * (replicas > 1)}"
    measures = interleave(turns, repetitions, label)
    return make_rows({"benchmark": "server", "replicas": replicas, **case.columns()}, measures)


class ServerWays:
    """A client of each kind for one server, and the count of what goes over the wire."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        self._server = server
        self._config = make_config(max_tokens)
        self._client = VLLMInferClient(hosts=["127.0.0.1"], server_ports=[server.port])
        self._servers = RolloutServers(self._client, timeout=600)
        self._sent = self._received = 0
        self._client.sessions[0].hooks["response"].append(self._count)

    def turn(self, case: Case, draw: Callable[[Any], Any], repetition: int) -> Measures:
        samples = make_samples(case, repetition)
        for cache in CACHES:
            url = f"{self._client.base_urls[0]}/{cache}/"
            self._client.sessions[0].post(url).raise_for_status()
        self._sent = self._received = 0
        measures: Measures = {}
        server_cpu = self._server.cpu_seconds()
        with stopwatch(measures):
            outputs = draw(samples)
        return {
            **measures,
            "server_cpu_seconds": self._server.cpu_seconds() - server_cpu,
            "request_bytes": self._sent,
            "response_bytes": self._received,
            "tokens": count_tokens(outputs),
        }

    def draw_theirs(self, samples: Sequence[Any]) -> list[Any]:
        def ask(requests: list[Any]) -> Any:
            messages = [asdict(request) for request in requests]
            return self._client.infer(messages, asdict(self._config), use_tqdm=False)

        return draw_theirs(samples, ask)

    def draw_ours(self, samples: Sequence[Any]) -> list[Any]:
        def ask(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
            answers = self._servers.infer(requests, metadatas, self._config)
            return [[ServedSample(c, prompt_ids) for c in cs] for cs, prompt_ids in answers]

        return draw_ours(samples, RUN_SEED, ask)

    def _count(self, response: Any, *_: Any, **__: Any) -> None:
        self._sent += len(response.request.body or b"")
        self._received += len(response.content)


if __name__ == "__main__":
    main()
