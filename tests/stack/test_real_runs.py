"""A real training with the monitor ends on all ranks at frozen noise, with a checkpoint (D2, D3).

`test_seeds.py` has sound noise, `tests/extra/test_collapse.py` a policy that collapses.
"""

from collections import defaultdict
from pathlib import Path

from swift_grpo_ext.record.query import read_samples
from tests.rig.diversity.samples import train_watched
from tests.rig.record.rows import read_diversity
from tests.rig.rounds import HOT, digits, write_lines


def test_frozen_noise_stops_the_run_in_its_second_round(assets: Path, tmp_path: Path) -> None:
    """With ms-swift's own seeds and tensor parallel 2, every step generates the samples of the
    first. This is the plugin's reason, and proves that the tests of invariance would notice it."""
    equal_rows = write_lines(tmp_path / "rows.jsonl", digits(assets, [0] * 3))
    finished, run = train_watched(
        *(assets, equal_rows, tmp_path, "--num_generations", "4", "--rollout_seed_mode", "engine"),
        *("--learning_rate", "1e-5", "--warmup_steps", "0", *HOT),
        *("--vllm_tensor_parallel_size", "2", "--per_device_train_batch_size", "6"),
        *("--max_steps", "5", "--diversity_action", "stop"),
        ranks=2,
    )
    healthy, broken = read_diversity(run)
    assert (healthy.verdict, broken.verdict) == ("healthy", "broken")
    assert "broken randomness in train round 1.0" in finished.output
    assert "(frozen noise)" in finished.output
    assert (run / "checkpoint-2/model.safetensors").is_file()
    assert {s["replica"] for found in broken.collisions for s in found["samples"]} == {"rank 0"}
    by_step = defaultdict[int, list[list[int]]](list)
    for row in read_samples(run, columns=["step", "token_ids"]).to_pylist():
        by_step[row["step"]].append(row["token_ids"])
    assert len(by_step[0]) == 12
    assert sorted(by_step[0]) == sorted(by_step[1])
