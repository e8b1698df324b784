"""`swift-grpo-ext audit`: files as TRL, verl, slime and ms-swift write them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_grpo_ext.tools.audit import Audit, audit, read_dump
from swift_grpo_ext.tools.cli import main
from tests.tools.view.runs import Writer, make_rows

GROUP_SIZE, NUM_GROUPS, NUM_STEPS, VOCABULARY = 4, 6, 3, 8


def draw(kind: str, *, num_tokens: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each sample, of uniform tokens; every step has the same prompts.

    `shared`: samples 0 and 2 of a group, and 1 and 3, have one noise. `one noise`: all samples of a
    group. `frozen`: every step has the noise of the first. `collapse`: two answers are left.
    """
    rng = np.random.default_rng(seed)
    steps: list[np.ndarray] = []
    for _ in range(NUM_STEPS):
        tokens = rng.integers(0, VOCABULARY, (NUM_GROUPS, GROUP_SIZE, num_tokens))
        if kind == "shared":
            tokens[:, 2:] = tokens[:, :2]
        elif kind == "one noise":
            tokens[:] = tokens[:, :1]
        elif kind == "collapse":
            tokens[:] = rng.integers(0, 2, (NUM_GROUPS, GROUP_SIZE, 1))
        steps.append(steps[0] if kind == "frozen" and steps else tokens)
    return [
        {
            "step": step,
            "group": group,
            "prompt": f"Question {group}?",
            "tokens": tokens.tolist(),
            "text": " ".join(map(str, tokens)),
        }
        for step, groups in enumerate(steps)
        for group, samples in enumerate(groups)
        for tokens in samples
    ]


def write(framework: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    """Write a dump as a framework does."""
    if framework == "trl":  # conversations are lists of messages
        lines = [
            {
                "step": row["step"],
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "completion": [{"role": "assistant", "content": row["text"]}],
            }
            for row in rows
        ]
        pq.write_table(pa.Table.from_pylist(lines), folder / "completions.parquet")
        return folder / "completions.parquet"
    if framework == "verl":
        lines = [{"input": r["prompt"], "output": r["text"], "step": r["step"]} for r in rows]
    elif framework == "slime":  # tokens begin with the prompt's, log-probabilities do not
        lines = [
            {
                "rollout_id": row["step"],
                "group_index": row["group"],
                "prompt": row["prompt"],
                "tokens": [90, 91, 92, *row["tokens"]],
                "response": row["text"],
                "rollout_log_probs": [-math.log(VOCABULARY)] * len(row["tokens"]),
            }
            for row in rows
        ]
    else:  # ms-swift's lines are steps, with a list for each column
        table = pd.DataFrame(rows).rename(columns={"text": "completion"})
        columns = ["step", "prompt", "completion"]
        lines = [of_step.to_dict("list") for _, of_step in table[columns].groupby("step")]
    return write_lines(folder / "dump.jsonl", lines)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


IN_18_GROUPS = "samples 0 and 2 of their groups are equal in 18 groups, and 6.0 were expected"
ALL_FROZEN = (
    "48 of 48 samples are those that their prompt had at the same position the time before "
    "(frozen noise)"
)
BITS_36 = "step 0 (counted from 0): samples {} of group 0 begin with the same 12 tokens, 36 bits"


@pytest.mark.parametrize(
    ("framework", "kind", "verdict", "num_copied", "log10_p", "evidence"),
    [
        # 6 pairs of positions and 2 tests: log10(3 ** -18 * 6 * 2).
        ("trl", "shared", "shared noise", 18, -7.509, [IN_18_GROUPS]),
        ("verl", "frozen", "shared noise", 0, -6.326, [ALL_FROZEN]),
        ("verl", "independent", "healthy", 0, 0.0, []),
        # Two possible answers are no surprise to a policy that has collapsed; the log-probabilities
        # of slime's file say that these tokens were improbable.
        ("verl", "collapse", "collapse", 18, 0.0, []),
        ("verl", "one noise", "collapse", 18, 0.0, []),
        ("slime", "independent", "healthy", 0, 0.0, []),
        ("slime", "shared", "shared noise", 18, -98.290, [BITS_36.format("1, 3")]),
        ("slime", "one noise", "shared noise", 18, -163.733, [BITS_36.format("0, 1, 2, 3")]),
        ("ms-swift", "shared", "shared noise", 18, -7.810, [IN_18_GROUPS]),  # one test
        ("ms-swift", "frozen", "healthy", 0, 0.0, []),  # its file repeats rows by itself
    ],
)
def test_every_format(
    framework: str, kind: str, verdict: Any, num_copied: int, log10_p: float, evidence: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    steps, repeats = read_dump([write(framework, draw(kind), tmp_path)], {})
    found = audit(steps, repeats=repeats)
    assert found == Audit(
        verdict=verdict,
        num_steps=3,
        num_groups=18,
        num_samples=72,
        num_with_logprobs=72 if framework == "slime" else 0,
        num_groups_with_copies=num_copied,
        log10_p=pytest.approx(log10_p, abs=1e-3),
        evidence=found.evidence,
    )
    assert found.evidence[:1] == evidence


def test_columns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"i": r["step"], "q": r["prompt"], "ids": r["tokens"], "lp": [-2.1] * len(r["tokens"])}
        for r in draw("frozen")
    ]
    argv = ["--step", "i", "--prompt", "q", "--token-ids", "ids", "--logprobs", "lp", "--json"]
    assert main(["audit", str(write_lines(tmp_path / "rows.jsonl", lines)), *argv]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["num_steps"], found["num_groups"], found["num_with_logprobs"]) == (3, 18, 72)
    assert found["evidence"][0].endswith(", 36 bits, as step 0 had them (frozen noise)")


