"""The same rounds, however they are run: the same token ids for the same (round, group, index).

All runs draw from the same weights (learning rate 0) with the same `--seed`, over few rows, so that
prompts come back; one prompt stands in the data three times, so that it meets itself in a batch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.groups import parse_request_id
from swift_grpo_ext.sampling.seeding import sample_seed
from tests.stack.conftest import STEPS
from tests.stack.processes import rollout_server
from tests.stack.rounds import (
    BATCH,
    GROUP_SIZE,
    Samples,
    assert_same,
    client_argv,
    server_argv,
    train,
)

pytestmark = pytest.mark.stack

SEED = 42  # ms-swift's default


def test_seeds_are_unique_and_noise_is_fresh(reference: Samples) -> None:
    assert len(reference) == BATCH * STEPS
    for name, sample in reference.items():
        assert sample["infos"]["seed"] == sample_seed(SEED, parse_request_id(name))
    seeds = {sample["infos"]["seed"] for sample in reference.values()}
    assert len({seed % 2**32 for seed in seeds}) == len(reference)
    prompts = [(tuple(s["images"]), s["step"]) for s in reference.values()]
    repeated = max(prompts.count(prompt) for prompt in set(prompts))
    assert repeated > GROUP_SIZE, "no prompt met itself in a batch: the test sees nothing"
    completions = {tuple(sample["token_ids"]) for sample in reference.values()}
    assert len(completions) == len(reference), "a completion came twice"


def test_a_group_is_asked_for_once(reference_folder: Path, reference: Samples) -> None:
    """One request a group; each image of a round goes through the vision tower once."""
    lines = (reference_folder / "record/engine.jsonl").read_text(encoding="utf-8").splitlines()
    work = [json.loads(line) for line in lines]
    requests = [entry for entry in work if "samples" in entry]
    assert requests == [{"samples": GROUP_SIZE, "images": 1}] * (STEPS * BATCH // GROUP_SIZE)
    images_of_rounds = {(sample["step"], tuple(sample["images"])) for sample in reference.values()}
    assert sum(entry.get("encoded", 0) for entry in work) == len(images_of_rounds)
    log = (reference_folder / "log").read_text(encoding="utf-8")
    assert "--dataset: 2 of 6 rows repeat a prompt" in log
    assert "prompts of the generation batch stand in it twice" in log


def test_two_ranks_and_resuming(assets: Path, rows: Path, folder: Path, reference: Samples) -> None:
    """Checkpoint 3 of two ranks stands in the middle of epoch 1."""
    saving = ("--save_strategy", "steps", "--save_steps", "3")
    first = train(assets, rows, folder / "two-ranks", *saving, ranks=2)
    assert_same(first, reference)
    checkpoint = folder / "two-ranks/run/checkpoint-3"
    resume = ("--resume_from_checkpoint", str(checkpoint))
    second = train(assets, rows, folder / "resumed", *resume, ranks=2, steps=STEPS)
    assert_same(second, reference, range(3, STEPS))


def test_tensor_parallel(assets: Path, rows: Path, folder: Path, reference: Samples) -> None:
    tp = ("--vllm_tensor_parallel_size", "2")
    assert_same(train(assets, rows, folder / "tp", *tp, ranks=2), reference)


def test_async_engine(assets: Path, rows: Path, folder: Path, reference: Samples) -> None:
    server = server_argv(assets, "--vllm_use_async_engine", "true")
    with rollout_server(*server, log=folder / "async.log") as port:
        samples = train(assets, rows, folder / "async-engine", *client_argv(port))
    assert_same(samples, reference)
