"""`RUN_DIR/diversity.jsonl`: what the monitor found in each round, and what is read of it. Pure.

One JSON object a line: `{"start_step": s}` where a session begins (a start of the trainer, resumed
from the checkpoint of step s), and a round's findings. An evaluation writes one line a batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.collision import Sharing
from swift_grpo_ext.diversity.drawn import Group, Origin
from swift_grpo_ext.diversity.metrics import num_distinct
from swift_grpo_ext.diversity.verdict import Verdict

FILE_NAME = "diversity.jsonl"
MAX_WORST_GROUPS = 4
MAX_NAMED_SAMPLES = 8
"""Of one shared prefix."""


@dataclass(kw_only=True)
class RoundRecord:
    """What was found in one round, as plain values."""

    phase: str
    step: int
    number: int
    num_samples: int
    num_groups: int
    verdict: str
    """`healthy`, `collapse`, `broken` or `unknown`."""

    log10_p: float
    """Of the collision test, corrected; 0 where nothing was tested."""

    shared_bits: float
    num_pairs: int
    num_earlier_pairs: int
    num_untested: int
    metrics: dict[str, float]
    sharings: list[dict[str, Any]] = field(default_factory=list)
    worst_groups: list[int] = field(default_factory=list)
    """Numbers of groups, those with shared prefixes first, then those with most copies."""

    alarm: str | None = None
    """What the alarm said; None for none."""

    seconds: float = 0.0
    """That the findings took."""

    time: float = 0.0
    """Unix time."""

    @property
    def round_name(self) -> str:
        return f"{self.phase} round {self.step}.{self.number}"

    def scalars(self) -> dict[str, float]:
        """What goes to `logging.jsonl` and the reporters, by name."""
        return {
            **{f"diversity/{name}": value for name, value in self.metrics.items()},
            "diversity/log10_p": self.log10_p,
            "diversity/shared_bits": self.shared_bits,
            "diversity/broken": float(self.verdict == "broken"),
            "diversity/collapse": float(self.verdict == "collapse"),
        }


def make_record(
    groups: Sequence[Group], verdict: Verdict, metrics: Mapping[str, float]
) -> RoundRecord:
    """From what was found in a round that has samples."""
    sample_id, test = groups[0][0].origin.sample_id, verdict.test
    return RoundRecord(
        phase=sample_id.phase,
        step=sample_id.step,
        number=sample_id.number,
        num_samples=sum(map(len, groups)),
        num_groups=len(groups),
        verdict=verdict.kind,
        log10_p=test.log2_p * float(np.log10(2)),
        shared_bits=test.max_bits,
        num_pairs=test.num_pairs,
        num_earlier_pairs=test.num_earlier_pairs,
        num_untested=test.num_untested,
        metrics=dict(metrics),
        sharings=[_plain(sharing) for sharing in test.sharings],
        worst_groups=_worst_groups(groups, test.sharings),
    )


def _plain(sharing: Sharing) -> dict[str, Any]:
    return {
        "kind": sharing.kind,
        "num_tokens": sharing.num_tokens,
        "bits": sharing.bits,
        "log10_p": sharing.log2_p * float(np.log10(2)),
        "num_samples": len(sharing.samples),
        "samples": [_plain_origin(o) for o in sharing.samples[:MAX_NAMED_SAMPLES]],
        "earlier": [_plain_origin(o) for o in sharing.earlier[:MAX_NAMED_SAMPLES]],
    }


def _plain_origin(origin: Origin) -> dict[str, Any]:
    named = {"seed": origin.seed, "rank": origin.rank, "replica": origin.replica}
    return {**asdict(origin.sample_id), **named}


def _worst_groups(groups: Sequence[Group], sharings: Sequence[Sharing]) -> list[int]:
    worst = [origin.sample_id.group for sharing in sharings for origin in sharing.samples[:2]]
    copies = {g[0].origin.sample_id.group: num_distinct(g) / len(g) for g in groups if len(g) > 1}
    worst += [number for number in sorted(copies, key=copies.__getitem__) if copies[number] < 1]
    return list(dict.fromkeys(worst))[:MAX_WORST_GROUPS]


def record_path(run_dir: str | os.PathLike[str]) -> Path:
    return Path(run_dir) / FILE_NAME


class RecordFile:
    """Appends to a run's file; each line is written out at once."""

    def __init__(self, run_dir: str | os.PathLike[str], *, start_step: int) -> None:
        """Begin a session.

        Raises:
            OSError: the file cannot be written.
        """
        self._path = record_path(run_dir)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"start_step": start_step})

    def append(self, record: RoundRecord) -> None:
        self._write(asdict(record))

    def _write(self, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(values, ensure_ascii=False) + "\n")


def read_records(run_dir: str | os.PathLike[str]) -> list[RoundRecord]:
    """The rounds of a run in their order, each once: what a resumed session drew again replaces
    what the session before had found. [] where there is no file.

    A line that a crash cut off is left out.
    """
    path = record_path(run_dir)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records: list[RoundRecord] = []
    for line in lines:
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "start_step" in values:
            records = [r for r in records if not _is_superseded(r, values["start_step"])]
        else:
            records.append(RoundRecord(**values))
    return sorted(records, key=lambda r: (time_of(r), r.phase == "eval", r.number))


def time_of(record: RoundRecord) -> int:
    """Optimizer steps that are done when ms-swift logs the round: one that begins at step s serves
    the step after it; an evaluation stands at its own."""
    return record.step + (record.phase == "train")


def _is_superseded(record: RoundRecord, start_step: int) -> bool:
    """As `samples.index` has it: an evaluation at the step of the checkpoint came before it."""
    if record.phase == "eval" and start_step > 0:
        return record.step > start_step
    return record.step >= start_step
