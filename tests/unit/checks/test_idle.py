"""Rows that no batch would have are counted before the start."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.checks.rules import rules_of_data
from tests.rig.arguments import command_line_arguments, training_arguments


def arguments(**changes: Any) -> Any:
    """Arguments of 8 prompts in a training batch, and 4 in one of evaluation."""
    of_training: dict[str, Any] = {"generation_batch_size": 16, "per_device_eval_batch_size": 8}
    of_training |= {name: changes.pop(name) for name in ("eval_strategy",) if name in changes}
    args = command_line_arguments("rlhf", **{"num_generations": 2, **changes})
    args.training_args = training_arguments(**of_training)
    return args


@pytest.mark.parametrize(
    ("num_rows", "num_eval", "changes", "expected"),
    [
        (16, 8, {"eval_strategy": "steps"}, []),
        (17, None, {}, []),
        (16, 5, {"eval_strategy": "steps"}, ["warning: --split_dataset_ratio: 1 of 5 rows are"]),
        (
            *(16, 5, {"eval_strategy": "steps", "val_dataset": ["v.jsonl"]}),
            ["warning: --val_dataset: 1 of 5 rows are left out of each evaluation: its batches"],
        ),
        (16, 6, {"eval_strategy": "steps", "num_generations_eval": 1}, ["error: "]),
        (
            7,
            None,
            {"dataset": ["d.jsonl"]},
            ["error: --dataset d.jsonl: 7 rows are fewer than the 8"],
        ),
        (16, 8, {"eval_strategy": "steps", "num_generations_eval": 1}, []),
        (16, 3, {"eval_strategy": "epoch"}, ["error: --split_dataset_ratio: 3 rows make no batch"]),
        (16, 5, {"eval_strategy": "no"}, []),
        (
            *(16, 5, {"eval_strategy": "no", "val_dataset": ["v.jsonl"]}),
            ["warning: --val_dataset v.jsonl: is never evaluated"],
        ),
    ],
)
def test_rows(
    num_rows: int, num_eval: int | None, changes: dict[str, Any], expected: list[str]
) -> None:
    evaluation = None if num_eval is None else range(num_eval)
    found = rules_of_data(arguments(**changes), range(num_rows), evaluation)
    texts = [f"{f.level}: {f.sentence}" for f in found]
    assert len(texts) == len(expected), texts
    assert all(text.startswith(begin) for text, begin in zip(texts, expected, strict=True)), texts
