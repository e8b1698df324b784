"""Conversations on the page: read from the top, counted once, with the time that they took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.overview import make_panels
from swift_grpo_ext.tools.view.pages import group_values, overview_values, render, samples_values
from swift_grpo_ext.tools.view.runs import NotFoundError, list_groups
from tests.tools.view.runs import Writer, add_tokenizer, make_conversations, make_rows

NAME = RoundId("train", 0, 0)


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    writer = Writer(tmp_path)
    for step in range(2):
        rows = make_conversations(step)
        writer.write(rows, scored=False)
        writer.score([r for r in rows if not r.sample_id.turn], gaps=[(0, 0.5), (4, 0.25)])
    add_tokenizer(tmp_path)
    run = RunView(tmp_path)
    run.refresh()
    return run


def test_a_conversation_turn_by_turn(run: RunView) -> None:
    group = run.group(NAME, 1)
    assert (group["has_turns"], group["has_one_prompt"], group["has_masks"]) == (True, True, True)
    single, several = group["samples"]
    assert [len(sample["turns"]) for sample in (single, several)] == [1, 3]
    assert several["all_num_tokens"] == 5
    assert (several["all_engine_seconds"], several["all_tool_seconds"]) == (3.0, 4.0)
    first, second, third = several["turns"]
    assert [m.media[0][:2] for m in first["said"]] == [(0, "images/1.png")]
    [said] = second["said"]
    assert (said.role, said.text) == ("tool", "看这里 \\ud83d")
    assert said.media[0][2].startswith("data:image/webp;base64,UklG")
    assert [piece.is_masked for piece in second["pieces"]] == [False, True]
    # Position 4 of the sample is the second token of its second turn.
    assert [turn["gaps"] for turn in (first, second, third)] == [{0: 0.5}, {1: 0.25}, {}]
    assert third["said"][0].text == '{"tool_calls": [{"f": "找"}]}'
    assert third["pieces"] == []


def test_the_page_says_who_spoke_and_for_how_long(run: RunView) -> None:
    values = group_values(run, {"round": "train.0.0", "group": 1})
    whole = render("group", run, **values)
    text = whole[whole.index('id="sample-1"') :]
    places = [text.index(part) for part in (
        'id="sample-1"', "Turn 1<", "看这里", "data:image/webp", "Turn 2<", "找", "Turn 3<",
        "the prompt left no room for one",
    )]  # fmt: skip
    assert places[2] > places[3]  # the crop stands before the words that came with it
    assert sorted([*places[:2], *places[3:]]) == [*places[:2], *places[3:]]
    assert 'class=" masked"' in text
    assert "index=1&amp;turn=0&amp;number=0" in text
    assert "Struck out" in whole


def test_a_run_without_conversations_has_none_of_it(tmp_path: Path) -> None:
    Writer(tmp_path).write(make_rows(0))
    run = RunView(tmp_path)
    run.refresh()
    text = render("group", run, **group_values(run, {"round": "train.0.0", "group": 1}))
    text += render("samples", run, **samples_values(run, {}))
    text += render("overview", run, **overview_values(run))
    main = "".join(part.partition("</main>")[0] for part in text.split("<main")[1:])
    for word in ("Turn ", "conversation", "turns", "Engine", "masked"):
        assert word not in main


def test_samples_count_once(run: RunView) -> None:
    first, second = list_groups(run, NAME)
    assert (first["samples"], first["distinct"], first["rewards"]) == (2, 2, [0.0, 0.0])
    assert (second["samples"], second["rewards"], second["reward"]) == (2, [0.0, 1.0], 0.5)
    panels = make_panels(run, [])
    assert panels["reward"]["reward"] == [(1, 0.25), (2, 0.25)]
    assert panels["length"] == {"length": [(1, 4.0), (2, 4.0)]}  # 3 and 5 tokens
    page = render("samples", run, **samples_values(run, {"text": "第二"}))
    assert '4 <span lang="en">of</span><span lang="zh">/</span> 16 <span lang="en">turns' in page


def test_each_turn_of_a_group_has_the_media_that_it_names(run: RunView) -> None:
    assert run.medium_name(NAME, 1, 0) == "images/1.png"
    assert run.medium_name(NAME, 1, 0, 1, 1) == "blake2b:0"
    for wrong in ((1, 2), (0, 1), (7, 0)):
        with pytest.raises(NotFoundError):
            run.medium_name(NAME, 1, 0, *wrong)


def test_each_conversation_has_its_own_question_where_they_differ(tmp_path: Path) -> None:
    rows = make_conversations(0)
    rows = [replace(r, fingerprint=f"own {r.sample_id.index}.{r.sample_id.turn}") for r in rows]
    Writer(tmp_path).write(rows)
    run = RunView(tmp_path)
    run.refresh()
    assert not run.group(NAME, 0)["has_one_prompt"]
