"""Replay without an engine: comparisons, the search for weights and prompts, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.tools import replay as tool
from swift_grpo_ext.tools.cli import main, round_name, setting
from swift_grpo_ext.tools.replay import check_seeds, find_checkpoint, find_prompt, read_settings
from tests.rig.record.rows import ROW, sample_id, write_session
from tests.rig.view.runs import add_tokenizer

SETTINGS: dict[str, Any] = {
    "vllm_mode": "colocate",
    "tuner_type": "full",
    "model": "models/tiny",
    "seed": 42,
    "dataset": ["train.jsonl"],
}


def seeded(name: SampleId = ROW.sample_id, **changes: Any) -> SampleRow:
    return replace(ROW, sample_id=name, seed=sample_seed(42, name), **changes)


# --- the command ---


@dataclass
class Replay:
    """The command with a stand-in engine, which generates the recorded tokens, or `draws`."""

    folder: Path
    draws: list[list[int]] = field(default_factory=list)
    generated: Sequence[SampleRow] = ()
    """The turns that the command generated again."""

    def record(self, *rows: SampleRow) -> None:
        self.folder.mkdir()
        (self.folder / "args.json").write_text(json.dumps(SETTINGS))
        add_tokenizer(self.folder)
        write_session(self.folder, rows)

    def run(self, *flags: str) -> int:
        return main(["replay", str(self.folder), "--round", "0.0", "--group", "0", *flags])

    def generate(
        self, _: Any, __: Any, rows: Sequence[SampleRow], ___: str
    ) -> tuple[list[SampleRow], list[str]]:
        self.generated = rows
        ids = self.draws or [row.token_ids for row in rows]
        again = [
            replace(row, token_ids=i, logprobs=[-0.5, -1.5][: len(i)])
            for row, i in zip(rows, ids, strict=True)
        ]
        return again, []


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    made = Replay(tmp_path / "run")
    monkeypatch.setattr(tool, "generate_again", made.generate)
    return made


def test_the_result_as_lines_and_as_json(replay: Replay, capfd: pytest.CaptureFixture[str]) -> None:
    """One sample is equal, the other one differs from its second token on."""
    ids = [sample_id(index=index) for index in range(2)]
    replay.record(*[seeded(name, token_ids=[1, 2], logprobs=[-0.5, -1.0]) for name in ids])
    replay.draws = [[1, 2], [1, 4]]
    assert replay.run() == 1
    assert capfd.readouterr().out.splitlines()[:4] == [
        "Generated again with models/tiny:",
        "  train-0.0-0-0: 2 tokens, log-probabilities within 5.0e-01 nats; equal",
        "  train-0.0-0-1: 2 tokens, log-probabilities within 0.0e+00 nats; first difference, train "
        'round 0.0, group 0, sample 1: token 1 is id 2 ("w2", log-probability -1.000) in '
        'the record and id 4 ("w4", log-probability -1.500) now',
        "1 of 2 samples have equal tokens.",
    ]
    assert replay.run("--json") == 1
    printed = json.loads(capfd.readouterr().out)
    assert (printed["weights"], printed["weight_version"]) == ("models/tiny", 0)
    assert [sample["logprob_gap"] for sample in printed["samples"]] == [0.5, 0.0]
    replay.draws = [[1, 2]] * 2
    assert replay.run() == 0


def test_arguments_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert [round_name(text) for text in ("12", "3.7")] == [(12, 0), (3, 7)]
    assert setting('dataset=["a=b.jsonl"]') == ("dataset", ["a=b.jsonl"])  # a value is JSON or text
    assert setting("model=models/tiny") == ("model", "models/tiny")
    for argv in (["--round", "x"], ["--round", "1", "--set", "seed"]):
        with pytest.raises(SystemExit):
            main(["replay", "run", "--group", "0", *argv])
        assert " value: '" in capsys.readouterr().err


# --- runs and weights ---


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


def make_checkpoints(folder: Path, *steps: int) -> list[Path]:
    checkpoints = [folder / f"checkpoint-{step}" for step in steps]
    for checkpoint in checkpoints:
        checkpoint.mkdir(parents=True)
    return checkpoints


def test_weights(tmp_path: Path) -> None:
    _, fourth = make_checkpoints(tmp_path, 10, 4)
    assert find_checkpoint(tmp_path, SETTINGS, 0) is None
    assert find_checkpoint(tmp_path, SETTINGS, 4) == fourth
    named = (
        r"checkpoint-6 is not there \(.* has checkpoint-10, checkpoint-4\).*--save_steps 1.* of 6"
    )
    with pytest.raises(ValueError, match=named):
        find_checkpoint(tmp_path, SETTINGS, 6)
    moved = {**SETTINGS, "model": "/gone/model"}
    with pytest.raises(ValueError, match=r"--model /gone/model is not there: .*--set model=DIR"):
        find_checkpoint(tmp_path, moved, 4)


def test_weights_of_a_resumed_run(tmp_path: Path) -> None:
    [before] = make_checkpoints(tmp_path / "before", 2)
    run = tmp_path / "run"
    settings = {**SETTINGS, "resume_from_checkpoint": str(before)}
    assert find_checkpoint(run, settings, 2) == before
    assert find_checkpoint(run, settings, 0) is None
    assert find_checkpoint(run, {**settings, "resume_only_model": True}, 0) == before


# --- samples ---


@pytest.mark.parametrize(
    ("changes", "settings", "named"),
    [
        ({"seed": None}, {}, r"sample 0 has no seed: .*--rollout_seed_mode engine"),
        ({}, {"seed": 7}, r"has the seed \d+, and --seed 7 .*--set seed=N"),
    ],
)
def test_samples_that_cannot_be_generated_again(
    changes: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    row = seeded()
    check_seeds([row], SETTINGS)
    with pytest.raises(ValueError, match=named):
        check_seeds([replace(row, **changes), row], {**SETTINGS, **settings})


# --- prompts ---


def test_later_turns_are_left_out(replay: Replay, capfd: pytest.CaptureFixture[str]) -> None:
    later = sample_id(index=3, turn=1)
    tokens: dict[str, Any] = {"token_ids": [1, 2], "logprobs": [-0.5, -1.0]}
    replay.record(seeded(sample_id(index=3), **tokens), seeded(later, **tokens))
    assert replay.run("--json") == 0
    assert [row.sample_id.turn for row in replay.generated] == [0]
    [note] = json.loads(capfd.readouterr().out)["notes"]
    assert note == "Later turns of conversations are not generated again."


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
