"""Measure dynamic sampling on the digits, with ms-swift's waves and with ours (`wave_sizes.py`).

    python scripts/bench/waves.py --model CHECKPOINT --vllm_mode server     for `swift rlhf`

Both ways alternate, and must train on the same groups. `passes` sums the tokens of each wave's
longest answer: the passes of an engine with room for a whole wave. Two steps of a run warm up.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from common import DEFAULT_MODEL, ROOT, SWIFT

from swift_grpo_ext.record.query import open_record
from swift_grpo_ext.timing import PARTS

SETTINGS = f"""--add_version false --save_strategy no --max_steps 12 --learning_rate 1e-6
--dynamic_sample true --max_resample_times 3 --dataset {DEFAULT_MODEL.parent}/digits/train.jsonl
--external_plugins plugins/grpo_ext.py examples/digits/rewards.py scripts/bench/wave_sizes.py"""
GROUPS = """select step, number, "group", fate = 'trained' as is_trained, list(token_ids order by
"index") as answers from scored group by all order by step, number, "group" """


def train(way: str) -> Iterator[dict[str, Any]]:
    """Train on the digits, and yield the measures of each step."""
    with TemporaryDirectory() as folder:
        command = [SWIFT, "rlhf", "examples/digits/grpo.yaml", *SETTINGS.split()]
        command += ["--output_dir", folder, *sys.argv[1:]]
        env = {**os.environ, "WAVES": way, "WAVE_SIZES": f"{folder}/waves"}
        subprocess.run(command, cwd=ROOT, env=env, stdout=sys.stderr, check=True)
        logs = Path(folder, "logging.jsonl").read_text("utf-8").splitlines()
        waves = Path(folder, "waves").read_text("utf-8").splitlines()
        steps = groupby(open_record(folder).rows(GROUPS), lambda group: group["step"])
    for log, sizes, (_, groups) in zip(map(json.loads, logs), waves, steps, strict=False):
        drawn = list(groups)
        tokens = iter([max(map(len, group["answers"])) for group in drawn])
        passes = [max(islice(tokens, int(size))) for size in sizes.split()]
        seconds = {"seconds": sum(log[f"time/{p}"] for p in PARTS), "rollout": log["time/rollout"]}
        counts = {"waves": len(passes), "passes": sum(passes), "drawn groups": len(drawn)}
        yield {**seconds, **counts, "trained": [group for group in drawn if group["is_trained"]]}


if __name__ == "__main__":
    runs = [[*train(way)] for way in ("ms-swift", "ours") * 2]
    trained = [[step.pop("trained") for step in run] for run in runs]
    assert all(each == trained[0] for each in trained), "the ways train on different groups"
    for name in runs[0][0]:
        values = [[step[name] for step in run[2:]] for run in runs]
        before, ours = ([*map(fmean, zip(*values[i::2], strict=True))] for i in (0, 1))
        saved = [a - b for a, b in zip(before, ours, strict=True)]
        print(f"{name:14} {fmean(before):6.2f} {fmean(ours):6.2f}", end="  saved ")
        print(f"{fmean(saved):5.2f} +- {stdev(saved) / len(saved) ** 0.5:.2f}")
