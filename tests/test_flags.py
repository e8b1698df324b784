"""Flags: documented, within range, and refused where this version does not build them."""

from __future__ import annotations

import re

import pytest

from swift_grpo_ext.flags import ExtFlags, check_flags, flag_infos, flag_names, show


def test_every_flag_has_help_and_a_type_in_words() -> None:
    for info in flag_infos():
        assert len(info.help) > 20, info.name
        assert info.type
        assert info.help.endswith(".")


def test_names_that_are_promised() -> None:
    assert {
        "rollout_seed_mode",
        "include_stop_str_in_output",
        "stop_token_ids",
        "logits_shim",
        "logps_chunk_size",
        "diversity_action",
        "diversity_alarm_p",
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
        ("rollout_timeout", 0.0, "expected a number of seconds above 0"),
        ("sample_log", "some", "expected one of all, tokens, none"),
        ("media_cache_gb", -0.5, "expected a number of gigabytes, or 0 to keep no media"),
        ("media_cache_gb", float("inf"), "expected a number of gigabytes, or 0 to keep no media"),
        ("encoder_cache_gb", -1.0, "expected a number of gigabytes, or 0 for ms-swift's passes"),
        ("sample_log_gb", -1.0, "expected a number of gigabytes, or 0 for no bound"),
        ("sample_log_gb", float("nan"), "expected a number of gigabytes, or 0 for no bound"),
        ("rollout_restarts", -1, "expected a number of restarts"),
    ],
)
def test_values_out_of_range_are_refused_by_name(flag: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} .*{message}"):
        check_flags(ExtFlags(**{flag: value}))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("stop_token_ids", [0]),
        ("logps_chunk_size", 0),
        ("logps_chunk_size", "1"),
        ("logps_chunk_size", "auto"),
        ("diversity_alarm_p", 5e-324),
        ("diversity_alarm_p", 0.999),
        ("rollout_timeout", 0.001),
        ("sample_log_gb", 0.0),
        ("media_cache_gb", 0.0),
        ("encoder_cache_gb", 0.0),
        ("rollout_restarts", 0),
        ("rollout_seed_mode", "engine"),
    ],
)
def test_values_at_the_edge_pass(flag: str, value: object) -> None:
    check_flags(ExtFlags(**{flag: value}))


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        (
            "stop_token_ids",
            [3, -1, -2],
            "--stop_token_ids 3 -1 -2: -1 is negative; token ids are 0 or more, as "
            "`tokenizer.convert_tokens_to_ids` gives them.",
        ),
        (
            "rollout_timeout",
            float("nan"),
            "--rollout_timeout nan: expected a number of seconds above 0.",
        ),
        (
            "rollout_restarts",
            -1,
            "--rollout_restarts -1: expected a number of restarts, or 0 for none.",
        ),
        (
            "logps_chunk_size",
            -1,
            "--logps_chunk_size -1: expected a number of positions, 0 for no chunks, or `auto`.",
        ),
        (
            "logps_chunk_size",
            "many",
            "--logps_chunk_size many: expected a number of positions, 0 for no chunks, or `auto`.",
        ),
        (
            "diversity_alarm_p",
            1.0,
            "--diversity_alarm_p 1.0: expected a probability between 0 and 1, such as 1e-6.",
        ),
        ("logits_shim", "on", "--logits_shim on: expected one of auto, strict, off."),
    ],
)
def test_refusals_in_full(flag: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_flags(ExtFlags(**{flag: value}))


@pytest.mark.parametrize(
    ("value", "typed"),
    [(True, "true"), (False, "false"), ([], "none given"), ([1, 2], "1 2"), (0.5, "0.5")],
)
def test_values_are_shown_as_they_are_typed(value: object, typed: str) -> None:
    assert show(value) == typed


def test_what_the_help_says_of_a_flag() -> None:
    infos = {info.name: info for info in flag_infos()}
    assert list(infos) == flag_names()
    assert {name: (info.type, info.default) for name, info in infos.items()} == {
        "rollout_seed_mode": ("sample | engine", "sample"),
        "rollout_mismatch": ("stop | warn", "stop"),
        "rollout_timeout": ("float", 1800.0),
        "rollout_restarts": ("int", 3),
        "sample_log": ("all | tokens | none", "all"),
        "media_cache_gb": ("float", 4.0),
        "encoder_cache_gb": ("float", 0.0),
        "sample_log_gb": ("float", 0.0),
        "stop_token_ids": ("int ...", []),
        "include_stop_str_in_output": ("bool", True),
        "logits_shim": ("auto | strict | off", "auto"),
        "logps_chunk_size": ("str", "0"),
        "logps_shared_prompt": ("bool", False),
        "diversity_action": ("log | warn | stop", "warn"),
        "diversity_alarm_p": ("float", 1e-6),
    }
    assert infos["stop_token_ids"].group == "Where a completion ends."
    assert infos["stop_token_ids"].help.startswith("Token ids that end a completion")
