"""The tool call example: turns end with calls, a crop comes back, and training learns from both.
The training or the server leads the conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from tests.rig.processes import PLUGIN, ROOT, rollout_server, swift
from tests.rig.rounds import client_argv, digits, logged_steps, run_training

FOLDER = ROOT / "examples/tool_call"
TOOLS = "examples/tool_call/tools.py"
STOP = "</answer>"
STEPS = 3


def rows_of_users(assets: Path, path: Path) -> Path:
    """Write rows with an image by its path, an image as bytes, and no image."""
    named, held, bare = digits(assets, [0, 1, 2])
    [file] = held["images"]
    named["images"] = [{"bytes": None, "path": named["images"][0]}]
    held["images"] = [{"bytes": Path(file).read_bytes(), "path": None}]
    bare["images"] = []
    bare["messages"][0]["content"] = "Which digit is this? Answer as <answer>d</answer>."
    pa.parquet.write_table(pa.Table.from_pylist([named, held, bare]), path)
    return path


def train_preset(assets: Path, rows: Path, folder: Path, *argv: str) -> list[SampleRow]:
    """Train the preset for three rounds at learning rate 0; return the turns. Assert that rollout
    and training agree in log-probabilities."""
    small = ("--gradient_accumulation_steps", "1", "--temperature", "1.0")
    finished = run_training(
        assets,
        rows,
        folder,
        *small,
        *argv,
        steps=STEPS,
        plugins=[TOOLS],
        preset=FOLDER / "grpo.yaml",
    )
    assert finished.returncode == 0, finished.cause
    steps = logged_steps(folder / "run")
    assert len(steps) == STEPS
    assert all(0 < step["rollout_gap/max"] < 1e-3 for step in steps)
    return to_rows(read_samples(folder / "run"))


def server_of(assets: Path, *, leads: bool) -> list[str]:
    """Return the arguments of the example's server; without its scheduler if it does not lead."""
    file = FOLDER / "served.rollout.yaml"
    settings: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    settings |= {"model": str(assets / "tiny_vlm"), "external_plugins": [PLUGIN, TOOLS]}
    scheduler = ("vllm_use_async_engine", "multi_turn_scheduler", "max_turns")
    argv = []
    for name, value in settings.items():
        if name != "port" and (leads or name not in scheduler):
            values = value if isinstance(value, list) else [value]
            argv += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return argv


@pytest.fixture(scope="module")
def rows(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows_of_users(assets, tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def colocated(
    assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[SampleRow]:
    """The turns of a colocated engine. A crop comes back where the row has an image."""
    turns = train_preset(assets, rows, tmp_path_factory.mktemp("colocated") / "run")
    assert len({row.sample_id.request_id for row in turns if row.sample_id.turn == 0}) == 36
    second = [row for row in turns if row.sample_id.turn == 1]
    with_crop = [row for row in second if row.media]
    assert 0 < len(with_crop) < len(second)  # some rows have no image
    for row in second:
        expected = "no. <image>" if row.media else "There is no image to look at."
        assert expected in row.prompt
    assert all(row.pictures and row.pictures[0] for row in with_crop)
    assert len({row.media[0] for row in with_crop}) == 2  # one for each image
    assert_stopped(turns)
    return turns


@pytest.mark.parametrize(
    "leader",
    [
        pytest.param("training", marks=pytest.mark.extra),
        pytest.param("server", marks=pytest.mark.smoke),
    ],
)
def test_whoever_leads_the_conversations_they_are_the_same(
    leader: str, assets: Path, rows: Path, colocated: list[SampleRow], tmp_path: Path
) -> None:
    argv = server_of(assets, leads=leader == "server")
    with rollout_server(*argv, log=tmp_path / "log") as port:
        served = train_preset(assets, rows, tmp_path / "served", *client_argv(port))
    assert list(map(what_is_seen, served)) == list(map(what_is_seen, colocated))
    assert {row.replica.split()[-2] for row in served} == {"replica"}


def what_is_seen(row: SampleRow) -> tuple[Any, ...]:
    media = tuple(name.rpartition("/")[2] for name in row.media)
    return row.sample_id, row.seed, row.token_ids, row.text, row.finish_reason, row.mask, media


def assert_stopped(rows: list[SampleRow]) -> None:
    """Assert that turns about an image end with their call, and have nothing after it."""
    first_turns = [row for row in rows if row.sample_id.turn == 0 and row.media]
    # The tiny model follows the format in 96% or more; which samples do not depends on the CPU.
    assert sum(row.stop_reason == STOP for row in first_turns) > 0.75 * len(first_turns)
    stopped = [row for row in rows if row.stop_reason == STOP]
    for row in stopped:
        assert row.text.endswith(STOP)
        assert row.text.count(STOP) == 1
        assert row.finish_reason == "stop"
        assert row.logprobs is not None
        assert len(row.logprobs) == len(row.token_ids)
        assert 151645 not in row.token_ids  # no end of a turn


@pytest.mark.extra
def test_the_preset_trains_on_calls(assets: Path, tmp_path: Path) -> None:
    command = [
        *("rlhf", "examples/tool_call/grpo.yaml", "--model", str(assets / "tiny_vlm")),
        *("--dataset", str(assets / "digits/train.jsonl"), "--max_steps", "2"),
        *("--output_dir", str(tmp_path / "run"), "--add_version", "false"),
    ]
    finished = swift(*command, log=tmp_path / "log")
    assert finished.returncode == 0, finished.cause
    rows = to_rows(read_samples(tmp_path / "run"))
    assert {row.sample_id.step for row in rows} == {0, 1}
    assert {row.sample_id.turn for row in rows} == {0, 1}
    assert_stopped(rows)
    assert "NaN" not in (tmp_path / "run/logging.jsonl").read_text(encoding="utf-8")
