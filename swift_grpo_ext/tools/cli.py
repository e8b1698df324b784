"""`swift-grpo-ext`: tools around a training."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import docstring_parser

from swift_grpo_ext.flags import ExtFlags
from swift_grpo_ext.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, which is 2 if a command fails."""
    parser = argparse.ArgumentParser(prog="swift-grpo-ext", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, runs: str, text: str, epilog: str = "") -> Callable[..., object]:
        """Add a command that runs the function `runs`; return the method that adds arguments."""
        added = commands.add_parser(name, help=text, epilog=epilog)
        added.set_defaults(runs=runs)
        return added.add_argument

    add = command(
        "check",
        "check.command.run",
        "check machine, settings, data and prompts before a training",
        "Arguments of swift rlhf go after -- and override the file. Without settings the machine "
        "alone is checked. Exit status: 1 if there is an error.",
    )
    add("config", nargs="?", help="YAML file, or NAME for NAME.train.yaml and NAME.rollout.yaml")
    add("--model", help="model of both sides; with --dataset, no file is needed")
    add("--dataset", nargs="+", default=[], help="in place of the file's")
    add("--ranks", type=int, help="training processes (default: from ENV)")
    add("--gpus", metavar="LIST", help="GPUs of this machine, such as 0,1 (default: from ENV)")
    add("--settings-only", action="store_true", help="check names and files for another machine")
    add("--quiet", action="store_true", help="print errors and warnings only")

    add = command(
        "selftest",
        "selftest.command.run",
        "check each promise with your settings, model, rows and devices",
        "Arguments of swift rlhf go after -- and override the file. Servers that the settings name "
        "must run. Exit status: 1 if a promise does not hold, 2 if none could be tried.",
    )
    add("config", nargs="?", type=Path, help="YAML file of swift rlhf")
    add("--model", help="in place of the file's; with --dataset, no file is needed")
    add("--dataset", nargs="+", default=[], help="in place of the file's")
    add("--output", type=Path, default=Path("output/selftest"), help="folder (%(default)s)")

    add = command("init", "share.init", "copy a preset and its launch script")
    add("directory", type=Path, nargs="?", help="target folder")
    add("--preset", default="server_2x6_lora", help="name (default: %(default)s)")
    add("--list", action="store_true", help="list the presets and copy nothing")

    command("plugin-path", "share.plugin_path", "print the path of the file for --external_plugins")

    command("flags", "cli.flags", "list the flags that the plugin adds")

    add = command("view", "cli.view", "show samples, rewards, curves and diversity in a browser")
    add("run_dirs", nargs="+", metavar="RUN", help="output folder of a run, or a folder of runs")
    add("--port", type=int, default=8462, help="0: any free one (default: %(default)s)")
    add("--host", default="127.0.0.1", help="0.0.0.0: for other machines (default: %(default)s)")
    add("--output", metavar="FILE.html", help="write one page that opens offline instead")

    add = command("replay", "replay.run", "generate a group again and compare its tokens")
    add("run_dir", help="output folder with args.json, samples and checkpoints")
    add("--round", required=True, type=round_name, help="step and number: 12.0; 12 means 12.0")
    add("--group", required=True, type=int, help="number in its round, from 0")
    add("--phase", choices=("train", "eval"), default="train", help="default: %(default)s")
    add("--json", action="store_true", help="print JSON")
    add(
        "--set",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="override a setting of args.json (model=DIR), or give one of the server "
        "(vllm_max_model_len=512); the value is JSON or text",
    )

    add = command(
        "diff",
        "diff.run_diff",
        "find the first difference of two runs",
        "Exit status: 0 equal, 1 different, 2 nothing to compare.",
    )
    add("run_a", help="output folder of a run")
    add("run_b", help="output folder of another")
    add("--json", action="store_true", help="print JSON")

    add = command("compare", "diff.run_compare", "compare rewards prompt by prompt, with intervals")
    add("--baseline", nargs="+", required=True, metavar="RUN", help="output folders")
    add("--candidate", nargs="+", required=True, metavar="RUN", help="paired by their --seed")
    add("--phase", choices=("train", "eval"), default="train", help="default: %(default)s")
    add("--steps", metavar="A:B", type=steps, help="the first and the last step (default: all)")
    add("--reward", metavar="NAME", help="a reward function (default: the total)")
    add("--json", action="store_true", help="print JSON")

    words = sys.argv[1:] if argv is None else [*argv]
    end = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    if unknown:
        takes_more = options.command in ("check", "selftest")
        hint = ". Arguments of swift rlhf go after --" if takes_more else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.rest = words[end + 1 :]
    if options.command in ("selftest", "view", "replay", "diff", "compare"):
        print("loading ...", file=sys.stderr, flush=True)  # numpy, pyarrow, or ms-swift
    module, _, function = options.runs.rpartition(".")
    try:
        # Imported only now: numpy and pyarrow take a second, ms-swift and torch ten.
        run = getattr(importlib.import_module(f"swift_grpo_ext.tools.{module}"), function)
        return run(options) or 0
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext {options.command}: {e}", file=sys.stderr)
        return 2


def steps(text: str) -> range:
    """Parse the steps A:B, both included."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) + 1)


def round_name(text: str) -> tuple[int, int]:
    """Parse the step and the number of a round."""
    step, _, number = text.partition(".")
    return int(step), int(number or 0)


def setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value is JSON or text."""
    name, value = text.split("=", 1)
    with suppress(ValueError):
        return name, json.loads(value)
    return name, value


def flag_rows() -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of every flag of the plugin."""
    rows = []
    for param in docstring_parser.parse_from_object(ExtFlags).params:
        name, hint, text = param.arg_name, param.type_name or "", param.description or ""
        choices = " | ".join(re.findall(r"'(\w+)'", hint))  # of a Literal
        default = json.dumps(getattr(ExtFlags(), name)).strip('"')
        rows.append((name, choices or hint, default, " ".join(text.split())))
    return rows


def flags(_: argparse.Namespace) -> None:
    for name, values, default, text in flag_rows():
        print(f"--{name} {values}  (default: {default})\n    {text}")


def view(options: argparse.Namespace) -> None:
    """Serve runs as pages, or write one page."""
    from swift_grpo_ext.tools.runs import find_runs
    from swift_grpo_ext.tools.view import pages, server

    runs: list[Path] = []
    for folder in map(Path, options.run_dirs):
        try:
            runs += find_runs(folder)
        except FileNotFoundError as e:
            # A new folder may be served before its run begins.
            is_new = not any(path.is_dir() for path in folder.glob("[!.]*"))
            if options.output is not None or folder.is_file() or not is_new:
                raise
            print(f"{e} The page waits for it.", file=sys.stderr, flush=True)
            runs.append(folder)
    if options.output is not None:
        print(pages.write_page(runs, options.output))
    else:
        server.serve(runs, options.port, options.host)
