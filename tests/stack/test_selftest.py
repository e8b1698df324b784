"""`swift-grpo-ext selftest` on the tiny model: a sound stack, and faults that it has to find."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rig.processes import started
from tests.rig.rounds import HOT, PRESET, write_lines
from tests.rig.seeing import FAULTS as SEEN_WRONGLY
from tests.rig.selftest_faults import FAULTS, SIGHT, STOP, unequal_rows


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
    assert {name: r["reason"] for name, r in healthy.items() if r["status"] != "holds"} == {}
    assert healthy["seeds"]["values"]["surprisal of all (bits)"] > 1000
    weights = healthy["weights"]["values"]
    for change, clear in (("an update", 4), ("an update of the tower", 1)):
        moved = weights[f"{change} moved log-probabilities by (nats)"]
        assert moved >= clear * weights["limit (nats)"]
    logits = healthy["logits"]["values"]
    shortest, _, longest = logits["completions (tokens)"].partition(" to ")
    assert (logits["samples"], int(shortest) < int(longest)) == (4, True)
    assert found["again"]["weights"]["status"] == "holds", "a fault left something behind"


@pytest.mark.parametrize("name", [*FAULTS, *SIGHT])
def test_a_fault_is_found(name: str, found: dict[str, Any]) -> None:
    """An engine that sees images wrongly agrees in rows of text. Some rows with media differ by
    more than rounding."""
    result = found["faulty"][name]
    assert result["status"] == "does not hold"
    assert result["remedy"]
    if name in SIGHT:
        kinds = set(re.findall(r"rows of (\S+) lie", result["reason"]))
        assert set() < kinds <= SEEN_WRONGLY[name]
    else:
        assert FAULTS[name][1] in result["reason"]
