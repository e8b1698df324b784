"""Checkpoints that are whole, and weights that come back whatever names their files spell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer import Trainer

from swift_grpo_ext.checks.resume import check_resume, last_whole
from swift_grpo_ext.training.checkpoints import CheckpointError, holds_whole_model, load_whole_model
from tests.logits.models import add_lora, build


def other(name: str) -> Any:
    """A model of the same kind with other weights."""
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("name", "shard_size"),
    [("Qwen2", "20KB"), ("Qwen2, tied", "1GB"), ("Qwen2-VL", "1GB"), ("Qwen2.5-VL", "20KB")],
)
def test_every_parameter_comes_in_its_own_type(name: str, shard_size: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard_size == "20KB")
    assert holds_whole_model(tmp_path)
    resumed = other(name).to(torch.bfloat16)
    pointers = {n: p.data_ptr() for n, p in resumed.named_parameters()}
    load_whole_model(resumed, tmp_path)
    assert is_equal(resumed.state_dict(), model.to(torch.bfloat16).state_dict())
    assert {n: p.data_ptr() for n, p in resumed.named_parameters()} == pointers, "an optimizer's"


def test_upstream_still_needs_it(tmp_path: Path) -> None:
    """When this fails, transformers translates names: `WholeCheckpoints` can go."""
    model = build("Qwen2.5-VL")
    model.save_pretrained(tmp_path)
    resumed = other("Qwen2.5-VL")
    result = resumed.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert result.missing_keys
    assert result.unexpected_keys
    trainer: Any = Trainer.__new__(Trainer)
    trainer.is_fsdp_enabled = False
    trainer.model = other("Qwen2.5-VL")
    trainer.args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer._load_from_checkpoint(str(tmp_path))
    assert not is_equal(trainer.model.state_dict(), model.state_dict())


def test_another_model_is_refused(tmp_path: Path) -> None:
    build("Qwen2").save_pretrained(tmp_path)
    build("Qwen2-VL").config.save_pretrained(tmp_path)  # else the vision tower would be a large one
    expected = r"does not hold the weights of .*Qwen2VL.* has no .*visual.*--model"
    with pytest.raises(CheckpointError, match=expected):
        load_whole_model(build("Qwen2-VL"), tmp_path)


def test_adapters_are_left_to_peft(tmp_path: Path) -> None:
    add_lora(build("Qwen2.5-VL")).save_pretrained(tmp_path)
    assert not holds_whole_model(tmp_path)


def checkpoint(run: Path, step: int, state: str | None) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    if state is not None:
        (folder / "trainer_state.json").write_text(state, encoding="utf-8")
    return folder


def refused(folder: Path | None, *, only_model: bool = False) -> str:
    given = None if folder is None else str(folder)
    args: Any = SimpleNamespace(resume_from_checkpoint=given, resume_only_model=only_model)
    return "".join(finding.sentence for finding in check_resume(args))


def test_only_whole_checkpoints_are_resumed_from(tmp_path: Path) -> None:
    assert last_whole(tmp_path) is None
    missing = checkpoint(tmp_path, 10, None)
    assert refused(missing) == (
        f"--resume_from_checkpoint {missing}: is no whole checkpoint: its trainer_state.json, "
        f"which is written last, is missing or cut short. {tmp_path} has no whole checkpoint: "
        "start without --resume_from_checkpoint."
    )
    whole = checkpoint(tmp_path, 9, '{"global_step": 9}')
    cut_short = checkpoint(tmp_path, 11, '{"global_st')
    checkpoint(tmp_path, 8, '{"global_step": 8}')
    checkpoint(tmp_path, 70, "[]")
    checkpoint(tmp_path, 71, "{}")
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole(tmp_path) == whole
    assert f"The last whole one is {whole}: resume with" in refused(cut_short)
    assert refused(None) == refused(whole) == refused(missing, only_model=True) == ""
