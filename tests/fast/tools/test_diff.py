"""`diff` finds the first sample, turn or token, and the first update, at which two runs differ."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import open_record
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import Diff, compare_updates, diff, find_decoder, logprob_gap
from tests.rig.view.runs import Writer, add_tokenizer, make_conversations, make_rows, score

Place = tuple[int, int]
"""Group and index of a sample."""


def write(
    folder: Path,
    changed: Place | None = None,
    *,
    steps: int = 3,
    reward: float | None = None,
    **changes: Any,
) -> Path:
    """Write a run with other values, or another reward, in one sample of round 1."""
    writer = Writer(folder)
    for step in range(steps):
        rows = [replace(row, logprobs=[-0.5, -1.0, -1.5]) for row in make_rows(step)]
        scores = [score(row) for row in rows]
        for index, row in enumerate(rows):
            if step == 1 and changed == (row.sample_id.group, row.sample_id.index):
                rows[index] = replace(row, **changes)
                scores[index] = score(row, reward)
        writer.write(rows, scored=False)
        writer.append_scores(scores)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, with a tokenizer."""
    folder = write(tmp_path_factory.mktemp("one") / "run")
    assert find_decoder(folder) is None
    add_tokenizer(folder)
    return folder


def compared(one: Path, other: Path) -> Diff:
    return diff(open_record(one), open_record(other))


def first_difference(one: Path, other: Path) -> str:
    found = compared(one, other).difference
    assert found is not None
    return found.describe()


OTHER = '[{"role": "user", "content": "<image>Other"}]'
NEAR = [-0.5, -1.25, -2.0]
FIRST = 'token 2 is id 1 ("w1", log-probability -1.500) in A and '


@pytest.mark.parametrize(
    ("place", "changes", "expected"),
    [
        ((1, 0), {"prompt": OTHER}, 'prompt is … ...Question 1?"}] in A and … ...Other"}] in B'),
        ((1, 0), {"media": []}, 'media is ["images/1.png"] in A and [] in B'),
        ((1, 0), {"fingerprint": "f"}, "the hash of prompt, tools, boxes and the content of media"),
        # Only the column that causes the other differences is named.
        ((0, 1), {"seed": 7, "token_ids": [7, 0, 0]}, f"seed is {2**62 + 101} in A and 7 in B"),
        ((0, 1), {"weight_version": 0}, "weight_version is 1 in A and 0 in B"),
        ((0, 0), {"finish_reason": "length"}, 'finish_reason is "stop" in A and "length" in B'),
        ((0, 0), {"stop_reason": "7"}, 'stop_reason is missing in A and "7" in B'),
        ((0, 0), {"text": "b" * 90}, f'text is "g0 i0 s1" in A and "{"b" * 79}… in B'),
        ((0, 0), {"reward": 0.75}, "reward is 0.0 in A and 0.75 in B"),
        # Tokens. The gap is over those before.
        ((1, 1), {"token_ids": [7, 1, 9], "logprobs": NEAR}, f'{FIRST}id 9 ("", ... -2.000) in B'),
        ((1, 1), {"token_ids": [7, 1], "logprobs": NEAR[:2]}, f"{FIRST}missing in B"),
        ((1, 1), {"token_ids": [9], "logprobs": None}, 'token 0 is id 7 ("w7", ...id 9 ("") in B'),
    ],
)
def test_the_first_value_that_differs(
    one: Path, tmp_path: Path, place: Place, changes: dict[str, Any], expected: str
) -> None:
    result = compared(one, write(tmp_path, place, **changes))
    assert result.difference is not None
    decoders = find_decoder(one), find_decoder(one)
    sentence = result.difference.describe(decoders=decoders)
    beginning, *parts = expected.split("...")
    where = f"train round 1.0, group {place[0]}, sample {place[1]}"
    assert sentence.startswith(f"{where}: {beginning}")
    assert all(part in sentence for part in parts), sentence
    assert result.num_samples == 4 + 2 * place[0] + place[1]
    assert result.logprob_gap == (0.25 if changes.get("logprobs") else 0.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text": "b"}, 'turn 2: text is "第二轮" in A and "b" in B'),
        ({"mask": None}, "turn 2: mask is [true, false] in A and missing in B"),
        ({"token_ids": [5, 7]}, "turn 2: token 1 is id 6 (log-probability -1.000) in A"),
        ({"prompt": "[]"}, 'turn 2: prompt is [{"role": "tool", "content": "<image>看这里 '),
        (None, "turn 3: sample is there in A and missing in B"),
    ],
)
def test_the_turn_at_which_two_conversations_part(
    tmp_path: Path, change: dict[str, Any] | None, expected: str
) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    rows = make_conversations(0)
    Writer(a).write(rows)
    [place] = [i for i, r in enumerate(rows) if (r.sample_id.group, r.sample_id.turn) == (0, 1)]
    if change is None:
        del rows[place + 1]
    else:
        rows[place] = replace(rows[place], **change)
    Writer(b).write(rows)
    where = "train round 0.0, group 0, sample 1, "
    assert first_difference(a, b).startswith(f"{where}{expected}")
    assert first_difference(b, a).startswith(f"{where}turn ")
    assert compared(a, a).num_samples == 4
    rows[0] = replace(rows[0], seed=7)
    Writer(c).write(rows)
    assert first_difference(a, c).startswith("train round 0.0, group 0, sample 0: seed is ")