@pytest.mark.parametrize(
    ("name", "content", "argv", "error"),
    [
        ("a.jsonl", '{"prompt": "a"}', (), "No column of ['prompt'] holds completions"),
        ("a.jsonl", '{"output": "a"}', (), "No column of ['output'] holds prompts"),
        ("a.jsonl", '{"a": 1}', ("--token-ids", "q"), "--token-ids q: expected one of ['a']"),
        ("a.pt", "", (), "a.pt: expected an existing file, .parquet or .jsonl"),
        ("a.parquet", "PAR1 and no more", (), "a.parquet cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str, content: str, argv: Any, error: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / name).write_text(content)
    assert main(["audit", str(tmp_path / name), *argv]) == 1
    assert error in capsys.readouterr().err


def test_this_projects_record(tmp_path: Path) -> None:
    """Phase, step and number name a round: evaluations at a step are no part of its training."""
    evaluated = [
        replace(row, sample_id=replace(row.sample_id, phase="eval")) for row in make_rows(0)
    ]
    writer = Writer(tmp_path)
    for of_round in (evaluated, make_rows(0), make_rows(1)):
        writer.write(of_round, scored=False)
    steps, repeats = read_dump(sorted((tmp_path / "samples").glob("*.parquet")), {})
    assert [[s.token_ids.tolist() for s in step] for step in steps] == [
        [[7, 0, 0], [7, 0, 1], [7, 1, 0], [7, 1, 1]]
    ] * 3
    assert repeats is False


def test_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write("ms-swift", draw("collapse"), tmp_path)
    path.write_text('{"prompt": \n' + path.read_text())
    assert main(["audit", str(path)]) == 0
    assert str(path) in caplog.messages[0]  # of the damaged line, which is left out
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "72 samples, 18 groups, 3 steps; 0 samples with log-probabilities",
        "groups with equal completions: 18",
        "p-value of independent noise: 1",
        "verdict: collapse",
        "ms-swift repeats rows in such files: steps are not compared.",
    ]


def test_healthy_files_raise_no_alarm(tmp_path: Path) -> None:
    """P-values below 0.05 are no more frequent than that, with copies in most groups."""
    log10_ps = []
    for seed in range(60):
        path = write("verl", draw("independent", num_tokens=1, seed=seed), tmp_path)
        steps, _ = read_dump([path], {})
        result = audit(steps)
        assert result.num_groups_with_copies > 0
        log10_ps.append(result.log10_p)
    assert sum(p < math.log10(0.05) for p in log10_ps) <= 3
