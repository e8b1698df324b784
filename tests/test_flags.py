"""Flags are documented, with their types and defaults."""

from __future__ import annotations

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.cli import flag_infos


def test_what_the_help_says_of_a_flag() -> None:
    infos = {info.name: info for info in flag_infos()}
    assert list(infos) == flag_names()
    assert len(infos) == 12
    for info in infos.values():
        assert len(info.help) > 20, info.name
        assert info.help.endswith("."), info.name
    some = ("rollout_seed_mode", "stop_token_ids", "sample_log_gb", "logps_shared_prompt")
    assert {name: (infos[name].type, infos[name].default) for name in some} == {
        "rollout_seed_mode": ("sample | engine", "sample"),
        "stop_token_ids": ("list[int]", "[]"),
        "sample_log_gb": ("float", "0.0"),
        "logps_shared_prompt": ("auto | false", "auto"),
    }
    assert infos["stop_token_ids"].help.startswith("Token ids that end a completion")
