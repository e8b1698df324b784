"""Flags: documented, with their defaults, and refused by name where a value is out of range."""

from __future__ import annotations

import pytest

from swift_grpo_ext.flags import ExtFlags, check_flags, flag_infos, flag_names, show


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("rollout_seed_mode", "samples", "expected one of sample, engine"),
        ("stop_token_ids", [3, -1], "3 -1: -1 is negative; token ids are 0 or more, as `tokenizer"),
        ("logps_chunk_size", -1, "-1: expected a number of positions, 0 for no chunks, or `auto`."),
        ("logps_chunk_size", "many", "many: expected a number of positions"),
        ("diversity_alarm_p", 0.0, "between 0 and 1"),
        ("diversity_alarm_p", 1.0, "expected a probability between 0 and 1, such as 1e-6."),
        ("rollout_timeout", 0.0, "expected a number of seconds above 0"),
        ("rollout_timeout", float("nan"), "nan: expected a number of seconds above 0."),
        ("sample_log", "some", "expected one of all, tokens, none"),
        ("media_cache_gb", -0.5, "expected a number of gigabytes, or 0 to keep no media"),
        ("media_cache_gb", float("inf"), "expected a number of gigabytes, or 0 to keep no media"),
        ("encoder_cache_gb", -1.0, "expected a number of gigabytes, or 0 for ms-swift's passes"),
        ("sample_log_gb", float("nan"), "expected a number of gigabytes, or 0 for no bound"),
        ("logits_shim", "on", "--logits_shim on: expected one of auto, strict, off."),
    ],
)
def test_values_out_of_range_are_refused_by_name(flag: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} ") as refused:
        check_flags(ExtFlags(**{flag: value}))
    assert message in str(refused.value)


def test_values_at_the_edge_pass() -> None:
    check_flags(ExtFlags())
    edges: dict[str, list[object]] = {
        "stop_token_ids": [[0]],
        "logps_chunk_size": [0, "1", "auto"],
        "diversity_alarm_p": [5e-324, 0.999],
        "rollout_timeout": [0.001],
        "sample_log_gb": [0.0],
        "media_cache_gb": [0.0],
        "encoder_cache_gb": [0.0],
        "rollout_seed_mode": ["engine"],
    }
    for flag, values in edges.items():
        for value in values:
            check_flags(ExtFlags(**{flag: value}))


def test_values_are_shown_as_they_are_typed() -> None:
    shown = [show(value) for value in (True, False, [], [1, 2], 0.5)]
    assert shown == ["true", "false", "none given", "1 2", "0.5"]


def test_what_the_help_says_of_a_flag() -> None:
    infos = {info.name: info for info in flag_infos()}
    assert list(infos) == flag_names()
    for info in infos.values():
        assert len(info.help) > 20, info.name
        assert info.help.endswith("."), info.name
    some = ("rollout_seed_mode", "stop_token_ids", "sample_log_gb", "logps_shared_prompt")
    assert {name: (infos[name].type, infos[name].default) for name in some} == {
        "rollout_seed_mode": ("sample | engine", "sample"),
        "stop_token_ids": ("int ...", []),
        "sample_log_gb": ("float", 0.0),
        "logps_shared_prompt": ("bool", False),
    }
    assert infos["stop_token_ids"].group == "Where a completion ends."
    assert infos["stop_token_ids"].help.startswith("Token ids that end a completion")
