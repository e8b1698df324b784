"""Runs for tests of the tools: scored groups of two samples, with images and conversations."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.tables import REWARDS, RewardRow, SampleRow
from swift_grpo_ext.timing import PARTS, ROLLOUT_PARTS
from swift_grpo_ext.tools.runs import LOGS
from swift_grpo_ext.tools.view.runs import Run
from tests.rig.record.rows import ROW, open_log, sample_id

Scores = Sequence[RewardRow] | None

HOSTILE = "<img src=x onerror='document.title=1><script>document.title=1</script>‮\u202e"


def make_rows(step: int, *, num_groups: int = 2, folder: str = "images") -> list[SampleRow]:
    """Return a round's rows: sample i of group g has tokens [7, g, i] and text `gG iI sS`."""
    return [
        replace(
            ROW,
            sample_id=sample_id(step, group=group, index=index),
            seed=2**62 + 100 * step + 10 * group + index,
            weight_version=step,
            token_ids=[7, group, index],
            logprobs=[-0.5, -0.25 * group, -1.0 * index],
            text=f"g{group} i{index} s{step}",
            fingerprint=f"{group:032x}",
            prompt=json.dumps([{"role": "user", "content": f"<image>Question {group}?"}]),
            media=[f"{folder}/{group}.png"],
            columns=json.dumps({"solution": f"s{group}"}),
        )
        for group in range(num_groups)
        for index in range(2)
    ]


def make_conversations(step: int, folder: str = "images") -> list[SampleRow]:
    """Return a round's rows. In each group sample 0 has one turn, sample 1 three. The tool adds a
    crop without a file and text that is no UTF-8; the third turn has no room for an answer."""
    Image.new("RGB", (8, 4), "blue").save(crop := BytesIO(), "webp")
    rows = []
    for row in make_rows(step, folder=folder):
        rows.append(replace(row, engine_seconds=2.0))
        if row.sample_id.index:
            group = row.sample_id.group
            second = replace(
                row,
                sample_id=replace(row.sample_id, turn=1),
                **{"token_ids": [5, 6], "logprobs": [-0.5, -1.0], "text": "第二轮"},
                fingerprint=f"turn {step}.{group}.1",
                prompt=json.dumps([{"role": "tool", "content": "<image>看这里 \\ud83d"}]),
                **{"media": ["blake2b:0"], "pictures": [crop.getvalue()], "mask": [True, False]},
                **{"engine_seconds": 1.0, "tool_seconds": 3.0},
            )
            third = replace(
                row,
                sample_id=replace(row.sample_id, turn=2),
                **{"token_ids": [], "logprobs": None, "text": "", "media": []},
                fingerprint=f"turn {step}.{group}.2",
                prompt=json.dumps([{"role": "tool", "content": None, "tool_calls": [{"f": "找"}]}]),
                **{"finish_reason": "length", "engine_seconds": 0.0, "tool_seconds": 1.0},
            )
            rows += [second, third]
    return rows


def score(row: SampleRow, reward: float | None = None) -> RewardRow:
    """Return a sample's score; by default rewards of group g differ by g."""
    sample = row.sample_id
    value = float(sample.group * sample.index) if reward is None else reward
    return RewardRow(
        sample_id=sample, reward=value, rewards=[("Accuracy", value), ("Format", 1.0)],
        advantage=value - 0.5, gap_mean=0.1, gap_max=0.25, gaps=[(1, 0.25)],
        truncated=sample.index == 1, replaced=False, fate="trained",
    )  # fmt: skip


def write(log: SampleLog, rows: Sequence[SampleRow], scores: Scores = None) -> None:
    """Append a round as a training does; by default each sample has its `score`."""
    log.append(rows)
    first_turns = [row for row in rows if not row.sample_id.turn]
    log.append([*map(score, first_turns)] if scores is None else scores, REWARDS)
    log.flush()


def make_run(run_dir: Path) -> Path:
    """Write a run with everything that pages of samples show; return its folder.

    Rounds 0 to 2 have two groups of two samples. In round 1 the length limit ended one sample; in
    round 2 one has a hostile text and no score. Round 3 has conversations.
    """
    folder = run_dir / "images"
    folder.mkdir(parents=True)
    for group in range(2):
        Image.new("RGB", (56, 28), (200, 30 * group, 0)).save(folder / f"{group}.png")
    log = open_log(run_dir)
    for step in range(4):
        rows = (make_rows if step < 3 else make_conversations)(step, folder=f"{folder}")
        scores = [score(row) for row in rows if not row.sample_id.turn]
        if step == 1:
            rows[0] = replace(rows[0], finish_reason="length")
        elif step == 2:
            rows[3] = replace(rows[3], text=f"(七) a.c {HOSTILE}")
            del scores[3]
        elif step == 3:
            scores = [replace(one, gaps=[(0, 0.5), (4, 0.25)]) for one in scores]
        write(log, rows, scores)
    return run_dir


def open_run(run_dir: Path) -> Run:
    run = Run(run_dir)
    run.refresh()
    return run


def add_logs(run_dir: Path, *seconds: float) -> Path:
    """Log a step for each number of seconds, with an evaluation after each; return the file."""
    shares = {"rollout": 0.5, "wake": 0.05, "send": 0.1, "generate": 0.3, "batch": 0.1}
    shares = dict.fromkeys((*PARTS, *ROLLOUT_PARTS), 0.0) | shares | {"logps": 0.15, "loss": 0.25}
    with (run_dir / LOGS).open("a", encoding="utf-8") as file:
        for step, value in enumerate(seconds, 1):
            log = {f"time/{part}": share * value for part, share in shares.items()}
            log |= {"loss": 0.0, "grad_norm": step / 8, "kl": 0.0, "rollout_gap/mean": math.nan}
            log |= {"reward": step / 4, "rewards/Format/mean": 1.0, "completions/mean_length": 3.0}
            # As on a GPU; only the first step has a round.
            log |= {"memory(GiB)": 60.5, **({"memory/wake": 40.0} if step == 1 else {})}
            log |= {"memory/loss": 64.0}
            place = {"global_step/max_steps": f"{step}/100"}
            evaluation = {"eval_loss": 1.0, "eval_reward": 0.5}
            file.write(f"{json.dumps(log | place)}\n{json.dumps(evaluation | place)}\n")
        file.write('{"train_runtime": 9.0, "global_step/max_steps": "9/100"}\n')
        file.write('{"model_parameter_info": "9 Params"}\n')
    return run_dir / LOGS


def add_tokenizer(run_dir: Path) -> None:
    """Give the run a checkpoint whose tokenizer calls token n `wn`."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(8)}, unk_token="w0"))
    (run_dir / "checkpoint-1").mkdir()
    tokenizer.save(str(run_dir / "checkpoint-1/tokenizer.json"))
