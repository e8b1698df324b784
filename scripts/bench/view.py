"""Measures `swift-grpo-ext view` on a synthetic run: the first page, filters, sorting, one group.

    python scripts/bench/view.py --rows 1000000

Completions are words of 32 tokens, and half a round's prompts come again in the next. A first page
counts from the start of the command until the newest samples are answered over HTTP.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.rewards import REWARDS, RewardRow
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

GROUP_SIZE = 8
WORDS = np.array(
    ["the", "digit", "seven", "looks", "like", "two", "strokes", "answer", "nine", "or"]
)
PAGES = {
    "newest": "samples",
    "best first": "samples?sort=-reward",
    "longest first": "samples?sort=-num_tokens",
    "steps and reward": "samples?steps=100:200&min_reward=0.9",
    "truncated": "samples?truncated=true",
    "text": "samples?text=seven+looks+like+nine",
    "text, sorted": "samples?text=two+answer&sort=-gap_max",
    "groups of a round": "groups",
    "one group": "group?round=train.100.0&group=3",
    "overview": "overview",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--round", type=int, default=1024, help="samples of a round, all ranks")
    parser.add_argument("--ranks", type=int, default=4, help="that share a round")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--run-dir", type=Path, help="keep the run here; used again if it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = options.run_dir or Path(folder)
        if not (run_dir / "samples").is_dir():
            write(options, run_dir)
        measure(run_dir)


def write(options: argparse.Namespace, run_dir: Path) -> None:
    rng = np.random.default_rng(0)
    share = options.round // options.ranks
    logs = [SampleLog(run_dir, session=0, start_step=0, rank=rank) for rank in range(options.ranks)]
    for step in tqdm(range(options.rows // options.round), desc="Writing rounds", unit="round"):
        for rank, log in enumerate(logs):
            rows = [
                make_sample(rng, step, number, rank, options.tokens)
                for number in range(rank * share, (rank + 1) * share)
            ]
            log.append(rows)
            log.append([make_score(rng, row.sample_id) for row in rows], REWARDS)
            log.flush()


def make_sample(
    rng: np.random.Generator, step: int, number: int, rank: int, num_tokens: int
) -> SampleRow:
    group, index = divmod(number, GROUP_SIZE)
    prompt = step * 64 + group
    return SampleRow(
        sample_id=SampleId(phase="train", step=step, number=0, group=group, index=index),
        seed=step * 10_000 + number,
        rank=rank,
        replica=f"rank {rank}",
        weight_version=step,
        finish_reason="length" if rng.random() < 0.05 else "stop",
        stop_reason="<|im_end|>",
        token_ids=rng.integers(0, 150_000, num_tokens).tolist(),
        logprobs=(-rng.exponential(0.5, num_tokens)).tolist(),
        text=" ".join(rng.choice(WORDS, num_tokens)),
        fingerprint=f"{prompt:032x}",
        prompt=json.dumps([{"role": "user", "content": f"<image>Which digit is {prompt}?"}]),
        media=[f"images/{prompt}.png"],
    )


def make_score(rng: np.random.Generator, sample_id: SampleId) -> RewardRow:
    accuracy, form = rng.random(2).tolist()
    return RewardRow(
        sample_id=sample_id,
        reward=accuracy + 0.2 * form,
        rewards=[("Accuracy", accuracy), ("Format", form)],
        advantage=accuracy - 0.5,
        gap_mean=float(rng.exponential(1e-4)),
        gap_max=float(rng.exponential(1e-3)),
        truncated=bool(rng.random() < 0.05),
        replaced=False,
        fate="trained",
    )


def measure(run_dir: Path) -> None:
    start = time.perf_counter()
    code = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "view", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"http://\S+", server.stdout.readline())
            assert match, "the server printed no address"
            url = match[0]
            while 'class="thumb"' not in get(url, "samples"):
                time.sleep(0.02)
            told("first page", start, server.pid)
            while "…" in get(url, "state"):
                time.sleep(0.1)
            told("all read", start, server.pid)
            for name, page in PAGES.items():
                timed(name, url, page)
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
            peak = re.search(r"VmHWM:\s+(\d+)", status)
            print(f"{'memory':20} {int(peak[1]) / 1e6 if peak else 0:6.2f} GB at most")
        finally:
            server.terminate()


def told(name: str, start: float, pid: int) -> None:
    """Print seconds since the start, and the server's CPU seconds: what other work on the machine
    does not stretch."""
    cpu = psutil.Process(pid).cpu_times()
    seconds = time.perf_counter() - start
    print(f"{name:20} {seconds:6.2f} s, {cpu.user + cpu.system:.2f} s of CPU")


def timed(name: str, url: str, page: str) -> None:
    """Print the seconds of the first and of a second call, and how many samples there were."""
    seconds = []
    text = ""
    for _ in range(2):
        start = time.perf_counter()
        text = get(url, page)
        seconds.append(time.perf_counter() - start)
    count = re.search(r'id="count">([\d,]+)', text)
    samples = f"{count[1]} samples" if count else ""
    print(f"{name:20} {seconds[0]:6.2f} s, again {seconds[1]:.2f} s  {samples}")


def get(url: str, page: str) -> str:
    with urllib.request.urlopen(f"{url}{page}", timeout=120) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
