"""Runs compared prompt by prompt: pairs, intervals, what is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.paired import Scores, compare, pair_by_seed
from tests.tools.view.runs import Writer, make_rows, score


def scores(rewards: Sequence[float], seed: int = 1, names: str = "") -> Scores:
    prompts = list(names) or [f"p{i}" for i in range(len(rewards))]
    return Scores(seed=seed, by_prompt=pd.Series([*map(float, rewards)], prompts))


def pairs_of(a: np.ndarray, b: np.ndarray) -> list[tuple[Scores, Scores]]:
    return [(scores(x, k), scores(y, k)) for k, (x, y) in enumerate(zip(a, b, strict=True))]


def test_equal_gains_have_no_spread_when_paired() -> None:
    hard = np.linspace(0, 1, 50)[None]
    result = compare(pairs_of(hard, hard + 0.25))
    assert result.difference == pytest.approx(0.25)
    assert result.paired == pytest.approx((0.25, 0.25))
    # Two means of 50 uniform values: 1.96 * sqrt(2 / 12 / 50) = 0.113 to either side.
    assert result.unpaired == pytest.approx((0.25 - 0.113, 0.25 + 0.113), abs=0.02)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Gains differ by seed and by prompt; 20 seeds of 30 prompts."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        hard = random.normal(size=(20, 30))
        gain = 0.3 + random.normal(scale=0.2, size=(20, 1)) + random.normal(size=(20, 30))
        low, high = compare(pairs_of(hard, hard + gain)).paired
        covered += low <= 0.3 <= high
    assert 34 <= covered <= 40


def test_more_runs_than_prompts_decide() -> None:
    """One pair of runs knows nothing of other seeds; ten do."""
    random = np.random.default_rng(1)
    gain = np.repeat(random.normal(size=(10, 1)), 40, axis=1)
    zero = np.zeros((10, 40))
    one = compare(pairs_of(zero[:1], gain[:1]))
    assert one.paired[0] == pytest.approx(one.paired[1])
    low, high = compare(pairs_of(zero, gain)).paired
    assert high - low == pytest.approx(2 * 1.96 * gain[:, 0].std() / np.sqrt(10), rel=0.2)


def test_only_common_prompts_count() -> None:
    result = compare([(scores([0, 0, 9], names="abc"), scores([1, 1, 5], names="abd"))])
    assert (result.num_prompts, result.num_alone, result.difference) == (2, 2, 1.0)
    with pytest.raises(ValueError, match=r"1 prompts in common.*one data set in one folder"):
        compare([(scores([0, 9], names="ac"), scores([1, 5], names="ad"))])


def test_runs_are_paired_by_seed() -> None:
    ours = [scores([0, 0], 1), scores([0, 0], 2)]
    theirs = [scores([2, 2], 2), scores([1, 1], 1)]
    assert [(a.seed, b.seed) for a, b in pair_by_seed(ours, theirs)] == [(1, 1), (2, 2)]
    assert pair_by_seed(ours[:1], theirs[:1]) == [(ours[0], theirs[0])]
    for other in ([scores([0, 0], 3), theirs[0]], [theirs[0], theirs[0]]):
        with pytest.raises(ValueError, match="expected each seed once on both sides"):
            pair_by_seed(ours, other)


def write(folder: Path, rewards: Sequence[float]) -> Path:
    """Write two rounds of two groups; the second has twice the rewards."""
    writer = Writer(folder)
    for step in range(2):
        rows = make_rows(step)
        writer.write(rows, scored=False)
        scored = [score(r, (1 + step) * rewards[r.sample_id.group]) for r in rows]
        writer.append_scores(scored)
    (folder / "args.json").write_text(json.dumps({"seed": 3}), encoding="utf-8")
    return folder


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a", [0.0, 1.0]), write(tmp_path / "b", [1.0, 2.0])
    arguments = ["compare", "--baseline", str(one), "--candidate", str(other)]
    assert main([*arguments, "--json", "--steps", "1:1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["baseline"], result["candidate"]) == (1.0, 3.0)
    assert (result["paired"], result["differences"]) == ([2.0, 2.0], {"3": 2.0})
    assert main([*arguments, "--reward", "Format"]) == 0
    printed = capsys.readouterr().out
    assert "1 pair(s) of runs, 2 prompts\n" in printed
    assert "difference   +0.0000" in printed
    assert "other seeds may differ by more" in printed
    assert main([*arguments, "--reward", "Acuracy"]) == 1
    assert "'Acuracy'" in (error := capsys.readouterr().err)
    assert "has Accuracy, Format" in error
    assert main([*arguments, "--phase", "eval"]) == 1
    assert "has no scored eval round" in capsys.readouterr().err
