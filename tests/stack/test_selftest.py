"""`swift-grpo-ext selftest` on the tiny model: a sound stack, and faults that it has to find."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rig.processes import COMMAND, rollout_server, started
from tests.rig.rounds import HOT, PRESET, server_argv, write_lines
from tests.rig.selftest_faults import FAULTS, SIGHT
from tests.stack import test_sight

STOP = "</digit>"


def unequal_rows(assets: Path, folder: Path) -> list[dict[str, Any]]:
    """Return rows of all kinds with prompts of unequal lengths, and one that the template refuses
    because its images are missing."""
    rows = test_sight.rows(assets, folder)[:8]
    for number, row in enumerate(rows):
        row["messages"][0]["content"] += " Look twice." * number
    rows[4]["images"] = [str(assets / "digits/none.png")]
    return rows


@pytest.fixture(scope="module")
def found(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the sound stack and of each fault, all on one engine."""
    folder = tmp_path_factory.mktemp("selftest")
    rows = write_lines(folder / "rows.jsonl", unequal_rows(assets, folder))
    argv = [
        *(str(PRESET), "--model", str(assets / "tiny_vlm"), "--dataset", str(rows), *HOT),
        *("--num_generations", "4", "--per_device_train_batch_size", "16"),
        *("--stop_words", STOP, "--output_dir", str(folder / "run"), "--add_version", "false"),
        *("--sample_log", "none", "--max_steps", "1", "--freeze_vit", "false"),
        # Fewer tokens than the text of the check's grammar has.
        *("--truncation_strategy", "delete", "--max_completion_length", "8"),
    ]
    output = folder / "found.json"
    command = [sys.executable, "-m", "tests.rig.selftest_faults", str(output), *argv]
    environment = {**os.environ, "SIGHT": str(folder)}
    with started(command, folder / "log", environment) as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    return dict(json.loads(output.read_text(encoding="utf-8")))


def test_a_healthy_stack_holds(found: dict[str, Any]) -> None:
    healthy = found["healthy"]
    reasons = {name: r["reason"] for name, r in healthy.items() if r["status"] != "holds"}
    assert reasons == {}
    assert healthy["seeds"]["values"]["surprisal of all (bits)"] > 1000
    weights = healthy["weights"]["values"]
    for change, clear in (("an update", 4), ("an update of the tower", 1)):
        moved = weights[f"{change} moved log-probabilities by (nats)"]
        assert moved >= clear * weights["limit (nats)"]
    logits = healthy["logits"]["values"]
    shortest, _, longest = logits["completions (tokens)"].partition(" to ")
    assert (logits["samples"], int(shortest) < int(longest)) == (4, True)
    assert found["again"]["weights"]["status"] == "holds", "a fault left something behind"


@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_is_found(check: str, found: dict[str, Any]) -> None:
    result = found["faulty"][check]
    assert result["status"] == "does not hold"
    assert FAULTS[check][1] in result["reason"]
    assert result["remedy"]


@pytest.mark.parametrize("name", sorted(SIGHT))
def test_an_engine_that_sees_images_wrongly_is_found(name: str, found: dict[str, Any]) -> None:
    """Rows of text agree; some rows with media differ by more than rounding."""
    result = found["sight"][name]
    assert result["status"] == "does not hold"
    kinds = set(re.findall(r"rows of (\S+) lie", result["reason"]))
    assert kinds
    assert kinds <= test_sight.FAULTS[name]


@pytest.mark.extra
def test_the_command_with_a_server(assets: Path, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", unequal_rows(assets, tmp_path))
    settings = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    settings |= {"model": str(assets / "tiny_vlm"), "dataset": str(rows), "temperature": 2.0}
    settings |= {"num_generations": 4, "stop_words": [STOP], "vllm_mode": "server"}
    settings |= {"truncation_strategy": "delete"}
    output, train = tmp_path / "out", tmp_path / "train.yaml"
    with rollout_server(*server_argv(assets), log=tmp_path / "server.log") as port:
        settings |= {"vllm_server_host": ["127.0.0.1"], "vllm_server_port": [port]}
        train.write_text(yaml.safe_dump(settings), encoding="utf-8")
        argv = [str(train), "--output", str(output)]
        with started([*COMMAND, "selftest", *argv], tmp_path / "log") as running:
            finished = running.wait(1500)
    assert finished.returncode == 0, finished.cause
    report = json.loads((output / "selftest.json").read_text(encoding="utf-8"))
    assert {r["status"] for r in report["results"] if r["topology"] == "server"} == {"holds"}
    same = {r["topology"]: r["status"] for r in report["results"] if r["check"] == "same tokens"}
    assert same.pop("colocate, ranks: 1, tensor parallel: 1") == "holds"  # as the server's
    if len(os.sched_getaffinity(0)) > 1:
        assert same["colocate, ranks: 2, tensor parallel: 1"] == "holds"
        assert same["colocate, ranks: 2, tensor parallel: 2"] == "holds"
