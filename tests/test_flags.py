"""Flags are documented, with their types and defaults."""

from __future__ import annotations

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.cli import flag_rows


def test_what_the_help_says_of_a_flag() -> None:
    rows = {name: tuple(row) for name, *row in flag_rows()}
    assert list(rows) == flag_names()
    assert len(rows) == 12
    for name, (_, _, text) in rows.items():
        assert len(text) > 20, name
        assert text.endswith("."), name
    some = ("rollout_seed_mode", "stop_token_ids", "sample_log_gb", "logps_shared_prompt")
    assert {name: rows[name][:2] for name in some} == {
        "rollout_seed_mode": ("sample | engine", "sample"),
        "stop_token_ids": ("list[int]", "[]"),
        "sample_log_gb": ("float", "0.0"),
        "logps_shared_prompt": ("auto | false", "auto"),
    }
    assert rows["stop_token_ids"][2].startswith("Token ids that end a completion")
