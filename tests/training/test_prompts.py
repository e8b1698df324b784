"""Which prompts a round holds, and what comes in the place of those that cannot be encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.checks.rows import encoding_error
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.sampling.replacement import NoReplacementError, candidate_order
from swift_grpo_ext.sampling.rounds import Round, RoundClock, RoundNames
from swift_grpo_ext.training import RolloutGRPOConfig
from swift_grpo_ext.training.prompts import (
    rank_rows,
    replace_failing_prompts,
    round_clock,
)
from tests.arguments import training_arguments
from tests.ranks import ThreadRanks, run_rank_groups

ROUND = Round(phase="train", step=3, number=1)


def row(words: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], **fields}


def words_of(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"])


class Template:
    """Refuses words in capitals, as ms-swift's template refuses a prompt that is too long."""

    def encode(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if words_of(inputs).isupper():
            raise ValueError("too long")
        return {"input_ids": [1]}


# --- the clock ---


def arguments(**changes: Any) -> RolloutGRPOConfig:
    values = {
        "steps_per_generation": 4,
        "num_iterations": 1,
        "generation_batch_size": 12,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_resample_times": 5,
        "dynamic_sample": False,
    }
    return training_arguments(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "num_rows", "parallel", "expected"),
    [
        ({}, 7, 1, (4, 8, 0)),
        ({"num_iterations": 3}, 7, 1, (12, 24, 0)),
        ({}, 7, 2, (8, 16, 0)),
        ({"dynamic_sample": True}, 6, 1, (4, 8, 5)),
        ({}, 2, 1, (4, 4, 0)),  # fewer rows than a batch: an epoch is one round
        ({"num_generations": 3}, 8, 1, (4, 8, 0)),
    ],
)
def test_the_clock_of_a_run(
    changes: dict[str, Any], num_rows: int, parallel: int, expected: tuple[int, int, int]
) -> None:
    per_round, per_epoch, resamples = expected
    assert round_clock(arguments(**changes), num_rows, parallel) == RoundClock(
        batches_per_step=2,
        batches_per_round=per_round,
        batches_per_epoch=per_epoch,
        max_resamples=resamples,
    )


def test_a_round_serves_several_iterations() -> None:
    """`--num_iterations 2`: its batches are trained on twice before another round begins."""
    clock = round_clock(arguments(num_iterations=2, steps_per_generation=2), 6, 1)
    names = [clock.round_at(batch) for batch in range(8)]
    first = Round(phase="train", step=0, number=0)
    assert names == [first] * 4 + [Round(phase="train", step=2, number=0)] * 4


