"""Families of models in real processes, as docs/support.md lists them.

Each family trains all weights on one rank, LoRA on two ranks, and with a server. Prompts have their
image first, last, between words, twice, and not at all. The weights prefer placeholders to all
other tokens. `python scripts/support.py --run NAME` keeps the results for the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_vlm.families import Family, make_family

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from tests.rig import rounds
from tests.rig.encoders import BothSides
from tests.rig.families import (
    BATCH,
    STOP,
    assert_agrees,
    assert_replayed,
    first_round,
    record_result,
    samples_of,
    start,
)
from tests.rig.fixtures import once
from tests.rig.processes import rollout_server
from tests.rig.rounds import client_argv, read_records

FROZEN = ("--freeze_vit", "true", "--freeze_aligner", "true")


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits of placeholders are the largest, or the smallest, at every position."""

    def make(folder: Path) -> None:
        make_family(family, folder, seed=0)
        tensors = load_file(folder / "model.safetensors")
        heads = [name for name in tensors if name.endswith("lm_head.weight")]
        heads = heads or [name for name in tensors if name.endswith("embed_tokens.weight")]
        [head] = (tensors[name] for name in heads)
        for i in configured_placeholders(folder):
            if i < len(head):
                head[i] *= 20
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return once(tmp_path_factory, f"family-{family.name}", make)


def configured_placeholders(folder: Path) -> list[int]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = r"(image|video|audio)_token_(id|index)"
    if "thinker_config" in config:
        config, names = config["thinker_config"], names + "|(vision|audio)_start_token_id"
    return [v for k, v in config.items() if re.fullmatch(names, k)]


