"""Families of models in real processes, as docs/support.md lists them (R3).

Each family trains all weights on one rank, and LoRA on two ranks with a server. Prompts have their
media first, last, between words, twice, and not at all. The weights prefer placeholders to all
other tokens. `python scripts/support.py --run NAME` keeps the results for the page.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from swift.template import TEMPLATE_MAPPING
from tiny_vlm.families import Family, make_family

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.encode import GroupEncoder, encode_whole
from swift_grpo_ext.upstream.placeholders import placeholder_ids
from tests.rig import rounds
from tests.rig.encoders import BothSides
from tests.rig.families import (
    BATCH,
    PROMPTS,
    STOP,
    assert_agrees,
    assert_replayed,
    first_round,
    record_result,
    row_of,
    samples_of,
    start,
)
from tests.rig.processes import rollout_server
from tests.rig.rounds import client_argv, read_records


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits of placeholders are the largest, or the smallest, at every position."""
    folder = tmp_path_factory.mktemp(family.name)
    make_family(family, folder, seed=0)
    tensors = load_file(folder / "model.safetensors")
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    heads = heads or [name for name in tensors if name.endswith("embed_tokens.weight")]
    [head] = (tensors[name] for name in heads)
    for i in configured_placeholders(folder):
        if i < len(head):
            head[i] *= 20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
    folder = tmp_path_factory.mktemp("whole")
    samples_of(start(family, model, assets, folder), folder)
    return folder


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
    log = (whole / "log").read_text(encoding="utf-8", errors="replace")
    line_breaks = "Line breaks beside media differ" in log
    found = {"line_breaks": line_breaks, "stopped": len(stopped), "samples": len(rows)}
    record_result(family.name, "whole", gap=gap, **found)


def test_lora_with_a_server(
    family: Family, model: Path, whole: Path, assets: Path, tmp_path: Path
) -> None:
    """Its first round equals that of one rank with all weights. The vision tower is frozen, and
    training reads a group's prompt once."""
    argv = [*rounds.server_argv(assets), "--model", str(model), *family.swift_argv]
    with rollout_server(*argv, log=tmp_path / "server.log") as port:
        argv = [*rounds.LORA, "--freeze_vit", "true", *family.lora, *client_argv(port)]
        finished = start(family, model, assets, tmp_path, *argv, ranks=2)
    samples = samples_of(finished, tmp_path, ranks=2)
    gap = assert_agrees(family, tmp_path)
    assert first_round(samples) == first_round(rounds.recorded(whole))
    pattern = "as they are" if family.reads_prompts_again else "positions instead of"
    assert re.search(rf"\] --logps_shared_prompt.* {pattern}", finished.output)
    record_result(family.name, "served", gap=gap)


@pytest.fixture(scope="module")
def encoder(family: Family, model: Path) -> Iterator[BothSides]:
    settings = {"model_type": family.model_type or family.name, "template": family.template}
    with pytest.MonkeyPatch.context() as patch:
        # ms-swift writes ids into the class's list (4.6, base.py, `_init_placeholder_tokens`).
        kind = TEMPLATE_MAPPING[family.template].template_cls
        patch.setattr(kind, "placeholder_tokens", [*kind.placeholder_tokens])
        yield BothSides(model=str(model), vllm_max_model_len=8192, max_length=8000, **settings)


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


def test_shapes(family: Family, encoder: BothSides, tmp_path: Path) -> None:
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
    wrong = {}
    for name, (words, images, videos) in SHAPES.items():
        if videos and not (family.videos or family.videos_fail):
            continue
        media = {"images": [image(*one) for one in images], "videos": [video(*v) for v in videos]}
        row = {"messages": [{"role": "user", "content": words}], **media}
        try:
            _, fault = encoder.encode(row)
        except Exception as e:
            fault = f"{type(e).__name__}: {e}"
        if videos and family.videos_fail:
            assert family.videos_fail in fault
        elif fault:
            wrong[name] = fault
    record_result(family.name, "shapes", wrong=sorted(wrong))
    assert wrong.keys() == set(family.shapes_fail), wrong


RESPONSES = [[20, 21, 22, 23], [24], [25, 26, 27, 28, 29, 30]]
"""Token ids."""


def group_of(prompt: str, assets: Path, folder: Path) -> list[RolloutSample]:
    """Return samples of one prompt, each with its own media objects, as a data loader's rows."""
    samples = []
    for index, ids in enumerate(RESPONSES):
        row = row_of(prompt, assets, folder)
        row["messages"].append({"role": "assistant", "content": "-"})
        sample = RolloutSample.from_row(row)
        sample.response_token_ids = [ids]
        sample.rollout_logprobs = [[-1.0] * len(ids)]
        sample.sample_id = SampleId(phase="train", step=0, number=0, group=0, index=index)
        sample.prompt_hash = "one"
        samples.append(sample)
    return samples


def test_a_group_is_encoded_as_its_samples(
    family: Family, encoder: BothSides, assets: Path, tmp_path: Path
) -> None:
    """Samples share their group's prompt (G2), and equal ms-swift's whole encodes, bit for bit."""
    template = encoder.template
    for kind, prompts in PROMPTS.items():
        for prompt in prompts if getattr(family, kind, True) else ():
            samples = group_of(prompt.replace(*family.without), assets, tmp_path)
            group = GroupEncoder(template, SimpleNamespace(rollout_mismatch="stop"))
            for sample in samples:
                sample.encoded = group.encode(sample)
                whole = encode_whole(sample, template, None)
                torch.testing.assert_close({**sample.encoded}, {**whole}, rtol=0, atol=0)
            assert len({id(sample.encoded.prompt) for sample in samples}) == 1
            assert samples[0].encoded.prompt is not None
    assert not {*placeholder_ids(template)} & {i for ids in RESPONSES for i in ids}


@pytest.mark.parametrize(
    ("name", "served"), [("qwen3_vl_moe", True), ("qwen3_5_moe", False), ("qwen3_5_moe", True)]
)
def test_replay(
    name: str, served: bool, assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Training uses the experts that rollouts chose (L7)."""
    assert_replayed(name, assets, tmp_path, tmp_path_factory, served=served)
