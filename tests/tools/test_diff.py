"""Pairs of runs that were made to differ in one value each."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import diff, find_decoder, logprob_gap
from tests.tools.view.runs import Writer, add_tokenizer, make_conversations, make_rows, score

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
            'the prompt is … "content": "<image>Question 1?"}] in A and … "content": '
            '"<image>Other"}] in B',
        ),
        (
            (1, 0),
            {"media": ["images/1.png", "b.png"]},
            'the media are ["images/1.png"] in A and ["images/1.png", "b.png"] in B',
        ),
        (
            (1, 0),
            {"fingerprint": "f" * 32},
            "the prompt reads the same, and what its media hold, its tools or its boxes differ: "
            f'its hash is "{"0" * 31}1" in A and "{"f" * 32}" in B',
        ),
        # One change is told, by what decides the others.
        (
            (0, 1),
            {"seed": 7, "token_ids": [7, 0, 0], "text": "b"},
            f"the seed is {2**62 + 101} in A and 7 in B",
        ),
        ((0, 1), {"weight_version": 0}, "the weight version is 1 in A and 0 in B"),
        (
            (0, 0),
            {"finish_reason": "length"},
            'the finish reason is "stop" in A and "length" in B',
        ),
        ((0, 0), {"stop_reason": "7"}, 'the stop reason is none in A and "7" in B'),
        (
            (0, 0),
            {"text": "b" * 70},
            f'the text is "g0 i0 s1" in A and "{"b" * 59}… in B',
        ),
        ((0, 0), {"reward": 0.75}, "the reward is 0.0 in A and 0.75 in B"),
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
            'token 2: the token is "w1" (id 1, log-probability -1.500) in A and "" (id 9, '
            "log-probability -2.000) in B",
        ),
        (
            [7, 1],
            [-0.5, -1.25],
            'token 2: the token is "w1" (id 1, log-probability -1.500) in A and missing (the '
            "completion has ended) in B",
        ),
        (
            [9, 1, 1],
            None,
            'token 0: the token is "w7" (id 7, log-probability -0.500) in A and "" (id 9) in B',
        ),
    ],
)
def test_the_first_token_that_differs(
    tmp_path: Path, token_ids: list[int], logprobs: list[float] | None, expected: str
) -> None:
    other = write(tmp_path / "b", (1, 1), token_ids=token_ids, logprobs=logprobs)
    result = diff(write(tmp_path / "a"), other)
    where = "train round 1.0, group 1, sample 1, "
    assert result.difference is not None
    assert find_decoder(other) is None
    add_tokenizer(other)
    decoders = find_decoder(other), find_decoder(other)
    assert result.difference.describe(decoders=decoders) == where + expected
    id_alone = r"the token is id [17] \(log-probability -[.0-9]+\) in A"
    assert re.search(id_alone, str(result.difference))
    assert result.logprob_gap == (0.25 if logprobs else 0.0)  # of the tokens before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text": "b"}, 'turn 2: the text is "第二轮" in A and "b" in B'),
        ({"mask": None}, "turn 2: the mask is [true, false] in A and none in B"),
        ({"token_ids": [5, 7]}, "turn 2, token 1: the token is id 6 (log-probability -1.000) in A"),
        (
            {"prompt": "[]"},
            'turn 2: the prompt is [{"role": "tool", "content": "<image>看这里 \\\\ud83d"}] in A',
        ),
        (None, "turn 3: the sample is there in A and missing in B"),
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
    assert difference.startswith("train round 0.0, group 0, sample 0: the seed is ")


def test_infinite_log_probabilities_of_one_sign_do_not_differ() -> None:
    assert logprob_gap([-0.5, -math.inf], [-0.25, -math.inf]) == 0.25
    assert math.isnan(logprob_gap([math.nan, -1.0], [-0.5, -1.0]) or 0.0)


def test_rounds_and_samples_that_only_one_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "a")
    shorter = write(tmp_path / "b", steps=2)
    place = "train round 2.0: the round is"
    assert str(diff(one, shorter).difference) == f"{place} there in A and missing in B"
    assert str(diff(shorter, one).difference) == f"{place} missing in A and there in B"
    Writer(tmp_path / "c").write(make_rows(0)[:2])
    expected = "train round 0.0, group 1, sample 0: the sample is there in A and missing in B"
    assert str(diff(one, tmp_path / "c").difference) == expected
    assert main(["diff", str(one), str(tmp_path / "c")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [f"First difference: {expected}."]
    Writer(tmp_path / "d").write(make_rows(5))
    with pytest.raises(ValueError, match="no round in common"):
        diff(one, tmp_path / "d")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a")
    other = write(tmp_path / "b", (1, 1), logprobs=[-0.5, -1.0, -1.25])
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == (
        f"A: {one}\nB: {other}\n3 rounds with 12 samples are equal; log-probabilities agree within "
        "2.5e-01 nats.\n"
    )
    other = write(tmp_path / "c", (1, 1), seed=9)
    (one / "args.json").write_text('{"seed": 42, "output_dir": "a", "top_k": 5}')
    (other / "args.json").write_text('{"seed": 9, "output_dir": "b", "top_k": 5}')
    assert main(["diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"A: {one}",
        f"B: {other}",
        "1 rounds with 4 samples are equal; log-probabilities agree within 0.0e+00 nats.",
        "First difference: train round 1.0, group 1, sample 1: the seed is "
        f"{2**62 + 111} in A and 9 in B.",
        "Settings that differ, in A and B:",
        "  --seed: 42 and 9",
    ]
    assert main(["diff", str(one), str(other), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"] == {"seed": [42, 9]}
    assert printed["difference"]["values"] == [2**62 + 111, 9]
    assert main(["diff", str(one), str(tmp_path / "none")]) == 2
    assert f"{tmp_path}/none holds no run" in capsys.readouterr().err
