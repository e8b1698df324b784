"""A run is read while it goes on; filters, orders, and groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view import runs
from swift_grpo_ext.tools.view.runs import NotFoundError, Run, find_samples, list_groups, text_of
from tests.rig.view.runs import Writer, add_logs, make_rows, make_run, score


def rewards_of(run: Run) -> list[float | None]:
    """Return rewards by step, group, index and turn."""
    order = 'order by step, "group", "index", turn'
    return [row["reward"] for row in run.record.rows(f"select reward from scored {order}")]


def test_a_run_is_followed_from_before_its_first_round(tmp_path: Path) -> None:
    writer, run = Writer(tmp_path), Run(tmp_path)
    run.refresh()
    assert (run.record.is_whole, run.facts.num_rows, run.facts.rounds) == (True, 0, [])
    writer.write(make_rows(0))
    run.refresh()
    assert run.facts.num_rows == 4
    known = run.facts
    run.refresh()
    assert run.facts is known  # nothing is new
    rows = make_rows(1)
    writer.write(rows, scored=False)
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 1] + [None] * 4
    assert list_groups(run, RoundId("train", 1, 0))[0]["reward"] is None
    [fate] = run.record.rows("select distinct fate from scored where reward is null")
    assert fate == {"fate": "generated"}
    writer.score(rows)
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 1] * 2


def test_turns_share_their_sample_s_score(tmp_path: Path) -> None:
    writer, run = Writer(tmp_path), Run(tmp_path)
    first = make_rows(0)
    later = [replace(r, sample_id=replace(r.sample_id, turn=1)) for r in first if r.seed % 2]
    writer.write([*first, *later], scored=False)
    writer.score(first)
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 0, 1, 1]


def test_rounds_come_newest_first_and_a_resumed_session_supersedes(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "run"))
    run.refresh()
    assert run.facts.rounds == [("train", step, 0) for step in (2, 1, 0)]
    assert [*run.facts.ranges][-2:] == ["reward.Accuracy", "reward.Format"]
    Writer(tmp_path / "run", session=1, start_step=1).write(make_rows(1, num_groups=1))
    run.refresh()
    assert run.facts.rounds == [("train", step, 0) for step in (1, 0)]
    assert len(rewards_of(run)) == 4 + 2


def test_what_is_read_is_shown_meanwhile(tmp_path: Path) -> None:
    run, rounds = Run(make_run(tmp_path / "run")), []
    while not run.record.is_whole:
        run.refresh(seconds=0)
        rounds.append([name.step for name in run.facts.rounds])
    assert rounds == [[2], [2], [2, 1], [2, 1], [2, 1, 0], [2, 1, 0]]  # samples, then scores


def test_a_log_ends_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.facts.step, run.facts.max_steps, run.facts.updated) == (0, 0, "")
    path = add_logs(tmp_path, 9.0, 2.0, 4.0)
    facts = run.facts
    assert (facts.has_ended, facts.step, facts.max_steps) == (True, 3, 100)
    assert facts.updated > "2026"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 0.0, "global_step/max_steps": "4/100"}\n{"loss": 1')
    # The run was resumed, and a line is being written.
    assert (run.facts.has_ended, run.facts.step) == (False, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rounds 0 to 2. The length limit ended one sample, and one has no reward yet."""
    folder = tmp_path_factory.mktemp("run")
    writer = Writer(folder)
    for step in range(3):
        rows = make_rows(step)
        if step == 1:
            rows[0] = replace(rows[0], finish_reason="length", stop_reason=None)
        if step == 2:
            rows[3] = replace(rows[3], text="(七) a.c")
        writer.write(rows, scored=False)
        writer.score(rows if step < 2 else rows[:3])
    made = Run(folder)
    made.refresh()
    return made


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"min_step": "1", "max_step": "1"}, "1.0.0 1.0.1 1.1.0 1.1.1"),
        ({"min_step": "1", "min_reward": "0.5", "max_step": "1"}, "1.1.1"),
        ({"max_step": "0", "max_reward": "0.5"}, "0.0.0 0.0.1 0.1.0"),
        ({"min_step": "2", "truncated": "false"}, "2.0.0 2.1.0"),
        ({"finish_reason": "length"}, "1.0.0"),
        ({"text": "G1 I0"}, "2.1.0 1.1.0 0.1.0"),
        ({"text": "a.c"}, "2.1.1"),
        ({"text": "g. i1", "max_step": "0"}, ""),
        ({"text": "question 1", "where": "prompt", "max_step": "0"}, "0.1.0 0.1.1"),
        ({"text": '"s1', "where": "columns", "max_step": "0"}, "0.1.0 0.1.1"),
        ({"min_reward.Accuracy": "1", "max_reward.Format": "1"}, "1.1.1 0.1.1"),
        ({"max_step": "0", "sort": "-reward.Accuracy"}, "0.1.1 0.0.0 0.0.1 0.1.0"),
        ({"min_step": "1", "text": "i1", "sort": "-reward"}, "1.1.1 2.0.1 1.0.1"),
        ({"min_step": "2", "sort": "reward"}, "2.0.0 2.0.1 2.1.0 2.1.1"),
    ],
)
def test_filters_and_orders(run: Run, values: dict[str, str], expected: str) -> None:
    """Step, group and index of the samples that match, in order."""
    count, samples = find_samples(run, values)
    assert [f"{s['step']}.{s['group']}.{s['index']}" for s in samples] == expected.split()
    assert count == len(samples)
    assert find_samples(run, {**values, "offset": "1"}, 1) == (count, samples[1:2])


