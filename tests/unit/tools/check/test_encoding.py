"""`check` encodes rows as rollout and training do, and names rows that differ, are cut, or fail
(M3)."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from swift.dataset import load_dataset

from swift_grpo_ext.tools.check import encoding
from swift_grpo_ext.tools.check.encoding import difference, sample_of
from tests.rig import rounds
from tests.rig.encoders import BothSides
from tests.rig.processes import ROOT
from tests.rig.releases import needs_rates_of_videos

sys.path.insert(0, str(ROOT / "scripts"))
from tiny_vlm.families import FAMILIES, make_config, make_processor, make_tokenizer

LONG = "Many words come first. " * 20


def asks(question: str, **media: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], **media}


def loaded(path: Path, *rows: dict[str, Any]) -> Any:
    """Write rows, and return them as ms-swift reads them."""
    return load_dataset([str(rounds.write_lines(path, rows))], remove_unused_columns=False)[0]


@pytest.fixture(scope="module")
def image(assets: Path) -> str:
    """A picture of 112 x 112 pixels."""
    [row] = rounds.digits(assets, [0])
    return str(row["images"][0])


def videos_of(image: str, folder: Path, *lengths: int) -> list[str]:
    """Return videos of these numbers of frames."""
    return [str(rounds.write_video([image] * n, folder / f"{n}.mp4")) for n in lengths]


@pytest.fixture(scope="module")
def sides(assets: Path) -> BothSides:
    """Both sides of the tiny model. It takes seconds to make them, so all tests share them."""
    names = {"model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    lengths = {"max_length": 64, "vllm_max_model_len": 256, "max_completion_length": 100}
    return BothSides(model=str(assets / "tiny_vlm"), **names, **lengths)


def test_rows_that_are_right(sides: BothSides, image: str, tmp_path: Path) -> None:
    rows = loaded(
        tmp_path / "rows.jsonl",
        asks("<image>Which digit?", images=[image]),
        asks("Here:\n<image>\n and <image>?", images=[image] * 2),
        *[asks("Which digit?")] * 38,  # the first 16 rows, and 16 of the others
    )
    sample = sample_of(sides.template, rows[0])
    assert not difference(sides.template, sample, sides.encode(rows[0])[0])
    # 8 x 8 patches of 14 x 14 pixels in float32, two frames of three colours; the rest is small.
    pixels = 8 * 8 * 14 * 14 * 2 * 3 * 4
    assert pixels < encoding.media_bytes(sample.encoded) < 1.01 * pixels
    assert sides.check(rows) == [
        "ok: 32 rows with 3 media are equal in rollout and training, in tokens and positions.",
        "note: prompts have 22 to 61 tokens (--max_length 64 counts a medium as one); with "
        "--max_completion_length 100 a sample takes up to 161 of 256 (--vllm_max_model_len).",
    ]


@needs_rates_of_videos
def test_positions_behind_long_videos(
    sides: BothSides, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a video with more frames than patches on a side, positions agree only by our repair of
    transformers 5.19. Positions that differ are named."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    long, short = videos_of(image, tmp_path, 12, 4)
    rows = loaded(
        path := tmp_path / "rows.jsonl",
        asks("<video>What is seen?", videos=[long]),
        asks("<video> or <image> and <video>?", videos=[long, short], images=[image]),
        asks("Which digit?"),
    )
    for holder in (sides.engine, sides.engine.engine.model_config):
        monkeypatch.setattr(holder, "max_model_len", 4096)
    assert sides.check(rows)[0].startswith("ok: 3 rows with 4 media are equal in rollout and trai")
    count = Qwen2_5_VLModel.get_rope_index

    def elsewhere(model: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        positions, deltas = count(model, ids, *args, **kwargs)
        return positions - (positions > 20).long(), deltas

    monkeypatch.setattr(Qwen2_5_VLModel, "get_rope_index", elsewhere)
    text, second, *_ = sides.check(rows)
    assert second.startswith(f"error: row 2 of {path} (which asks '<video>")
    assert "give the same tokens different positions, from token " in text
    assert "in time, height and width). vLLM's model and transformers' count" in text


def test_rows_that_are_wrong(
    sides: BothSides, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = loaded(
        path := tmp_path / "rows.jsonl",
        asks(f"<image>{LONG}Which?", images=[image]),
        asks(f"<image> or <image>{LONG}Both?", images=[image] * 2),
        asks("<video>What?", videos=["none.mp4"]),  # the check of rows names it
        asks(f"Three: {'<image>' * 15}", images=[image] * 15),
    )
    monkeypatch.setattr(sides.args, "max_completion_length", 200)
    too_long, differs, cut, room = sides.check(rows)
    assert too_long.startswith(f"error: row 4 of {path} (which asks 'Three: <image>")
    assert "cannot be encoded for a rollout (" in too_long
    assert "(length 289) is longer than the maximum model length of 256" in too_long
    assert differs.startswith(
        f"error: row 2 of {path} (which asks {f'<image> or <image>{LONG}'[:60]!r}): the rollout "
        "saw a prompt of 94 tokens that training does not begin with; they differ from token 0 on "
    )
    assert " Give `swift rollout` the settings of the training" in differs
    assert cut.startswith("warning: 2 of 2 rows are cut to --max_length 64 at their beginning")
    assert room.startswith("warning: prompts have 79 to 94 tokens (--max_length 64 counts")
    assert " end after 162 tokens. Raise --vllm_max_model_len" in room
    monkeypatch.setattr(sides.args, "rollout_mismatch", "warn")
    for template in (sides.template, sides.engine.template):
        monkeypatch.setattr(template, "truncation_strategy", "raise")  # ms-swift's for "delete"
    for strategy, level in (("left", "error"), ("delete", "warning")):
        monkeypatch.setattr(sides.args, "truncation_strategy", strategy)
        first, *others = sides.check(rows)
        assert first.startswith(
            f"{level}: row 1 of {path} (which asks {f'<image>{LONG}'[:60]!r}) cannot be encoded "
            "for training (MaxLengthError: Current length of row(139) is larger than the "
            f"max_length(64); it shows images[0] {image!r}). "
        )
        named = [text.partition(" of ")[0] for text in others]
        assert named == [f"{level}: row 2", f"{level}: row 4"]


def test_videos_and_images_of_unequal_sizes(image: str, tmp_path: Path) -> None:
    """ms-swift's template of InternVL joins the videos of a row. The model has no weights."""
    family = FAMILIES["internvl"]
    tokenizer = make_tokenizer(family)
    config = make_config(family, tokenizer)
    config.architectures = ["InternVLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    make_processor(family, tokenizer).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "model_type": "internvl", "template": "internvl_hf"}
    sides = BothSides(**settings, torch_dtype="float32", vllm_max_model_len=2048)
    short, long = videos_of(image, tmp_path, 2, 5)
    wide = str(tmp_path / "wide.png")
    Image.open(image).crop((0, 0, 112, 56)).save(wide)
    for question, media, num_tiles in (
        ("<video>Or <video>?", {"videos": [short, long]}, 7),
        ("<video><image><video>?", {"videos": [long, short], "images": [wide]}, 10),
        ("<image>?<image>", {"images": [image, wide]}, 8),
    ):
        row = asks(question, **media)
        assert sides.encode(row)[1] == ""
        made = sides.process(sample_of(sides.template, row).to_infer_request())
        features = sorted(made.mm_features, key=lambda feature: feature.mm_position.offset)
        data = [named for feature in features for named in feature.data.get_data().items()]
        expected = torch.cat([values for name, values in data if "pixel" in name])
        row["messages"].append({"role": "assistant", "content": "7"})
        pixels = sides.template.encode(row)["pixel_values"]
        assert len(pixels) == num_tiles
        assert torch.equal(expected, pixels.to(expected.dtype))


def test_media_that_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,240 samples in groups of 8 on four machines are 320 prompts for each, of 1.5 GB."""
    sizes = SimpleNamespace(generation_batch_size=10_240, num_generations=8)
    args: Any = SimpleNamespace(training_args=sizes)
    monkeypatch.setenv("NNODES", "4")
    num_bytes = [10**9, 2 * 10**9]
    monkeypatch.setattr(encoding.psutil, "virtual_memory", lambda: SimpleNamespace(available=4e11))
    [finding] = encoding.memory_of(args, num_bytes)
    assert "the media of a round take about 480 GB on each machine" in finding.sentence
    assert "(1500.0 MB for each of 1280 prompts), and 400 GB are free" in finding.sentence
    monkeypatch.setattr(encoding.psutil, "virtual_memory", lambda: SimpleNamespace(available=5e11))
    assert not [*encoding.memory_of(args, num_bytes)]
