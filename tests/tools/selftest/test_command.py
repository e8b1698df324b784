"""Parts become results, whatever becomes of their processes; checks end with the budget."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.rollout.rank_group import RolloutError
from swift_grpo_ext.tools.selftest import command, worker
from swift_grpo_ext.tools.selftest.plan import Part
from swift_grpo_ext.tools.selftest.result import Result, untried
from swift_grpo_ext.tools.selftest.worker import BUDGET, Job
from swift_grpo_ext.weights.checksums import WeightUpdateError

PART = Part(topology="t", checks=("seeds", "stops"), settings={"model": "m"}, env={"A": "1"})


def holds(name: str) -> Result:
    return Result(name=name, topology="t", status="holds")


class Process:
    """Ends after so many looks; writes results before."""

    def __init__(self, results: list[Result], looks: int) -> None:
        self.results, self.looks = results, looks
        self.returncode: int | None = None

    def start(self, argv: list[str], log: Path, env: dict[str, str]) -> None:
        assert argv[1:3] == ["-m", "swift_grpo_ext.tools.selftest.worker"]
        assert env["A"] == "1"
        self.job = Job(**json.loads(Path(argv[3]).read_text(encoding="utf-8")))
        log.write_text("one\n\nCUDA error\n", encoding="utf-8")

    def poll(self) -> int | None:
        with Path(self.job.results).open("a", encoding="utf-8") as f:
            for result in self.results:
                f.write(json.dumps(asdict(result)) + "\n")
            f.write('{"name": "half a li' if self.looks else "")
        self.results, self.looks = [], self.looks - 1
        self.returncode = 3 if self.looks < 0 else None
        return self.returncode


def run(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Part = PART,
    minutes: float = 1,
) -> list[tuple[str, str, str]]:  # fmt: skip
    @contextmanager
    def started(argv: list[str], log: Path, env: dict[str, str]) -> Iterator[Process]:
        process.start(argv, log, env)
        yield process

    monkeypatch.setattr(command, "started", started)
    monkeypatch.setattr(command, "SECONDS_BETWEEN_LOOKS", 0)
    found: list[Result] = []
    command.run_part(part, 0, tmp_path, time.time() + 60 * minutes, found.append)
    assert {result.topology for result in found} == {"t"}
    return [(result.name, result.status, result.reason) for result in found]


def untried_for(reason: str) -> list[tuple[str, str, str]]:
    """The reason stands once."""
    reasons = zip(PART.checks, [reason, "as seeds"], strict=True)
    return [(name, "could not be tried", why) for name, why in reasons]


def test_results_come_from_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process([holds("seeds"), holds("stops")], looks=0)
    assert [name for name, *_ in run(process, tmp_path, monkeypatch)] == ["seeds", "stops"]
    assert process.job.argv == ["--model", "m"]
    assert process.job.checks == ["seeds", "stops"]


def test_a_process_that_dies_leaves_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(Process([holds("seeds")], looks=0), tmp_path, monkeypatch)
    reason = "its process ended with 3: one | CUDA error"
    assert found == [("seeds", "holds", ""), ("stops", "could not be tried", reason)]


def test_the_reason_is_the_last_exception_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Traceback (most recent call last):\n  raise KeyError(1)\nKeyError: 1\n"
        "[rank1]: vllm.exceptions.NoError: give --template\nW1122 worker ended\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    )
    assert command._end_of(log) == "vllm.exceptions.NoError: give --template"


def test_a_process_that_hangs_is_ended_after_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "GRACE_SECONDS", -60.0)
    found = run(Process([holds("seeds")], looks=9), tmp_path, monkeypatch)
    assert found == [("seeds", "holds", ""), ("stops", "could not be tried", BUDGET)]


@pytest.mark.parametrize(
    ("part", "minutes", "reason"),
    [(PART, 0, BUDGET), (Part(**{**vars(PART), "obstacle": "no GPU"}), 1, "no GPU")],
)
def test_what_cannot_be_tried_starts_no_process(
    part: Part, minutes: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(Process([], 0), tmp_path, monkeypatch, part, minutes)
    assert found == untried_for(reason)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_come_up_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(Process):
        def start(self, argv: list[str], log: Path, env: dict[str, str]) -> None:
            assert argv[1:] == ["-m", "swift.cli.main", "rollout", "--port", "7"]
            assert env["B"] == "2"
            log.write_text("no such model\n", encoding="utf-8")

        def poll(self) -> int:
            self.returncode = 1
            return 1

    monkeypatch.setattr(command, "_answers", lambda _: False)
    served = {"port": 7, "ENV": {"B": 2}}
    part = Part(**{**vars(PART), "server": served, "settings": {"vllm_server_port": [7]}})
    reason = "swift rollout ended with 1: no such model"
    found = run(Dead([], 0), tmp_path, monkeypatch, part)
    assert found == untried_for(reason)


def test_settings_are_refused_in_the_words_of_swift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Process):
        def start(self, argv: list[str], log: Path, env: dict[str, str]) -> None:
            assert argv[3:] == ["--settings", "--model", "m"]
            assert env["A"] == "1"
            log.write_text("ValueError: give --template\n" * self.looks, encoding="utf-8")

        def poll(self) -> int | None:
            return self.looks

    def why(status: int, minutes: float = 1) -> str:
        @contextmanager
        def started(argv: list[str], log: Path, env: dict[str, str]) -> Iterator[Process]:
            process = Refusing([], status)
            process.start(argv, log, env)
            yield process

        monkeypatch.setattr(command, "started", started)
        return command.refusal(PART, tmp_path, time.time() + 60 * minutes)

    assert why(1) == "ValueError: give --template"
    assert why(0) == ""


# --- in the process ---


def test_checks_begin_within_the_budget() -> None:
    clock = iter([False, True])

    class Rig:
        topology = "t"
        is_over = property(lambda _: next(clock))

    found: list[Result] = []
    known: Any = {"seeds": lambda _: Result(status="holds", values={"a": 1}), "stops": None}
    worker.run_checks(Rig(), ["seeds", "stops"], known, found.append)
    assert [replace(result, seconds=0) for result in found] == [
        Result(name="seeds", topology="t", status="holds", values={"a": 1}),
        untried(BUDGET, name="stops", topology="t"),
    ]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (WeightUpdateError("lost"), "does not hold", "WeightUpdateError: lost"),
        (RolloutError("gone"), "does not hold", "RolloutError: gone"),
        (torch.OutOfMemoryError("full\nmore"), "could not be tried", "no memory is left: full"),
        (KeyError("x"), "could not be tried", "the check itself failed (KeyError: 'x')"),
    ],
)
def test_errors_of_a_check(error: Exception, status: str, reason: str) -> None:
    def check(_: Any) -> Result:
        raise error

    result = worker.attempt(SimpleNamespace(), check)
    assert (result.status, result.reason) == (status, reason)
