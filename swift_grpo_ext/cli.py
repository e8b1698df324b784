"""`swift-grpo-ext`: what can be asked of the plugin, and of a run's samples, without training."""

from __future__ import annotations

import argparse
import sys
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
    samples = commands.add_parser("samples", help="sum up or export a run's sample log")
    samples.add_argument("run_dir", help="the run's output folder, which holds `samples`")
    samples.add_argument("--output", help="write all rows there: FILE.parquet or FILE.jsonl")
    options = parser.parse_args(argv)
    if options.command == "samples":
        return show_samples(options.run_dir, options.output)
    print(flag_table() if options.markdown else flag_list())
    return 0


def show_samples(run_dir: str, output: str | None) -> int:
    """Sum up or export a run's sample log; returns the exit status."""
    from swift_grpo_ext.samples import export  # `flags` does without pyarrow

    try:
        if output is None:
            print(export.summary(run_dir))
        else:
            print(f"{export.export(run_dir, output):,} rows written to {output}")
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext samples: {e}", file=sys.stderr)
        return 1
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
