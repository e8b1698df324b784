"""`swift-grpo-ext`: its version, the flags that it lists, and what `view` is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.cli import main, steps
from swift_grpo_ext.version import __version__

PAGE = Path(__file__).resolve().parents[2] / "docs/flags.md"


def test_flags_are_listed_and_the_page_holds_their_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    for name in flag_names():
        assert f"  --{name} " in output
    assert main(["flags", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert table in PAGE.read_text(encoding="utf-8"), "paste `swift-grpo-ext flags --markdown`"


def test_steps_count_both_ends() -> None:
    assert steps("3:5") == range(3, 6)


def test_view_serves_or_writes_one_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("swift_grpo_ext.tools.view.server.serve", lambda *a: calls.append(a))
    monkeypatch.setattr("swift_grpo_ext.tools.view.pages.write_page", lambda *a: calls.append(a))
    assert main(["view", "a"]) == main(["view", "a", "--port", "0"]) == 0
    assert main(["view", "a", "--output", "page.html"]) == 0
    assert calls == [("a", 8462), ("a", 0), ("a", "page.html")]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"
