"""`diff` finds the first sample, turn or token, and the first update, at which two runs differ.
`compare` pairs runs by seed and prompts by hash, with intervals (V3)."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import open_record
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.diff import (
    Diff,
    Pair,
    compare,
    compare_updates,
    diff,
    find_decoder,
    logprob_gap,
    pair_by_seed,
    read_pair,
)
from tests.rig.record.rows import open_log
from tests.rig.view.runs import add_tokenizer, make_conversations, make_rows, score, write

Place = tuple[int, int]
"""Group and index of a sample."""


def make(
    folder: Path,
    changed: Place | None = None,
    *,
    steps: int = 3,
    run_seed: int | None = None,
    rewards: Sequence[float] | None = None,
    **changes: Any,
) -> Path:
    """Write a run, with other values or another `reward` in one sample of round 1. With `rewards`
    of both groups, the rewards of step n are n + 1 times these."""
    log = open_log(folder)
    reward = changes.pop("reward", None)
    for step in range(steps):
        rows = [replace(row, logprobs=[-0.5, -1.0, -1.5]) for row in make_rows(step)]
        scores = [score(r, rewards and (1 + step) * rewards[r.sample_id.group]) for r in rows]
        for index, row in enumerate(rows):
            if step == 1 and changed == (row.sample_id.group, row.sample_id.index):
                rows[index] = replace(row, **changes)
                scores[index] = score(row, reward)
        write(log, rows, scores)
    if run_seed is not None:
        (folder / "args.json").write_text(json.dumps({"seed": run_seed}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, with a tokenizer."""
    folder = make(tmp_path_factory.mktemp("one") / "run")
    assert find_decoder(folder) is None
    add_tokenizer(folder)
    return folder


def compared(one: Path, other: Path) -> Diff:
    return diff(open_record(one), open_record(other))


def first_difference(one: Path, other: Path) -> str:
    found = compared(one, other).difference
    return found.describe() if found else ""


# --- samples ---

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
    result = compared(one, make(tmp_path, place, **changes))
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
        ({"mask": None}, "turn 2: mask is [true, false] in A and missing in B"),
        ({"token_ids": [5, 7]}, "turn 2: token 1 is id 6 (log-probability -1.000) in A"),
        (None, "turn 3: sample is there in A and missing in B"),
    ],
)
def test_the_turn_at_which_two_conversations_part(
    tmp_path: Path, change: dict[str, Any] | None, expected: str
) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    rows = make_conversations(0)
    write(open_log(a), rows)
    [place] = [i for i, r in enumerate(rows) if (r.sample_id.group, r.sample_id.turn) == (0, 1)]
    if change is None:
        del rows[place + 1]
    else:
        rows[place] = replace(rows[place], **change)
    write(open_log(b), rows)
    where = "train round 0.0, group 0, sample "
    assert first_difference(a, b).startswith(f"{where}1, {expected}")
    assert first_difference(b, a).startswith(f"{where}1, turn ")
    assert compared(a, a).num_samples == 4
    rows[0] = replace(rows[0], seed=7)
    write(open_log(c), rows)
    assert first_difference(a, c).startswith(f"{where}0: seed is ")


def test_rounds_and_samples_that_only_one_run_has(one: Path, tmp_path: Path) -> None:
    shorter = make(tmp_path / "b", steps=2)
    place = "train round 2.0, group 0, sample 0: round is"
    assert first_difference(one, shorter) == f"{place} there in A and missing in B"
    assert first_difference(shorter, one) == f"{place} missing in A and there in B"
    write(open_log(tmp_path / "c"), make_rows(0)[:2])
    expected = "train round 0.0, group 1, sample 0: sample is there in A and missing in B"
    assert first_difference(one, tmp_path / "c") == expected
    write(open_log(tmp_path / "d"), make_rows(5))
    with pytest.raises(ValueError, match="no round in common"):
        compared(one, tmp_path / "d")


def test_infinite_log_probabilities_of_one_sign_do_not_differ() -> None:
    assert logprob_gap([-0.5, -math.inf], [-0.25, -math.inf]) == 0.25
    assert math.isnan(logprob_gap([math.nan, -1.0], [-0.5, -1.0]) or 0.0)


# --- updates ---


def update(folder: Path, *steps: int, **changes: Any) -> Path:
    """Log these steps as ms-swift does, and save weights for each; `changes` apply to the last."""
    logs = []
    for step in steps:
        values = {"loss": 0.1 * step, "grad_norm": 1.0, "learning_rate": 1e-6}
        values |= changes if step == steps[-1] else {}
        times = {"step_time": 0.5, "global_step/max_steps": f"{step}/3"}
        logs += [values | times, {"eval_loss": 1.0, **times}]
        weights = folder / f"checkpoint-{step}/model.safetensors"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_bytes(bytes([step]))
    (folder / "logging.jsonl").write_text("\n".join(map(json.dumps, logs)))
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
    one, other = update(tmp_path / "a", 1, 2, 3), update(tmp_path / "b", 1, 2, **changes)
    assert compare_updates(one, other)[2] == expected
    assert compare_updates(other, update(tmp_path / "c", 1, 2, **changes))[2] is None


def test_weights_that_no_log_tells_of(tmp_path: Path) -> None:
    one, other = update(tmp_path / "a", 1, 2), update(tmp_path / "b", 1, 2, 3)
    for folder in (one, other):
        (folder / "checkpoint-3-merged").mkdir()
    assert compare_updates(one, other) == (2, "checkpoint-2", None)
    expected = (2, None, "the weights differ, checkpoint-2/model.safetensors")
    (other / "checkpoint-2/model.safetensors").write_bytes(b"\0")
    assert compare_updates(one, other) == expected
    (other / "checkpoint-2/model.safetensors").unlink()
    assert compare_updates(one, other) == expected


