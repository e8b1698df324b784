"""Pairs of runs that were made to differ in one value each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import diff
from tests.tools.view.runs import Writer, make_rows, score

SETTINGS = {"seed": 42, "temperature": 1.0, "output_dir": "x"}
Change = Callable[[SampleRow], SampleRow]


def unchanged(row: SampleRow) -> SampleRow:
    return row


def write(
    folder: Path,
    change: Change = unchanged,
    *,
    steps: int = 3,
    first_reward: float | None = None,
    **settings: Any,
) -> Path:
    """Write a run whose rows of round 1 are changed."""
    writer = Writer(folder)
    for step in range(steps):
        rows = [replace(row, logprobs=[-0.5, -1.0, -1.5]) for row in make_rows(step)]
        rows = [change(row) if step == 1 else row for row in rows]
        writer.write(rows, scored=False)
        reward = first_reward if step == 0 else None
        writer.append_scores([score(row, reward) for row in rows])
    (folder / "args.json").write_text(json.dumps({**SETTINGS, **settings}), encoding="utf-8")
    return folder


def at(group: int, index: int, **changes: Any) -> Change:
    """Change one sample."""

    def change(row: SampleRow) -> SampleRow:
        is_meant = (row.sample_id.group, row.sample_id.index) == (group, index)
        return replace(row, **changes) if is_meant else row

    return change


@pytest.mark.parametrize(
    ("change", "place", "what", "words"),
    [
        (at(1, 0, prompt='[{"role": "user", "content": "<image>Other"}]'), (1, 0), "prompt",
         "<image>Other"),
        (at(1, 0, media=["images/new.png"]), (1, 0), "media", "images/new.png"),
        (at(1, 0, fingerprint="f" * 32), (1, 0), "fingerprint", "ffff"),
        (at(0, 1, seed=7), (0, 1), "seed", " and 7"),
        (at(0, 1, weight_version=0), (0, 1), "weight_version", "1 and 0"),
        (at(0, 0, finish_reason="length"), (0, 0), "finish_reason", "'stop' and 'length'"),
        (at(0, 0, stop_reason="7"), (0, 0), "stop_reason", "None and 7"),
        (at(0, 0, text="other"), (0, 0), "text", "and 'other'"),
        # One change is told, by what decides the others.
        (at(1, 1, seed=7, token_ids=[1, 2, 3], text="other"), (1, 1), "seed", ""),
    ],
)  # fmt: skip
def test_the_first_value_that_differs(
    tmp_path: Path, change: Change, place: tuple[int, int], what: str, words: str
) -> None:
    result = diff(write(tmp_path / "a"), write(tmp_path / "b", change, temperature=0.7))
    difference = result.difference
    assert difference is not None
    assert (difference.phase, difference.step, difference.number) == ("train", 1, 0)
    assert (difference.group, difference.index) == place
    assert (difference.what, difference.token) == (what, None)
    assert str(difference).startswith(f"train round 1.0, group {place[0]}, sample {place[1]}: ")
    assert words in str(difference)
    assert (result.num_rounds, result.num_samples) == (1, 4)
    assert result.settings == {"temperature": (1.0, 0.7)}


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "position", "value"),
    [
        ([7, 1, 9], [-0.5, -1.25, -2.0], 2, {"id": [9], "logprob": [-2.0]}),
        ([7, 1], [-0.5, -1.25], 2, "ended"),
        ([9, 1, 1], None, 0, {"id": [9], "logprob": []}),
    ],
)
def test_the_first_token_that_differs(
    tmp_path: Path, token_ids: list[int], logprobs: Any, position: int, value: Any
) -> None:
    change = at(1, 1, token_ids=token_ids, logprobs=logprobs)
    result = diff(write(tmp_path / "a"), write(tmp_path / "b", change))
    assert result.difference is not None
    assert (result.difference.what, result.difference.token) == ("tokens", position)
    assert f"token {position}: tokens {{'id': [" in str(result.difference)
    assert result.difference.values[1] == value
    assert result.logprob_gap == (0.25 if logprobs else 0.0)  # of the tokens before


def test_rewards_and_rounds_that_differ(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b", first_reward=0.75)
    found = diff(one, other).difference
    assert str(found) == "train round 0.0, group 0, sample 0: reward 0.0 and 0.75"
    shorter = write(tmp_path / "c", steps=2)
    assert str(diff(one, shorter).difference) == "train round 2.0: rounds True and False"
    smaller = tmp_path / "d"
    Writer(smaller).write(make_rows(0)[:2])
    assert str(diff(write(tmp_path / "e", steps=1), smaller).difference).endswith("samples 4 and 2")


def test_equal_runs_and_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = partial(replace, logprobs=[-0.5, -1.0, -1.25])
    one, other = write(tmp_path / "a"), write(tmp_path / "b", changed, output_dir="y")
    assert main(["diff", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert (
        text == "3 rounds with 12 samples are equal; log-probabilities agree within 2.5e-01 nats.\n"
    )
    other = write(tmp_path / "c", at(1, 1, seed=9), seed=9)
    assert main(["diff", str(one), str(other)]) == 1
    assert "  --seed: 42 and 9\n" in capsys.readouterr().out
    assert main(["diff", str(one), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["what"] == "seed"
    (tmp_path / "empty").mkdir()
    assert main(["diff", str(one), str(tmp_path / "empty")]) == 2
    assert "does not exist" in capsys.readouterr().err
    later = tmp_path / "later"
    Writer(later).write(make_rows(5))
    with pytest.raises(ValueError, match="no round in common"):
        diff(one, later)
