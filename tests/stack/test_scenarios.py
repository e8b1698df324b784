"""Rounds of several steps with LoRA, evaluations and mixed media, and dynamic sampling: samples
depend on their names alone, also in a run that is resumed (S2, S4, G7, V1)."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig import seeing
from tests.rig.policy import SAME
from tests.rig.rounds import (
    BATCH,
    GROUP_SIZE,
    LORA,
    SHORT_STEPS,
    Samples,
    digits,
    read_records,
    token_ids,
    train,
    write_lines,
)


def names_of_rounds(samples: Samples, phase: str = "train") -> set[str]:
    sample_ids = [SampleId.parse(name) for name in samples]
    return {f"{p.step}.{p.number}" for p in sample_ids if p.phase == phase}


def in_phase(samples: Samples, phase: str) -> Samples:
    return {name: s for name, s in samples.items() if SampleId.parse(name).phase == phase}


def test_long_rounds_lora_eval_and_mixed_media(assets: Path, tmp_path: Path) -> None:
    """A round serves two steps. A run resumes in the middle of a round, with other batches. Rows
    have an image, two, a video or none; some differ by their images alone."""
    mixed = write_lines(tmp_path / "mixed.jsonl", seeing.rows(assets, tmp_path)[:8])
    evaluated = write_lines(tmp_path / "val.jsonl", digits(assets, range(3)))
    argv = [
        *(*LORA, "--per_device_train_batch_size", "8", "--steps_per_generation", "2"),
        *("--val_dataset", str(evaluated), "--eval_strategy", "steps", "--eval_steps", "4"),
        *("--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "2"),
    ]
    small = ("--per_device_eval_batch_size", "4")
    first = train(assets, mixed, tmp_path / "a", *argv, *small, steps=4)
    assert names_of_rounds(first) == {"0.0", "2.0"}
    assert len(in_phase(first, "train")) == 2 * 16
    assert names_of_rounds(first, "eval") == {"4.0"}
    assert len(in_phase(first, "eval")) == 3 * GROUP_SIZE
    for sample in in_phase(first, "train").values():
        words = sample["messages"][-1]["content"]
        assert words.count("<image>") == len(sample["images"])
        assert words.count("<video>") == len(sample["videos"])
    parts = ("messages", "images", "videos")
    seen = {json.dumps([s[part] for part in parts]) for s in in_phase(first, "train").values()}
    assert len(seen) == 8, "not every row came"

    resume = ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-3"))
    # Other batches of evaluation, and other steps of vLLM.
    argv += [*resume, "--per_device_eval_batch_size", "12", *SHORT_STEPS]
    second = train(assets, mixed, tmp_path / "b", *argv, steps=4)
    assert names_of_rounds(second) == {"2.0"}
    assert names_of_rounds(second, "eval") == {"4.0"}
    assert token_ids(second) == {name: first[name]["token_ids"] for name in second}


def scores_of(run: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded scores of each sample, by its name."""
    parts = ("phase", "step", "number", "group", "index")
    return {
        SampleId(**{part: row.pop(part) for part in parts}).request_id: row
        for row in read_rewards(run).to_pylist()
    }


def test_dynamic_sampling_and_scores(assets: Path, rows: Path, tmp_path: Path) -> None:
    """A step has two rounds, each with more that replace dropped groups. The record has the scores
    and the fate of all samples. A resumed run on two ranks, with waves of other sizes, trains on
    the same samples."""
    argv = [
        *("--dynamic_sample", "true", "--max_resample_times", "3"),
        *("--reward_funcs", "odd_groups", "silent", "--reward_weights", "1.0", "2.0"),
        *("--gradient_accumulation_steps", "2", "--steps_per_generation", "1"),
        *("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2"),
    ]
    samples = train(assets, rows, tmp_path / "a", *argv, steps=2)
    # Regular rounds are 0 and 1; round n may add 2 + 3 n and the two after it. One in three groups
    # is kept, so the waves of step 1 are larger.
    first = {name: s for name, s in samples.items() if SampleId.parse(name).step == 0}
    assert names_of_rounds(first) == {f"0.{n}" for n in (0, 2, 3, 1, 5, 6)}
    assert len(first) == 6 * BATCH
    assert len({s["infos"]["seed"] for s in samples.values()}) == len(samples)

    scores = scores_of(tmp_path / "a/run")
    assert scores.keys() == samples.keys()
    records = read_records(tmp_path / "a/record", "advantages")
    advantages = {record["name"]: record["advantage"] for record in records}
    assert len(advantages) == 4 * BATCH
    for name, score in scores.items():
        sample_id = SampleId.parse(name)
        is_odd = sample_id.group == 1
        odd, silent = float(is_odd * sample_id.index), 0.25 if is_odd else None
        assert score["rewards"] == [("OddGroups", odd), ("Silent", silent)]
        assert score["reward"] == odd + 2 * (silent or 0)
        assert (
            (score["fate"] == "trained") == (name in advantages) == (score["gap_max"] is not None)
        )
        assert is_odd or score["fate"] == "dropped"
        assert score["advantage"] == pytest.approx(advantages.get(name))
        assert (score["gap_mean"] or 0) <= (score["gap_max"] or 0) < SAME
        assert not score["replaced"]

    resume = ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-1"))
    resumed = train(assets, rows, tmp_path / "b", *argv, *resume, ranks=2, steps=2)
    found = scores_of(tmp_path / "b/run")
    trained = {name for name, score in found.items() if score["fate"] == "trained"}
    assert trained == {name for name in advantages if SampleId.parse(name).step == 1}
    assert {resumed[name]["token_ids"] == samples[name]["token_ids"] for name in trained} == {True}