def test_bad_queries_say_what_was_expected(run: Run) -> None:
    with pytest.raises(
        ValueError, match="sort=text: expected one of step, reward, advantage, num_"
    ):
        find_samples(run, {"sort": "text"})
    for name in ("min_step", "offset"):
        with pytest.raises(NotFoundError, match=f"{name}=a: expected a number"):
            find_samples(run, {name: "a"})


def test_a_sample_as_a_list_shows_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_TEXT", 5)
    _, [sample] = find_samples(run, {"finish_reason": "length"})
    assert sample["seed"] == 2**62 + 100
    assert sample["rewards"] == {"Accuracy": 0.0, "Format": 1.0}
    assert (sample["round"], len(sample["media"])) == ("train.1.0", 1)
    assert (sample["text"], sample["question"]) == ("g0 i0", "<image>Question 0?")
    assert sample["columns"] == {"solution": "s0"}


def test_menus(run: Run) -> None:
    assert run.facts.menus["finish_reason"] == {"stop": 11, "length": 1}
    assert run.facts.menus["truncated"] == {"false": 6, "true": 5}
    assert run.facts.menus["stop_reason"] == {}


def test_groups_of_a_round(run: Run) -> None:
    _, scored = list_groups(run, RoundId("train", 1, 0))
    expected = {
        **{"round": "train.1.0", "group": 1, "index": 0, "question": "<image>Question 1?"},
        **{"columns": {"solution": "s1"}, "media": ["images/1.png"]},
        **{"samples": 2, "num_texts": 2, "rewards": [0.0, 1.0], "reward": 0.5, "spread": 0.5},
    }
    assert {name: scored[name] for name in expected} == expected
    _, partly_scored = list_groups(run, RoundId("train", 2, 0))
    assert (partly_scored["rewards"], partly_scored["spread"]) == ([0.0, None], 0.0)


def test_what_a_message_says() -> None:
    assert text_of({"role": "user", "content": "七", "loss": True}) == "七"
    assert text_of({"role": "assistant", "content": None, "tool_calls": [{"f": "找"}]}) == (
        '{"tool_calls": [{"f": "找"}]}'
    )
    assert text_of({"role": "user", "content": [{"type": "text"}]}) == '[{"type": "text"}]'


@pytest.mark.parametrize("name", ["it's", 'a "name"', "准确", "a]b"])
def test_names_of_functions_are_text(name: str, tmp_path: Path) -> None:
    writer, run = Writer(tmp_path), Run(tmp_path)
    rows = make_rows(0)
    writer.write(rows, scored=False)
    writer.append_scores([replace(score(row, 1.0), rewards=[(name, 0.5)]) for row in rows])
    run.refresh()
    assert find_samples(run, {f"min_reward.{name}": "0.5", "sort": f"reward.{name}"})[0] == 4
