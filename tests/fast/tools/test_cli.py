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
SERVER = {"port": 8462, "host": "127.0.0.1"}

COMMANDS: list[tuple[str, str, dict[str, Any]]] = [
    ("check", "check.command.run", {}),
    (
        "check a.yaml --model m --dataset a b --ranks 2 --gpus 0,1 --settings-only --quiet",
        "check.command.run",
        {
            **{"config": "a.yaml", "model": "m", "dataset": ["a", "b"], "ranks": 2, "gpus": "0,1"},
            **{"settings_only": True, "quiet": True},
        },
    ),
    ("selftest", "selftest.command.run", {"output": Path("output/selftest")}),
    (
        "selftest a.yaml --model m --dataset a b --output out",
        "selftest.command.run",
        {"config": Path("a.yaml"), "model": "m", "dataset": ["a", "b"], "output": Path("out")},
    ),
    ("init", "share.init", {"preset": "server_2x6_lora"}),
    (
        "init here --preset p --list",
        "share.init",
        {"directory": Path("here"), "preset": "p", "list": True},
    ),
    ("plugin-path", "share.plugin_path", {}),
    ("flags", "cli.flags", {}),
    ("view run", "cli.view", {"run_dirs": ["run"], **SERVER}),
    (
        "view run other --port 0 --host :: --output a.html",
        "cli.view",
        {"run_dirs": ["run", "other"], "port": 0, "host": "::", "output": "a.html"},
    ),
    (
        "replay run --round 12 --group 3",
        "replay.run",
        {"run_dir": "run", "round": (12, 0), "group": 3, "phase": "train"},
    ),
    (
        'replay r --round 3.7 --group 0 --phase eval --json --set a=1 --set m=D --set d=["a=b"]',
        "replay.run",
        {
            **{"run_dir": "r", "round": (3, 7), "group": 0, "phase": "eval", "json": True},
            "set": [("a", 1), ("m", "D"), ("d", ["a=b"])],  # a value is JSON or text
        },
    ),
    ("diff a b", "diff.run_diff", {"run_a": "a", "run_b": "b"}),
    ("diff a b --json", "diff.run_diff", {"run_a": "a", "run_b": "b", "json": True}),
    (
        "compare --baseline a b --candidate c",
        "diff.run_compare",
        {"baseline": ["a", "b"], "candidate": ["c"], "phase": "train"},
    ),
    (
        "compare --baseline a --candidate c d --phase eval --steps 3:5 --reward r --json",
        "diff.run_compare",
        {
            **{"baseline": ["a"], "candidate": ["c", "d"], "phase": "eval"},
            **{"steps": range(3, 6), "reward": "r", "json": True},
        },
    ),
]
"""A command line of each command with no option and with all, its function, and the options that
are set."""

REST = ["--seed", "1"]


@pytest.mark.parametrize(("words", "runs", "expected"), COMMANDS)
def test_what_a_command_is_given(
    words: str, runs: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, dict[str, Any]] = {}

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, function: str) -> Any:
            return lambda options: called.update({f"{self.name}.{function}": vars(options)})

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=Module))
    assert main([*words.split(), "--", *REST]) == 0
    [(function, options)] = called.items()
    assert function == f"swift_grpo_ext.tools.{runs}"
    given = {n: v for n, v in options.items() if v is not None and v is not False and v != []}
    assert given == {"command": words.split()[0], "runs": runs, "rest": REST, **expected}


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


@pytest.mark.parametrize("name", ["", *sorted({words.split()[0] for words, *_ in COMMANDS})])
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
    assert main(["view", "new"]) == 0
    assert capsys.readouterr().err.endswith(" of a training. The page waits for it.\n")
    a, b, new = Path("a"), Path("b"), Path("new")
    one, two = ([a], *SERVER.values()), ([b, a], 0, "::1")
    assert calls == [one, two, ([a, b], "page.html"), ([new], *SERVER.values())]
