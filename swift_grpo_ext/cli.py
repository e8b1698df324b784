"""`swift-grpo-ext`: what can be asked of the plugin without a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby

from swift_grpo_ext.arguments import FlagInfo, flag_infos, show
from swift_grpo_ext.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="swift-grpo-ext", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    flags = commands.add_parser("flags", help="list the flags that the plugin adds")
    flags.add_argument("--markdown", action="store_true", help="as the README's table")
    options = parser.parse_args(argv)
    print(flag_table() if options.markdown else flag_list())
    return 0


def flag_list() -> str:
    """Every flag of ours with type, default, meaning and status, grouped."""
    lines: list[str] = []
    for group, infos in groupby(flag_infos(), key=lambda info: info.group):
        lines += ["", group]
        for info in infos:
            lines += [f"  --{info.name} {info.type}  (default: {show(info.default)})"]
            lines += [f"      {info.help}", f"      In this version: {info.status}."]
    return "\n".join(lines[1:])


def flag_table() -> str:
    """The flags as a Markdown table, one row each."""
    head = ["| flag | values | default | meaning | this version |", "|---|---|---|---|---|"]
    return "\n".join(head + [_table_row(info) for info in flag_infos()])


def _table_row(info: FlagInfo) -> str:
    values = info.type.replace("|", "\\|")
    return f"| `--{info.name}` | {values} | {show(info.default)} | {info.help} | {info.status} |"
