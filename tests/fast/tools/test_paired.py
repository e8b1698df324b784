"""Runs compared prompt by prompt: pairs of runs, intervals, and prompts that are left out (V3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import open_record
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import Comparison, Pair, compare, pair_by_seed, read_pair
from tests.rig.view.runs import Writer, make_conversations, make_rows, score


def pair(one: Sequence[float], other: Sequence[float], num_alone: int = 0) -> Pair:
    """Return a pair of runs with these mean rewards by prompt."""
    means = {str(number): each for number, each in enumerate(zip(one, other, strict=True))}
    return Pair(means, num_alone, (0, 2))


def test_prompts_count_of_one_pair_and_runs_of_several() -> None:
    """Student's t at 97.5%: 4.303 with 2 degrees of freedom, 12.706 with 1."""
    base = [1, 2, 3]
    one = compare({"1": pair(base, [1, 3, 5])})
    assert one.interval == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5), abs=1e-3)
    two = compare({"1": pair(base, [1, 3, 5], num_alone=2), "2": pair(base, [5, 5, 5])})
    assert two.interval == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert two == Comparison(
        num_pairs=2,
        num_prompts=6,
        num_alone=2,
        baseline=2.0,
        candidate=4.0,
        difference=2.0,
        interval=two.interval,
        differences={"1": 1.0, "2": 3.0},
        steps={"1": (0, 2), "2": (0, 2)},
    )
    assert compare({"1": pair([0, 0], [1, 1])}).interval == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"seed 1 have 1 prompts in common.*one data set in one"):
        compare({"1": pair([0], [1])})


def test_runs_are_paired_by_seed(tmp_path: Path) -> None:
    def make(name: str, seed: int) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(json.dumps({"seed": seed}), encoding="utf-8")
        return tmp_path / name

    none = tmp_path / "none"
    a1, a2, b1, b2, b3 = (make(name, int(name[1])) for name in ("a1", "a2", "b1", "b2", "b3"))
    assert pair_by_seed([a1, a2], [b2, b1]) == {"1": (a1, b1), "2": (a2, b2)}
    assert pair_by_seed([a1], [b3]) == {"1": (a1, b3)}
    assert pair_by_seed([none], [b3]) == {"unknown": (none, b3)}
    for other in ([b3, b1], [b1, b1], [b1]):
        with pytest.raises(ValueError, match="expected each seed once on both sides"):
            pair_by_seed([a1, a2], other)


def test_turns_of_a_conversation_are_one_sample(tmp_path: Path) -> None:
    """A prompt is that of the first turn. Its mean is over samples, not over turns."""
    rows = make_conversations(0)
    Writer(tmp_path / "run").write(rows)
    Writer(tmp_path / "other").write([*rows, *make_rows(0, num_groups=3)[-2:]])
    pair = read_pair(open_record(tmp_path / "run"), open_record(tmp_path / "other"))
    assert pair.means == {f"{0:032x}": (0.0, 0.0), f"{1:032x}": (0.5, 0.5)}
    assert pair.num_alone == 1


def write(folder: Path, seed: int, rewards: Sequence[float], *, num_steps: int = 2) -> str:
    """Write rounds of two groups; the rewards of step n are n + 1 times `rewards`."""
    writer = Writer(folder)
    for step in range(num_steps):
        rows = make_rows(step)
        writer.write(rows, scored=False)
        writer.append_scores([score(r, (1 + step) * rewards[r.sample_id.group]) for r in rows])
    (folder / "args.json").write_text(json.dumps({"seed": seed}), encoding="utf-8")
    return str(folder)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, other = write(tmp_path / "a", 3, [0, 1]), write(tmp_path / "b", 4, [0, 1])
    candidate, another = write(tmp_path / "c", 3, [1, 2]), write(tmp_path / "d", 4, [2, 3])
    one_pair = ["compare", "--baseline", baseline, "--candidate", candidate]
    assert main([*one_pair, "--json", "--steps", "1:1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["baseline"], result["candidate"]) == (1.0, 3.0)
    assert (result["interval"], result["differences"]) == ([2.0, 2.0], {"3": 2.0})
    assert main([*one_pair, "--reward", "Format"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 pair(s) of runs, 2 prompts",
        "  baseline      1.0000",
        "  candidate     1.0000",
        "  difference   +0.0000  [+0.0000, +0.0000] (95%)",
        "  seed 3       +0.0000  in the steps 0 to 1, which both runs have",
        "One pair says nothing about other seeds.",
    ]
    assert main(["compare", "--baseline", baseline, other, "--candidate", another, candidate]) == 0
    assert "  seed 4       +3.0000  in the steps 0 to 1" in capsys.readouterr().out
    for argv, expected in (
        (["--reward", "Acuracy"], f"--reward 'Acuracy': {baseline} has Accuracy, Format"),
        (["--phase", "eval"], "expected common scored eval steps "),
        (["--steps", "7:9"], f"{candidate} has the steps 0 to 1."),
    ):
        assert main([*one_pair, *argv]) == 2
        assert expected in capsys.readouterr().err


def test_of_runs_of_different_lengths_the_common_steps_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards rise equally in both, and the longer run does not count as better."""
    short, long = (write(tmp_path / f"{n}", 3, [1, 1], num_steps=n) for n in (2, 9))
    assert main(["compare", "--baseline", long, "--candidate", short]) == 0
    printed = capsys.readouterr().out
    assert "  difference   +0.0000  [+0.0000, +0.0000] (95%)" in printed
    assert "in the steps 0 to 1, which both runs have" in printed
    Writer(tmp_path / "late").write(make_rows(9))
    assert main(["compare", "--baseline", short, "--candidate", str(tmp_path / "late")]) == 2
    assert "late has the steps 9 to 9." in capsys.readouterr().err