def test_ahead_is_the_next_round() -> None:
    """`--async_generate` draws while it trains: names follow the step that uses the samples."""
    clock = round_clock(arguments(steps_per_generation=2), 6, 1)
    names = RoundNames(clock)
    names.begin_training(0)
    assert names.current == Round(phase="train", step=0, number=0)
    names.begin_training(0, ahead=True)
    assert names.current == Round(phase="train", step=1, number=0)
    before = [clock.generation_batch_before(batch) for batch in range(0, 10, 2)]
    assert before == [(0, 1), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_batch_before_the_first_of_an_epoch_is_the_last_of_the_one_before() -> None:
    clock = RoundClock(batches_per_step=1, batches_per_round=2, batches_per_epoch=6)
    assert clock.generation_batch_before(6) == (0, 2)
    assert clock.generation_batch_before(8) == (1, 0)


def test_ranks_share_a_batch_in_order() -> None:
    shares = run_rank_groups(3, lambda ranks: list(rank_rows(range(12), ranks)))
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert list(rank_rows([5, 6], SingleRank())) == [5, 6]


def test_ranks_that_share_an_engine_have_their_rows_together() -> None:
    shares = run_rank_groups(4, lambda ranks: list(rank_rows(range(8), ranks, sharing=2)))
    assert shares == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


# --- replacement ---

SPARE = [row(letter) for letter in "defgh"]


def replaced(
    batch: str, num_ranks: int = 1, round_: Round = ROUND, others: list[Any] = SPARE
) -> list[tuple[str, list[int]]]:
    """Each rank's rows after it, as letters, and the number of groups that it is told."""
    share = len(batch) // num_ranks

    def work(ranks: ThreadRanks) -> tuple[str, list[int]]:
        rows, groups = replace_failing_prompts(
            [row(letter) for letter in batch[ranks.rank * share : (ranks.rank + 1) * share]],
            others=others,
            round_=round_,
            group_size=2,
            seed=42,
            template=Template(),
            ranks=ranks,
        )
        return "".join(map(words_of, rows)), groups

    return run_rank_groups(num_ranks, work)


def candidates(round_: Round) -> str:
    return "".join("defgh"[i] for i in candidate_order(42, round_, 5))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_bad_groups_at_once(num_ranks: int, warnings: list[str]) -> None:
    """Each is given another row, whichever ranks they stand on; rank 0 names both."""
    first, second, *_ = candidates(ROUND)
    results = replaced("AAbbCCbb", num_ranks)
    assert "".join(rows for rows, _ in results) == f"{first * 2}bb{second * 2}bb"
    assert [groups for _, groups in results] == [[0, 2]] * num_ranks
    assert len(warnings) == 2
    for warning, group, words in zip(warnings, (0, 2), "AC", strict=True):
        expected = f"train round 3.1, group {group}: the row that asks '{words}' cannot be encoded"
        assert warning.startswith(f"{expected} (ValueError: too long)")


@pytest.mark.parametrize(
    "round_",
    [
        Round(phase="eval", step=3, number=1),
        Round(phase="eval", step=3, number=1, first_group=7),
        Round(phase="train", step=3, number=4),  # one that dynamic sampling adds
    ],
)
def test_each_round_tries_rows_in_an_order_of_its_own(round_: Round, warnings: list[str]) -> None:
    assert candidates(round_) != candidates(ROUND)
    [(rows, groups)] = replaced("bbAA", round_=round_)
    assert (rows, groups) == (f"bb{candidates(round_)[0] * 2}", [1])
    name = f"{round_.phase} round {round_.step}.{round_.number}, group {round_.first_group + 1}:"
    assert warnings[0].startswith(name)


def test_without_a_bad_prompt_nothing_changes(warnings: list[str]) -> None:
    assert replaced("bbcc", 2) == [("bb", []), ("cc", [])]
    assert warnings == []


def test_where_no_row_is_good_the_run_stops() -> None:
    with pytest.raises(NoReplacementError, match=r"group 0: ValueError: too long"):
        replaced("AA", others=[row("B")])


# --- errors of prompts ---


def test_why_a_prompt_cannot_be_encoded(tmp_path: Path) -> None:
    template = Template()
    assert encoding_error(template, row("ok")) is None
    assert encoding_error(template, row("LOUD")) == "ValueError: too long"
    assert encoding_error(template, {"messages": []}) == "it has no messages"
    missing = encoding_error(template, row("ok", images=[str(tmp_path / "none.png")]))
    assert missing is not None
    assert "none.png" in missing
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert encoding_error(template, row("ok", images=[str(tmp_path / "a.png")])) is None


def test_the_answer_in_a_row_is_no_part_of_the_prompt() -> None:
    """The data set's own response is left out, and stays in the row."""
    asked: list[Any] = []

    class Recording(Template):
        def encode(self, inputs: dict[str, Any]) -> dict[str, Any]:
            asked.append(inputs["messages"])
            return {}

    full = row("ok")
    full["messages"].append({"role": "assistant", "content": "an answer"})
    assert encoding_error(Recording(), full) is None
    assert asked == [[{"role": "user", "content": "ok"}]]
    assert [message["role"] for message in full["messages"]] == ["user", "assistant"]
