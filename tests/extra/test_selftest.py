"""`swift-grpo-ext selftest` with a server compares its tokens with those of other engines (S2)."""

import json
import os
from pathlib import Path

import yaml

from tests.rig.processes import COMMAND, rollout_server, started
from tests.rig.rounds import PRESET, server_argv, write_lines
from tests.rig.seeing import STOP, unequal_rows


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
            running.wait(1500).check()
    report = json.loads((output / "selftest.json").read_text(encoding="utf-8"))
    assert {r["status"] for r in report["results"] if r["topology"] == "server"} == {"holds"}
    same = {r["topology"]: r["status"] for r in report["results"] if r["check"] == "same tokens"}
    assert same.pop("colocate, ranks: 1, tensor parallel: 1") == "holds"  # as the server's
    if len(os.sched_getaffinity(0)) > 1:
        assert same["colocate, ranks: 2, tensor parallel: 1"] == "holds"
        assert same["colocate, ranks: 2, tensor parallel: 2"] == "holds"