def test_the_command_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(tmp_path / "a")
    other = make(tmp_path / "b", (1, 1), logprobs=[-0.5, -1.0, -1.25])
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == (
        f"A: {one}\nB: {other}\nEqual: 12 samples (prompts, media, seeds, tokens, rewards and "
        "advantages; log-probabilities within 2.5e-01 nats), 0 logged steps (learning_rate, loss, "
        "grad_norm, kl), and the weights of no checkpoint.\n"
    )
    other = update(make(tmp_path / "c", (1, 1), seed=9), 1, 2, loss=0.5)
    update(one, 1, 2)
    assert main(["diff", str(one), str(one)]) == 0
    printed = capsys.readouterr().out
    assert "\nEqual to the end: 12 samples (" in printed
    assert printed.endswith(", and the weights of checkpoint-2.\n")
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
    update(make(tmp_path / "d"), 1, 2, loss=0.5)  # an update alone differs
    assert main(["diff", str(one), str(tmp_path / "d")]) == 1


# --- compare ---


def pair(one: Sequence[float], other: Sequence[float], num_alone: int = 0) -> Pair:
    """Return a pair of runs with these mean rewards by prompt."""
    means = {str(number): each for number, each in enumerate(zip(one, other, strict=True))}
    return Pair(means, num_alone, (0, 2))


def test_prompts_count_of_one_pair_and_runs_of_several() -> None:
    """Student's t at 97.5%: 4.303 with 2 degrees of freedom, 12.706 with 1."""
    base = [1, 2, 3]
    one = compare({"1": pair(base, [1, 3, 5])})
    assert one.interval == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5), abs=1e-3)
    two = compare({"1": pair(base, [1, 3, 5], num_alone=2), "2": pair(base, [5, 5, 5])})
    assert two.interval == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert (two.num_pairs, two.num_prompts, two.num_alone) == (2, 6, 2)
    assert (two.baseline, two.candidate, two.difference) == (2.0, 4.0, 2.0)
    assert (two.differences, two.steps["2"]) == ({"1": 1.0, "2": 3.0}, (0, 2))
    assert compare({"1": pair([0, 0], [1, 1])}).interval == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"seed 1 have 1 prompts in common.*one data set in one"):
        compare({"1": pair([0], [1])})


def test_runs_are_paired_by_seed_and_prompts_by_their_first_turn(tmp_path: Path) -> None:
    """A conversation's turns are one sample: a prompt's mean is over samples, not over turns."""
    a1, a2, b1, b2, b3 = (tmp_path / name for name in ("a1", "a2", "b1", "b2", "b3"))
    for folder in (a1, a2, b1, b2, b3):
        make(folder, steps=1, run_seed=int(folder.name[1]))
    assert pair_by_seed([a1, a2], [b2, b1]) == {"1": (a1, b1), "2": (a2, b2)}
    assert pair_by_seed([a1], [b3]) == {"1": (a1, b3)}
    assert pair_by_seed([tmp_path], [b3]) == {"unknown": (tmp_path, b3)}
    for other in ([b3, b1], [b1, b1], [b1]):
        with pytest.raises(ValueError, match="expected each seed once on both sides"):
            pair_by_seed([a1, a2], other)
    rows, one, other = make_conversations(0), tmp_path / "one", tmp_path / "other"
    write(open_log(one), rows)
    write(open_log(other), [*rows, *make_rows(0, num_groups=3)[-2:]])
    found = read_pair(open_record(one), open_record(other))
    assert found.means == {f"{0:032x}": (0.0, 0.0), f"{1:032x}": (0.5, 0.5)}
    assert found.num_alone == 1


def test_the_command_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The common steps of runs of different lengths are compared: rewards rise equally in both, and
    the longer run does not count as better."""
    runs = {"a": (3, [0, 1], 2), "b": (4, [0, 1], 2), "c": (3, [1, 2], 2), "d": (4, [2, 3], 9)}
    a, b, c, d = (
        str(make(tmp_path / name, steps=steps, run_seed=seed, rewards=rewards))
        for name, (seed, rewards, steps) in runs.items()
    )
    one_pair = ["compare", "--baseline", a, "--candidate", c]
    assert main([*one_pair, "--json", "--steps", "1:1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["baseline"], result["candidate"]) == (1.0, 3.0)
    assert (result["interval"], result["differences"]) == ([2.0, 2.0], {"3": 2.0})
    assert main([*one_pair, "--reward", "Format"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 pair(s) of runs, 2 prompts",
        "  baseline      1.0000",
        "  candidate     1.0000",
        "  difference   +0.0000  [+0.0000, +0.0000] (95%)",
        "  seed 3       +0.0000  in the steps 0 to 1, which both runs have",
        "One pair says nothing about other seeds.",
    ]
    assert main(["compare", "--baseline", a, b, "--candidate", d, c]) == 0
    assert "  seed 4       +3.0000  in the steps 0 to 1" in capsys.readouterr().out
    for argv, expected in (
        (["--reward", "Acuracy"], f"--reward 'Acuracy': {a} has Accuracy, Format"),
        (["--phase", "eval"], "expected common scored eval steps "),
        (["--steps", "7:9"], f"{c} has the steps 0 to 1."),
    ):
        assert main([*one_pair, *argv]) == 2
        assert expected in capsys.readouterr().err
