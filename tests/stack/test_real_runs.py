"""Real trainings with the monitor: frozen noise, and a policy that collapses. They use ms-swift's
versions of --output_dir. `tests/stack/test_invariance.py` has sound noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import DiversityRow
from swift_grpo_ext.tools.runs import find_run
from swift_grpo_ext.tools.view.pages import write_page
from tests.rig.processes import PLUGIN, Finished, swift
from tests.rig.record.rows import read_diversity
from tests.rig.rounds import HOT, digits, write_lines

PLUGINS = (PLUGIN, "examples/digits/rewards.py", "examples/diversity/favour.py")
SMALL = ("--num_generations", "4", "--learning_rate", "1e-5", "--warmup_steps", "0", *HOT)


def train(
    assets: Path, rows: Path, folder: Path, *argv: str, ranks: int = 1
) -> tuple[Finished, list[DiversityRow]]:
    """Train with the monitor; return the end, and the monitor's rows."""
    command = [
        *("rlhf", "examples/digits/grpo.yaml", "--external_plugins", *PLUGINS),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(rows)),
        *("--output_dir", str(folder / "run"), "--callbacks", "diversity", *argv),
    ]
    env = {"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}
    finished = swift(*command, log=folder / "log", env=env)
    assert finished.returncode == 0, finished.cause
    return finished, read_diversity(find_run(folder / "run"))


@pytest.fixture(scope="module")
def one_prompt(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of three equal rows."""
    return write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", digits(assets, [0] * 3))


def test_frozen_noise_stops_the_run_in_its_second_round(
    assets: Path, one_prompt: Path, tmp_path: Path
) -> None:
    """With ms-swift's own seeds and tensor parallel 2, every step generates the samples of the
    first. This is the plugin's reason, and proves that the tests of invariance would notice it."""
    finished, records = train(
        *(assets, one_prompt, tmp_path, *SMALL),
        *("--rollout_seed_mode", "engine"),
        *("--vllm_tensor_parallel_size", "2", "--per_device_train_batch_size", "6"),
        *("--max_steps", "5", "--diversity_action", "stop"),
        ranks=2,
    )
    assert [r.verdict for r in records] == ["healthy", "broken"]
    assert "broken randomness in train round 1.0" in finished.output
    assert "(frozen noise)" in finished.output
    run = find_run(tmp_path / "run")
    assert (run / "checkpoint-2/model.safetensors").is_file()
    assert {s["replica"] for found in records[1].collisions for s in found["samples"]} == {"rank 0"}
    rows = read_samples(run, columns=["step", "token_ids"]).to_pylist()
    by_step: dict[int, list[list[int]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row["token_ids"])
    assert len(by_step[0]) == 12
    assert sorted(by_step[0]) == sorted(by_step[1])


@pytest.mark.extra
def test_a_reward_that_favours_one_answer_collapses_the_policy(
    assets: Path, tmp_path: Path
) -> None:
    finished, records = train(
        *(assets, assets / "digits/train.jsonl", tmp_path),
        *("--reward_funcs", "favour", "--reward_weights", "1", "--seed", "1"),
        *("--max_steps", "16", "--save_strategy", "no"),
    )
    assert {r.verdict for r in records} == {"healthy", "collapse"}
    assert "diversity: collapsed policy" in finished.output
    assert records[0].verdict == "healthy"
    page = write_page([find_run(tmp_path / "run")], tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
    assert 'class="verdict collapse"' in page
    assert "data:image/png" in page
