"""Replay without an engine: comparisons, the search for weights and prompts, and refusals."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.tools import replay as tool
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.replay import check_seeds, find_checkpoint, find_prompt, read_settings
from tests.rig.record.rows import ROW, sample_id, write_session
from tests.rig.view.runs import add_tokenizer

SETTINGS: dict[str, Any] = {
    **{"vllm_mode": "colocate", "tuner_type": "full", "model": "models/tiny", "seed": 42},
    "dataset": ["train.jsonl"],
}


def seeded(name: SampleId = ROW.sample_id, **changes: Any) -> SampleRow:
    return replace(ROW, sample_id=name, seed=sample_seed(42, name), **changes)


def test_the_result_as_lines_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sample is equal, the other differs from its second token on. Later turns are left out."""
    ids = [sample_id(index=0), sample_id(index=1), sample_id(index=1, turn=1)]
    write_session(tmp_path, [seeded(name, token_ids=[1, 2], logprobs=[-0.5, -1.0]) for name in ids])
    (tmp_path / "args.json").write_text(json.dumps(SETTINGS))
    add_tokenizer(tmp_path)
    draws = [[1, 2], [1, 4]]

    def generate(_: Any, __: Any, rows: Sequence[SampleRow], ___: str) -> Any:
        assert [row.sample_id for row in rows] == ids[:2]
        logprobs = [-0.5, -1.5]
        pairs = zip(rows, draws, strict=True)
        return [replace(row, token_ids=drawn, logprobs=logprobs) for row, drawn in pairs], []

    monkeypatch.setattr(tool, "generate_again", generate)
    command = ["replay", str(tmp_path), "--round", "0.0", "--group", "0"]
    assert main(command) == 1
    note = "Later turns of conversations are not generated again."
    assert capfd.readouterr().out.splitlines() == [
        "Generated again with models/tiny:",
        "  train-0.0-0-0: 2 tokens, log-probabilities within 5.0e-01 nats; equal",
        "  train-0.0-0-1: 2 tokens, log-probabilities within 0.0e+00 nats; first difference, train "
        'round 0.0, group 0, sample 1: token 1 is id 2 ("w2", log-probability -1.000) in '
        'the record and id 4 ("w4", log-probability -1.500) now',
        "1 of 2 samples have equal tokens.",
        f"Note: {tool.DIFFERENT}",
        f"Note: {note}",
    ]
    draws[1] = [1, 2]
    assert main([*command, "--json", "--set", "model=other"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["notes"], printed["weights"], printed["weight_version"]) == ([note], "other", 0)
    assert [sample["logprob_gap"] for sample in printed["samples"]] == [0.5, 0.5]


def test_settings_of_a_run(tmp_path: Path) -> None:
    args = tmp_path / "args.json"
    with pytest.raises(ValueError, match=r"args\.json, a run's settings, cannot be read"):
        read_settings(tmp_path, {})
    args.write_text(json.dumps(SETTINGS))
    assert read_settings(tmp_path, {"seed": 7}) == {**SETTINGS, "seed": 7}
    args.write_text(json.dumps({**SETTINGS, "vllm_mode": "server"}))  # with no size of an engine
    assert read_settings(tmp_path, {})["vllm_gpu_memory_utilization"] == 0.4
    with pytest.raises(ValueError, match=r"--set sed: .*setting\. did you mean seed\?"):
        read_settings(tmp_path, {"sed": 7})


def test_weights(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-4", "before/checkpoint-2"):
        (tmp_path / name).mkdir(parents=True)
    before = tmp_path / "before/checkpoint-2"
    resumed = {**SETTINGS, "resume_from_checkpoint": str(before)}
    for settings, version, expected in (
        (SETTINGS, 0, None),
        (SETTINGS, 4, tmp_path / "checkpoint-4"),
        (resumed, 2, before),
        (resumed, 0, None),
        ({**resumed, "resume_only_model": True}, 0, before),
    ):
        assert find_checkpoint(tmp_path, settings, version) == expected
    named = r"checkpoint-6 is not there .* has checkpoint-10, checkpoint-4\).*--save_steps 1.* of 6"
    with pytest.raises(ValueError, match=named):
        find_checkpoint(tmp_path, SETTINGS, 6)
    moved = {**SETTINGS, "model": "/gone/model"}
    with pytest.raises(ValueError, match=r"--model /gone/model is not there: .*--set model=DIR"):
        find_checkpoint(tmp_path, moved, 4)


def test_samples_that_cannot_be_generated_again() -> None:
    row = seeded()
    check_seeds([row], SETTINGS)
    with pytest.raises(ValueError, match=r"sample 0 has no seed: .*--rollout_seed_mode engine"):
        check_seeds([row, replace(row, seed=None)], SETTINGS)
    with pytest.raises(ValueError, match=r"has the seed \d+, and --seed 7 .*--set seed=N"):
        check_seeds([row], {**SETTINGS, "seed": 7})


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>哪个?"}]


def test_the_prompt_comes_from_the_data_set() -> None:
    """ms-swift adds a system message to a row's prompt; a row may also have an answer."""
    row = {"messages": MESSAGES[1:], "images": [{"bytes": b"png", "path": None}], "solution": "7"}
    other = {**row, "images": [{"bytes": b"gnp", "path": None}]}
    prompt = {**row, "messages": MESSAGES}
    text = json.dumps(MESSAGES, ensure_ascii=False)
    sample = replace(ROW, prompt=text, fingerprint=prompt_hash(prompt))
    answered = [*MESSAGES, {"role": "assistant", "content": "7"}]
    for data in ([other, row], [prompt], [{**row, "messages": answered}]):
        assert find_prompt(sample, data) == prompt
    with pytest.raises(ValueError, match=r"No row of the data set has the fingerprint.*--set"):
        find_prompt(sample, [other])
