"""What the selftest decides, on plain values; `tests/stack/test_selftest.py` runs engines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from swift_grpo_ext.diversity.sample import Origin, Sample
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.selftest import command, worker
from swift_grpo_ext.tools.selftest.checks import NUM_TENSORS, shared_noise, spread
from swift_grpo_ext.tools.selftest.command import last_error, plan, read_training
from swift_grpo_ext.tools.selftest.outcome import (
    ALL,
    SAME_TOKENS,
    Flips,
    NotTriedError,
    Result,
    flips,
)
from swift_grpo_ext.weights.checksums import WeightUpdateError


def sample(index: int, ids: list[int], logprobs: list[float] | None) -> Sample:
    sample_id = SampleId(phase="train", step=0, number=0, group=0, index=index)
    return Sample(
        origin=Origin(sample_id=sample_id, seed=None, rank=0, replica=""),
        prompt_hash="prompt",
        token_ids=np.asarray(ids, np.int32),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        text="",
    )


# --- rounding, or other noise? ---


def test_tokens_count_up_to_the_first_difference() -> None:
    one = [sample(0, [1, 2, 3], [-1.0, -2.0, -0.5]), sample(1, [1, 2], [-1.0, -1.0])]
    one += [sample(2, [1, 2], None), sample(3, [9], None)]
    other = [sample(1, [1, 2], [-1.0, -1.5]), sample(0, [1, 4, 3], [-1.25, -3.0, -0.5])]
    other += [sample(2, [1], None)]
    assert flips(one, other) == Flips(num_tokens=6, count=2, drift=0.75, largest=0.5)


@pytest.mark.parametrize(
    ("result", "is_rounding"),
    [
        (Flips(num_tokens=1000), True),
        (Flips(num_tokens=1000, count=1, drift=1e-3), True),
        (Flips(num_tokens=10, count=3, drift=0.0), False),
        (Flips(num_tokens=1000, count=12, drift=10.0), True),
        (Flips(num_tokens=1000, count=200, drift=10.0), False),
    ],
)
def test_flips_are_held_against_the_differences_of_log_probabilities(
    result: Flips, is_rounding: bool
) -> None:
    assert result.is_rounding is is_rounding


def test_real_noise_on_rounded_logits_is_rounding_and_other_noise_is_not() -> None:
    def generate(noise: int, size: float) -> list[Sample]:
        """Sample with one Gumbel noise from logits that rounding of a size has moved."""
        samples = []
        for index in range(32):
            logits = np.random.default_rng(index).normal(0, 2, (64, 50))
            logits += np.random.default_rng(999).normal(0, 1, logits.shape) * size
            logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            gumbel = np.random.default_rng((noise, index)).gumbel(size=logits.shape)
            ids = (logprobs + gumbel).argmax(1)
            samples.append(sample(index, ids.tolist(), logprobs[np.arange(64), ids].tolist()))
        return samples

    for size in (1e-6, 3e-2):
        assert flips(generate(0, 0.0), generate(0, size)).is_rounding
        assert not flips(generate(0, 0.0), generate(1, size)).is_rounding


@pytest.mark.parametrize(
    ("seeds", "is_shared"), [((1, 2, 3, 4), False), ((1, 1, 3, 4), True), ((1, 2, 3, 1), True)]
)
def test_noise_of_a_later_round_or_another_seed_is_shared_or_not(
    seeds: tuple[int, ...], is_shared: bool
) -> None:
    rounds = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        surprisals = [-10 * float(np.log(2))] * 8
        rounds.append([sample(i, rng.integers(0, 1024, 8).tolist(), surprisals) for i in range(4)])
    log10_p, bits = shared_noise(rounds)
    assert bits == pytest.approx(16 * 80)
    assert (log10_p < -15) is is_shared
    assert is_shared or log10_p == 0


def test_a_known_change_touches_both_tensors_of_adapters() -> None:
    """Their B is 0 at first: a change of A alone would change nothing."""
    for num_layers in (1, 8, 80):
        trained = [f"{number}{t}" for number in range(7 * num_layers) for t in "AB"]
        some = spread(trained)
        assert {name[-1] for name in some} == {"A", "B"}
        assert min(NUM_TENSORS, len(trained)) / 2 <= len(some) <= 2 * NUM_TENSORS


# --- in the process ---


@pytest.mark.parametrize(
    ("check", "status", "reason"),
    [
        (lambda rig: ({"a": 1}, []), "holds", ""),
        (lambda rig: ({"a": 1}, ["x", "y"]), "does not hold", "x; y"),
        (WeightUpdateError("lost"), "does not hold", "WeightUpdateError: lost"),
        (NotTriedError("no rows"), "could not be tried", "no rows"),
        (KeyError("x"), "could not be tried", "the check itself failed (KeyError: 'x')"),
    ],
)
def test_the_result_of_a_check(check: Any, status: str, reason: str) -> None:
    def raising(_: Any) -> Any:
        raise check

    rig: Any = SimpleNamespace()
    result = worker.attempt(rig, "stops", raising if isinstance(check, Exception) else check)
    assert (result.check, result.status, result.reason) == ("stops", status, reason)
    assert bool(result.remedy) == (status == "does not hold" or isinstance(check, KeyError))


# --- settings and topologies ---

TRAINING: dict[str, Any] = {
    **{"rlhf_type": "grpo", "model": "m", "dataset": ["d.jsonl"], "num_generations": 4},
    **{"deepspeed": "zero3", "callbacks": ["diversity"], "max_steps": 500},
    "ENV": {"NPROC_PER_NODE": 6, "MAX_PIXELS": 1000},
}


@pytest.mark.parametrize(
    ("settings", "topologies"),
    [
        ({}, [(1, "1"), (2, "1"), (2, "2")]),
        ({"vllm_tensor_parallel_size": 2}, [(2, "2"), (2, "1")]),
        ({"vllm_tensor_parallel_size": 4}, [(4, "4"), (2, "1"), (2, "2")]),
    ],
)
def test_other_engines_are_compared_with_the_users(
    settings: dict[str, Any], topologies: list[tuple[int, str]]
) -> None:
    jobs = plan({**TRAINING, **settings}, Path("out"))
    words = [dict(zip(job.argv, job.argv[1:], strict=False)) for job in jobs]
    sizes = [given["--vllm_tensor_parallel_size"] for given in words]
    assert [*zip([job.ranks for job in jobs], sizes, strict=True)] == topologies
    assert [job.checks for job in jobs] == [ALL, *[[SAME_TOKENS]] * (len(jobs) - 1)]
    for given in words:
        assert not given.keys() & {"--deepspeed", "--callbacks", "--ENV"}
        assert (given["--max_steps"], given["--output_dir"]) == ("1", "out/run")
        # A group for each rank.
        assert given["--per_device_train_batch_size"] == given["--num_generations"] == "4"
    assert jobs[0].topology == f"colocate, ranks: {sizes[0]}, tensor parallel: {sizes[0]}"


def test_a_server_comes_first() -> None:
    settings = {**TRAINING, "vllm_mode": "server", "vllm_server_port": [8001]}
    server, alone, *_ = plan(settings, Path("out"))
    assert (server.topology, server.checks, server.ranks) == ("server", ALL, 1)
    assert server.argv[server.argv.index("--vllm_server_port") + 1] == "8001"
    assert alone.argv[alone.argv.index("--vllm_mode") + 1] == "colocate"
    assert "--vllm_server_port" not in alone.argv


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"config": None, "model": None, "dataset": [], "rest": [], **given})


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(TRAINING))
    given = options(
        config=path, model="n", rest=["--num-generations", "8", "--stop_words", "a", "b"]
    )
    changed = {"model": "n", "num_generations": 8, "stop_words": ["a", "b"]}
    assert read_training(given) == {**TRAINING, **changed}
    bare = read_training(options(model="m", dataset=["d"]))
    assert (bare["model"], bare["dataset"], bare["rlhf_type"]) == ("m", ["d"], "grpo")
    with pytest.raises(ValueError, match="or --model and --dataset"):
        read_training(options(model="m"))
    with pytest.raises(ValueError, match="rlhf_type dpo: expected grpo"):
        read_training(options(model="m", dataset=["d"], rest=["--rlhf_type", "dpo"]))


# --- processes ---


def test_the_reason_is_the_last_exception_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Traceback (most recent call last):\n  raise KeyError(1)\nKeyError: 1\n"
        "[rank1]: vllm.exceptions.NoError: give --template\nW1122 worker ended\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    )
    assert last_error(log) == "vllm.exceptions.NoError: give --template"
    log.write_text("one\n\ntwo\nthree\nfour\n")
    assert last_error(log) == "two | three | four"


@pytest.mark.parametrize(
    ("code", "checks", "reason"),
    [
        ("emit('seeds'); emit('stops')", ["seeds", "stops"], ""),
        ("emit('seeds'); raise KeyError(1)", ["seeds"], "its process ended with 1: KeyError: 1"),
        ("emit('seeds'); time.sleep(60)", ["seeds"], "its process did not end within 3 seconds"),
    ],
)
def test_a_process_leaves_what_it_has_and_why_no_more(
    code: str, checks: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small program stands for the worker."""
    monkeypatch.setattr(command, "MOST_SECONDS", 3.0)
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, sys, time\n"
        "job = json.loads(sys.argv[1])\n"
        "def emit(check):\n"
        "    with open(job['results'], 'a') as f:\n"
        "        f.write(json.dumps({'check': check, 'topology': job['topology']}) + '\\n')\n"
        + code
    )

    def popen(words: list[str], **how: Any) -> psutil.Popen:
        assert words[2] == "swift_grpo_ext.tools.selftest.worker"
        assert how["env"]["A"] == "1"
        return original([words[0], str(program), words[-1]], **how)

    original = psutil.Popen
    monkeypatch.setattr(psutil, "Popen", popen)
    (tmp_path / "results.jsonl").write_text("of another run")
    job = plan(TRAINING, tmp_path)[0]
    results, why = command.run_job(job, tmp_path / "part.log", {"A": "1"})
    assert [(r.check, r.topology) for r in results] == [(c, job.topology) for c in checks]
    assert why == reason


