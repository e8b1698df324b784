"""How samples scored, read back from a real run on two ranks that drops groups."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from swift_grpo_ext.record.reader import read_rewards
from swift_grpo_ext.sampling.seeding import SampleId
from tests.stack.policy import SAME
from tests.stack.rounds import BATCH, train, write_rows

pytestmark = pytest.mark.stack


def test_scores_of_trained_and_dropped_samples(assets: Path, tmp_path: Path) -> None:
    rows = write_rows(assets / "digits/train.jsonl", tmp_path / "rows.jsonl", range(12))
    dynamic = ["--dynamic_sample", "true", "--max_resample_times", "4"]
    rewards = ["--reward_funcs", "odd_groups_only", "silent", "--reward_weights", "1.0", "2.0"]
    samples = train(assets, rows, tmp_path / "two", *dynamic, *rewards, ranks=2, steps=1)

    scores = {
        SampleId(**{name: row.pop(name) for name in NAMES}).request_id: row
        for row in read_rewards(tmp_path / "two/run").to_pylist()
    }
    assert scores.keys() == samples.keys()
    advantages = {
        record["name"]: record["advantage"]
        for path in (tmp_path / "two/record").glob("advantages*.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
    }
    fates = Counter(score["fate"] for score in scores.values())
    assert fates == {"trained": BATCH, "dropped": len(samples) - BATCH}
    assert fates["dropped"] >= BATCH  # groups 0 and 2 of three rounds
    for name, score in scores.items():
        *_, group, index = map(int, name.replace(".", "-").split("-")[1:])
        odd, silent = float(group % 2 * index), 0.25 if group % 2 else None
        assert score["rewards"] == [("OddGroupsReward", odd), ("SilentReward", silent)]
        assert score["reward"] == odd + 2 * (silent or 0)
        assert (score["fate"] == "trained") == (name in advantages) == (group == 1)
        assert score["advantage"] == pytest.approx(advantages.get(name))
        assert (score["gap_max"] is None) == (name not in advantages)
        assert (score["gap_max"] or 0) < SAME
        assert (score["gap_mean"] or 0) <= (score["gap_max"] or 0)
        assert not score["replaced"]


NAMES = ("phase", "step", "number", "group", "index")
