"""`swift-grpo-ext`: the options of each command, its version, and its list of flags."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.tools import cli
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.version import __version__

PAGE = Path(__file__).resolve().parents[3] / "docs/flags.md"


COMMANDS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "check": (
        "check.command.run",
        "",
        {
            **{"config": None, "model": None, "dataset": [], "ranks": None, "gpus": None},
            **{"settings_only": False, "quiet": False},
        },
        "a.yaml --model m --dataset a b --ranks 2 --gpus 0,1 --settings-only --quiet",
        {
            **{"config": "a.yaml", "model": "m", "dataset": ["a", "b"], "ranks": 2, "gpus": "0,1"},
            **{"settings_only": True, "quiet": True},
        },
    ),
    "selftest": (
        "selftest.command.run",
        "",
        {
            **{"config": None, "model": None, "dataset": []},
            "output": Path("output/selftest"),
        },
        "a.yaml --model m --dataset a b --output out",
        {
            **{"config": Path("a.yaml"), "model": "m", "dataset": ["a", "b"]},
            "output": Path("out"),
        },
    ),
    "init": (
        "share.init",
        "",
        {"directory": None, "preset": "server_2x6_lora", "list": False},
        "here --preset p --list",
        {"directory": Path("here"), "preset": "p", "list": True},
    ),
    "plugin-path": ("share.plugin_path", "", {}, "", {}),
    "flags": ("cli.flags", "", {}, "", {}),
    "view": (
        "cli.view",
        "run",
        {"run_dirs": ["run"], "port": 8462, "host": "127.0.0.1", "output": None},
        "run other --port 0 --host :: --output a.html",
        {"run_dirs": ["run", "other"], "port": 0, "host": "::", "output": "a.html"},
    ),
    "replay": (
        "replay.run",
        "run --round 12 --group 3",
        {
            **{"run_dir": "run", "round": (12, 0), "group": 3},
            **{"phase": "train", "json": False, "set": []},
        },
        "run --round 12.1 --group 3 --phase eval --json --set a=1 --set model=DIR",
        {
            **{"run_dir": "run", "round": (12, 1), "group": 3},
            **{"phase": "eval", "json": True, "set": [("a", 1), ("model", "DIR")]},
        },
    ),
    "diff": (
        "diff.run_diff",
        "a b",
        {"run_a": "a", "run_b": "b", "json": False},
        "a b --json",
        {"run_a": "a", "run_b": "b", "json": True},
    ),
    "compare": (
        "diff.run_compare",
        "--baseline a b --candidate c",
        {
            **{"baseline": ["a", "b"], "candidate": ["c"], "phase": "train"},
            **{"steps": None, "reward": None, "json": False},
        },
        "--baseline a --candidate c d --phase eval --steps 3:5 --reward r --json",
        {
            **{"baseline": ["a"], "candidate": ["c", "d"], "phase": "eval"},
            **{"steps": range(3, 6), "reward": "r", "json": True},
        },
    ),
}
"""By command: its function, its shortest command line, and one with all options, each with the
parsed options."""

REST = ["--seed", "1"]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, *pairs = COMMANDS[name]
    called: list[tuple[str, dict[str, Any]]] = []

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, function: str) -> Any:
            return lambda options: called.append((f"{self.name}.{function}", vars(options)))

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=Module))
    for words, expected in zip(pairs[::2], pairs[1::2], strict=True):
        assert main([name, *str(words).split(), "--", *REST]) == 0
        common = {"command": name, "runs": runs, "rest": REST}
        assert called.pop() == (f"swift_grpo_ext.tools.{runs}", {**common, **dict(expected)})


@pytest.mark.parametrize(
    "words",
    [
        *("", "nothing", "view", "replay", "replay run --round 1", "replay run --group 1"),
        *("diff", "diff a", "compare --baseline a", "compare --candidate a"),
        *(
            "replay run --round 1 --group 1 --phase test",
            "compare --baseline a --candidate b --phase x",
        ),
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


def test_an_error_of_a_command_is_a_line_and_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (ValueError("no such round"), OSError("no such round")):

        def run(options: Namespace, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("swift_grpo_ext.tools.cli.view", run)
        assert main(["view", "run"]) == 2
        assert capsys.readouterr().err == "loading ...\nswift-grpo-ext view: no such round\n"


def test_flags_are_listed_and_the_page_holds_their_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["flags"]) == 0
    output = capsys.readouterr().out
    page = PAGE.read_text(encoding="utf-8")
    for name, values, default, text in cli.flag_rows():
        assert f"--{name} {values}  (default: {default})\n    {text}\n" in output
        escaped = values.replace("|", "\\|")
        assert f"| `--{name}` | {escaped} | {default} | {text} |" in page


def test_view_serves_or_writes_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "args.json").touch()
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("swift_grpo_ext.tools.view.server.serve", lambda *a: calls.append(a))
    monkeypatch.setattr("swift_grpo_ext.tools.view.pages.write_page", lambda *a: calls.append(a))
    assert main(["view", "a"]) == main(["view", "b", "a", "--port", "0", "--host", "::1"]) == 0
    assert main(["view", ".", "--output", "page.html"]) == 0
    assert main(["view", "new", "--output", "page.html"]) == 2
    a, b = Path("a"), Path("b")
    assert main(["view", "new"]) == 0
    assert capsys.readouterr().err.endswith(" of a training. The page waits for it.\n")
    served, new = [([a], 8462, "127.0.0.1"), ([b, a], 0, "::1")], ([Path("new")], 8462, "127.0.0.1")
    assert calls == [*served, ([a, b], "page.html"), new]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"
