"""`swift-grpo-ext`: the options of each command, its version, and its list of flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swift_grpo_ext.tools import cli
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.version import __version__

PAGE = Path(__file__).resolve().parents[3] / "docs/flags.md"
COMMANDS = ("check", "selftest", "init", "flags", "view", "replay", "diff", "compare")


@pytest.mark.parametrize(
    "words",
    [
        *("", "nothing", "view", "replay", "replay run --round 1", "replay run --group 1"),
        *("diff", "diff a", "compare --baseline a", "compare --candidate a"),
        "replay run --round 1 --group 1 --phase test",
        "replay run --round x --group 1",
        "replay run --round 1 --group 1 --set seed",
        "compare --baseline a --candidate b --phase x",
    ],
)
def test_what_is_missing_or_unknown_is_refused(words: str) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words.split())


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_says_something_of_each_argument(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*name.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: swift-grpo-ext {name}".rstrip() + " ")
    arguments = [i for i, line in enumerate(lines) if re.match(r" {2,4}\S", line)]
    for i in arguments:
        described = re.search(r"\S {2,}\S", lines[i]) or re.match(r" {10,}\S", [*lines, ""][i + 1])
        assert described or lines[i].strip().startswith("{"), lines[i]
    assert any("default: train" in line for line in lines) == (name in ("replay", "compare"))


def test_flags_and_the_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    page = PAGE.read_text(encoding="utf-8")
    for name, values, default, text in cli.flag_rows():
        assert f"--{name} {values}  (default: {default})\n    {text}\n" in output
        escaped = values.replace("|", "\\|")
        assert f"| `--{name}` | {escaped} | {default} | {text} |" in page
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


def test_values_of_options() -> None:
    assert [cli.round_name(text) for text in ("12", "3.7")] == [(12, 0), (3, 7)]
    assert cli.steps("3:5") == range(3, 6)
    assert cli.setting('dataset=["a=b.jsonl"]') == ("dataset", ["a=b.jsonl"])
    assert cli.setting("model=models/tiny") == ("model", "models/tiny")


def test_view_serves_runs_and_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "args.json").touch()
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("swift_grpo_ext.tools.view.server.serve", lambda *a: calls.append(a))
    monkeypatch.setattr("swift_grpo_ext.tools.view.pages.write_page", lambda *a: calls.append(a))
    assert main(["view", "b", "a", "--port", "0", "--host", "::1"]) == 0
    assert main(["view", ".", "--output", "page.html"]) == 0
    assert main(["view", "new", "--output", "page.html"]) == 2
    assert main(["view", "new"]) == 0
    assert capsys.readouterr().err.endswith(" of a training. The page waits for it.\n")
    a, b, new = Path("a"), Path("b"), Path("new")
    written = ([a, b], "page.html")
    assert calls == [([b, a], 0, "::1"), written, ([new], 8462, "127.0.0.1")]
