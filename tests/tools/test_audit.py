"""`swift-grpo-ext audit`: files as TRL, verl, slime and ms-swift write them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.tools.audit import _log2_fixed, audit, read_dump
from swift_grpo_ext.tools.cli import main
from tests.tools.view.runs import Writer, make_rows

GROUP_SIZE, NUM_GROUPS, NUM_STEPS, VOCABULARY = 4, 6, 3, 8
Step = list[list[list[int]]]
"""[groups][samples][tokens]"""


def draw(kind: str, *, num_tokens: int = 12, seed: int = 0) -> list[Step]:
    """Uniform tokens; every step has the same prompts.

    `shared`: samples 0 and 2 of a group, and 1 and 3, have one noise. `one noise`: all samples of a
    group. `frozen`: every step has the noise of the first. `collapse`: two answers are left.
    """
    rng = np.random.default_rng(seed)
    steps: list[Step] = []
    for _ in range(NUM_STEPS):
        tokens = rng.integers(0, VOCABULARY, (NUM_GROUPS, GROUP_SIZE, num_tokens))
        if kind == "shared":
            tokens[:, 2:] = tokens[:, :2]
        elif kind == "one noise":
            tokens[:] = tokens[:, :1]
        elif kind == "collapse":
            tokens[:] = rng.integers(0, 2, (NUM_GROUPS, GROUP_SIZE, 1))
        steps.append(steps[0] if kind == "frozen" and steps else tokens.tolist())
    return steps


def rows(steps: list[Step]) -> list[dict[str, Any]]:
    return [
        {"step": step, "group": group, "prompt": f"Question {group}?", "tokens": tokens}
        for step, groups in enumerate(steps)
        for group, samples in enumerate(groups)
        for tokens in samples
    ]


def text(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def write_trl(steps: list[Step], folder: Path) -> list[Path]:
    """`completions/completions_00001.parquet`, one a step; conversations are lists of messages."""
    paths = []
    for step in range(len(steps)):
        table = [
            {
                "step": step,
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "completion": [{"role": "assistant", "content": text(row["tokens"])}],
            }
            for row in rows(steps)
            if row["step"] == step
        ]
        paths.append(folder / f"completions_{step:05d}.parquet")
        pq.write_table(pa.Table.from_pylist(table), paths[-1])
    return paths


def write_verl(steps: list[Step], folder: Path) -> list[Path]:
    """`{step}.jsonl` of `trainer.rollout_data_dir`."""
    paths = []
    for step in range(len(steps)):
        lines = [
            {"input": row["prompt"], "output": text(row["tokens"]), "score": 0.0, "step": step}
            for row in rows(steps)
            if row["step"] == step
        ]
        paths.append(write_lines(folder / f"{step}.jsonl", lines))
    return paths


def write_slime(steps: list[Step], folder: Path) -> list[Path]:
    """Its samples as JSON lines: tokens begin with the prompt's, log-probabilities do not."""
    surprisal = math.log(VOCABULARY)
    lines = [
        {
            "rollout_id": row["step"],
            "group_index": row["group"],
            "prompt": row["prompt"],
            "tokens": [90, 91, 92, *row["tokens"]],
            "response": text(row["tokens"]),
            "response_length": len(row["tokens"]),
            "rollout_log_probs": [-surprisal] * len(row["tokens"]),
        }
        for row in rows(steps)
    ]
    return [write_lines(folder / "samples.jsonl", lines)]


def write_swift(steps: list[Step], folder: Path) -> list[Path]:
    """`completions.jsonl`: a line a step, with a list for each column."""
    lines = []
    for step in range(len(steps)):
        of_step = [row for row in rows(steps) if row["step"] == step]
        lines.append(
            {
                "step": [str(step)] * len(of_step),
                "prompt": [row["prompt"] for row in of_step],
                "completion": [text(row["tokens"]) for row in of_step],
                "advantages": [0.0] * len(of_step),
            }
        )
    return [write_lines(folder / "completions.jsonl", lines)]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


WRITERS = {"trl": write_trl, "verl": write_verl, "slime": write_slime, "ms-swift": write_swift}


