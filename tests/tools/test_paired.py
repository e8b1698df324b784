"""Runs compared prompt by prompt: pairs, intervals, what is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.paired import compare, pair_by_seed
from tests.tools.view.runs import Writer, make_rows, score

Pairs = dict[str, tuple["pd.Series[float]", "pd.Series[float]"]]


def pairs_of(baselines: np.ndarray, candidates: np.ndarray) -> Pairs:
    """Return a pair of runs for each row of two tables of mean rewards by prompt."""
    pairs = enumerate(zip(baselines, candidates, strict=True))
    return {str(seed): (pd.Series(one), pd.Series(other)) for seed, (one, other) in pairs}


def test_equal_gains_have_no_spread() -> None:
    hard = np.linspace(0, 1, 50)[None]
    result = compare(pairs_of(hard, hard + 0.25))
    assert (result.difference, *result.interval) == pytest.approx((0.25, 0.25, 0.25))


def test_prompts_count_of_one_pair_and_runs_of_several() -> None:
    """Student's t at 97.5%: 4.303 with 2 degrees of freedom, 12.706 with 1."""
    gains = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]])
    one = compare(pairs_of(np.zeros((1, 3)), gains[:1]))
    assert one.interval == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5), abs=1e-3)
    two = compare(pairs_of(np.zeros((2, 3)), gains))
    assert (two.baseline, two.candidate, two.difference) == (0.0, 2.0, 2.0)
    assert two.interval == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert two.differences == {"0": 1.0, "1": 3.0}


def test_only_common_prompts_count() -> None:
    def series(rewards: Sequence[float], names: str) -> pd.Series[float]:
        return pd.Series([*map(float, rewards)], list(names))

    result = compare({"1": (series([0, 0, 9], "abc"), series([1, 1, 5], "abd"))})
    assert (result.num_prompts, result.num_alone, result.difference) == (2, 2, 1.0)
    with pytest.raises(ValueError, match=r"seed 1 have 1 prompts in common.*one data set in one"):
        compare({"1": (series([0, 9], "ac"), series([1, 5], "ad"))})


def test_runs_are_paired_by_seed(tmp_path: Path) -> None:
    def make(name: str, seed: int) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(json.dumps({"seed": seed}), encoding="utf-8")
        return str(tmp_path / name)

    a1, a2, b1, b2, b3 = (make(name, int(name[1])) for name in ("a1", "a2", "b1", "b2", "b3"))
    assert pair_by_seed([a1, a2], [b2, b1]) == {"1": (a1, b1), "2": (a2, b2)}
    assert pair_by_seed([a1], [b3]) == {"1": (a1, b3)}
    assert pair_by_seed(["none"], [b3]) == {"unknown": ("none", b3)}
    for other in ([b3, b1], [b1, b1], [b1]):
        with pytest.raises(ValueError, match="expected each seed once on both sides"):
            pair_by_seed([a1, a2], other)


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
    assert (result["interval"], result["differences"]) == ([2.0, 2.0], {"3": 2.0})
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
