"""Flags of other releases lead to flags that there are."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from swift_grpo_ext.checks.former_flags import FORMER, flag_hint
from swift_grpo_ext.command_line import RLHFExtArguments, RolloutExtArguments
from tests.newest import is_newest

TRAINING = {f.name for f in fields(RLHFExtArguments)}
SERVING = {f.name for f in fields(RolloutExtArguments)}


@pytest.mark.skipif(not is_newest("swift"), reason="the table is that of ms-swift 4.6")
def test_each_leads_to_a_flag_and_is_none() -> None:
    for former, new in FORMER.items():
        assert former not in TRAINING | SERVING
        named = [new] if " " not in new else re.findall(r"--(\w+)", new)
        assert TRAINING.issuperset(named), former


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--train_type", "ms-swift 4 calls it --tuner_type"),
        ("train_type", "ms-swift 4 calls it tuner_type"),
        ("--lora-modules=here", "ms-swift 4 calls it --adapters"),
        ("--tensor_parallel_size", "ms-swift 4 calls it --vllm_tensor_parallel_size"),
        ("--mask_truncated_completions", "ms-swift 4 calls it --overlong_filter"),
        ("--num_generation", "did you mean --num_generations?"),
        ("--zzzz", ""),
        ("", ""),
    ],
)
def test_what_to_write_instead(name: str, expected: str) -> None:
    dashes = "--" if name.startswith("--") else ""
    assert flag_hint(name, [dashes + known for known in sorted(TRAINING)]) == expected


def test_a_server_is_not_led_to_flags_of_trainings() -> None:
    known = [f"--{name}" for name in sorted(SERVING)]
    assert flag_hint("--use_async_engine", known) == "ms-swift 4 calls it --vllm_use_async_engine"
    assert "overlong_filter" not in flag_hint("--mask_truncated_completions", known)
