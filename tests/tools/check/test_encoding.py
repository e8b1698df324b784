"""`check` encodes rows on both sides: what differs, is cut or fails is named, token by token."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from swift_grpo_ext.checks.rows import Row
from swift_grpo_ext.tools.check.data import check_data
from swift_grpo_ext.tools.check.encoding import (
    Difference,
    RowEncoder,
    check_encoding,
    differences,
    make_encoder,
)
from swift_grpo_ext.tools.check.lookup import check_template
from swift_grpo_ext.tools.check.settings import Run
from tests.stack import rounds
from tests.stack.processes import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from tiny_vlm.families import FAMILIES, make_config, make_processor, make_tokenizer

LONG = "Many words come first. " * 20


def write_rows(folder: Path, *rows: tuple[str, dict[str, Sequence[str]]]) -> str:
    """Write rows of a question and its media; return the path."""
    path = folder / "rows.jsonl"
    lines = [
        json.dumps({"messages": [{"role": "user", "content": question}], **media})
        for question, media in rows
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def said(run: Run) -> list[str]:
    """Return what the check says of the data set behind the number of its media, without its
    name."""
    loaded: dict[str, list[Row]] = {}
    list(check_template(run))
    findings = [*check_data(run, loaded), *check_encoding(run, loaded)]
    names = [f"{f.level}: {f.sentence}" for f in findings]
    names = names[1 + next(i for i, name in enumerate(names) if "hold images" in name) :]
    return [name.replace(f"--dataset {(run.training or {})['dataset'][0]}: ", "") for name in names]


@pytest.fixture(scope="module")
def image(assets: Path) -> str:
    """A picture of 112 x 112 pixels."""
    [row] = rounds.digits(assets, [0])
    return str(row["images"][0])


@pytest.fixture
def settings(assets: Path, tmp_path: Path) -> dict[str, Any]:
    names = {"model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    lengths = {"max_length": 64, "vllm_max_model_len": 256, "max_completion_length": 100}
    return {"model": str(assets / "tiny_vlm"), **names, **lengths}


def test_rows_that_are_right(settings: dict[str, Any], image: str, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path,
        ("<image>Which digit?", {"images": [image]}),
        ("Here:\n<image>\n and <image>?", {"images": [image] * 2}),
        *(("Which digit?", {}) for _ in range(38)),  # 16 in all, and 16 of the others
    )
    assert said(Run(training={**settings, "dataset": [rows]})) == [
        "ok: 32 rows with 3 media are equal in rollout and training, in tokens and positions.",
        "note: prompts have 22 to 61 tokens (--max_length 64 counts a medium as one); with "
        "--max_completion_length 100 a sample takes up to 161 of 256 (--vllm_max_model_len).",
    ]


def test_positions_behind_long_videos(
    settings: dict[str, Any], image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More frames than patches on a side: transformers 5.19 alone goes on at the larger side. What
    differs, by whatever release, is named."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    for name, count in (("long", 12), ("short", 4)):
        rounds.write_video([image] * count, tmp_path / f"{name}.mp4")
    long, short = str(tmp_path / "long.mp4"), str(tmp_path / "short.mp4")
    rows = write_rows(
        tmp_path,
        ("<video>What is seen?", {"videos": [long]}),
        ("<video> or <image> and <video>?", {"videos": [long, short], "images": [image]}),
        ("Which digit?", {}),
    )
    settings["vllm_max_model_len"] = 4096
    run = Run(training={**settings, "dataset": [rows]})
    assert said(run)[0] == "ok: 3 rows with 4 media are equal in rollout and training, " + (
        "in tokens and positions."
    )
    count = Qwen2_5_VLModel.get_rope_index

    def elsewhere(model: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        positions, deltas = count(model, ids, *args, **kwargs)
        return positions - (positions > 20).long(), deltas

    monkeypatch.setattr(Qwen2_5_VLModel, "get_rope_index", elsewhere)
    first, second, *_ = said(run)
    for text, number in ((first, 1), (second, 2)):
        assert text.startswith(f"error: row {number} of {rows} (which asks '<video>")
        assert ") has the same tokens at other positions, from token " in text
        assert "in time, height and width). vLLM's model and transformers' count" in text


def test_a_model_that_is_not_here(assets: Path, tmp_path: Path) -> None:
    """The check of the template says it, as of a type that is open."""
    rows = write_rows(tmp_path, ("Which digit?", {}))
    for model in ("No-Such/Model", "./none", str(assets / "tiny_vlm"), None):
        assert said(Run(training={"model": model, "dataset": [rows]})) == []


def test_a_model_of_the_hub_needs_no_names(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id tells the template; the folder of a cache, which has a number for its name, does
    not."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--Qwen--Qwen2.5-VL-3B-Instruct"
    shutil.copytree(assets / "tiny_vlm", cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    model = {"model": "Qwen/Qwen2.5-VL-3B-Instruct", "vllm_max_model_len": 1024}
    rows = write_rows(tmp_path, ("Which digit?", {}))
    first, *_ = said(Run(training={**model, "dataset": [rows]}))
    assert (
        first
        == "ok: 1 rows with 0 media are equal in rollout and training, in tokens and positions."
    )


def test_rows_that_are_wrong(settings: dict[str, Any], image: str, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path,
        (f"<image>{LONG}Which?", {"images": [image]}),
        (f"<image> or <image>{LONG}Both?", {"images": [image] * 2}),
        ("<video>What?", {"videos": ["none.mp4"]}),  # which the check of rows names
        (f"Three: {'<image>' * 15}", {"images": [image] * 15}),
    )
    settings["max_completion_length"] = 200
    too_long, differs, behind, both_behind, room = said(
        Run(training={**settings, "dataset": [rows]})
    )
    assert too_long.startswith(f"error: row 4 of {rows} (which asks 'Three: <image>")
    assert ") cannot be encoded for a rollout (VLLMValidationError: The" in too_long
    assert "(length 289) is longer than the maximum model length of 256" in too_long
    assert differs.startswith(
        f"error: row 2 of {rows} (which asks {f'<image> or <image>{LONG}'[:60]!r}) has a prompt "
        "of 94 tokens in the rollout (image 1 of 112x112 (16 tokens from token 0 on), image 2 of "
        "112x112 (16 tokens from token 16 on)) and of 159 in training: from token 0 on the rollout "
        "has "
        "'<|image_pad|>' (151655 x 32) where training has '<|im_start|>system\\nYou are' (151644, "
        "8948, 198, 2610, 525, ... 97 tokens in all). Give `swift rollout`"
    )
    cut = " is truncated to --max_length 64: {0} of its {0} media lost the text around them."
    assert cut.format(1) in behind
    assert cut.format(2) in both_behind
    assert room.startswith("warning: prompts have 79 to 94 tokens (--max_length 64 counts")
    assert room.endswith(
        " end after 162 tokens. Raise --vllm_max_model_len, or lower --max_length."
    )
    settings |= {"truncation_strategy": "delete", "rollout_mismatch": "warn"}
    assert said(Run(training={**settings, "dataset": [rows]})) == [
        f"warning: row 1 of {rows} (which asks {f'<image>{LONG}'[:60]!r}), like 2 more, cannot be "
        "encoded for training (MaxLengthError: Current length of row(139) is larger than the "
        "max_length(64).). Others take its place (--truncation_strategy delete)."
    ]


def write_without_weights(name: str, architecture: str, folder: Path) -> None:
    """Write a family's configuration and processor."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    config = make_config(family, tokenizer)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    make_processor(family, tokenizer).save_pretrained(folder)


