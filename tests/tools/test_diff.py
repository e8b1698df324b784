"""Pairs of runs that were made to differ in one cause each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import IncomparableError, Part, diff
from tests.tools.view.runs import Writer, make_rows, score

SETTINGS = {"torch_dtype": "float32", "seed": 42, "temperature": 1.0, "stop_words": [],
            "output_dir": "x"}  # fmt: skip
Change = Callable[[SampleRow], SampleRow]


def rows_of(step: int) -> list[SampleRow]:
    rows = make_rows(step)
    return [
        replace(r, fingerprint=f"{10 * step + r.sample_id.group:032x}", logprobs=[-0.5, -1.0, -1.5])
        for r in rows
    ]


def write(
    folder: Path,
    change: Change = lambda row: row,
    *,
    steps: int = 3,
    rewards: float | None = None,
    **settings: Any,
) -> Path:
    """A run whose rows of round 1 are changed."""
    writer = Writer(folder)
    for step in range(steps):
        rows = [change(r) if step == 1 else r for r in rows_of(step)]
        writer.write(rows, scored=False)
        writer._rewards.append([score(r, rewards if step == 0 else None) for r in rows])
    (folder / "args.json").write_text(json.dumps({**SETTINGS, **settings}), encoding="utf-8")
    return folder


def at(group: int, index: int, **changes: Any) -> Change:
    """Change one sample."""

    def change(row: SampleRow) -> SampleRow:
        is_meant = (row.sample_id.group, row.sample_id.index) == (group, index)
        return replace(row, **changes) if is_meant else row

    return change


def group_1(**changes: Any) -> Change:
    return lambda row: replace(row, **changes) if row.sample_id.group == 1 else row


def everywhere(**changes: Any) -> Change:
    return lambda row: replace(row, **changes)


def swapped(row: SampleRow) -> SampleRow:
    return replace(row, fingerprint=f"{10 + 1 - row.sample_id.group:032x}")


OTHER = "f" * 32
SHIFTED = [-0.6, -1.0, -1.5]


@pytest.mark.parametrize(
    ("change", "settings", "place", "cause", "words"),
    [
        (swapped, {}, (0, 0, None), "prompt order", "meets this prompt at another place"),
        (
            group_1(fingerprint=OTHER, prompt='[{"role": "user", "content": "<image>Other"}]'),
            {}, (1, 0, None), "prompt text", "differ from character 37: '.*Question 1.*Other",
        ),
        (
            group_1(fingerprint=OTHER, media=["images/new.png"]),
            {}, (1, 0, None), "pixels", "Other media: images/1.png and images/new.png",
        ),
        (group_1(fingerprint=OTHER), {}, (1, 0, None), "pixels", "their content differs"),
        (at(0, 1, seed=7), {"seed": 7}, (0, 1, None), "seed", r"--seed 42 and 7"),
        (at(0, 1, weight_version=0), {}, (0, 1, None), "weights", "steps 1 and 0"),
        (
            lambda r: at(0, 1, token_ids=[7, 0, 9])(replace(r, logprobs=SHIFTED)),
            {}, (0, 1, 2), "weights", r"up to 0.098\d nats in all groups, of step 1",
        ),
        (
            lambda r: at(0, 1, token_ids=[7, 0, 9])(replace(r, logprobs=SHIFTED)),
            {"temperature": 0.7}, (0, 1, 2), "settings", "--temperature 1.0 and 0.7",
        ),
        (
            at(1, 1, token_ids=[7, 1, 9], logprobs=SHIFTED),
            {}, (1, 1, 2), "pixels", "groups 1 of 2 only",
        ),
        (
            everywhere(token_ids=[8, 9], logprobs=[-0.5, -0.5]),
            {}, (0, 0, 0), "weights", "No token of the round",
        ),
        (
            at(1, 1, token_ids=[7, 1, 9]),
            {}, (1, 1, 2), "near tie", r"Token 1 \(probability 0.2231\) against 9",
        ),
        (
            at(1, 1, token_ids=[7, 1], logprobs=[-0.5, -1.0], stop_reason="7"),
            {"stop_words": ["7"]}, (1, 1, 2), "stop", r"stop None and stop '7'.*--stop_words",
        ),
        (at(0, 0, finish_reason="length"), {}, (0, 0, None), "stop", "stop None and length None"),
    ],
)  # fmt: skip
def test_causes(
    tmp_path: Path, change: Change, settings: dict[str, Any], place: tuple[int, int, int | None],
    cause: str, words: str,
) -> None:  # fmt: skip
    one, other = write(tmp_path / "a"), write(tmp_path / "b", change, **settings)
    result = diff(one, other)
    [part] = result.parts
    assert (part.phase, part.step, part.number, part.group, part.index, part.token) == (
        *("train", 1, 0), *place,
    )  # fmt: skip
    assert part.cause == cause
    assert re.search(words, part.why), part.why
    assert (result.num_rounds, result.num_samples) == (1, 4)
    assert result.settings == {name: (SETTINGS[name], value) for name, value in settings.items()}


def test_a_round_of_another_size(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", steps=1), tmp_path / "b"
    Writer(other).write(rows_of(0)[:2])
    [part] = diff(one, other).parts
    assert (part.cause, part.place) == ("settings", "train round 0.0")
    assert "4 and 2 samples" in part.why


def test_rewards_part_before_tokens(tmp_path: Path) -> None:
    change = at(1, 0, token_ids=[7, 1, 9])
    one, other = write(tmp_path / "a"), write(tmp_path / "b", change, rewards=0.75)
    rewards, tokens = diff(one, other).parts
    assert (rewards.cause, rewards.place) == ("rewards", "train round 0.0, group 0, sample 0")
    assert "0.0 and 0.75" in rewards.why
    assert (tokens.cause, tokens.step) == ("near tie", 1)


def test_equal_runs_within_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = everywhere(logprobs=[-0.5006, -1.0, -1.503])  # the first: one step of the record
    one, other = write(tmp_path / "a"), write(tmp_path / "b", change, output_dir="y")
    assert main(["diff", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("3 rounds with 12 samples have equal tokens; their log-probabilities")
    assert "within 1.5e-03 nats and the record's rounding" in text
    assert "Settings" not in text  # where a run lives is no difference


def test_a_run_that_ended_earlier(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b", steps=2)
    [part] = diff(one, other).parts
    assert (part.cause, part.place) == ("rounds", "train round 2.0")
    assert f"{other} lacks it" in part.why
    assert diff(one, other, common_only=True).parts == []


def test_exit_statuses_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a"), write(tmp_path / "b", at(1, 1, token_ids=[7, 1, 9]))
    assert main(["diff", str(one), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert Part(**found["parts"][0]).place == "train round 1.0, group 1, sample 1, token 2"
    (tmp_path / "empty").mkdir()
    assert main(["diff", str(one), str(tmp_path / "empty")]) == 2
    assert "samples does not exist" in capsys.readouterr().err


def test_runs_without_a_common_round(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", steps=1), tmp_path / "b"
    Writer(other).write(rows_of(5))
    with pytest.raises(IncomparableError, match="no round in common"):
        diff(one, other)
