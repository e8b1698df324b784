"""The digit example's reward functions and scripts, on plain values."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import train
import yaml
from rewards import DigitAccuracy, DigitFormat


@pytest.mark.parametrize(
    ("completion", "form", "accuracy"),
    [
        ("<answer>7</answer>", 1.0, 1.0),
        (" <answer>7</answer>\n", 1.0, 1.0),
        ("<answer>3</answer>", 1.0, 0.0),
        ("It is <answer>7</answer>", 0.0, 1.0),
        ("<answer>77</answer>", 0.0, 0.0),
        ("<answer>七</answer>", 0.0, 0.0),
        ("7", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_rewards(completion: str, form: float, accuracy: float) -> None:
    assert DigitFormat()([completion]) == [form]
    assert DigitAccuracy()([completion], solution=["7"]) == [accuracy]


def test_several_digits_in_order() -> None:
    completions = ["<answer>1 2</answer>", "<answer>2 1</answer>"]
    assert DigitFormat()(completions) == [1.0, 1.0]
    assert DigitAccuracy()(completions, solution=["1 2", "1 2"]) == [1.0, 0.0]


@pytest.mark.parametrize(("done", "left"), [(0, 198 * 3), (150, 48 * 3)])
def test_the_bars_estimate_leaves_the_start_up_out(
    done: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    progress = train.Progress(200, done)
    now[0] += 60
    progress.wait()
    assert "01:00" in str(progress)
    progress.step(0.5)
    now[0] += 3
    progress.step(0.5)
    shown = re.search(rf"{done + 2}/200 .*<(\d+):(\d+),", str(progress))
    assert shown is not None
    minutes, seconds = map(int, shown.groups())
    assert 60 * minutes + seconds == pytest.approx(left, abs=1)
    progress.close()


def test_the_last_whole_checkpoint_is_resumed(tmp_path: Path) -> None:
    assert train.last_checkpoint(tmp_path) is None
    for step, whole in ((40, True), (80, True), (120, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if whole:
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert train.last_checkpoint(tmp_path) == (80, tmp_path / "checkpoint-80")


def test_half_written_log_rows_wait(tmp_path: Path) -> None:
    log = tmp_path / "logging.jsonl"
    assert train.new_rows(log, 0) == []
    log.write_text('{"reward": "0.5"}\n{"eval": 1}\n{"reward": "0.6"}\n{"rewa')
    assert train.new_rows(log, 0) == [{"reward": "0.5"}, {"reward": "0.6"}]
    assert train.new_rows(log, 1) == [{"reward": "0.6"}]


def test_what_a_run_was_made_on_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with train.recorded(tmp_path / "machine.json", 50) as loads:
        loads += [1.0, 2.0, 2.0]
    made = json.loads((tmp_path / "machine.json").read_text())
    assert (made["omp_num_threads"], made["first_step"], made["load_average"]) == ("3", 50, 1.7)
    assert made["versions"]["ms-swift"].startswith("4.")
    assert made["cores"] >= 1
    assert made["started"].endswith(" UTC")


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        ([], False),
        (["--use_vllm", "true", "--num_generations", "4"], False),
        (["--use_vllm", "false"], True),
        (["--use_vllm", "false", "--use_vllm", "true"], False),
    ],
)
def test_without_vllm_the_preset_goes_without_its_settings(
    tmp_path: Path, arguments: list[str], without: bool
) -> None:
    preset = train.preset_for(Namespace(output=tmp_path, swift=arguments))
    assert (preset == train.PRESET) is not without
    settings, kept = (yaml.safe_load(p.read_text()) for p in (train.PRESET, preset))
    dropped = {name for name in settings if name.startswith("vllm_")} if without else set()
    assert kept == {name: settings[name] for name in settings if name not in dropped}
