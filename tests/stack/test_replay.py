"""`swift-grpo-ext replay` on real runs: logged groups drawn again from the checkpoints that drew
them, token by token."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swift_grpo_ext.record.reader import read_group, read_samples
from swift_grpo_ext.record.row import LOGPROB_STEPS, SampleRow, to_rows
from tests.record.rows import write_session
from tests.stack.processes import Finished, started
from tests.stack.rounds import BATCH, GROUP_SIZE

pytestmark = pytest.mark.stack

SAME = 1e-4
"""Nats: log-probabilities of the same weights in float32, before they are rounded for the log.
LoRA's are merged anew."""


def rounding(rows: Sequence[SampleRow]) -> float:
    """Nats by which the log's rounding may change a log-probability of these samples."""
    return max(1.0, *(abs(p) for row in rows for p in row.logprobs or ())) / LOGPROB_STEPS


@pytest.fixture
def run(learned_full: Path) -> Path:
    return learned_full / "run"


def replay(run: Path, log: Path, *argv: str) -> tuple[Finished, str]:
    """The command's end, and what it wrote to standard output."""
    out = log.with_suffix(".out")
    main = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "replay", str(run), *argv]
    with started(command, log, out=out) as running:
        finished = running.wait(900)
    return finished, out.read_text(encoding="utf-8")


def group_of_round(run: Path, step: int, *, as_content: bool) -> list[SampleRow]:
    """A group whose image was given as content, or as a path."""
    groups = [
        read_group(run, phase="train", step=step, number=0, group=group)
        for group in range(BATCH // GROUP_SIZE)
    ]
    return next(g for g in groups if g[0].media[0].startswith("blake2b:") == as_content)


@pytest.mark.parametrize(("step", "as_content"), [(0, True), (2, False)])
def test_a_group_is_drawn_again(step: int, as_content: bool, run: Path, tmp_path: Path) -> None:
    rows = group_of_round(run, step, as_content=as_content)
    group = str(rows[0].sample_id.group)
    argv = ["--round", str(step), "--group", group, "--json"]
    finished, output = replay(run, tmp_path / "log", *argv)
    assert finished.returncode == 0, finished.cause
    result = json.loads(output)
    assert result["equal"] is True
    assert result["weight_version"] == step
    assert [sample["num_generated"] for sample in result["samples"]] == [
        len(r.token_ids) for r in rows
    ]
    assert [sample["seed"] for sample in result["samples"]] == [row.seed for row in rows]
    assert all(s["logprob_gap"] < SAME + rounding(rows) for s in result["samples"])


def test_other_tokens_and_other_weights_are_seen(run: Path, tmp_path: Path) -> None:
    """A token of the log is changed, and the weights of round 2 are those of round 1."""
    rows = group_of_round(run, 2, as_content=False)
    sample_id = rows[1].sample_id
    changed = tmp_path / "run"
    shutil.copytree(run / "checkpoint-1", changed / "checkpoint-2")
    shutil.copy(run / "args.json", changed)
    logged = to_rows(read_samples(run))
    [number] = [i for i, row in enumerate(logged) if row.sample_id == sample_id]
    token_ids = list(logged[number].token_ids)
    token_ids[0] = 198 if token_ids[0] != 198 else 199
    logged[number] = replace(logged[number], token_ids=token_ids)
    write_session(changed, logged)

    argv = ["--round", "2.0", "--group", str(sample_id.group)]
    finished, output = replay(changed, tmp_path / "log", *argv, "--json")
    assert finished.returncode == 1, finished.cause
    result = json.loads(output)
    samples = {sample["name"]: sample for sample in result["samples"]}
    changed_sample = samples[f"train-2.0-{sample_id.group}-{sample_id.index}"]
    assert changed_sample["position"] == 0
    assert changed_sample["logged"]["token_id"] == token_ids[0]
    assert changed_sample["generated"]["text"]
    # Other weights show in the log-probabilities, even where the tokens are the same.
    gaps = [s["logprob_gap"] for s in result["samples"] if s["logprob_gap"] is not None]
    gaps += [
        abs(math.exp(s["logged"]["logprob"]) - math.exp(s["generated"]["logprob"]))
        for s in result["samples"]
        if s["logged"] and s["generated"]
    ]
    assert max(gaps) > 10 * (SAME + 1 / LOGPROB_STEPS)
    assert "Tokens differ." in result["notes"][-1]


def test_lora(learned_lora: Path, tmp_path: Path) -> None:
    run = learned_lora / "run"
    before = sorted(path.name for path in run.iterdir())
    argv = ["--round", "1", "--group", "0", "--json"]
    finished, output = replay(run, tmp_path / "log", *argv)
    assert finished.returncode == 0, finished.cause
    result = json.loads(output)
    assert result["weights"].endswith("checkpoint-1")
    rows = read_group(run, phase="train", step=1, number=0, group=0)
    assert all(s["logprob_gap"] < SAME + rounding(rows) for s in result["samples"])
    assert sorted(path.name for path in run.iterdir()) == before  # the merged model is gone
