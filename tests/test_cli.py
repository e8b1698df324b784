"""`swift-grpo-ext flags`, and the README's table that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.arguments import flag_names
from swift_grpo_ext.cli import flag_table, main
from swift_grpo_ext.version import __version__

README = Path(__file__).resolve().parents[1] / "README.md"


def test_flags_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    for name in flag_names():
        assert f"--{name} " in output


def test_the_readme_holds_the_table_of_this_version() -> None:
    text = README.read_text(encoding="utf-8")
    assert flag_table() in text, "paste the output of `swift-grpo-ext flags --markdown`"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == __version__
