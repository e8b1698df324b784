"""Read runs from their folders, and write and read the short records of an experiment."""

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
"""Published runs of 80 and of 200 steps, with several seeds."""

NUM_ENDS = 20
"""The reward is averaged over this many steps at the start and at the end of training."""

CURVES = {
    "reward": ("reward", 3),
    "step_seconds": ("step_time", 2),
}
"""Name in ms-swift's log, and number of decimals, of each curve."""

SHARES = ("greedy_accuracy", "sampled_accuracy", "sampled_format")
NOT_COMPARED = {
    *("callbacks", "report_to", "max_steps"),
    *("dataloader_persistent_workers", "ddp_find_unused_parameters"),
}
"""Settings that do not change a run's result: there are no dataloader workers, and all parameters
are used. `published` compares the number of steps."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished run."""

    name: str
    seed: int
    machine: dict[str, Any] | None  # content of machine.json, if the run has one
    before: dict[str, float]  # held-out shares (`SHARES`) of the start model, from 0 to 1
    after: dict[str, float]  # held-out shares after training
    curves: dict[str, list[float]]  # values of each step, by the names of `CURVES`

    @property
    def first_reward(self) -> float:
        return fmean(self.curves["reward"][:NUM_ENDS])

    @property
    def last_reward(self) -> float:
        return fmean(self.curves["reward"][-NUM_ENDS:])

    @property
    def gain(self) -> float:
        return self.last_reward - self.first_reward

    @property
    def num_steps(self) -> int:
        return len(self.curves["reward"])


def rows_by_step(run: Path) -> list[dict[str, Any]]:
    """Return the row of ms-swift's log for each training step; a resumed run's later row wins."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (run / "logging.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "reward" in row:
            rows[int(row["global_step/max_steps"].partition("/")[0])] = row
    return [rows[step] for step in sorted(rows)]


def settings(run: Path) -> dict[str, Any]:
    """Return the arguments that ms-swift recorded."""
    return dict(json.loads((run / "args.json").read_text(encoding="utf-8")))


def is_finished(run: Path) -> bool:
    return (run / "evaluation.json").is_file() and (run / "logging.jsonl").is_file()


def read_run(run: Path) -> Record:
    """Read a finished run from its folder.

    Raises:
        ValueError: the folder has no finished run, or the log lacks steps.
    """
    if not is_finished(run):
        raise ValueError(
            f"{run} has no finished run (evaluation.json and logging.jsonl). Make one with "
            f"RUN={run} bash scripts/demo.sh"
        )
    arguments, rows = settings(run), rows_by_step(run)
    if len(rows) != arguments["max_steps"]:
        raise ValueError(
            f"{run}/logging.jsonl has {len(rows)} steps, expected {arguments['max_steps']}. "
            "Remove the folder and run it again"
        )
    before, after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    machine = run / "machine.json"
    return Record(
        name=run.resolve().name,
        seed=arguments["seed"],
        machine=json.loads(machine.read_text(encoding="utf-8")) if machine.is_file() else None,
        before={key: before[key] for key in SHARES},
        after={key: after[key] for key in SHARES},
        curves={
            key: [round(float(row[name]), decimals) for row in rows]
            for key, (name, decimals) in CURVES.items()
        },
    )


def deviations(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Describe, by setting, how a run's arguments differ from the published ones."""
    preset = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    return {
        name: f"{name} is {arguments.get(name)!r}, published with {value!r}"
        for name, value in preset.items()
        if name not in NOT_COMPARED and _as_number(arguments.get(name)) != _as_number(value)
    }


def _as_number(value: Any) -> Any:
    """Convert strings of numbers, which a preset may contain, to numbers."""
    if isinstance(value, list):
        return [_as_number(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def write_results(path: Path, command: str, records: Iterable[Record]) -> None:
    """Write a JSON file with a line for each run."""
    runs = ",\n".join(json.dumps(asdict(record)) for record in records)
    text = f'{{"command": {json.dumps(command)},\n"runs": [\n{runs}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def published(num_steps: int) -> list[Record]:
    """Return the published runs of `num_steps` steps, if any."""
    path = RESULTS / f"steps{num_steps}.json"
    return read_results(path) if path.is_file() else []


def read_results(path: Path) -> list[Record]:
    """Read a file of `write_results`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Record(**run) for run in content["runs"]]
