"""Other kinds of rounds: several steps a round, evaluations, dynamic sampling, rows left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.policy import SAME
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    BATCH,
    GROUP_SIZE,
    LORA,
    SHORT_STEPS,
    Samples,
    client_argv,
    digits,
    logged_steps,
    read_records,
    recorded,
    run_training,
    server_argv,
    token_ids,
    train,
    write_lines,
    write_video,
)


def names_of_rounds(samples: Samples, phase: str = "train") -> set[str]:
    sample_ids = [SampleId.parse(name) for name in samples]
    return {f"{p.step}.{p.number}" for p in sample_ids if p.phase == phase}


def in_phase(samples: Samples, phase: str) -> Samples:
    return {name: s for name, s in samples.items() if SampleId.parse(name).phase == phase}


@pytest.fixture
def mixed_rows(assets: Path, tmp_path: Path) -> Path:
    """Rows with one image, two images, a video and no media; some differ by their images alone."""
    rows = digits(assets, range(8))
    images = [row["images"][0] for row in rows]
    rows[1]["images"] = images[:2]
    rows[1]["messages"][0]["content"] = "<image><image>Which digits are these?"
    rows[2]["images"] = images[2:4]
    rows[2]["messages"] = rows[1]["messages"]
    rows[3] = {**rows[3], "images": [], "videos": [str(write_video(images, tmp_path / "v.mp4"))]}
    rows[3]["messages"][0]["content"] = "<video>Which digits come by?"
    rows[4] = {**rows[4], "images": []}
    rows[4]["messages"][0]["content"] = "Which digit comes after 4?"
    return write_lines(tmp_path / "mixed.jsonl", rows)


def test_long_rounds_lora_eval_and_mixed_media(
    assets: Path, mixed_rows: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round serves two steps. A run resumes in the middle of a round, with other batches."""
    monkeypatch.setenv("VIDEO_MIN_TOKEN_NUM", "16")  # frames keep the size of a digit
    argv = [
        *(*LORA, "--per_device_train_batch_size", "8", "--steps_per_generation", "2"),
        *("--val_dataset", str(rows), "--eval_strategy", "steps", "--eval_steps", "4"),
        *("--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "2"),
    ]
    small = ("--per_device_eval_batch_size", "4")
    first = train(assets, mixed_rows, tmp_path / "a", *argv, *small, steps=4)
    assert names_of_rounds(first) == {"0.0", "2.0"}
    assert len(in_phase(first, "train")) == 2 * 16
    assert names_of_rounds(first, "eval") == {"4.0"}
    assert len(in_phase(first, "eval")) == 6 * GROUP_SIZE
    for sample in in_phase(first, "train").values():
        words = sample["messages"][-1]["content"]
        assert words.count("<image>") == len(sample["images"])
        assert words.count("<video>") == len(sample["videos"])
    shown = {json.dumps([s["images"], s["videos"]]) for s in in_phase(first, "train").values()}
    assert len(shown) == 8, "not every row came"

    resume = ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-3"))
    # Other batches of evaluation, and other steps of vLLM.
    argv += [*resume, "--per_device_eval_batch_size", "12", *SHORT_STEPS]
    second = train(assets, mixed_rows, tmp_path / "b", *argv, steps=4)
    assert names_of_rounds(second) == {"2.0"}
    assert names_of_rounds(second, "eval") == {"4.0"}
    assert token_ids(second) == {name: first[name]["token_ids"] for name in second}


def test_dynamic_sampling_and_scores(assets: Path, rows: Path, tmp_path: Path) -> None:
    """A step has two rounds, each with two more that replace dropped groups; one rank and two have
    the same samples. The record has the scores and the fate of all, dropped ones too."""
    argv = [
        *("--dynamic_sample", "true", "--max_resample_times", "3"),
        *("--reward_funcs", "odd_groups", "silent", "--reward_weights", "1.0", "2.0"),
        *("--gradient_accumulation_steps", "2", "--steps_per_generation", "1"),
    ]
    samples = train(assets, rows, tmp_path / "a", *argv, steps=1)
    # Regular rounds are 0 and 1; round n may add 2 + 3 n and the two after it.
    assert names_of_rounds(samples) == {f"0.{n}" for n in (0, 2, 3, 1, 5, 6)}
    assert len(samples) == 6 * BATCH
    assert len({s["infos"]["seed"] for s in samples.values()}) == len(samples)
    on_two = train(assets, rows, tmp_path / "b", *argv, ranks=2, steps=1)
    assert token_ids(on_two) == token_ids(samples)

    names = ("phase", "step", "number", "group", "index")
    scores = {
        SampleId(**{name: row.pop(name) for name in names}).request_id: row
        for row in read_rewards(tmp_path / "b/run").to_pylist()
    }
    assert scores.keys() == samples.keys()
    records = read_records(tmp_path / "b/record", "advantages")
    advantages = {record["name"]: record["advantage"] for record in records}
    assert len(advantages) == 2 * BATCH
    for name, score in scores.items():
        sample_id = SampleId.parse(name)
        is_odd = sample_id.group == 1
        odd, silent = float(is_odd * sample_id.index), 0.25 if is_odd else None
        assert score["rewards"] == [("OddGroups", odd), ("Silent", silent)]
        assert score["reward"] == odd + 2 * (silent or 0)
        assert score["fate"] == ("trained" if is_odd else "dropped")
        assert is_odd == (name in advantages) == (score["gap_max"] is not None)
        assert score["advantage"] == pytest.approx(advantages.get(name))
        assert (score["gap_mean"] or 0) <= (score["gap_max"] or 0) < SAME
        assert not score["replaced"]


def test_what_dynamic_sampling_keeps_follows_from_names(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    """A resumed run, whose waves have other sizes, and three ranks with two replicas train on the
    same samples. One in three groups is kept, so the first wave of step 1 has two rounds."""
    argv = [
        *("--dynamic_sample", "true", "--max_resample_times", "3"),
        *("--reward_funcs", "odd_groups"),
        *("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2"),
    ]

    def trained(name: str, *others: str, ranks: int = 1) -> dict[str, list[int]]:
        folder = tmp_path / name
        samples = token_ids(train(assets, rows, folder, *argv, *others, ranks=ranks, steps=2))
        scores = read_rewards(folder / "run").to_pylist()
        parts = ("phase", "step", "number", "group", "index")
        kept = [
            SampleId(**{part: score[part] for part in parts})
            for score in scores
            if score["fate"] == "trained"
        ]
        return {name.request_id: samples[name.request_id] for name in kept}

    whole = trained("whole")
    assert len(whole) == 2 * BATCH
    resumed = trained(
        "resumed", "--resume_from_checkpoint", str(tmp_path / "whole/run/checkpoint-1")
    )
    assert resumed == {name: ids for name, ids in whole.items() if name.startswith("train-1.")}
    server = server_argv(assets, "--vllm_data_parallel_size", "2")
    with rollout_server(*server, log=tmp_path / "server.log") as port:
        assert trained("served", *client_argv(port), ranks=3) == whole


@pytest.mark.extra
def test_completions_that_are_all_cut_and_rows_that_fill_no_batch(
    assets: Path, tmp_path: Path
) -> None:
    """A training with nothing to learn from goes on. One warning counts the rows that an evaluation
    leaves out."""
    rows = digits(assets, range(12))
    evaluated = write_lines(tmp_path / "val.jsonl", rows[:5])
    finished = run_training(
        *(assets, write_lines(tmp_path / "rows.jsonl", rows), tmp_path),
        *("--overlong_filter", "true", "--max_completion_length", "1"),
        *("--val_dataset", str(evaluated), "--eval_strategy", "steps", "--eval_steps", "4"),
        *("--per_device_eval_batch_size", str(4 * GROUP_SIZE)),
        *("--learning_rate", "1e-3", *LORA),
        steps=4,
    )
    assert finished.returncode == 0, finished.cause
    steps = logged_steps(tmp_path / "run")
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0, 0)] * 4
    names = map(SampleId.parse, recorded(tmp_path))
    assert len({name.group for name in names if name.phase == "eval"}) == 4
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert log.count("--val_dataset: 1 of 5 rows are left out of each evaluation") == 1
