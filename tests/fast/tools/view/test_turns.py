"""Conversations on the page: turns in order, counted as one sample, with their times."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view.group import read_group, read_image
from swift_grpo_ext.tools.view.pages import render
from swift_grpo_ext.tools.view.runs import NotFoundError, Run, list_groups
from tests.rig.view.runs import Writer, add_tokenizer, make_conversations, make_rows

NAME = RoundId("train", 0, 0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    writer = Writer(tmp_path)
    for step in range(2):
        rows = make_conversations(step)
        writer.write(rows, scored=False)
        writer.score([r for r in rows if not r.sample_id.turn], gaps=[(0, 0.5), (4, 0.25)])
    add_tokenizer(tmp_path)
    run = Run(tmp_path)
    run.refresh()
    return run


def test_a_conversation_turn_by_turn(run: Run) -> None:
    group = read_group(run, NAME, 1)
    assert group["has_one_prompt"]
    assert [len(turns) for turns in group["samples"]] == [1, 3]
    first, second, third = group["samples"][1]
    assert second["messages"] == [("tool", "<image>看这里 \\ud83d")]
    assert [span.is_masked for span in second["spans"]] == [False, True]
    # Position 4 of the sample is the second token of its second turn.
    gaps = [[span.gap for span in turn["spans"]] for turn in (first, second, third)]
    assert gaps == [[0.5, 0, 0], [0, 0.25], []]
    assert third["messages"] == [("tool", '{"tool_calls": [{"f": "找"}]}')]
    assert third["spans"] == []


def test_the_page_says_who_spoke_and_for_how_long(run: Run) -> None:
    whole = render([run], 0, "group", {"round": "train.0.0", "group": "1"})
    text = whole[whole.index('id="sample-train.0.0-1-1"') :]
    places = [text.index(part) for part in (
        "</span> 1</h4>", "index=1&amp;turn=1&amp;number=0", "看这里", "</span> 2</h4>", "找",
    )]  # fmt: skip
    assert places[3] < places[1] < places[2] < places[4]
    assert "<i>tool_seconds</i> 3" in text
    assert 'class=" masked"' in text
    assert "Struck out" in whole


def test_a_run_without_conversations_has_none_of_it(tmp_path: Path) -> None:
    Writer(tmp_path).write(make_rows(0))
    run = Run(tmp_path)
    run.refresh()
    text = render([run], 0, "group", {"round": "train.0.0", "group": "1"})
    text += render([run], 0, "samples", {})
    main = "".join(part.partition("</main>")[0] for part in text.split("<main")[1:])
    for word in ("Turn", "seconds", "masked"):
        assert word not in main


def test_samples_count_once(run: Run) -> None:
    first, second = list_groups(run, NAME)
    assert (first["samples"], first["num_texts"], first["rewards"]) == (2, 2, [0.0, 0.0])
    assert (second["samples"], second["rewards"], second["reward"]) == (2, [0.0, 1.0], 0.5)
    assert '<span id="count">4 / 16</span>' in render([run], 0, "samples", {"text": "第二"})


def test_each_turn_of_a_group_has_the_media_that_it_names(run: Run) -> None:
    place = {"round": "train.0.0", "group": "1", "index": "1", "turn": "1", "number": "0"}
    with Image.open(io.BytesIO(read_image(run, place))) as crop:  # the record has the picture
        assert (crop.format, crop.size) == ("PNG", (8, 4))
    for wrong in ({"turn": "2"}, {"number": "1"}, {"group": "7"}):
        with pytest.raises(NotFoundError, match="has no such medium"):
            read_image(run, {**place, **wrong})


def test_each_conversation_has_its_own_question_where_they_differ(tmp_path: Path) -> None:
    rows = make_conversations(0)
    rows = [replace(r, fingerprint=f"own {r.sample_id.index}.{r.sample_id.turn}") for r in rows]
    Writer(tmp_path).write(rows, scored=False)
    run = Run(tmp_path)
    run.refresh()
    assert not read_group(run, NAME, 0)["has_one_prompt"]
    page = render([run], 0, "group", {"round": "train.0.0", "group": "0"})
    assert page.count("Question 0?") == 2
