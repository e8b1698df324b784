"""What passes rank 0 in a served round: its CPU seconds by stage, for real sizes of rounds.

    python scripts/bench/rank0.py --output scripts/bench/results/rank0.json

Training ranks are gloo processes without a model, which do what the trainer does with a round: they
name and fingerprint their samples, plan requests, send their rows to rank 0, take their samples
from it, and write them to the sample log. Rank 0 asks one server over HTTP, which echoes samples of
random tokens at once. All processes share this machine, so that the wall time says little of ranks
with cores of their own; CPU time does. Rounds have groups of 8; the first warms up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist
from cases import make_config, make_row
from common import Results
from step_clock import PhaseClock
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.rollout import draw, wire
from swift_grpo_ext.rollout.rank_group import training_ranks
from swift_grpo_ext.rollout.wire import Completion
from swift_grpo_ext.sampling.groups import fingerprints, sample_ids_at
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.server.client import RolloutServers
from swift_grpo_ext.training.rollouts import (
    DuplicateCheck,
    RolloutSettings,
    SampleRecorder,
    name_samples,
)

GROUP_SIZE = 8
STAGES = ("own", "plan", "rows", "send", "read", "scatter", "log")
MEANINGS = {
    "own": "names, fingerprints and rows of its own samples",
    "plan": "slices of all ranks, requests made of them",
    "rows": "rows of all ranks taken",
    "send": "requests as JSON, HTTP both ways, the answer's JSON",
    "read": "answers unpacked and checked",
    "scatter": "samples given to their ranks, its own taken",
    "log": "its own samples handed to the sample log, and the wait for it",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--samples", type=int, nargs="+", default=[1024, 10_240], help="of a round, about")
    add("--ranks", type=int, nargs="+", default=[1, 6, 14])
    add("--tokens", type=int, default=1000, help="of a completion")
    add("--image-kb", type=int, nargs="+", default=[0, 100], help="of a prompt's image; 0: none")
    add("--rounds", type=int, default=2, help="after the warm-up")
    add("--output", type=Path, help="FILE.json")
    options = parser.parse_args()
    results = Results(options.output)
    with echo_server(options.tokens) as port:
        for image_kb in options.image_kb:
            for samples in options.samples:
                for ranks in options.ranks:
                    results.add([run_case(options, port, ranks, samples, image_kb)])
    print(as_markdown(results.rows))


def run_case(
    options: argparse.Namespace, port: int, num_ranks: int, samples: int, image_kb: int
) -> dict[str, Any]:
    """Medians of rank 0's rounds; each rank has the same number of whole groups."""
    groups = max(samples // num_ranks // GROUP_SIZE, 1)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run_rank,
                args=(rank, num_ranks, groups, image_kb, options, port, folder, send),
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        send.close()
        rounds = [receive.recv() for _ in range(options.rounds + 1)][1:]
        for process in processes:
            process.join()
    row = {
        "ranks": num_ranks,
        "samples": groups * GROUP_SIZE * num_ranks,
        "tokens": options.tokens,
        "image_kb": image_kb,
        **{name: round(median(r[name] for r in rounds), 3) for name in rounds[0]},
    }
    print(json.dumps(row), flush=True)
    return row


# --- a training rank ---


def run_rank(
    rank: int,
    size: int,
    groups: int,
    image_kb: int,
    options: argparse.Namespace,
    port: int,
    folder: str,
    send: Any,
) -> None:
    if size > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    ranks = training_ranks(600.0)
    settings = RolloutSettings(
        draws=True, run_seed=42, grouped=True, stop_token_ids=(), include_stop_str_in_output=True
    )
    recorder = SampleRecorder(f"{folder}/run", ranks, 42)
    duplicates = DuplicateCheck("warn", ranks)
    config = make_config(options.tokens)
    clock = PhaseClock(time.process_time, STAGES)
    if rank == 0:
        client = VLLMInferClient(hosts=["127.0.0.1"], server_ports=[port])
        served = RolloutServers(client, timeout=600.0)
        clock.wrap(ranks, {"all_gather": "plan", "gather": "rows", "scatter": "scatter"})
        clock.wrap(draw, {"make_slices": "plan", "plan_requests": "plan", "_rows": "own"})
        clock.wrap(draw, {"split_by_rank": "read"})
        clock.wrap(client.wire, {"unpack_answer": "read"})

    def ask(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
        with clock.phase("send"):
            answers = served.infer(requests, metadatas, config)
        with clock.phase("read"):
            return [[draw.ServedSample(c, prompt_ids) for c in cs] for cs, prompt_ids in answers]

    for number in range(options.rounds + 1):
        samples = make_samples(groups, image_kb, rank)
        ranks.all_gather(None)
        clock.take()
        start = time.perf_counter()
        with clock.phase("own"):
            positions = range(rank * len(samples), (rank + 1) * len(samples))
            round_ = Round(phase="train", step=number, number=0)
            sample_ids = sample_ids_at(round_, positions, GROUP_SIZE)
            name_samples(samples, sample_ids)
            recorder.open(start_step=0)
            duplicates.check(samples, sample_ids)
            prompts = fingerprints(samples)
            batch = settings.rank_batch(
                sample_ids, prompts, request=partial(_request, samples), packed=True
            )
            outputs, _ = draw.draw(batch, ranks, ask)
        with clock.phase("log"):
            recorder.record(
                sample_ids, samples, prompts, outputs, num_ranks=1, weight_version=number
            )
            recorder.flush()
        if rank == 0:
            seconds = time.perf_counter() - start
            peak = psutil.Process().memory_info().rss / 1e9
            send.send({**clock.take(), "wall": seconds, "memory_gb": peak})
    if size > 1:
        ranks.all_gather(None)
        dist.destroy_process_group()
    os._exit(0)  # threads that the import of vLLM left are of no use here


def _request(samples: list[Any], number: int) -> Any:
    return samples[number].to_infer_request()


def make_samples(groups: int, image_kb: int, rank: int) -> list[Any]:
    samples = []
    for group in range(groups):
        row = make_row(0, rank * groups + group)
        if image_kb:
            image = np.random.default_rng((rank, group)).bytes(1000 * image_kb)
            row["messages"][0]["content"] = "<image>" + row["messages"][0]["content"]
            row["images"] = [{"bytes": image, "path": None}]
        samples += [OnPolicySample.from_row(row) for _ in range(GROUP_SIZE)]
    return samples


# --- the server ---


@contextmanager
def echo_server(tokens: int) -> Iterator[int]:
    """Its port; it answers every request with as many samples as it asks for."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    Echo.tokens = tokens
    process = multiprocessing.get_context("fork").Process(target=http.serve_forever, daemon=True)
    process.start()
    try:
        yield http.server_port
    finally:
        process.kill()
        process.join()
        http.server_close()


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    tokens = 0

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/get_engine_type/":
            ours = {"version": wire.VERSION, "instance": "echo", "replicas": 1, "members": ["0.0"]}
            self._answer(json.dumps({wire.KEY: ours}).encode())
            return
        requests = json.loads(body)["infer_requests"]
        counts = (request["data_dict"][wire.KEY]["count"] for request in requests)
        self._answer(b"[" + b",".join(answer(count, self.tokens) for count in counts) + b"]")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@cache
def answer(count: int, tokens: int) -> bytes:
    rng = np.random.default_rng(count)
    completions = [
        Completion(
            text="x" * 4 * tokens,
            token_ids=rng.integers(0, 151_643, tokens).tolist(),
            logprobs=(-rng.exponential(0.5, tokens)).astype(np.float32).tolist(),
            finish_reason="length",
        )
        for _ in range(count)
    ]
    packed = wire.pack_answer(completions, range(200), "replica 0")
    usage = {"prompt_tokens": 200, "completion_tokens": count * tokens, "total_tokens": 0}
    response = {"model": "", "choices": [], "usage": usage, "id": "echo"}
    return json.dumps({"response": response, "rollout_infos": {wire.KEY: packed}}).encode()


def as_markdown(rows: list[dict[str, Any]]) -> str:
    names = ("samples", "ranks", "image, kB", *STAGES, "CPU s", "wall s", "memory, GB")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        stages = [row[stage] for stage in STAGES]
        values = [*stages, sum(stages), row["wall"], row["memory_gb"]]
        counts = [f"{row['samples']:,}", f"{row['ranks']}", f"{row['image_kb']}"]
        lines.append("| " + " | ".join([*counts, *(f"{value:.2f}" for value in values)]) + " |")
    return "\n".join([*lines, "", *(f"- {name}: {MEANINGS[name]}" for name in STAGES)])


if __name__ == "__main__":
    main()