@pytest.mark.parametrize(
    ("statuses", "reason", "exit_status", "num_untried"),
    [
        (["holds"] * 5, "", 0, 0),
        (["holds", "does not hold"], "died", 1, 3),
        (["could not be tried"] * 5, "", 2, 5),
        ([], "give --template", 2, 0),
    ],
)
def test_the_command(
    statuses: list[str], reason: str, exit_status: int, num_untried: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run_job(job: worker.Job, *_: Any) -> tuple[list[Result], str]:
        pairs: Any = zip(ALL, statuses, strict=False)
        return [Result(check=c, topology=job.topology, status=s) for c, s in pairs], reason

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: {0})
    given = options(model="m", dataset=["d"], output=tmp_path, json=True)
    assert command.run(given) == exit_status
    printed = capsys.readouterr()
    if not statuses:
        assert f"no check can start. {reason}" in printed.err
        return
    report = json.loads(printed.out)
    assert report == json.loads((tmp_path / "selftest.json").read_text(encoding="utf-8"))
    assert [*report["machine"]][-3:] == ["Python", "system", "devices"]
    assert report["machine"]["devices"] == "1 x cpu"
    untried = [r for r in report["results"] if r["status"] == "could not be tried"]
    assert len(untried) == num_untried + 2
    for result in untried[-2:]:
        assert result["check"] == SAME_TOKENS
        assert result["reason"] == "2 devices are needed, and 1 are there (cpu)"
    given.json = False
    command.run(given)
    printed_lines = capsys.readouterr().out
    assert "  could not be tried same tokens (S2)\n      2 devices are needed" in printed_lines
    assert f"  {statuses[0]:18} prompts (M3)\n" in printed_lines
