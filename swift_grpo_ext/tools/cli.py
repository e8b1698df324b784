"""`swift-grpo-ext`: everything around a training.

`main` adds a parser for each command, and imports its module only when it runs: numpy and pyarrow
take a second, ms-swift and torch ten.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import docstring_parser

from swift_grpo_ext.flags import ExtFlags
from swift_grpo_ext.version import __version__

PHASES = ("train", "eval")  # those of sampling/seeding.py, which takes 0.2 s to import


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="swift-grpo-ext", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, runs: str, text: str, epilog: str = "") -> Callable[..., object]:
        """Add a command that `runs` a module's function; return what adds its arguments."""
        added = commands.add_parser(name, help=text, epilog=epilog)
        added.set_defaults(runs=runs)
        return added.add_argument

    # --- before a run ---

    add = command(
        "check",
        "check.command.run",
        "is this machine ready, and would this run start? each problem with a remedy",
        "Arguments of swift rlhf behind -- win over the file's settings. Without settings the "
        "machine alone is checked. Exit status: 1 where there is an error.",
    )
    add("config", nargs="?", help="a file, or NAME for NAME.train.yaml and NAME.rollout.yaml")
    add("--model", help="of both sides, instead of the files'; with --dataset, no file is needed")
    add("--dataset", nargs="+", default=[], help="instead of the file's")
    add("--ranks", type=int, help="training processes (default: as ENV says)")
    add("--gpus", metavar="LIST", help="of this machine, e.g. 0,1 (default: ENV's)")
    add("--settings-only", action="store_true", help="for another machine: do both files agree?")
    add("--quiet", action="store_true", help="errors and warnings only")

    add = command(
        "selftest",
        "selftest.command.run",
        "check each promise with your settings, model, rows and devices",
        "Arguments of swift rlhf behind -- win over the file's settings. Servers that the settings "
        "name must run. Exit status: 1 where a promise does not hold, 2 where none could be tried.",
    )
    add("config", nargs="?", type=Path, help="the YAML file of swift rlhf")
    add("--model", help="instead of the file's; with --dataset, no file is needed")
    add("--dataset", nargs="+", default=[], help="instead of the file's")
    add("--output", type=Path, default=Path("output/selftest"), help="folder (%(default)s)")

    add = command("init", "share.init", "copy a preset and its launch script to start from")
    add("directory", type=Path, nargs="?", help="where to")
    add("--preset", default="server_2x6_lora", help="which (--list shows them)")
    add("--list", action="store_true", help="show the presets, copy nothing")

    command("plugin-path", "share.plugin_path", "the file to give to --external_plugins")

    command("flags", "cli.flags", "list the flags that the plugin adds")

    # --- after a run ---

    add = command(
        "view", "cli.view", "samples, rewards, curves and diversity of a run in a browser"
    )
    add("run_dirs", nargs="+", metavar="RUN", help="output folders of runs, or a folder of such")
    add("--port", type=int, default=8462, help="0: any (default: %(default)s)")
    add("--host", default="127.0.0.1", help="0.0.0.0: other machines, too (default: %(default)s)")
    add("--output", metavar="FILE.html", help="write one page that opens offline instead")

    add = command(
        "replay",
        "replay.command.run",
        "generate a recorded group again, and compare token by token",
    )
    add("run_dir", help="the run's output folder: args.json, samples, checkpoints")
    add("--round", required=True, type=round_name, help="step and number: 12.0; 12 means 12.0")
    add("--group", required=True, type=int, help="number in its round, from 0")
    add("--phase", choices=PHASES, default="train", help="default: %(default)s")
    add("--json", action="store_true", help="print JSON instead of a table")
    add(
        "--set",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="in place of a setting of args.json, such as model=DIR, or a server's "
        "vllm_max_model_len=512; the value is JSON, or text",
    )

    add = command(
        "diff",
        "diff.run_diff",
        "the first place where two runs differ, or that they are equal to the end",
        "Exit status: 0 equal, 1 different, 2 nothing to compare.",
    )
    add("run_a", help="a run's output folder")
    add("run_b", help="another's")
    add("--json", action="store_true", help="for scripts")

    add = command(
        "compare",
        "diff.run_compare",
        "how much better runs score than others, prompt by prompt, with intervals",
    )
    add("--baseline", nargs="+", required=True, metavar="RUN", help="output folders")
    add("--candidate", nargs="+", required=True, metavar="RUN", help="paired by their --seed")
    add("--phase", choices=PHASES, default="train", help="default: %(default)s")
    add("--steps", metavar="A:B", type=steps, help="only these rounds, both included")
    add(
        "--reward",
        metavar="NAME",
        help="a reward function, or `turns` (default: the total)",
    )
    add("--json", action="store_true", help="for scripts")

    words = sys.argv[1:] if argv is None else [*argv]
    end = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    if unknown:
        takes_more = options.command in ("check", "selftest")
        hint = ". Arguments of swift rlhf stand behind --" if takes_more else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.rest = words[end + 1 :]
    if options.command in ("selftest", "view", "replay", "diff", "compare"):
        print("loading ...", file=sys.stderr, flush=True)  # numpy, pyarrow, or ms-swift
    module, _, function = options.runs.rpartition(".")
    try:
        run = getattr(importlib.import_module(f"swift_grpo_ext.tools.{module}"), function)
        return run(options) or 0
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext {options.command}: {e}", file=sys.stderr)
        return 1


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


class FlagInfo(NamedTuple):
    """A flag of ours, as words."""

    name: str
    type: str
    default: str
    help: str


def flag_infos() -> list[FlagInfo]:
    """Return every flag, with its field's docstring."""
    hints, defaults = get_type_hints(ExtFlags), ExtFlags()
    docs = docstring_parser.parse_from_object(ExtFlags)
    texts = {param.arg_name: param.description or "" for param in docs.params}
    infos = []
    for name, hint in hints.items():
        values, default = get_args(hint), getattr(defaults, name)
        if get_origin(hint) is Literal:
            words = " | ".join(values)
        else:  # `list[int]` takes several values
            words = f"{values[0].__name__} ..." if values else str(hint.__name__)
        if isinstance(default, list):
            shown = " ".join(map(str, default)) or "none given"
        else:
            shown = str(default).lower() if isinstance(default, bool) else str(default)
        infos.append(FlagInfo(name, words, shown, " ".join(texts[name].split())))
    return infos


def flags(_: argparse.Namespace) -> None:
    """Print every flag of ours with type, default and meaning."""
    for info in flag_infos():
        print(f"--{info.name} {info.type}  (default: {info.default})\n    {info.help}")


def view(options: argparse.Namespace) -> None:
    """Serve runs as pages, or write one page. A folder that is new may wait for its run."""
    from swift_grpo_ext.tools.runs import find_runs

    runs: list[Path] = []
    for folder in map(Path, options.run_dirs):
        try:
            runs += find_runs(folder)
        except FileNotFoundError as e:
            is_new = not any(path.is_dir() for path in folder.glob("[!.]*"))
            if options.output is not None or folder.is_file() or not is_new:
                raise
            print(f"{e} The page waits for it.", file=sys.stderr, flush=True)
            runs.append(folder)
    if options.output is not None:
        from swift_grpo_ext.tools.view.pages import write_page

        print(write_page(runs, options.output))
    else:
        from swift_grpo_ext.tools.view.server import serve

        serve(runs, options.port, options.host)
