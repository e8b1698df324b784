"""Samples for tests of the diversity statistics, and runs with the monitor's rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.record.tables import DIVERSITY, SAMPLE_ID_COLUMNS, DiversityRow, SampleRow
from swift_grpo_ext.tools.runs import find_run
from tests.rig.processes import PLUGIN, Finished, swift
from tests.rig.record.rows import ROW, open_log, read_diversity, sample_id

LN2 = float(np.log(2))
LONG = list(range(60))
"""At 1 bit a token, an improbable completion."""


def sample(
    token_ids: Sequence[int],
    *,
    bits: float | Sequence[float] | None = 1.0,
    prompt: str = "prompt",
    **changes: Any,
) -> SampleRow:
    """Make the row of a completion; `bits`: the surprisal of each token, or of all alike. `changes`
    are parts of its name, or columns."""
    name = sample_id(**{part: changes.pop(part) for part in SAMPLE_ID_COLUMNS if part in changes})
    made = {"sample_id": name, "weight_version": name.step, "fingerprint": prompt, "seed": None}
    made |= {"token_ids": list(token_ids), "logprobs": None, "text": "", "media": []}
    made |= {"prompt": '[{"role": "user", "content": "<image>Which digit?"}]'}
    if bits is not None:
        nats = np.broadcast_to(LN2 * np.asarray(bits, float), len(token_ids))
        made |= {"logprobs": (-nats).tolist()}
    return replace(ROW, **made | changes)


def group_of(*completions: Sequence[int], **kwargs: Any) -> list[SampleRow]:
    return [sample(ids, index=i, **kwargs) for i, ids in enumerate(completions)]


def groups_of(*groups: Sequence[Sequence[int]], **kwargs: Any) -> list[list[SampleRow]]:
    """Make a round of groups, each with a prompt of its own."""
    return [group_of(*ids, group=g, prompt=f"{g}", **kwargs) for g, ids in enumerate(groups)]


def make_run(folder: Path, rounds: Sequence[list[SampleRow]]) -> list[DiversityRow]:
    """Write a sample log and the monitor's rows; return these rows."""
    analyzer = RoundAnalyzer(is_greedy=False, seed_mode="engine")
    log = open_log(folder)
    for samples in rounds:
        log.append(analyzer.analyze(samples), DIVERSITY)
        log.append(samples)
    log.flush()
    return read_diversity(folder)


def frozen_rounds() -> list[list[SampleRow]]:
    """Return three rounds; round 2 has the tokens of round 0."""
    ids = [[i * 100 + k for k in range(40)] for i in range(4)]
    others = [[5000 + i * 100 + k for k in range(40)] for i in range(4)]
    return [
        group_of(*completions, step=step, text="<script>alert('数字')</script>" + "x" * 3000)
        for step, completions in enumerate([ids, others, ids])
    ]


def train_watched(
    assets: Path, rows: Path, folder: Path, *argv: str, ranks: int = 1
) -> tuple[Finished, Path]:
    """Train on digits with the monitor; return the end, and ms-swift's version of the folder."""
    plugins = (PLUGIN, "examples/digits/rewards.py", "examples/diversity/favour.py")
    command = [
        *("rlhf", "examples/digits/grpo.yaml", "--external_plugins", *plugins),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(rows)),
        *("--output_dir", str(folder / "run"), "--callbacks", "diversity", *argv),
    ]
    env = {"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}
    finished = swift(*command, log=folder / "log", env=env).check()
    return finished, find_run(folder / "run")
