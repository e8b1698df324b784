"""Measure rollouts of ms-swift and of the plugin, side by side on one engine.

    python scripts/bench/rollouts.py --output colocate.json            in the training process
    python scripts/bench/rollouts.py --server --output server.json     through `swift rollout`

Both ways use the plugin's engine or server, which serves a request without our metadata just as
ms-swift does. `ms-swift` sends one request for each completion. `ours` does what the trainer's
`_rollout` does: hash the prompts, form groups, send one request for each group, and return one
output for each sample.

Before each run, untimed, the samples are made, and vLLM's caches of prefixes, processed images and
encoded images are emptied, as `--sleep_level` empties them. Loading the model and syncing weights
are not timed. With `--server`, client and server share this machine, and the bytes of HTTP bodies
are counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cases import case_name, generate_ours, make_config, make_samples
from common import DEFAULT_MODEL, ROOT, SWIFT, Results, as_markdown, free_port, make_rows
from swift.infer_engine.protocol import RolloutOutput
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from scripts.bench.measure import Measures, Turn, interleave, stopwatch
from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Answer
from swift_grpo_ext.server.client import RolloutServers

CACHES = ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache")
STARTUP_SECONDS = 600
MEASURES = ("seconds", "tokens", "request_bytes", "response_bytes")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
Samples = Sequence[RolloutSample]
MakeSamples = Callable[[int], Samples]  # the argument is the number of the repetition
Generate = Callable[[Samples], list[RolloutOutput]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--server", action="store_true", help="through a `swift rollout` server")
    add("--model", type=Path, default=DEFAULT_MODEL, help="folder of a Qwen2.5-VL")
    add("--repetitions", type=int, default=5, help="measured runs of each way and case")
    add("--num-prompts", type=int, default=8, help="prompts of a batch")
    add("--group-sizes", type=int, nargs="+", default=[4, 8, 16], help="samples of a prompt")
    add("--image-sides", type=int, nargs="+", default=[0, 256, 1024], help="pixels; 0: text only")
    add("--max-tokens", type=int, default=16, help="maximum tokens of a completion")
    add("--output", type=Path, help="write rows and environment there, as JSON")
    options = parser.parse_args()
    results = Results(options.output)
    with served(options) if options.server else nullcontext(Colocated(options)) as engine:
        for side in options.image_sides:
            for size in options.group_sizes:
                case = {"case": case_name(side), "num_prompts": options.num_prompts}
                make = partial(make_samples, side, options.num_prompts, size)
                ours = partial(generate_ours, call_engine=engine.ask)
                ways: dict[str, Turn] = {
                    "ms-swift": partial(measure, engine, make, engine.theirs),
                    "ours": partial(measure, engine, make, ours),
                }
                label = f"{case['case']}, G = {size}"
                measures = interleave(ways, options.repetitions, label)
                results.add(make_rows({**case, "group_size": size}, measures))
    shown = [name for name in MEASURES if any(name in row for row in results.rows)]
    print(as_markdown(results.rows, ("case", "num_prompts", "group_size", "way"), shown))


def measure(
    engine: Colocated | Served, make: MakeSamples, generate: Generate, repetition: int
) -> Measures:
    samples = make(repetition)
    for cache in CACHES:
        engine.reset(cache)
    engine.traffic = dict.fromkeys(engine.traffic, 0.0)
    measures: Measures = {}
    with stopwatch(measures):
        outputs = generate(samples)
    num_tokens = sum(len(output.response.choices[0].token_ids) for output in outputs)
    return {**measures, **engine.traffic, "tokens": num_tokens}


class Colocated:
    """An engine in this process, as in a training of one rank (`_prepare_vllm_engine`)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.config = make_config(options.max_tokens)
        self.traffic: Measures = {}
        apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as in ms-swift's training
        self._engine = RolloutEngine(
            str(options.model),
            model_type="qwen2_5_vl",
            template_type="qwen2_5_vl",
            torch_dtype=DTYPE,
            max_model_len=8192,
            max_num_seqs=options.num_prompts * max(options.group_sizes),
            enable_prefix_caching=True,
            enforce_eager=True,
            seed=0,
            logprobs_mode="processed_logprobs",
            engine_kwargs={"kv_cache_memory_bytes": 2**30},
        )

    def reset(self, cache: str) -> None:
        getattr(self._engine.engine, cache)()

    def theirs(self, samples: Samples) -> list[RolloutOutput]:
        return self._infer([sample.to_infer_request() for sample in samples])

    def ask(self, requests: list[Any], metadatas: list[Any]) -> list[Answer]:
        return [answer_of(output) for output in self._infer(requests)]

    def _infer(self, requests: list[Any]) -> list[Any]:
        return list(self._engine.infer(requests, copy(self.config), use_tqdm=False))


class Served:
    """A client of the server at a port of this machine."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self.config = make_config(max_tokens)
        self.traffic = {"request_bytes": 0.0, "response_bytes": 0.0}
        self._client = VLLMInferClient(hosts=["127.0.0.1"], server_ports=[port])
        self._servers = RolloutServers(self._client, timeout=600)
        self._client.sessions[0].hooks["response"].append(self._count)

    def _count(self, response: Any, *_: Any, **__: Any) -> None:
        self.traffic["request_bytes"] += len(response.request.body or b"")
        self.traffic["response_bytes"] += len(response.content)

    def reset(self, cache: str) -> None:
        url = f"{self._client.base_urls[0]}/{cache}/"
        self._client.sessions[0].post(url).raise_for_status()

    def theirs(self, samples: Samples) -> list[RolloutOutput]:
        messages = [asdict(sample.to_infer_request()) for sample in samples]
        return list(self._client.infer(messages, asdict(self.config), use_tqdm=False))

    def ask(self, requests: list[Any], metadatas: list[Any]) -> list[Answer]:
        return self._servers.infer(requests, metadatas, self.config)


@contextmanager
def served(options: argparse.Namespace) -> Iterator[Served]:
    """Run `swift rollout` with this plugin within the block; also stop it on SIGTERM."""
    port = free_port()
    log = ROOT / "output" / "bench" / "rollout.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(str(SWIFT), "rollout", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(options.model.resolve()), "--external_plugins", "plugins/grpo_ext.py"),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"),
        *("--torch_dtype", str(DTYPE).removeprefix("torch.")),
        *("--vllm_max_model_len", "8192", "--vllm_enforce_eager", "true"),
        *("--vllm_engine_kwargs", f'{{"kv_cache_memory_bytes": {2**30}}}'),
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run `finally`
    with log.open("wb") as f:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=f, stderr=f, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        deadline = time.monotonic() + STARTUP_SECONDS
        print("Starting swift rollout", file=sys.stderr)
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise SystemExit(f"swift rollout did not start:\n{end}")
            time.sleep(0.5)
        yield Served(port, options.max_tokens)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
        return True
    return False


if __name__ == "__main__":
    main()
