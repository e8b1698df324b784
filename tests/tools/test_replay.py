"""Replay without an engine: comparing, finding weights and prompts, and what is refused."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from swift_grpo_ext.record.row import SampleRow, media_name
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.replay.command import Replay, round_name, run, setting, show
from swift_grpo_ext.tools.replay.compare import Comparison, Token, compare, first_difference
from swift_grpo_ext.tools.replay.prompts import (
    check_media,
    lack_of_prompt,
    prompt_from_log,
    prompt_from_rows,
)
from swift_grpo_ext.tools.replay.run import ReplayError, Run, first_turns, read_run, weights_of
from tests.record.rows import ROW, sample_id, write_session

SETTINGS: dict[str, Any] = {
    "rlhf_type": "grpo",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "tuner_type": "full",
    "model": "models/tiny",
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 2.0,
    "save_total_limit": 3,
    "dataset": ["train.jsonl"],
}
SEEDED = replace(ROW, seed=sample_seed(42, ROW.sample_id))
ids = st.lists(st.integers(0, 3), max_size=6)


# --- tokens ---


@given(ids, ids)
def test_the_first_difference(logged: list[int], drawn: list[int]) -> None:
    position = first_difference(logged, drawn)
    if position is None:
        assert logged == drawn
    else:
        assert logged[:position] == drawn[:position]
        assert logged[position : position + 1] != drawn[position : position + 1]


def completion(ids: list[int], logprobs: list[float] | None = None, **fields: Any) -> SampleRow:
    return replace(ROW, token_ids=ids, logprobs=logprobs, **fields)


def compared(row: SampleRow, ids: list[int], logprobs: list[float] | None = None) -> Comparison:
    return compare(row, ids, logprobs, lambda token_id: f"<{token_id}>")


def test_a_difference_has_both_tokens_and_the_gap_of_their_probabilities() -> None:
    row = completion([1, 2, 3], [-0.5, -1.0, -9.0], sample_id=sample_id(2, group=3, index=1))
    found = compared(row, [1, 5, 3, 4], [-0.75, -1.5, -0.1, -0.1])
    assert (found.name, found.seed, found.equal) == ("train-2.0-3-1", 1, False)
    assert (found.num_logged, found.num_drawn) == (3, 4)
    assert found.logprob_gap == 0.25  # of the common beginning only
    assert found.difference is not None
    assert found.difference.position == 1
    assert found.difference.logged == Token(token_id=2, logprob=-1.0, text="<2>")
    assert found.difference.drawn == Token(token_id=5, logprob=-1.5, text="<5>")
    gap = math.exp(-1.0) - math.exp(-1.5)
    assert found.difference.probability_gap == pytest.approx(gap)


def test_the_gap_of_probabilities_has_no_sign() -> None:
    for logged, drawn in ((-0.5, -1.5), (-1.5, -0.5)):
        found = compared(completion([1], [logged]), [2], [drawn])
        assert found.difference is not None
        expected = math.exp(-0.5) - math.exp(-1.5)
        assert found.difference.probability_gap == pytest.approx(expected)


def test_equal_tokens() -> None:
    found = compared(completion([1, 2], [-0.5, -math.inf]), [1, 2], [-0.5, -math.inf])
    assert (found.equal, found.difference, found.logprob_gap) == (True, None, 0.0)
    found = compared(completion([1, 2], [-0.5, -1.0]), [1, 2], [-0.25, -3.0])
    assert (found.equal, found.logprob_gap) == (True, 2.0)


def test_log_probabilities_that_one_side_lacks() -> None:
    found = compared(completion([1, 2], [-0.5, -1.0]), [1, 3])
    assert found.logprob_gap is None
    assert found.difference is not None
    assert found.difference.logged == Token(token_id=2, logprob=-1.0, text="<2>")
    assert found.difference.drawn == Token(token_id=3, logprob=None, text="<3>")
    assert found.difference.probability_gap is None
    assert compared(completion([1, 2]), [1, 2], [-0.5, -1.0]).logprob_gap is None
    assert compared(completion([1], [-0.5]), [2], [-0.5]).logprob_gap is None  # nothing precedes


@pytest.mark.parametrize(("logged", "drawn"), [([1, 2], [1]), ([1], [1, 2]), ([], [2])])
def test_one_ends_earlier(logged: list[int], drawn: list[int]) -> None:
    found = compared(completion(logged), drawn)
    assert found.difference is not None
    assert found.difference.position == min(len(logged), len(drawn))
    assert (found.difference.logged is None) == (len(logged) < len(drawn))
    assert (found.difference.drawn is None) == (len(drawn) < len(logged))
    assert found.difference.probability_gap is None
    assert found.logprob_gap is None


# --- the result ---


def a_replay(*, equal: bool = False) -> Replay:
    samples = [
        compared(completion([1, 2], sample_id=sample_id(group=3)), [1, 2]),
        compared(
            completion([1, 2], [-0.5, -1.0], sample_id=sample_id(group=3, index=1)),
            [1, 4],
            [-0.5, -1.5],
        ),
        compared(completion([1, 2], sample_id=sample_id(group=3, index=2)), [1]),
    ]
    return Replay(
        run_dir="run",
        weights="run/checkpoint-2",
        weight_version=2,
        equal=equal,
        samples=samples[:1] if equal else samples,
        notes=["a note"],
    )


def run_with(replay: Replay, monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> int:
    monkeypatch.setattr("swift_grpo_ext.tools.replay.command._replay", lambda options: replay)
    return run(argparse.Namespace(json=as_json))


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(a_replay(), monkeypatch, as_json=True) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["equal"], result["weights"], result["notes"]) == (
        False,
        "run/checkpoint-2",
        ["a note"],
    )
    same, different, _ = result["samples"]
    assert (same["name"], same["equal"], same["difference"]) == ("train-0.0-3-0", True, None)
    assert different["difference"]["position"] == 1
    assert different["difference"]["logged"] == {"token_id": 2, "logprob": -1.0, "text": "<2>"}
    assert different["difference"]["drawn"] == {"token_id": 4, "logprob": -1.5, "text": "<4>"}


def test_the_exit_status_says_whether_all_are_equal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(a_replay(equal=True), monkeypatch, as_json=False) == 0
    assert "1 of 1 samples have equal tokens." in capsys.readouterr().out
    assert run_with(a_replay(), monkeypatch, as_json=False) == 1


def test_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(a_replay())
    assert capsys.readouterr().out.splitlines() == [
        "Drawn again with run/checkpoint-2:",
        "  train-0.0-3-0: 2 tokens, equal",
        "  train-0.0-3-1: 2 tokens, 2 drawn; equal before position 1 (log-probabilities within "
        "0.0e+00 nats), where the log has '<2>' (2) -1.000 and the replay '<4>' (4) -1.500; their "
        "probabilities lie 0.145 apart",
        "  train-0.0-3-2: 2 tokens, 1 drawn; equal before position 1, where the log has '<2>' (2) "
        "and the replay ended",
        "1 of 3 samples have equal tokens.",
        "Note: a note",
    ]


@pytest.mark.parametrize(("text", "name"), [("12.0", (12, 0)), ("12", (12, 0)), ("3.7", (3, 7))])
def test_round_names(text: str, name: tuple[int, int]) -> None:
    assert round_name(text) == name


@pytest.mark.parametrize("argv", [["--round", "x"], ["--round", "1", "--set", "seed"]])
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "run", "--group", "0", *argv])
    assert "expected" in capsys.readouterr().err


def test_settings_are_json_or_text() -> None:
    assert setting("seed=7") == ("seed", 7)
    assert setting('dataset=["a=b.jsonl"]') == ("dataset", ["a=b.jsonl"])
    assert setting("model=models/tiny") == ("model", "models/tiny")


# --- runs and weights ---


def make_run(folder: Path, *steps: int, **changes: Any) -> Run:
    for step in steps:
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").touch()
    return Run(folder=folder, settings={**SETTINGS, **changes})


def test_settings_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"args\.json.*cannot be read.*--output_dir"):
        read_run(tmp_path, {})
    (tmp_path / "args.json").write_text(json.dumps(SETTINGS))
    assert read_run(tmp_path, {"seed": 7}).settings == {**SETTINGS, "seed": 7}
    with pytest.raises(ReplayError, match=r"--set sed: .*did you mean seed\?"):
        read_run(tmp_path, {"sed": 7})
    (tmp_path / "args.json").write_text("{")
    with pytest.raises(ReplayError, match="cannot be read"):
        read_run(tmp_path, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_vllm": False}, "--use_vllm False"),
        ({"rlhf_type": "dpo"}, "--rlhf_type dpo"),
        ({"tuner_type": "llamapro"}, "--tuner_type llamapro"),
        ({"quant_method": "bnb"}, "--quant_method bnb"),
    ],
)
def test_runs_that_cannot_be_replayed(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({**SETTINGS, **changes}))
    with pytest.raises(ReplayError, match=f"{named}: the run cannot be replayed"):
        read_run(tmp_path, {})


def test_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4)
    assert weights_of(run, 0) == ["models/tiny"]
    assert weights_of(run, 4) == [str(tmp_path / "checkpoint-4")]


def test_weights_of_lora(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, tuner_type="lora")
    with pytest.raises(ReplayError, match="checkpoint-2 holds no adapter"):
        weights_of(run, 2)
    (tmp_path / "checkpoint-2/adapter_config.json").touch()
    checkpoint = str(tmp_path / "checkpoint-2")
    assert weights_of(run, 2) == ["models/tiny", checkpoint]
    assert weights_of(run, 0) == ["models/tiny"]
    further = make_run(tmp_path, tuner_type="lora", adapters=["first"])
    assert weights_of(further, 0) == ["models/tiny", "first"]


def test_weights_of_a_resumed_run(tmp_path: Path) -> None:
    make_run(tmp_path / "before", 2)
    checkpoint = str(tmp_path / "before/checkpoint-2")
    run = make_run(tmp_path / "run", resume_from_checkpoint=checkpoint)
    assert weights_of(run, 2) == [checkpoint]
    assert weights_of(run, 0) == ["models/tiny"]
    anew = make_run(tmp_path / "run", resume_from_checkpoint=checkpoint, resume_only_model=True)
    assert weights_of(anew, 0) == [checkpoint]


@pytest.mark.parametrize("changes", [{}, {"save_strategy": "no"}, {"save_total_limit": None}])
def test_missing_weights_are_named(changes: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 4, **changes)
    saving = " ".join(
        f"--{name} {run.settings[name]}"
        for name in ("save_strategy", "save_steps", "save_total_limit")
    )
    named = rf"checkpoint-6 is not there \(.* has checkpoint-4, checkpoint-10\).*{saving}.* of 6"
    with pytest.raises(ReplayError, match=named):
        weights_of(run, 6)
    with pytest.raises(ReplayError, match="has no checkpoint"):
        weights_of(make_run(tmp_path / "checkpoint-4"), 6)


def test_a_checkpoint_in_shards_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2)
    (tmp_path / "checkpoint-2/model.safetensors").unlink()
    with pytest.raises(ReplayError, match="checkpoint-2 holds no model in Hugging Face format"):
        weights_of(run, 2)


# --- samples ---


def test_first_turns() -> None:
    later = replace(SEEDED, sample_id=sample_id(turn=1), seed=1)
    assert first_turns([SEEDED, later], SETTINGS) == [SEEDED]


@pytest.mark.parametrize(
    ("changes", "settings", "named"),
    [
        ({"seed": None}, {}, r"sample 0 has no seed: .*--rollout_seed_mode engine"),
        ({}, {"seed": 7}, r"drawn with seed \d+, and --seed 7 .*--set seed=N"),
        (
            {},
            {"multi_turn_scheduler": "math_tip", "vllm_mode": "server"},
            "--multi_turn_scheduler math_tip with --vllm_mode server: the server led",
        ),
    ],
)
def test_samples_that_cannot_be_drawn_again(
    changes: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ReplayError, match=named):
        first_turns([replace(SEEDED, **changes)], {**SETTINGS, **settings})


def test_a_group_has_the_weights_of_one_step() -> None:
    other = replace(SEEDED, sample_id=sample_id(index=1), weight_version=1)
    with pytest.raises(ReplayError, match=r"steps \[0, 1\]"):
        first_turns([SEEDED, other], SETTINGS)


# --- prompts ---

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>哪个?"}]


def logged(prompt: Mapping[str, Any]) -> Any:
    media = [m for kind in ("images", "videos", "audios") for m in prompt.get(kind) or ()]
    return replace(
        ROW,
        prompt=json.dumps(prompt["messages"], ensure_ascii=False),
        media=[media_name(m) for m in media],
        fingerprint=prompt_hash(prompt),
    )


@pytest.mark.parametrize(
    "media",
    [
        {},
        {"images": [{"bytes": None, "path": "a.png"}]},
        {"images": ["a.png", "b.png"]},
        {"videos": ["v.mp4"], "audios": ["a.wav", "b.wav"]},
        {"images": [{"bytes": None, "path": "数字 七.png"}], "videos": ["v.mp4"]},
    ],
)
def test_a_prompt_that_the_log_holds(media: dict[str, Any]) -> None:
    prompt = {"messages": MESSAGES, **media}
    found = prompt_from_log(logged(prompt))
    assert found is not None
    assert {name: value for name, value in found.items() if value} == prompt


def test_a_prompt_that_the_data_set_holds() -> None:
    """Bytes are logged as a digest; the row has no system message, which ms-swift puts in front."""
    row = {"messages": MESSAGES[1:], "images": [{"bytes": b"png", "path": None}], "solution": "7"}
    other = {**row, "images": [{"bytes": b"gnp", "path": None}]}
    sample = logged({**row, "messages": MESSAGES})
    assert prompt_from_log(sample) is None
    assert prompt_from_rows(sample, [other, row]) == {**row, "messages": MESSAGES}
    answered = [*MESSAGES, {"role": "assistant", "content": "7"}]
    found = prompt_from_rows(sample, [{**row, "messages": answered}])
    assert found == {**row, "messages": MESSAGES}
    assert prompt_from_rows(sample, [other]) is None
    reason = lack_of_prompt(sample, SETTINGS)
    assert f"its media {sample.media[0]} were given as content" in reason
    assert "no row of train.jsonl has this fingerprint" in reason


@pytest.mark.parametrize("prompt", ["Which digit?", "[]", "7", "[7]", "null"])
def test_a_prompt_that_nobody_holds(prompt: str) -> None:
    sample = replace(ROW, prompt=prompt, fingerprint="f" * 32)
    assert prompt_from_log(sample) is None
    assert prompt_from_rows(sample, [{"messages": MESSAGES}]) is None
    assert "tools, boxes" in lack_of_prompt(replace(sample, media=[]), {})


def test_media_that_are_gone_or_changed_are_named(tmp_path: Path) -> None:
    good, text, later = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "v.mp4"
    Image.new("RGB", (4, 4)).save(good)
    text.write_text("text")
    later.touch()
    os.utime(good, (1000, 1000))
    os.utime(later, (3000, 3000))
    pixels = io.BytesIO()
    Image.new("L", (4, 4)).save(pixels, "PNG")
    images = [{"bytes": None, "path": str(good)}, {"bytes": pixels.getvalue(), "path": None}]
    prompt = {"images": images, "videos": [str(later), [str(good)]], "audios": ["https://x/a.wav"]}
    notes = check_media(prompt, since=2000)
    assert len(notes) == 1
    assert notes[0].startswith(repr(str(later)))
    with pytest.raises(ReplayError, match=r"none\.png' does not exist.*no\.mp4' does not exist"):
        check_media({"images": [str(tmp_path / "none.png")], "videos": ["no.mp4"]}, since=0)
    with pytest.raises(ReplayError, match=r"b\.png' is not an image"):
        check_media({"images": [str(text)]}, since=0)


# --- the command, as far as it needs no engine ---


def test_what_is_wrong_is_said_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> str:
        assert main(["replay", str(tmp_path), *argv]) == 1
        output = capfd.readouterr()
        assert output.out == ""
        return output.err

    assert "args.json" in said("--round", "0", "--group", "0")
    (tmp_path / "args.json").write_text(json.dumps(SETTINGS))
    assert "does not exist" in said("--round", "0", "--group", "0")
    write_session(tmp_path, [replace(SEEDED, weight_version=2)])
    assert "holds no group 1 of train round 0.0" in said("--round", "0", "--group", "1")
    assert "no eval rounds" in said("--round", "0", "--group", "0", "--phase", "eval")
    assert "checkpoint-2 is not there" in said("--round", "0.0", "--group", "0")