def test_infinite_log_probabilities_of_one_sign_do_not_differ() -> None:
    assert logprob_gap([-0.5, -math.inf], [-0.25, -math.inf]) == 0.25
    assert math.isnan(logprob_gap([math.nan, -1.0], [-0.5, -1.0]) or 0.0)


def test_rounds_and_samples_that_only_one_run_has(one: Path, tmp_path: Path) -> None:
    shorter = write(tmp_path / "b", steps=2)
    place = "train round 2.0, group 0, sample 0: round is"
    assert first_difference(one, shorter) == f"{place} there in A and missing in B"
    assert first_difference(shorter, one) == f"{place} missing in A and there in B"
    Writer(tmp_path / "c").write(make_rows(0)[:2])
    expected = "train round 0.0, group 1, sample 0: sample is there in A and missing in B"
    assert first_difference(one, tmp_path / "c") == expected
    Writer(tmp_path / "d").write(make_rows(5))
    with pytest.raises(ValueError, match="no round in common"):
        compared(one, tmp_path / "d")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a")
    other = write(tmp_path / "b", (1, 1), logprobs=[-0.5, -1.0, -1.25])
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == (
        f"A: {one}\nB: {other}\nEqual: 12 samples (prompts, media, seeds, tokens, rewards and "
        "advantages; log-probabilities within 2.5e-01 nats), 0 logged steps (learning_rate, loss, "
        "grad_norm, kl), and the weights of no checkpoint.\n"
    )
    other = write(tmp_path / "c", (1, 1), seed=9)
    log(one, 1, 2)
    assert main(["diff", str(one), str(one)]) == 0
    printed = capsys.readouterr().out
    assert "\nEqual to the end: 12 samples (" in printed
    assert ", 2 logged steps (" in printed
    assert printed.endswith(", and the weights of checkpoint-2.\n")
    log(other, 1, 2, loss=0.5)
    (one / "args.json").write_text('{"seed": 42, "output_dir": "a", "top_k": 5}')
    (other / "args.json").write_text('{"seed": 9, "output_dir": "b", "top_k": 5}')
    assert main(["diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines()[3:] == [
        "First difference: train round 1.0, group 1, sample 1: seed is "
        f"{2**62 + 111} in A and 9 in B.",
        "First update that differs: step 2: loss is 0.2 in A and 0.5 in B.",
        "Settings that differ, in A and B:",
        "  --seed: 42 and 9",
    ]
    assert main(["diff", str(one), str(other), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"] == {"seed": [42, 9]}
    assert printed["difference"]["values"] == [2**62 + 111, 9]
    log(write(tmp_path / "d"), 1, 2, loss=0.5)  # an update alone differs
    assert main(["diff", str(one), str(tmp_path / "d")]) == 1
    assert main(["diff", str(one), str(tmp_path / "none")]) == 2
    assert f"{tmp_path}/none holds no run" in capsys.readouterr().err


# --- updates ---


def log(folder: Path, *steps: int, **changes: Any) -> Path:
    """Log these steps as ms-swift does, and save weights for each; `changes` apply to the last."""
    folder.mkdir(exist_ok=True)
    with (folder / "logging.jsonl").open("a", encoding="utf-8") as f:
        for step in steps:
            values = {"loss": 0.1 * step, "grad_norm": 1.0, "learning_rate": 1e-6}
            values |= changes if step == steps[-1] else {}
            times = {"step_time": 0.5, "global_step/max_steps": f"{step}/3"}
            f.write(json.dumps(values | times) + "\n")
            f.write(json.dumps({"eval_loss": 1.0, **times}) + "\n")
            checkpoint = folder / f"checkpoint-{step}"
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / "model.safetensors").write_bytes(bytes([step]))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"grad_norm": 1.0000001}, "step 2: grad_norm is 1.0 in A and 1.0000001 in B"),
        ({"loss": 0.3, "grad_norm": 2.0}, "step 2: loss is 0.2 in A and 0.3 in B"),
        ({"kl": 0.5}, "step 2: kl is missing in A and 0.5 in B"),
        ({"grad_norm": math.nan}, "step 2: grad_norm is 1.0 in A and nan in B"),
        ({"step_time": 9.0}, None),
    ],
)
def test_the_first_value_of_an_update_that_differs(
    tmp_path: Path, changes: dict[str, Any], expected: str | None
) -> None:
    one, other = log(tmp_path / "a", 1, 2, 3), log(tmp_path / "b", 1, 2, **changes)
    *_, found = compare_updates(one, other)
    assert found == expected
    *_, found = compare_updates(other, log(tmp_path / "c", 1, 2, **changes))
    assert found is None


def test_weights_that_no_log_tells_of(tmp_path: Path) -> None:
    one, other = log(tmp_path / "a", 1, 2), log(tmp_path / "b", 1, 2, 3)
    for folder in (one, other):
        (folder / "checkpoint-3-merged").mkdir()
    assert compare_updates(one, other) == (2, "checkpoint-2", None)
    expected = (2, None, "the weights differ, checkpoint-2/model.safetensors")
    (other / "checkpoint-2/model.safetensors").write_bytes(b"\0")
    assert compare_updates(one, other) == expected
    (other / "checkpoint-2/model.safetensors").unlink()
    assert compare_updates(one, other) == expected