def audited(
    paths: list[Path], capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, dict[str, Any]]:
    status = main(["audit", *map(str, paths), "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("framework", "kind", "verdict"),
    [
        *((framework, "shared", "shared noise") for framework in WRITERS),
        *((framework, "independent", "healthy") for framework in WRITERS),
        ("trl", "frozen", "shared noise"),
        ("verl", "frozen", "shared noise"),
        ("ms-swift", "frozen", "healthy"),  # its file repeats rows by itself
        # Two possible answers are no surprise to a policy that has collapsed; the log-probabilities
        # of slime's file say that these tokens were improbable.
        ("verl", "collapse", "collapse"),
        ("verl", "one noise", "collapse"),
        ("slime", "one noise", "shared noise"),
        ("slime", "collapse", "shared noise"),
    ],
)
def test_every_format(
    framework: str, kind: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = audited(WRITERS[framework](draw(kind), tmp_path), capsys)
    assert found["verdict"] == verdict
    assert status == (verdict == "shared noise")
    assert found["num_samples"] == GROUP_SIZE * NUM_GROUPS * NUM_STEPS
    assert (found["num_groups"], found["num_steps"]) == (NUM_GROUPS * NUM_STEPS, NUM_STEPS)
    assert found["num_with_logprobs"] == (found["num_samples"] if framework == "slime" else 0)
    num_copied = 0 if kind in ("independent", "frozen") else NUM_GROUPS * NUM_STEPS
    assert found["num_groups_with_copies"] == num_copied
    assert (found["log10_p"] < -6) == (verdict == "shared noise")
    assert bool(found["evidence"]) == (verdict == "shared noise")


def test_evidence_names_positions_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = audited(write_verl(draw("shared"), tmp_path), capsys)
    num = NUM_GROUPS * NUM_STEPS
    assert found["evidence"][0].startswith("samples 0 and 2 of their groups are equal in ")
    assert f"equal in {num} groups, and {num / 3:.1f} were expected" in found["evidence"][0]
    _, found = audited(write_verl(draw("frozen"), tmp_path), capsys)
    repeated = GROUP_SIZE * NUM_GROUPS * (NUM_STEPS - 1)
    assert found["evidence"] == [
        f"{repeated} of {repeated} samples are those that their prompt had at the same position "
        "the time before (frozen noise)"
    ]
    _, found = audited(write_slime(draw("frozen"), tmp_path), capsys)
    assert "as step 0 had them (frozen noise)" in found["evidence"][0]


def test_columns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"i": r["step"], "q": r["prompt"], "ids": r["tokens"], "lp": [-2.1] * len(r["tokens"])}
        for r in rows(draw("one noise"))
    ]
    path = write_lines(tmp_path / "rows.jsonl", lines)
    argv = ["--step", "i", "--prompt", "q", "--token-ids", "ids", "--logprobs", "lp"]
    status, found = audited([path], capsys, *argv)
    assert (status, found["verdict"], found["num_steps"]) == (1, "shared noise", NUM_STEPS)
    assert found["num_with_logprobs"] == found["num_samples"]


@pytest.mark.parametrize(
    ("name", "content", "argv", "error"),
    [
        ("a.jsonl", '{"prompt": "a"}', [], "No column of ['prompt'] holds completions"),
        ("a.jsonl", '{"output": "a"}', [], "No column of ['output'] holds prompts"),
        ("a.jsonl", '{"output": "a"}', ["--prompt", "q"], "--prompt q: expected one of ['output']"),
        ("a.pt", "", [], "a.pt: expected an existing file, .parquet or .jsonl"),
        ("a.parquet", "PAR1 and no more", [], "a.parquet cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str,
    content: str,
    argv: list[str],
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["audit", str(tmp_path / name), *argv]) == 1
    assert error in capsys.readouterr().err


def test_damaged_lines_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = write_slime(draw("independent"), tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"prompt": \n', *lines[1:]]))
    status, found = audited([path], capsys)
    assert (status, found["num_samples"]) == (0, GROUP_SIZE * NUM_GROUPS * NUM_STEPS)
    assert str(path) in caplog.messages[0]


def test_this_projects_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Phase, step and number name a round: evaluations at a step are no part of its training."""
    evaluated = [
        replace(row, sample_id=replace(row.sample_id, phase="eval")) for row in make_rows(0)
    ]
    writer = Writer(tmp_path)
    for of_round in (evaluated, make_rows(0), make_rows(1)):
        writer.write(of_round, scored=False)
    _, found = audited(sorted((tmp_path / "samples").glob("*.parquet")), capsys)
    assert (found["num_steps"], found["num_groups"], found["num_with_logprobs"]) == (3, 6, 12)


def test_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = write_swift(draw("collapse"), tmp_path)
    assert main(["audit", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "72 samples, 18 groups, 3 steps; 0 samples with log-probabilities" in printed
    assert "verdict: collapse" in printed
    assert "steps are not compared" in printed
    assert "cannot be told from collapse" in printed


def test_healthy_files_raise_no_alarm(tmp_path: Path) -> None:
    """P-values below 0.05 are no more frequent than that, with copies in most groups."""
    log10_ps = []
    for seed in range(60):
        [path] = write_slime(draw("independent", num_tokens=1, seed=seed), tmp_path)
        steps, repeats = read_dump([path], {})
        without_logprobs = [[replace(s, logprobs=None) for s in step] for step in steps]
        result = audit(without_logprobs, repeats=repeats)
        assert result.num_groups_with_copies > 0
        log10_ps.append(result.log10_p)
    assert sum(p < math.log10(0.05) for p in log10_ps) <= 3


@pytest.mark.parametrize(("size", "common"), [(4, 4), (4, 2), (5, 1), (3, 0)])
def test_the_bound_of_fixed_positions(size: int, common: int) -> None:
    """It is never below the share of orders that keep so many of the common items."""
    kept = [sum(order[i] == i for i in range(common)) for order in permutations(range(size))]
    for fixed in range(common + 1):
        exact = sum(count >= fixed for count in kept) / len(kept)
        assert exact <= 2 ** _log2_fixed(size, common, fixed) * (1 + 1e-9)
    assert 2 ** _log2_fixed(4, 4, 4) == pytest.approx(1 / 24)
