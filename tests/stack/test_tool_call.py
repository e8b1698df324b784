"""The example of tool calls: a turn ends with its call, and a crop comes back. The training leads
the conversations, with its own engine and with a server (T2, T3, M3)."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import yaml

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.tools.sources import to_argv
from tests.rig.processes import PLUGIN, ROOT, rollout_server
from tests.rig.rounds import client_argv, digits, logged_steps, run_training

FOLDER = ROOT / "examples/tool_call"
TOOLS = "examples/tool_call/tools.py"
STOP = "</answer>"


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
    data = (assets, rows, folder)
    preset = FOLDER / "grpo.yaml"
    run_training(*data, *small, *argv, plugins=[TOOLS], preset=preset).check()
    gaps = [step["rollout_gap/max"] for step in logged_steps(folder / "run")]
    assert [0 < gap < 1e-3 for gap in gaps] == [True] * 3
    return to_rows(read_samples(folder / "run"))


def test_calls_end_turns_wherever_they_are_generated(assets: Path, tmp_path: Path) -> None:
    rows = rows_of_users(assets, tmp_path / "rows.parquet")
    colocated = train_preset(assets, rows, tmp_path / "colocated")
    first = [row for row in colocated if row.sample_id.turn == 0]
    assert len({row.sample_id for row in first}) == 36
    second = [row for row in colocated if row.sample_id.turn == 1]
    with_crop = [row for row in second if row.media]
    assert 0 < len(with_crop) < len(second)  # some rows have no image
    for row in second:
        expected = "no. <image>" if row.media else "There is no image to look at."
        assert expected in row.prompt
    assert all(row.pictures and row.pictures[0] for row in with_crop)
    assert len({row.media[0] for row in with_crop}) == 2  # one for each image

    # The tiny model follows the format in 96% or more; which samples do not depends on the CPU.
    with_image = [row for row in first if row.media]
    assert sum(row.stop_reason == STOP for row in with_image) > 0.75 * len(with_image)
    for row in colocated:
        if row.stop_reason == STOP:
            assert row.text.endswith(STOP)
            assert row.text.count(STOP) == 1
            assert row.finish_reason == "stop"
            assert len(row.logprobs or ()) == len(row.token_ids)
            assert 151645 not in row.token_ids  # no end of a turn

    # The servers' file without its last three settings, as it says itself.
    settings = yaml.safe_load((FOLDER / "served.rollout.yaml").read_text(encoding="utf-8"))
    for name in ("port", "vllm_use_async_engine", "multi_turn_scheduler", "max_turns"):
        del settings[name]
    settings |= {"model": str(assets / "tiny_vlm"), "external_plugins": [PLUGIN, TOOLS]}
    argv = ["--vllm_data_parallel_size", "2", *to_argv(settings)]
    with rollout_server(*argv, log=tmp_path / "server.log") as port:
        served = train_preset(assets, rows, tmp_path / "served", *client_argv(port))
    assert list(map(what_is_seen, served)) == list(map(what_is_seen, colocated))
    assert {row.replica.split(") ")[1] for row in served} == {"replica 0", "replica 1"}


def what_is_seen(row: SampleRow) -> tuple[object, ...]:
    media = tuple(name.rpartition("/")[2] for name in row.media)
    return row.sample_id, row.seed, row.token_ids, row.text, row.finish_reason, row.mask, media
