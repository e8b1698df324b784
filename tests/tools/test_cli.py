"""`swift-grpo-ext flags`, and the documentation's table that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.cli import flag_table, main, steps
from swift_grpo_ext.version import __version__

PAGE = Path(__file__).resolve().parents[2] / "docs/flags.md"


def test_flags_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    for name in flag_names():
        assert f"--{name} " in output


def test_the_page_holds_the_table_of_this_version() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert flag_table() in text, "paste the output of `swift-grpo-ext flags --markdown`"


def test_steps_count_both_ends() -> None:
    assert steps("3:5") == range(3, 6)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == __version__
