"""Families of models on real processes: what docs/families.md says."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.reader import read_samples
from swift_grpo_ext.record.row import to_rows
from swift_grpo_ext.training.agreement import gap_limit
from tests.stack import rounds
from tests.stack.conftest import once
from tests.stack.processes import ROOT
from tests.stack.rounds import run_training

sys.path.insert(0, str(ROOT / "scripts"))
from tiny_vlm.families import FAMILIES, Family, make_family
from tiny_vlm.tokenizer import find_ranks_file, read_ranks

pytestmark = [pytest.mark.stack, pytest.mark.extra]

QUESTION = "Which digit is this?"
WITH_IMAGES = [f"<image>{QUESTION}", f"{QUESTION}\n<image>", f"<image>\n{QUESTION} <image> Both?"]


@cache
def ranks() -> dict[bytes, int]:
    return read_ranks(find_ranks_file())


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    param: Family = request.param
    return param


@pytest.fixture
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(
        tmp_path_factory,
        f"family-{family.name}",
        lambda folder: make_family(family, ranks(), folder, seed=0),
    )


def write_rows(assets: Path, path: Path, prompts: list[str]) -> Path:
    lines = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()
    images = [json.loads(line)["images"][0] for line in lines]
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        count = prompt.count("<image>")
        messages = [{"role": "user", "content": prompt}]
        rows.append({"messages": messages, "images": images[i : i + count], "solution": "1"})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def model_argv(family: Family, model: Path) -> list[str]:
    model_type = family.model_type or family.name
    return ["--model", str(model), "--model_type", model_type, "--template", family.template]


def test_a_family_trains(family: Family, model: Path, assets: Path, tmp_path: Path) -> None:
    prompts = WITH_IMAGES if family.has_images else ["One?", "Two?", "Three?"]
    rows = write_rows(assets, tmp_path / "rows.jsonl", prompts)
    argv = [*model_argv(family, model), *rounds.LEARNING]
    finished = run_training(assets, rows, tmp_path / "one", *argv)
    assert finished.returncode == 0, finished.cause
    logs = (tmp_path / "one/run/logging.jsonl").read_text(encoding="utf-8").splitlines()
    gaps = [log["rollout_gap/mean"] for log in map(json.loads, logs) if "rollout_gap/mean" in log]
    assert len(gaps) == 3
    assert max(gaps) < gap_limit(32)
    samples = to_rows(read_samples(tmp_path / "one/run"))
    assert len({tuple(sample.token_ids) for sample in samples}) > 30