@pytest.fixture(scope="module")
def whole(
    family: Family, model: Path, assets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The training of all weights on one rank."""

    def make(folder: Path) -> None:
        samples_of(start(family, model, assets, folder), folder)

    return once(tmp_path_factory, f"whole-{family.name}", make)


def test_all_weights_are_trained(family: Family, model: Path, whole: Path) -> None:
    gap = assert_agrees(family, whole)
    rows = to_rows(read_samples(whole / "run"))
    assert len({tuple(row.token_ids) for row in rows}) > 30
    stopped = [row for row in rows if row.stop_reason == STOP]
    assert len(stopped) > 5
    assert all(row.text.endswith(STOP) and row.text.count(STOP) == 1 for row in stopped)
    assert all(STOP not in row.text for row in rows if row.stop_reason != STOP)
    work = read_records(whole / "record", "engine")
    requests = [record for record in work if record.get("samples") == rounds.GROUP_SIZE]
    assert len(requests) == 3 * BATCH // rounds.GROUP_SIZE  # a group is one request
    placeholders = set(configured_placeholders(model)) if family.images else set()
    assert not placeholders.intersection(i for row in rows for i in row.token_ids)
    line_breaks = "Line breaks beside media differ" in (whole / "log").read_text(
        encoding="utf-8", errors="replace"
    )
    found = {"line_breaks": line_breaks, "stopped": len(stopped), "samples": len(rows)}
    record_result(family, "whole", gap=gap, **found)


def test_lora_on_two_ranks(
    family: Family, model: Path, whole: Path, assets: Path, tmp_path: Path
) -> None:
    """Its first round equals that of one rank with all weights. The vision tower is frozen, and
    training reads a group's prompt once."""
    argv = (*rounds.LORA, *FROZEN, *family.lora)
    finished = start(family, model, assets, tmp_path, *argv, ranks=2)
    samples = samples_of(finished, tmp_path, ranks=2)
    gap = assert_agrees(family, tmp_path)
    assert first_round(samples) == first_round(rounds.recorded(whole))
    pattern = "as they are" if family.reads_prompts_again else "positions instead of"
    assert re.search(rf"\] --logps_shared_prompt.* {pattern}", finished.output)
    record_result(family, "lora", gap=gap)


@pytest.mark.parametrize("kind", ["videos", "audio"])
def test_other_media(kind: str, family: Family, model: Path, assets: Path, tmp_path: Path) -> None:
    """A training on these media samples no placeholder, or a fault of upstream ends it."""
    fault = family.videos_fail if kind == "videos" else ""
    if not (fault or getattr(family, kind)):
        pytest.skip(f"not made for {kind}")
    finished = start(family, model, assets, tmp_path, *FROZEN, shown=kind)
    if fault:
        assert finished.returncode == 1
        assert fault in finished.output
        return
    samples = samples_of(finished, tmp_path)
    tokens = {i for sample in samples.values() for i in sample["token_ids"]}
    assert not tokens.intersection(configured_placeholders(model))
    record_result(family, kind, gap=assert_agrees(family, tmp_path))


SHAPES: dict[str, tuple[str, list[tuple[int, int]], list[tuple[int, int, int]]]] = {
    "tall": ("<image>What?", [(56, 280)], []),
    "wide": ("What\n<image>?", [(280, 56)], []),
    "two images in a row": ("<image><image>Both?", [(112, 112), (56, 280)], []),
    "a long video": ("<video>What?", [], [(40, 56, 56)]),
    "a video and an image in a row": ("<video><image>And here?", [(56, 140)], [(24, 56, 84)]),
    "two videos in a row": ("<video><video>Both?", [], [(24, 56, 84), (24, 56, 84)]),
    "two videos of unequal length": ("<video> and <video>?", [], [(40, 56, 56), (8, 56, 84)]),
}
"""By name: the text of a prompt, width and height of its images, and frames, width and height of
its videos, which have more frames than patches on a side."""


def test_shapes(family: Family, model: Path, tmp_path: Path) -> None:
    """Rollout and training agree in tokens and positions, or a fault of upstream is named."""
    random = np.random.default_rng(0)

    def image(width: int, height: int) -> str:
        path = tmp_path / f"{random.integers(2**32)}.png"
        Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
        return str(path)

    def video(frames: int, width: int, height: int) -> str:
        path = tmp_path / f"{random.integers(2**32)}.mp4"
        return str(rounds.write_video([image(width, height) for _ in range(frames)], path))

    if not family.images:
        pytest.skip("words are all that it takes")
    encoder = BothSides(
        model=str(model),
        model_type=family.model_type or family.name,
        template=family.template,
        vllm_max_model_len=8192,
        max_length=8000,
    )
    wrong = {}
    for name, (words, images, videos) in SHAPES.items():
        if videos and not family.videos:
            continue
        media = {"images": [image(*one) for one in images], "videos": [video(*v) for v in videos]}
        row = {"messages": [{"role": "user", "content": words}], **media}
        try:
            _, fault = encoder.encode(row)
        except Exception as e:
            wrong[name] = f"{type(e).__name__}: {e}"
            continue
        if fault:
            wrong[name] = fault
    record_result(family, "shapes", wrong=sorted(wrong))
    assert wrong.keys() == set(family.shapes_fail), wrong


def test_served(family: Family, model: Path, whole: Path, assets: Path, tmp_path: Path) -> None:
    argv = [*rounds.server_argv(assets), "--model", str(model), *family.swift_argv]
    with rollout_server(*argv, log=tmp_path / "server.log") as port:
        finished = start(family, model, assets, tmp_path, *client_argv(port))
    samples = samples_of(finished, tmp_path)
    gap = assert_agrees(family, tmp_path)
    assert first_round(samples) == first_round(rounds.recorded(whole))
    record_result(family, "served", gap=gap)


@pytest.mark.parametrize(
    ("name", "served"), [("qwen3_vl_moe", True), ("qwen3_5_moe", False), ("qwen3_5_moe", True)]
)
def test_replay(
    name: str, served: bool, assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Training uses the experts that rollouts chose (L7)."""
    assert_replayed(name, assets, tmp_path, tmp_path_factory, served=served)