def test_sides_that_differ(image: str, tmp_path: Path) -> None:
    """The sides have other system prompts and sizes of images; no weights are there."""
    write_without_weights("glm4v", "Glm4vForConditionalGeneration", tmp_path)
    video = rounds.write_video([image] * 4, tmp_path / "digits.mp4")
    rows = write_rows(
        tmp_path,
        ("<image>Which digit?", {"images": [image]}),
        ("<video>Which digits?", {"videos": [str(video)]}),
    )
    names = {"model": str(tmp_path), "model_type": "glm4v", "template": "glm4v"}
    run = Run(
        training={**names, "vllm_mode": "server", "dataset": [rows]},
        rollout={**names, "system": "Be brief.", "max_pixels": 784, "vllm_max_model_len": 512},
    )
    no_video, differs, room = said(run)
    assert no_video.startswith(
        f"error: row 2 of {rows} (which asks '<video>Which digits?') cannot be encoded for "
        "training (AssertionError: glm.py, line "
    )
    assert differs.startswith(
        f"error: row 1 of {rows} (which asks '<image>Which digit?') has a prompt of 25 tokens in "
        "the rollout (image 1 of 28x28 (9 tokens from token 10 on)) and of 27 in training: from "
        "token 2 on the rollout has "
        "'<|system|>\\nBe brief.' (151335, 198, 3430, 9814, 13) where training has "
        "nothing; from token 10 on the rollout has '<|image|>' (151343 x 9) where training has "
        "'<|image|>' (151343 x 16). Give `swift rollout` the settings of the training"
    )
    assert " end after 487 tokens." in room


