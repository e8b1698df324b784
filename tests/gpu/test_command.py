"""`scripts/gpu.sh` as on a bare machine: on CPU in small, and on a GPU where there is one."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import swift.utils
import torch
from torch import Tensor

from scripts.gpu import __main__ as command
from scripts.gpu import plan, run, widths
from scripts.gpu.compare import compare, equal
from scripts.gpu.models import Batch, made
from scripts.gpu.prompt_once import once, plain, why_not_installed
from swift_grpo_ext.logger import get_logger
from tests.conftest import ROOT
from tests.gpu.bare import make_bare

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.stack
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_part_runs_on_a_bare_machine(device: str, tmp_path: Path) -> None:
    hidden = make_bare(tmp_path)
    assert {"swift", "vllm", "trl", "datasets", "xxhash", "docstring_parser", "pytest"} <= hidden
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    bare = subprocess.run([sys.executable, "-c", "import swift"], env=environment, check=False)
    assert bare.returncode == 1
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu.sh"), "--output", str(tmp_path), "--device", device],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["is_ok"]
    for part, planned in zip(result["parts"], plan.plan(device), strict=True):
        assert [case["name"] for case in part["cases"]] == [case.name for case in planned.cases]
        for case in part["cases"]:
            assert all(c["error"] <= c["bound"] for c in case["comparisons"])
            if case["status"] != "passed":  # a release without the model
                assert device == "cuda" or case["reason"].startswith("transformers "), case
    rows = [row for case in result["parts"][-1]["cases"] for row in case["rows"]]
    assert {"plain", "chunked", "prompt once"} <= {row["way"] for row in rows}
    assert all(row["of plain"] > 0 for row in rows if "of plain" in row)
    page = (tmp_path / "gpu.md").read_text()
    assert result["parts"][0]["cases"][0]["rows"][0]["device"] in page
    assert ("in small sizes" in page) == (device == "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_case_can_be_called(device: str) -> None:
    """Those of a GPU too, which nothing here runs."""
    names = list[tuple[str, str]]()
    for part in plan.plan(device):
        for case in part.cases:
            names.append((part.name, case.name))
            module, _, function = case.function.partition(":")
            inspect.signature(getattr(import_module(module), function)).bind(**case.arguments)
    assert len(set(names)) == len(names)


def test_messages_are_ms_swifts() -> None:
    assert get_logger() is swift.utils.get_logger()


# --- what is wrong is seen ---


def blind(model: Any, batch: Batch, columns: int = 4) -> Tensor:
    """Log-probabilities of samples that do not see the first tokens of their prompt."""
    seen = batch.inputs["attention_mask"].clone()
    seen[:, :columns] = 0
    return plain(model, replace(batch, inputs={**batch.inputs, "attention_mask": seen}))


def off(model: Any, batch: Batch) -> Tensor:
    """One log-probability is wrong, and no gradient."""
    values = plain(model, batch)
    return values + 0.05 * values.detach().abs().max() * torch.eye(len(values))[2]


def without_a_gradient(model: Any, batch: Batch) -> Tensor:
    """No value is wrong, and a fifth of them says nothing to the weights."""
    values = plain(model, batch)
    return torch.cat([values[:-4], values[-4:].detach()])


def not_a_number(model: Any, batch: Batch) -> Tensor:
    return plain(model, batch) / 0 * 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (once, (True, True)),
        (blind, (False, False)),
        (off, (False, True)),
        (without_a_gradient, (True, False)),
        (not_a_number, (False, False)),
    ],
)
def test_a_wrong_pass_is_seen(way: Any, expected: tuple[bool, bool], dtype: str) -> None:
    """In the values, in the gradients, or in both."""
    comparisons = compare(partial(made, "Qwen2", "cpu", dtype), plain, {"way": way})
    assert tuple(c.passed for c in comparisons) == expected


@pytest.mark.parametrize(("way", "passed"), [(once, True), (partial(blind, columns=32), False)])
def test_a_wrong_pass_is_seen_at_real_widths(
    way: Any, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widths, "once", way)
    found = widths.run("cpu", "small", 4, "sdpa", 64, 16, 4, repetitions=1)
    assert [c.passed for c in found.comparisons] == [True, passed]


def test_one_release_of_flash_attention_is_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth is found under the name of the second."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0\n"
    (tmp_path / "flash_attn_4-4.0.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.dist-info/METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not_installed("flash_attention_2") == "flash-attn is not installed"
    assert why_not_installed("flash_attention_4") == ""


def test_what_has_to_be_the_same() -> None:
    one = torch.tensor([1.0, 2.0])
    assert equal("", one, one.clone()).passed
    assert not equal("", one, one + 1e-6).passed
    assert not equal("", 3, 4).passed


# --- a case that fails ---


def test_no_case_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error stands in the JSON and on the page, and in the exit status."""
    names = ("hangs", "raises", "dies", "says_nothing", "fails", "leaves_alone", "passes")
    cases = [plan.Case(name, f"tests.gpu.faulty:{name}") for name in names]
    parts = [
        plan.Part("machine", "", 60, cases[-1:]),
        plan.Part("one", "", 60, cases),
        plan.Part("two", "", 0, cases[-1:]),
    ]
    monkeypatch.setattr(plan, "plan", lambda _: parts)
    monkeypatch.setattr(run, "CASE_SECONDS", 2.0)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path), "--device", "cpu"])
    assert command.main() == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    found = {case["name"]: (case["status"], case["reason"]) for case in result["parts"][1]["cases"]}
    assert found.pop("raises")[1].endswith("ValueError: a <wrong> shape\n")
    assert found.pop("says_nothing")[1].endswith("it compared and measured nothing\n")
    assert found == {
        "hangs": ("error", "It took more than 2 s."),
        "dies": ("error", "It ended its process (exit code 3)."),
        "fails": ("failed", ""),
        "leaves_alone": ("not tried", "left alone: <windows>"),
        "passes": ("passed", ""),
    }
    assert [case["status"] for case in result["parts"][2]["cases"]] == ["no time"]
    assert not result["is_ok"]
    page = (tmp_path / "gpu.md").read_text()
    for text in ("a <wrong> shape", "no number", "left alone: <windows>", "1.5"):
        assert text in page
    assert "FAILED" in capsys.readouterr().out


def test_all_is_well_only_where_each_part_passed() -> None:
    def result(*statuses: str) -> dict[str, Any]:
        return {"parts": [{"cases": [{"status": status}]} for status in statuses]}

    assert command.is_ok(result("passed", "passed"))
    for status in ("failed", "error", "not tried", "no time"):
        assert not command.is_ok(result("passed", status))
