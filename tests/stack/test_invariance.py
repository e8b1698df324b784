"""Rounds have the same token ids for the same (round, group, index), however they are run.

All runs have the same weights (learning rate 0) and `--seed`. The data set has few rows, so prompts
come back, and three equal ones, so a batch can hold duplicates.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.tools.cli import main
from tests.rig.fixtures import STEPS
from tests.rig.policy import SAME
from tests.rig.record.rows import read_diversity
from tests.rig.rounds import (
    BATCH,
    GROUP_SIZE,
    Samples,
    assert_same,
    logged_steps,
    read_records,
    train,
)

SEED = 42  # ms-swift's default


def test_seeds_are_unique_and_noise_is_fresh(reference: Samples) -> None:
    assert len(reference) == BATCH * STEPS
    for name, sample in reference.items():
        assert sample["infos"]["seed"] == sample_seed(SEED, SampleId.parse(name))
    seeds = {sample["infos"]["seed"] for sample in reference.values()}
    assert len({seed % 2**32 for seed in seeds}) == len(reference)
    prompts = [(tuple(s["images"]), s["step"]) for s in reference.values()]
    repeated = max(prompts.count(prompt) for prompt in set(prompts))
    assert repeated > GROUP_SIZE, "no prompt met itself in a batch: the test sees nothing"
    completions = {tuple(sample["token_ids"]) for sample in reference.values()}
    assert len(completions) == len(reference), "a completion came twice"


def test_sound_noise_is_no_alarm_and_reaches_the_log(
    reference_folder: Path, tmp_path: Path
) -> None:
    """Prompts come back in each epoch, and each sample has its own seed."""
    records = read_diversity(reference_folder / "run")
    assert [r.verdict for r in records] == ["healthy"] * STEPS
    assert all(r.num_earlier_pairs for r in records[2:])  # of the second epoch on
    assert "diversity:" not in (reference_folder / "log").read_text(encoding="utf-8")
    logged = [log["diversity/vendi"] for log in logged_steps(reference_folder / "run")]
    assert logged == pytest.approx([r.metrics["vendi"] for r in records], abs=1e-6)
    page = tmp_path / "page.html"
    assert main(["view", str(reference_folder / "run"), "--output", str(page)]) == 0
    assert 'class="verdict healthy"' in page.read_text(encoding="utf-8")


def test_a_group_is_asked_for_once(reference_folder: Path, reference: Samples) -> None:
    """A group is one request. The vision tower encodes each image of a round once."""
    work = read_records(reference_folder / "record", "engine")
    requests = [entry for entry in work if "samples" in entry]
    assert requests == [{"samples": GROUP_SIZE, "images": 1}] * (STEPS * BATCH // GROUP_SIZE)
    images_of_rounds = {(sample["step"], tuple(sample["images"])) for sample in reference.values()}
    assert sum(entry.get("encoded", 0) for entry in work) == len(images_of_rounds)
    log = (reference_folder / "log").read_text(encoding="utf-8")
    assert "--dataset: 2 of 6 rows repeat an earlier row's prompt" in log
    assert "prompts of the generation batch are duplicates" in log


def test_an_image_is_decoded_once_for_a_group(reference_folder: Path, reference: Samples) -> None:
    """The engine decodes an image once for a group, and so does the training. vLLM caches processed
    images by content; training processes an image once for each group."""
    names = {tuple(sample["images"]) for sample in reference.values()}
    num_groups = STEPS * BATCH // GROUP_SIZE
    work = read_records(reference_folder / "record", "engine")
    assert sum("decoded" in entry for entry in work) == 2 * num_groups
    assert sum("processed" in entry for entry in work) == num_groups + len(names)


def assert_same_training(run: Path, expected: Path) -> list[dict[str, float]]:
    """Assert that two runs have equal steps but for rounding; return those of the first."""
    logs = logged_steps(run / "run")
    assert len(logs) > 1
    for ours, theirs in zip(logs, logged_steps(expected / "run"), strict=False):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
        assert ours["rollout_gap/mean"] == pytest.approx(theirs["rollout_gap/mean"], abs=SAME)
    return logs


def test_savings_change_nothing(
    assets: Path, rows: Path, folder: Path, reference_folder: Path, reference: Samples
) -> None:
    """By default training encodes a group and reads its prompt once. Losses equal those of
    ms-swift's passes but for rounding; `test_sharded.py` compares passes of a trained tower."""
    frozen = ("--freeze_vit", "true", "--freeze_aligner", "true", "--rollout_mismatch", "warn")
    ways = {"saved": frozen, "upstream": (*frozen, "--logps_shared_prompt", "false")}
    for way, argv in ways.items():
        assert_same(train(assets, rows, folder / way, *argv), reference)
    assert_same_training(folder / "saved", folder / "upstream")
    for run in (folder / "saved", reference_folder):
        text = (run / "log").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"auto: passes of .* read (\d+) positions instead of (\d+)", text)
        assert found is not None
        assert int(found[1]) < 0.7 * int(found[2])


def test_two_ranks_and_resuming(assets: Path, rows: Path, folder: Path, reference: Samples) -> None:
    """Checkpoint 3 of two ranks is in the middle of epoch 1."""
    saving = ("--save_strategy", "steps", "--save_steps", "3")
    first = train(assets, rows, folder / "two-ranks", *saving, ranks=2)
    assert_same(first, reference)
    checkpoint = folder / "two-ranks/run/checkpoint-3"
    resume = ("--resume_from_checkpoint", str(checkpoint))
    second = train(assets, rows, folder / "resumed", *resume, ranks=2, steps=STEPS)
    assert_same(second, reference, range(3, STEPS))
