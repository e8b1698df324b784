"""Runs as the experiment keeps them: read from their directories, written in short to one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

PRESET = Path(__file__).with_name("grpo.yaml")
RESULTS = Path(__file__).with_name("results")
"""This folder holds what is published: several seeds of runs of 80 and of 200 steps."""

NUM_ENDS = 20
"""Steps at each end of training over which the reward is averaged."""

CURVES = {
    "reward": ("reward", 3),
    "step_seconds": ("step_time", 2),
}
"""Our names of curves: ms-swift's, and the decimals that are kept."""

SHARES = ("greedy_accuracy", "sampled_accuracy", "sampled_format")
NOT_COMPARED = {
    *("callbacks", "report_to", "max_steps"),
    *("dataloader_persistent_workers", "ddp_find_unused_parameters"),
}
"""Settings that change nothing in a run's result (who watches it and where it is logged; there are
no dataloader workers, and all parameters are used), and the steps: `published` looks at these."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished run."""

    name: str
    seed: int
    machine: dict[str, Any] | None
    """What `train.py` wrote about the machine; None for runs before it did."""

    before: dict[str, float]
    """Held-out shares of the start model, from 0 to 1: keys as in `SHARES`."""

    after: dict[str, float]
    """The same after training."""

    curves: dict[str, list[float]]
    """Values of each step, from the first: keys as in `CURVES`."""

    @property
    def first_reward(self) -> float:
        """Mean reward of the first steps' samples."""
        return fmean(self.curves["reward"][:NUM_ENDS])

    @property
    def last_reward(self) -> float:
        """Mean reward of the last steps' samples."""
        return fmean(self.curves["reward"][-NUM_ENDS:])

    @property
    def gain(self) -> float:
        return self.last_reward - self.first_reward

    @property
    def num_steps(self) -> int:
        return len(self.curves["reward"])


def rows_by_step(run: Path) -> list[dict[str, Any]]:
    """ms-swift's log, one row a training step; of a step that was made twice, the later one."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run / "logging.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "reward" in row:
            rows[int(row["global_step/max_steps"].partition("/")[0])] = row
    return [rows[step] for step in sorted(rows)]


def settings(run: Path) -> dict[str, Any]:
    """The arguments that ms-swift recorded."""
    return dict(json.loads((run / "args.json").read_text(encoding="utf-8")))


def is_finished(run: Path) -> bool:
    return (run / "evaluation.json").is_file() and (run / "logging.jsonl").is_file()


def read_run(run: Path) -> Record:
    """A finished run from its directory, whose name becomes the record's.

    Raises ValueError for a directory that is none, and for a log that lacks steps.
    """
    if not is_finished(run):
        raise ValueError(
            f"{run} holds no finished run (evaluation.json and logging.jsonl); make one: "
            f"RUN={run} bash scripts/demo.sh"
        )
    made, rows = settings(run), rows_by_step(run)
    if len(rows) != made["max_steps"]:
        raise ValueError(
            f"{run}/logging.jsonl has {len(rows)} steps, expected {made['max_steps']}; "
            "remove the directory and run it again"
        )
    before, after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    machine = run / "machine.json"
    return Record(
        name=run.resolve().name,
        seed=made["seed"],
        machine=json.loads(machine.read_text(encoding="utf-8")) if machine.is_file() else None,
        before={key: before[key] for key in SHARES},
        after={key: after[key] for key in SHARES},
        curves={
            key: [round(float(row[name]), decimals) for row in rows]
            for key, (name, decimals) in CURVES.items()
        },
    )


def deviations(made: Mapping[str, Any]) -> dict[str, str]:
    """How a run's recorded settings differ from the published ones, by setting, in words."""
    preset = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    return {
        name: f"{name} is {made.get(name)!r}, published with {value!r}"
        for name, value in preset.items()
        if name not in NOT_COMPARED and _plain(made.get(name)) != _plain(value)
    }


def _plain(value: Any) -> Any:
    """A setting with numbers as numbers: YAML may spell them as words, ms-swift reads both."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def write_results(path: Path, command: str, records: Iterable[Record]) -> None:
    """One JSON file, a line for each run."""
    runs = ",\n".join(json.dumps(asdict(record)) for record in records)
    text = f'{{"command": {json.dumps(command)},\n"runs": [\n{runs}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def published(num_steps: int) -> list[Record]:
    """Return the published runs of `num_steps` steps; none where there are no such runs."""
    path = RESULTS / f"steps{num_steps}.json"
    return read_results(path) if path.is_file() else []


def read_results(path: Path) -> list[Record]:
    """The runs of a file that `write_results` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Record(**run) for run in content["runs"]]
