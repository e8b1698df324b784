"""Trainings with two servers, of one replica and of two: tokens equal those of a colocated rank,
and engines have the trained weights."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
import requests
from PIL import Image

from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.rig import policy
from tests.rig.record.rows import read_diversity
from tests.rig.rounds import (
    BATCH,
    LEARNING,
    LORA,
    Samples,
    assert_same,
    client_argv,
    train,
)


def test_a_callers_fault_is_told_as_his(servers: tuple[int, int]) -> None:
    """Bad requests get 400 (F5, F7): a picture of 20 kB that would take half a gigabyte, and bytes
    that are no image, which only a replica notices."""
    file = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(file, "PNG")
    assert file.tell() < 25_000
    faults = {
        base64.b64encode(file.getvalue()).decode(): "decompression bomb",
        f"data:image/png;base64,{'A' * 80}": "cannot identify image file",
    }
    for image, reason in faults.items():
        request = {"messages": [{"role": "user", "content": "<image>?"}], "images": [image]}
        for port in servers:
            url = f"http://127.0.0.1:{port}/infer/"
            refused = requests.post(url, json={"infer_requests": [request]}, timeout=60)
            assert reason in refused.json()["detail"]
            assert refused.status_code == 400


def test_two_servers(
    assets: Path, rows: Path, folder: Path, servers: tuple[int, int], reference: Samples
) -> None:
    """All three replicas generate for three ranks; `test_launch.py` has six ranks."""
    samples = train(assets, rows, folder / "two-servers", *client_argv(*servers), ranks=3)
    assert_same(samples, reference)
    assert len({sample["infos"]["replica"] for sample in samples.values()}) == 3


def test_async_generation(
    assets: Path, rows: Path, folder: Path, servers: tuple[int, int], reference: Samples
) -> None:
    """A round has the name of the step that uses it, and the prompts of the step before. An
    evaluation has its own names, seeds and group size, also in batches generated ahead."""
    argv = [*client_argv(servers[0]), "--async_generate", "true"]
    argv += ["--val_dataset", str(rows), "--eval_strategy", "steps", "--eval_steps", "2"]
    argv += ["--per_device_eval_batch_size", "2", "--num_generations_eval", "2"]
    argv += ["--callbacks", "diversity"]
    samples = train(assets, rows, folder / "ahead", *argv, ranks=2, steps=3)
    training = {n: s for n, s in samples.items() if SampleId.parse(n).phase == "train"}
    evaluation = [SampleId.parse(name) for name in samples.keys() - training.keys()]
    assert {0, 1, 2} <= {SampleId.parse(name).step for name in training}
    assert {(i.step, i.number) for i in evaluation} == {(2, 0), (3, 0)}
    assert {i.index for i in evaluation} == {0, 1}
    assert {i.group for i in evaluation} >= {0, 1}
    for name, sample in samples.items():
        assert sample["infos"]["seed"] == sample_seed(42, SampleId.parse(name))
    for name, sample in training.items():
        sample_id = SampleId.parse(name)
        if sample_id.step > 0:
            before = f"train-{sample_id.step - 1}.0-{sample_id.group}-{sample_id.index}"
            assert sample["images"] == reference[before]["images"]
    # The monitor gets each round, and each batch of an evaluation, when it is complete and scored.
    records = read_diversity(folder / "ahead/run")
    trained = [(r.round.step, r.num_samples) for r in records if r.round.phase == "train"]
    assert trained == [(step, BATCH) for step in range(3)]
    assert {r.num_samples for r in records if r.round.phase == "eval"} == {4}
    assert all("pass_at_1" in r.metrics for r in records)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param("one-replica", 1, marks=pytest.mark.extra), ("two-replicas", 2)],
)
def test_engine_samples_with_the_trained_weights(
    name: str, ranks: int, assets: Path, learning_rows: Path, folder: Path, servers: tuple[int, int]
) -> None:
    """One rank trains LoRA, two ranks train all weights. The servers had other weights before."""
    argv = (*LEARNING, *(LORA if ranks == 1 else ()), *client_argv(servers[ranks - 1]))
    run = folder / f"{name}-learning"
    train(assets, learning_rows, run, *argv, ranks=ranks)
    policy.assert_sampled_with_trained_weights(run, assets / "tiny_vlm", 3)
