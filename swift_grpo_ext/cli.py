"""`swift-grpo-ext`: what can be asked of the plugin, and of a run's samples, without training.

Each command has a function that adds its parser, and one that runs it and returns the exit status.
What a command needs is imported when it runs, so that `flags` does without the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from swift_grpo_ext.arguments import FlagInfo, flag_infos, show
from swift_grpo_ext.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="swift-grpo-ext", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in ADDERS:
        add(commands)
    own, _, rest = _partition(list(sys.argv[1:] if argv is None else argv), "--")
    options = parser.parse_args(own)
    options.rest = rest  # what stands behind `--`
    try:
        return int(options.run(options))
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext {options.command}: {e}", file=sys.stderr)
        return 1


def _partition(values: list[str], mark: str) -> tuple[list[str], list[str], list[str]]:
    """As `str.partition` does."""
    sample_id = values.index(mark) if mark in values else len(values)
    return values[:sample_id], values[sample_id : sample_id + 1], values[sample_id + 1 :]


# --- doctor ---


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="is this machine ready? each problem with a remedy")
    parser.add_argument("config", nargs="?", help="a YAML file: takes the settings below from it")
    parser.add_argument("--model", help="a local model: its logits and its template are looked at")
    parser.add_argument("--model_type", help="as for swift rlhf")
    parser.add_argument("--template", help="as for swift rlhf")
    parser.add_argument("--dataset", nargs="+", default=[], help="its first rows are looked at")
    parser.add_argument("--stop_words", nargs="+", default=[], help="as for swift rlhf")
    parser.add_argument("--server", nargs="+", default=[], metavar="HOST:PORT", help="of servers")
    parser.add_argument(
        "--port", nargs="+", type=int, default=None, help="that have to be free (default 29500)"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    from swift_grpo_ext.checks.doctor import examine, report, target_of

    return report(examine(target_of(options)), as_json=options.json)


# --- check ---


def add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="would this run start? settings, model, data, plugins, packages, GPUs",
        epilog="Arguments of swift rlhf behind -- win over the file's settings.",
    )
    parser.add_argument(
        "config", nargs="+", help="a file, or NAME for NAME.train.yaml and NAME.rollout.yaml"
    )
    parser.add_argument("--ranks", type=int, help="training processes (default: as ENV says)")
    parser.add_argument("--model", help="of both sides, instead of the files'")
    parser.add_argument("--gpus", metavar="LIST", help="of this machine, e.g. 0,1 (default: ENV's)")
    parser.add_argument(
        "--settings-only", action="store_true", help="for another machine: look nothing up here"
    )
    parser.add_argument("--quiet", action="store_true", help="errors and warnings only")
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    from swift_grpo_ext.checks import check, read_run
    from swift_grpo_ext.checks.rules import errors_first

    gpus = None if options.gpus is None else [gpu for gpu in options.gpus.split(",") if gpu]
    failed = False
    for config in options.config:
        run = read_run(config, ranks=options.ranks, model=options.model, overrides=options.rest)
        findings = check(run)
        if not options.settings_only and not run.unread:
            from swift_grpo_ext.checks.lookup import look_up

            findings = errors_first([*findings, *look_up(run, gpus)])
        failed = failed or any(finding.level == "error" for finding in findings)
        shown = [f for f in findings if f.level != "note" or not options.quiet]
        if shown or not options.quiet:
            print("\n".join([config, *(f"  {finding}" for finding in shown)]))
    return int(failed)


# --- init, plugin-path ---


def add_init(commands: Any) -> None:
    parser = commands.add_parser("init", help="copy a preset and its launch script to start from")
    parser.add_argument("directory", type=Path, nargs="?", help="where to")
    parser.add_argument("--preset", default="server_2x6_lora", help="which (--list shows them)")
    parser.add_argument("--list", action="store_true", help="show the presets, copy nothing")
    parser.set_defaults(run=run_init)


def run_init(options: argparse.Namespace) -> int:
    from swift_grpo_ext.checks import share

    if options.list:
        for name in share.preset_names():
            print(f"{name:20} {share.title(name)}")
        return 0
    if options.directory is None:
        raise ValueError("where to? swift-grpo-ext init DIRECTORY; --list shows the presets.")
    for file in share.copy_preset(options.preset, options.directory):
        print(file)
    print(f"\nIn {options.directory}: {share.command(options.preset)}")
    return 0


def add_plugin_path(commands: Any) -> None:
    parser = commands.add_parser("plugin-path", help="the file to give to --external_plugins")
    parser.set_defaults(run=run_plugin_path)


def run_plugin_path(options: argparse.Namespace) -> int:
    from swift_grpo_ext.checks import share

    print(share.PLUGIN_FILE)
    return 0


# --- flags ---


def add_flags(commands: Any) -> None:
    parser = commands.add_parser("flags", help="list the flags that the plugin adds")
    parser.add_argument("--markdown", action="store_true", help="as the README's table")
    parser.set_defaults(run=run_flags)


def run_flags(options: argparse.Namespace) -> int:
    print(flag_table() if options.markdown else flag_list())
    return 0


def flag_list() -> str:
    """Every flag of ours with type, default and meaning, grouped."""
    lines: list[str] = []
    for group, infos in groupby(flag_infos(), key=lambda info: info.group):
        lines += ["", group]
        for info in infos:
            lines += [f"  --{info.name} {info.type}  (default: {show(info.default)})"]
            lines.append(f"      {info.help}")
    return "\n".join(lines[1:])


def flag_table() -> str:
    """The flags as a Markdown table, one row each."""
    head = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join(head + [_table_row(info) for info in flag_infos()])


def _table_row(info: FlagInfo) -> str:
    values = info.type.replace("|", "\\|")
    return f"| `--{info.name}` | {values} | {show(info.default)} | {info.help} |"


# --- samples ---


def add_samples(commands: Any) -> None:
    parser = commands.add_parser("samples", help="sum up, show or export a run's samples")
    parser.add_argument("run_dir", help="the run's output folder, which holds `samples`")
    parser.add_argument("--output", help="write rows with their scores: FILE.parquet, FILE.jsonl")
    parser.add_argument("--where", metavar="CONDITION", help="only rows such as 'reward < 0.5'")
    parser.add_argument("--sort", metavar="COLUMN", help="such as reward; the least come first")
    parser.add_argument("--descending", action="store_true", help="the greatest come first")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    parser.set_defaults(run=run_samples)


def run_samples(options: argparse.Namespace) -> int:
    from swift_grpo_ext.record import export

    selection = export.Selection(
        where=options.where,
        sort=options.sort,
        descending=options.descending,
        limit=options.limit,
    )
    if options.output is not None:
        num_rows = export.export(options.run_dir, options.output, selection)
        print(f"{num_rows:,} rows written to {options.output}")
    elif selection == export.Selection():
        print(export.summary(options.run_dir))
    else:
        print("\n".join(export.lines(options.run_dir, selection)))
    return 0


# --- a run that has been ---


def add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="a run's curves, alarms and worst groups, as a page"
    )
    parser.add_argument("run_dir", help="the run's output folder")
    parser.add_argument("--output", help="folder for report.html and report.png (default: RUN_DIR)")
    parser.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> int:
    from swift_grpo_ext.diversity.report import write_report

    for path in write_report(options.run_dir, options.output):
        print(path)
    return 0


def add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit", help="do rollouts that any framework dumped share their noise?"
    )
    parser.add_argument(
        "file", nargs="+", type=Path, help="of TRL, verl, slime, ms-swift: .parquet, .csv, .jsonl"
    )
    for name in ("step", "group", "prompt", "completion", "token-ids", "logprobs"):
        parser.add_argument(f"--{name}", metavar="COLUMN", help=f"the column that holds the {name}")
    parser.add_argument("--alarm-p", type=float, default=1e-6, help="default: %(default)g")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.set_defaults(run=run_audit)


def run_audit(options: argparse.Namespace) -> int:
    from swift_grpo_ext.diversity.audit import audit, report
    from swift_grpo_ext.diversity.dumps import COLUMNS, read_dump

    names = {key: name for key in COLUMNS if (name := getattr(options, key, None))}
    result = audit(read_dump(options.file, names), options.alarm_p)
    print(report(result, as_json=options.json))
    return int(result.verdict == "shared noise")


def add_replay(commands: Any) -> None:
    from swift_grpo_ext.replay.command import add_arguments

    add_arguments(commands.add_parser("replay", help="draw a logged group again, token by token"))


ADDERS = (
    add_doctor,
    add_check,
    add_init,
    add_plugin_path,
    add_flags,
    add_samples,
    add_report,
    add_replay,
    add_audit,
)
