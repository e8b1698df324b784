"""The selftest's decisions on plain values; `tests/stack/test_selftest.py` runs engines."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools import harness
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.selftest import checks, command
from swift_grpo_ext.tools.selftest.checks import shared_noise
from swift_grpo_ext.tools.selftest.command import CHANGED, plan, read_training
from swift_grpo_ext.tools.selftest.outcome import (
    ALL,
    REPORT,
    SAME_TOKENS,
    Flips,
    NotTriedError,
    Result,
    flips,
)
from swift_grpo_ext.tools.share import PLUGIN_FILE
from swift_grpo_ext.tools.sources import by_flag, to_argv
from swift_grpo_ext.weights.update import WeightUpdateError
from tests.rig.record.rows import ROW, sample_id


def sample(index: int, ids: list[int], logprobs: list[float]) -> SampleRow:
    return replace(ROW, sample_id=sample_id(index=index), token_ids=ids, logprobs=logprobs)


# --- rounding, or other noise? ---


def test_tokens_count_up_to_the_first_difference() -> None:
    one = [sample(0, [1, 2, 3], [-1.0, -2.0, -0.5]), sample(1, [1, 2], [-1.0, -1.0])]
    one += [sample(2, [1, 2], [-1.0, -1.0]), sample(3, [9], [-1.0])]
    other = [sample(1, [1, 2], [-1.0, -1.5]), sample(0, [1, 4, 3], [-1.25, -3.0, -0.5])]
    other += [sample(2, [1], [-1.0])]
    assert flips(one, other) == Flips(count=2, num_samples=3, drift=0.75, largest=0.5)


def test_flips_are_held_against_the_differences_of_log_probabilities() -> None:
    """A Poisson variable of mean 4 x drift + 0.001 exceeds the bound once in a million times."""
    for drift, count in ((0.0, 1), (10.0, 73)):
        assert Flips(count=count, drift=drift).is_rounding
        assert not Flips(count=count + 1, drift=drift).is_rounding


@pytest.mark.parametrize(
    ("seeds", "log10_p"), [((1, 2, 3, 4), 0.0), ((1, 1, 3, 4), -86.8), ((1, 2, 3, 1), -84.9)]
)
def test_noise_of_a_later_round_or_another_seed_is_shared_or_not(
    seeds: tuple[int, ...], log10_p: float
) -> None:
    """The last round has the sample names of the first, as in `check_seeds`."""
    rounds = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        surprisals = [-10 * float(np.log(2))] * 8
        rounds.append([sample(i, rng.integers(0, 1024, 8).tolist(), surprisals) for i in range(4)])
    assert shared_noise(rounds) == pytest.approx((log10_p, 16 * 80), abs=0.1)


@pytest.mark.parametrize(
    ("bits", "temperature", "gap", "is_fault"),
    [
        *((32, 1.0, 0.0, False), (32, 1.0, 0.002, True), (32, 1.0, math.nan, True)),
        (32, 0.25, 0.002, False),  # logits are divided by it, and so is their rounding
        *((16, 1.0, 0.251, False), (16, 1.0, 0.6, True)),  # measured, at a largest logit of 66
    ],
)
def test_passes_agree_as_far_as_rounding_lets_them(
    bits: int, temperature: float, gap: float, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logps(_: Any, __: Any, flags: dict[str, Any]) -> torch.Tensor:
        return torch.tensor([-1.0, -1.0 if flags.get("logits_shim") == "off" else -1.0 + gap])

    drawn = Mock(response_token_ids=[[7]], response_loss_mask=[])
    monkeypatch.setattr(checks, "unequal_samples", lambda _: [drawn])
    monkeypatch.setattr(checks, "_logps", logps)
    _, faults = checks.check_logits(Mock(trainer=Mock(number_bits=bits, temperature=temperature)))
    assert bool(faults) == is_fault


CRASH = "the check itself failed (ZeroDivisionError: x)"


@pytest.mark.parametrize(
    ("outcome", "status", "reason", "remedy"),
    [
        ([], "holds", "", ""),
        (["x", "y"], "does not hold", "x; y", REPORT),
        (WeightUpdateError("lost"), "does not hold", "WeightUpdateError: lost", REPORT),
        (NotTriedError("no rows"), "could not be tried", "no rows", ""),
        (ZeroDivisionError("x"), "could not be tried", CRASH, "Report it."),
    ],
)
def test_the_result_of_a_check(outcome: Any, status: Any, reason: str, remedy: str) -> None:
    values = {"a": 1} if isinstance(outcome, list) else {}
    check = Mock(side_effect=[(values, outcome)] if values else outcome)
    expected = {"status": status, "values": values, "reason": reason, "remedy": remedy}
    assert command.attempt(Mock(), "stops", check) == Result(check="stops", **expected)


# --- settings and topologies ---

TRAINING: dict[str, Any] = {
    **{"rlhf_type": "grpo", "model": "m", "dataset": ["d.jsonl"], "num_generations": 4},
    **{"deepspeed": "zero3", "callbacks": ["diversity"], "max_steps": 500},
    "external_plugins": ["plugins/grpo_ext.py"],
    "ENV": {"NPROC_PER_NODE": 6, "MAX_PIXELS": 1000},
}
PLANNED = {
    **{"rlhf_type": "grpo", "model": "m", "dataset": "d.jsonl", "num_generations": "4"},
    "external_plugins": "plugins/grpo_ext.py",
    **{name: str(value) for name, value in CHANGED.items()},
    "per_device_train_batch_size": "4",  # a group for each rank
    **{"output_dir": "out/run", "vllm_mode": "colocate"},
}


@pytest.mark.parametrize(
    ("changes", "first", "others"),
    [
        ({"vllm_tensor_parallel_size": 2}, "colocate, ranks: 2, tensor parallel: 2", [(2, 1)]),
        ({"vllm_mode": "server", "vllm_server_port": [1]}, "server", [(1, 1), (2, 1), (2, 2)]),
        # Distillation runs as GRPO: `beta` would become a KL term, and the teacher is left out.
        (
            {"rlhf_type": "gkd", "teacher_model": "t", "beta": 0.5, "lmbda": 1},
            "colocate, ranks: 1, tensor parallel: 1",
            [(2, 1), (2, 2)],
        ),
    ],
)
def test_other_engines_are_compared_with_the_users(
    changes: dict[str, Any], first: str, others: list[tuple[int, int]]
) -> None:
    own, *jobs = plan(by_flag(to_argv({**TRAINING, **changes})), Path("out"))
    assert (own.topology, own.checks) == (first, ALL)
    assert ("--vllm_server_port" in own.argv) == (first == "server")
    grpo = {"lmbda": "1", "reward_funcs": "format", "beta": "0.0"} if "lmbda" in changes else {}
    for job, (ranks, size) in zip(jobs, others, strict=True):
        assert job.topology == f"colocate, ranks: {ranks}, tensor parallel: {size}"
        assert (job.ranks, job.checks) == (ranks, [SAME_TOKENS])
        assert job.first_round == own.first_round == "out/round.pickle"
        words = {name[2:]: value for name, value in zip(job.argv[::2], job.argv[1::2], strict=True)}
        assert words == {**PLANNED, **grpo, "vllm_tensor_parallel_size": str(size)}


def test_settings_of_a_training_are_needed(tmp_path: Path) -> None:
    """They come from a file, or from the command line, which wins."""
    path, rows = tmp_path / "train.yaml", tmp_path / "d.jsonl"
    rows.touch()
    settings = {**TRAINING, "dataset": [str(rows)], "external_plugins": [str(PLUGIN_FILE)]}
    path.write_text(yaml.safe_dump(settings))
    given = {"config": path, "model": "n", "dataset": [], "rest": ["--num-generations", "8"]}
    source = read_training(argparse.Namespace(**given))
    expected = {"model": ["n"], "num_generations": ["8"], "dataset": [str(rows)]}
    assert expected.items() <= source.given.items()
    assert source.env == {"NPROC_PER_NODE": "6", "MAX_PIXELS": "1000"}
    with pytest.raises(ValueError, match="or --model and --dataset"):
        read_training(argparse.Namespace(**{**given, "config": None}))
    with pytest.raises(ValueError, match="--rlhf_type: is dpo; expected grpo or gkd"):
        read_training(argparse.Namespace(**{**given, "rest": ["--rlhf_type", "dpo"]}))


# --- processes ---

LOG = "[rank1]: vllm.exceptions.NoError: give --template\nW1122 worker\nx.ChildFailedError:\n====="


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("", ""),
        (f"sys.exit({LOG!r})", "ended with 1: vllm.exceptions.NoError: give --template"),
        ("sys.exit('one\\n\\ntwo\\nthree\\nfour')", "ended with 1: two | three | four"),
        ("time.sleep(60)", "did not end within 3 seconds"),
    ],
)
def test_a_process_leaves_its_results_and_why_it_failed(
    end: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import json, sys, time\nprint(json.dumps({'argv': sys.argv[1:]}), flush=True)\n"
    (tmp_path / "child.py").write_text(f"{program}{end}\n")
    monkeypatch.setattr(harness, "MOST_SECONDS", 3.0 if "sleep" in end else 60.0)
    lines = harness.run_child("child", {"a": 1}, {"PYTHONPATH": str(tmp_path)}, tmp_path / "log")
    assert next(lines) == {"argv": ['{"a": 1}']}
    with pytest.raises(harness.ChildError if reason else StopIteration) as caught:
        next(lines)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("statuses", "reason", "exit_status"),
    [
        (["holds"] * 5, "", 0),
        (["holds", "does not hold"], "died", 1),
        (["could not be tried"] * 5, "", 2),
        ([], "died", 2),
    ],
)
def test_the_command(
    statuses: Sequence[Any], reason: str, exit_status: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run_child(_: str, job: dict[str, Any], *__: Any) -> Iterator[dict[str, Any]]:
        for check, status in zip(ALL, statuses, strict=False):
            values = {"number": 3}
            yield {"check": check, "topology": job["topology"], "status": status, "values": values}
        if reason:
            raise harness.ChildError(reason)

    monkeypatch.setattr(command, "run_child", run_child)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: {0})
    argv = ["selftest", "--model", "m", "--dataset", "Org/d", "--output", str(tmp_path)]
    assert main(argv) == exit_status
    printed = capsys.readouterr()
    if not statuses:
        assert "can start. its process died" in printed.err
        return
    report = json.loads((tmp_path / "selftest.json").read_text(encoding="utf-8"))
    assert report["machine"]["devices"] == "1 x cpu"
    too_few = "2 devices are needed, and 1 are there (cpu)"
    assert [(r["check"], r["status"], r["reason"]) for r in report["results"]] == [
        *((check, status, "") for check, status in zip(ALL, statuses, strict=False)),
        *((check, "could not be tried", f"its process {reason}") for check in ALL[len(statuses) :]),
        *[(SAME_TOKENS, "could not be tried", too_few)] * 2,
    ]
    assert f"  {statuses[0]:18} prompts (M3)\n      number: 3\n" in printed.out
    assert f"  could not be tried same tokens (S2)\n      {too_few}\n" in printed.out
    assert f"Verdict: {statuses.count('holds')} of 7 checks hold, " in printed.out
