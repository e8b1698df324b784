"""Rows for tests of the sample log."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift_grpo_ext.record.log import SampleLog, record_files
from swift_grpo_ext.record.query import Record, diversity_of, read_samples
from swift_grpo_ext.record.tables import SAMPLES, DiversityRow, RewardRow, SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import SampleId

ROW = SampleRow(
    sample_id=SampleId(phase="train", step=0, number=0, group=0, index=0),
    seed=1,
    rank=0,
    replica="rank 0",
    weight_version=0,
    finish_reason="stop",
    token_ids=[1, 2, 151643],
    logprobs=[-0.5, -0.25, 0.0],  # 32 bits hold them exactly
    text="seven",
    fingerprint="0" * 32,
    prompt="Which digit?",
    media=["images/7.png"],
)


def sample_id(step: int = 0, phase: Any = "train", **place: int) -> SampleId:
    return replace(ROW.sample_id, step=step, phase=phase, **place)


def row_of(name: SampleId, **changes: Any) -> SampleRow:
    """Return a row whose completion differs in length from its neighbours'."""
    length = 1 + (3 * (name.step + 2 * name.group + name.index + name.turn) + 2) % 5
    tokens = {"token_ids": [*range(7, 6 + length), 151643]}
    tokens |= {"logprobs": [-0.125 * i for i in range(length)], "text": "seven" * length}
    return replace(ROW, **{"sample_id": name, **tokens, **changes})


def score_of(name: SampleId, reward: float = 0.5, **changes: Any) -> RewardRow:
    rewards = [("Accuracy", None), ("数字", reward)]
    row = RewardRow(
        sample_id=name,
        reward=reward,
        rewards=rewards,
        truncated=False,
        replaced=False,
        fate="trained",
    )
    return replace(row, **changes)


def open_log(run_dir: Path, **options: Any) -> SampleLog:
    return SampleLog(run_dir, **{"session": 0, "start_step": 0, **options})


def write_session(run_dir: Path, rows: Sequence[SampleRow], **place: int) -> Path:
    """Append all rows at once; return the file. `place`: the options of `open_log`."""
    log = open_log(run_dir, **place)
    log.append(rows)
    log.flush()
    return record_files(SAMPLES.folder(run_dir))[-1].path


def read_rows(run_dir: Path) -> list[SampleRow]:
    return to_rows(read_samples(run_dir))


def read_diversity(run_dir: Path) -> list[DiversityRow]:
    record = Record(run_dir)
    record.refresh()
    return diversity_of(record)
