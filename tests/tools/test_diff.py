"""Pairs of runs that were made to differ in one value each."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import diff, logprob_gap
from tests.tools.view.runs import Writer, make_conversations, make_rows, score

Place = tuple[int, int]
"""Group and index of a sample."""


def write(
    folder: Path,
    changed: Place | None = None,
    *,
    steps: int = 3,
    reward: float | None = None,
    **changes: Any,
) -> Path:
    """Write a run with other values in one sample of round 1, or another reward there."""
    writer = Writer(folder)
    for step in range(steps):
        rows = [replace(row, logprobs=[-0.5, -1.0, -1.5]) for row in make_rows(step)]
        scores = [score(row) for row in rows]
        for index, row in enumerate(rows):
            if step == 1 and changed == (row.sample_id.group, row.sample_id.index):
                rows[index] = replace(row, **changes)
                scores[index] = score(row, reward)
        writer.write(rows, scored=False)
        writer.append_scores(scores)
    return folder


@pytest.mark.parametrize(
    ("place", "changes", "expected"),
    [
        (
            (1, 0),
            {"prompt": '[{"role": "user", "content": "<image>Other"}]'},
            """prompt ' "content": "<image>Question 1?"}]' and ' "content": "<image>Other"}]'""",
        ),
        ((1, 0), {"media": ["b.png"]}, "media ['images/1.png'] and ['b.png']"),
        ((1, 0), {"fingerprint": "f" * 32}, f"fingerprint '{'0' * 31}1' and '{'f' * 32}'"),
        # One change is told, by what decides the others.
        ((0, 1), {"seed": 7, "token_ids": [7, 0, 0], "text": "b"}, f"seed {2**62 + 101} and 7"),
        ((0, 1), {"weight_version": 0}, "weight_version 1 and 0"),
        ((0, 0), {"finish_reason": "length"}, "finish_reason 'stop' and 'length'"),
        ((0, 0), {"stop_reason": "7"}, "stop_reason None and 7"),
        ((0, 0), {"text": "b"}, "text 'g0 i0 s1' and 'b'"),
        ((0, 0), {"reward": 0.75}, "reward 0.0 and 0.75"),
    ],
)
def test_the_first_value_that_differs(
    tmp_path: Path, place: Place, changes: dict[str, Any], expected: str
) -> None:
    result = diff(write(tmp_path / "a"), write(tmp_path / "b", place, **changes))
    where = f"train round 1.0, group {place[0]}, sample {place[1]}"
    assert str(result.difference) == f"{where}: {expected}"
    assert (result.num_rounds, result.num_samples) == (1, 4)


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "expected"),
    [
        (
            [7, 1, 9],
            [-0.5, -1.25, -2.0],
            "token 2: tokens {'id': [1], 'logprob': [-1.5]} and {'id': [9], 'logprob': [-2.0]}",
        ),
        ([7, 1], [-0.5, -1.25], "token 2: tokens {'id': [1], 'logprob': [-1.5]} and ended"),
        (
            [9, 1, 1],
            None,
            "token 0: tokens {'id': [7], 'logprob': [-0.5]} and {'id': [9], 'logprob': []}",
        ),
    ],
)
def test_the_first_token_that_differs(
    tmp_path: Path, token_ids: list[int], logprobs: list[float] | None, expected: str
) -> None:
    other = write(tmp_path / "b", (1, 1), token_ids=token_ids, logprobs=logprobs)
    result = diff(write(tmp_path / "a"), other)
    assert str(result.difference) == f"train round 1.0, group 1, sample 1, {expected}"
    assert result.logprob_gap == (0.25 if logprobs else 0.0)  # of the tokens before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text": "b"}, "turn 2: text '第二轮' and 'b'"),
        ({"mask": None}, "turn 2: mask [True, False] and None"),
        ({"token_ids": [5, 7]}, "turn 2, token 1: tokens {'id': [6], 'logprob': [-1.0]} and {'id'"),
        ({"prompt": "[]"}, "turn 2: prompt "),
        (None, "turn 3: turns 3 and 2"),
    ],
)
def test_the_turn_at_which_two_conversations_part(
    tmp_path: Path, change: dict[str, Any] | None, expected: str
) -> None:
    rows = make_conversations(0)
    Writer(tmp_path / "a").write(rows)
    [place] = [i for i, r in enumerate(rows) if (r.sample_id.group, r.sample_id.turn) == (0, 1)]
    if change is None:
        del rows[place + 1]
    else:
        rows[place] = replace(rows[place], **change)
    Writer(tmp_path / "b").write(rows)
    for pair in (("a", "b"), ("b", "a")):
        difference = str(diff(tmp_path / pair[0], tmp_path / pair[1]).difference)
        assert difference.startswith("train round 0.0, group 0, sample 1, turn ")
    difference = str(diff(tmp_path / "a", tmp_path / "b").difference)
    assert difference.startswith(f"train round 0.0, group 0, sample 1, {expected}")
    assert diff(tmp_path / "a", tmp_path / "a").num_samples == 4
    rows[0] = replace(rows[0], seed=7)
    Writer(tmp_path / "c").write(rows)
    difference = str(diff(tmp_path / "a", tmp_path / "c").difference)
    assert difference.startswith("train round 0.0, group 0, sample 0, turn 1: seed ")


def test_infinite_log_probabilities_of_one_sign_do_not_differ() -> None:
    assert logprob_gap([-0.5, -math.inf], [-0.25, -math.inf], None) == 0.25
    assert math.isnan(logprob_gap([math.nan, -1.0], [-0.5, -1.0], None) or 0.0)


def test_rounds_and_samples_that_only_one_run_has(tmp_path: Path) -> None:
    one = write(tmp_path / "a")
    shorter = write(tmp_path / "b", steps=2)
    assert str(diff(one, shorter).difference) == "train round 2.0: rounds True and False"
    Writer(tmp_path / "c").write(make_rows(0)[:2])
    assert str(diff(one, tmp_path / "c").difference) == "train round 0.0: samples 4 and 2"
    Writer(tmp_path / "d").write(make_rows(5))
    with pytest.raises(ValueError, match="no round in common"):
        diff(one, tmp_path / "d")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a")
    other = write(tmp_path / "b", (1, 1), logprobs=[-0.5, -1.0, -1.25])
    assert main(["diff", str(one), str(other)]) == 0
    equal = "3 rounds with 12 samples are equal; log-probabilities agree within 2.5e-01 nats.\n"
    assert capsys.readouterr().out == equal
    other = write(tmp_path / "c", (1, 1), seed=9)
    (one / "args.json").write_text('{"seed": 42, "output_dir": "a", "top_k": 5}')
    (other / "args.json").write_text('{"seed": 9, "output_dir": "b", "top_k": 5}')
    assert main(["diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 rounds with 4 samples are equal; log-probabilities agree within 0.0e+00 nats.",
        f"First difference: train round 1.0, group 1, sample 1: seed {2**62 + 111} and 9.",
        "Settings that differ:",
        "  --seed: 42 and 9",
    ]
    assert main(["diff", str(one), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["settings"] == {"seed": [42, 9]}
    assert main(["diff", str(one), str(tmp_path / "none")]) == 2
    assert f"{tmp_path}/none is no folder ({tmp_path} has a, b, c)" in capsys.readouterr().err
