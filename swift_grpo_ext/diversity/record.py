"""`RUN_DIR/diversity.jsonl`: what the monitor measured in each round.

One JSON object a line: `{"start_step": s}` where a session begins (a start of the trainer, resumed
from the checkpoint of step s), and a round's record. An evaluation writes one line a batch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swift_grpo_ext.record.reader import is_superseded

logger = logging.getLogger(__name__)

FILE_NAME = "diversity.jsonl"
MAX_NAMED_LINES = 5
VERDICTS = ("broken", "collapse", "unknown", "healthy")


@dataclass(kw_only=True)
class RoundRecord:
    """The monitor's results for one round, as plain values."""

    phase: str
    step: int
    number: int
    num_samples: int
    num_groups: int
    verdict: str
    """`healthy`, `collapse`, `broken` or `unknown` (see `analyzer`)."""

    log10_p: float
    """p-value of the collision test, corrected; 0 where nothing was tested."""

    shared_bits: float
    num_pairs: int
    num_earlier_pairs: int
    num_untested: int
    metrics: dict[str, float]
    collisions: list[dict[str, Any]] = field(default_factory=list)
    """The fields of `collision.Collision`, the origins shortened, and `num_samples` before that."""

    worst_groups: list[int] = field(default_factory=list)
    """Numbers of groups: first those with collisions, then those with most copies."""

    remedy: str = ""
    """Key of the remedy in `alarms`; empty without alarm."""

    alarm: str | None = None
    """The alarm's text; None for none."""

    @property
    def round_name(self) -> str:
        return round_name(vars(self))

    @property
    def steps_done(self) -> int:
        """Optimizer steps that are done when ms-swift logs the round: a round that begins at step s
        serves the step after it; an evaluation stands at its own."""
        return self.step + (self.phase == "train")

    def scalars(self) -> dict[str, float]:
        """Return the values for `logging.jsonl` and the reporters, by name."""
        return {
            **{f"diversity/{name}": value for name, value in self.metrics.items()},
            "diversity/log10_p": self.log10_p,
            "diversity/shared_bits": self.shared_bits,
            "diversity/broken": float(self.verdict == "broken"),
            "diversity/collapse": float(self.verdict == "collapse"),
        }


def round_name(sample_id: Mapping[str, Any]) -> str:
    """Write `train round 3.0`: the phase, the step, and the number of the round within it."""
    return f"{sample_id['phase']} round {sample_id['step']}.{sample_id['number']}"


def append_line(run_dir: str | os.PathLike[str], line: RoundRecord | int) -> None:
    """Append a round's record to a run's file, or the step at which a session begins.

    It is a line of its own, whatever a process that was killed has left behind.

    Raises:
        OSError: the file cannot be written; it is as it was, unless the disk fails altogether.
    """
    values = {"start_step": line} if isinstance(line, int) else asdict(line)
    content = json.dumps(values, ensure_ascii=False).encode() + b"\n"
    path = Path(run_dir) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            content = content if file.read(1) == b"\n" else b"\n" + content
        try:
            while content:  # a disk that fills takes a piece
                content = content[file.write(content) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def read_records(run_dir: str | os.PathLike[str]) -> list[RoundRecord]:
    """Read the rounds of a run in their order, each once; [] where there is no file.

    The rounds of a resumed session replace those that the session before generated from there on.
    Lines that a crash or damage has spoilt are left out, and a warning names them.
    """
    path = Path(run_dir) / FILE_NAME
    records: list[RoundRecord] = []
    spoilt: list[int] = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if "start_step" in values:
                start_step = int(values["start_step"])
                records = [r for r in records if not is_superseded(r.phase, r.step, start_step)]
                continue
            record = RoundRecord(**values)
            VERDICTS.index(record.verdict)  # raises ValueError for a verdict that is spoilt
            records.append(record)
        except (TypeError, ValueError):
            spoilt.append(number)
    if spoilt:
        first = ", ".join(map(str, spoilt[:MAX_NAMED_LINES]))
        num_more = len(spoilt) - MAX_NAMED_LINES
        more = f" and {num_more} more" if num_more > 0 else ""
        logger.warning(
            f"{path}: the lines {first}{more} are damaged or incomplete, and are left out."
        )
    return sorted(records, key=lambda r: (r.steps_done, r.phase == "eval", r.number))
