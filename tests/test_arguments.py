"""Flags: documented, within range, and refused where this version does not build them."""

from __future__ import annotations

import pytest

from swift_grpo_ext.arguments import (
    ExtFlags,
    check_flags,
    flag_infos,
    flag_names,
)


def test_every_flag_has_help_and_a_type_in_words() -> None:
    for info in flag_infos():
        assert len(info.help) > 20, info.name
        assert info.type
        assert info.help.endswith(".")


def test_names_that_are_promised() -> None:
    assert {
        "rollout_seed_mode",
        "rollout_group_requests",
        "include_stop_str_in_output",
        "stop_token_ids",
        "logits_shim",
        "logps_chunk_size",
        "duplicate_prompts",
        "diversity_action",
        "diversity_alarm_p",
        "diversity_patience",
        "rollout_timeout",
    } <= set(flag_names())


def test_defaults_pass() -> None:
    check_flags(ExtFlags())


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("rollout_seed_mode", "samples", "expected one of sample, engine"),
        ("stop_token_ids", [3, -1], "-1 is negative"),
        ("logps_chunk_size", -5, "expected a number of positions"),
        ("diversity_alarm_p", 0.0, "between 0 and 1"),
        ("diversity_alarm_p", 1.0, "between 0 and 1"),
        ("diversity_patience", -1, "expected a number of rounds"),
        ("rollout_timeout", 0.0, "expected a number of seconds above 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(flag: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} .*{message}"):
        check_flags(ExtFlags(**{flag: value}))