def seen(
    encoder: RowEncoder, row: dict[str, Any], known: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels that vLLM and training make of a row, in the row's order.

    Args:
        known: of media that vLLM was shown before, which it sends its core but once.
    """
    assert encoder.encode(row).differences == []
    features = encoder.core.add_request.call_args.args[0].mm_features
    for feature in features:
        if feature.data is not None:
            [known[feature.identifier]] = (
                values for name, values in feature.data.get_data().items() if "pixel" in name
            )
    features = sorted(features, key=lambda feature: feature.mm_position.offset)
    answered = {**row, "messages": [*row["messages"], {"role": "assistant", "content": "7"}]}
    of_training = encoder.template.encode(answered)["pixel_values"]
    return torch.cat([known[feature.identifier] for feature in features]), of_training


def test_videos_and_images_of_unequal_sizes(image: str, tmp_path: Path) -> None:
    """InternVL, whose template of ms-swift joins a row's videos."""
    write_without_weights("internvl", "InternVLForConditionalGeneration", tmp_path)
    settings = {"model": str(tmp_path), "model_type": "internvl", "template": "internvl_hf"}
    settings |= {"torch_dtype": "float32", "vllm_max_model_len": 2048}
    encoder = make_encoder(Run(training=settings))
    assert encoder is not None
    short, long = (
        str(rounds.write_video([image] * frames, tmp_path / f"{frames}.mp4")) for frames in (2, 5)
    )
    wide = str(tmp_path / "wide.png")
    Image.open(image).crop((0, 0, 112, 56)).save(wide)
    known: dict[str, torch.Tensor] = {}
    for question, media, num_tiles in (
        ("<video>?", {"videos": [long]}, 5),
        ("<video>Or <video>?", {"videos": [short, long]}, 7),
        ("<video><video>", {"videos": [short, short]}, 4),
        ("<video><image><video>?", {"videos": [long, short], "images": [wide]}, 10),
        ("<image>?<image>", {"images": [image, wide]}, 8),
    ):
        row = {"messages": [{"role": "user", "content": question}], **media}
        of_vllm, of_training = seen(encoder, row, known)
        assert len(of_training) == num_tiles
        assert torch.equal(of_vllm, of_training.to(of_vllm.dtype))


@pytest.mark.parametrize(
    ("rollout", "training", "expected"),
    [
        ([1, 9, 9, 2], [1, 9, 9, 2], []),
        ([1, 9, 9, 2], [1, -5, 2], []),  # a medium of unknown size
        ([1, 8, 8, 2], [1, 9, 9, 2], []),  # frames of InternVL
        ([1, 9, 9, 2], [1, 9, 2], [Difference(1, [9, 9], [9])]),
        ([1, 8, 9, 2], [1, 9, 8, 2], [Difference(1, [8, 9], [9, 8])]),
        ([1, 9, 9, 2, 3], [2, 3, 4], [Difference(0, [1, 9, 9], []), Difference(5, [], [4])]),
        ([9, 1, 9, 9], [1, 9, 1, 9, 9], [Difference(0, [], [1])]),
        ([], [1], [Difference(0, [], [1])]),
        ([1, 2, 4], [1, 3, 4], [Difference(1, [2], [3])]),
    ],
)
def test_differences(rollout: list[int], training: list[int], expected: list[Difference]) -> None:
    assert list(differences(rollout, training, {8, 9})) == expected
