"""`swift-grpo-ext`: what can be asked of the plugin, and of a run's samples, without training.

`@command` enters a function with its command's arguments. What a command needs is imported when it
runs, so that `flags` does without the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from swift_grpo_ext.flags import FlagInfo, flag_infos, show
from swift_grpo_ext.sampling.seeding import PHASES
from swift_grpo_ext.tools.replay.command import round_name, setting
from swift_grpo_ext.version import __version__

Run = Callable[[argparse.Namespace], int | None]
"""What runs a command; gives the exit status, None for 0."""

COMMANDS: list[Callable[[Any], None]] = []
"""Each adds a command's parser."""


def arg(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """As `add_argument` takes it."""
    return names, options


def command(
    name: str, text: str, *arguments: tuple[tuple[str, ...], dict[str, Any]], epilog: str = ""
) -> Callable[[Run], Run]:
    """Enter a function as a command."""

    def enter(run: Run) -> Run:
        def add(commands: Any) -> None:
            parser = commands.add_parser(name, help=text, epilog=epilog)
            for names, options in arguments:
                parser.add_argument(*names, **options)
            parser.set_defaults(run=run)

        COMMANDS.append(add)
        return run

    return enter


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="swift-grpo-ext", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in COMMANDS:
        add(commands)
    own = list(sys.argv[1:] if argv is None else argv)
    end = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:end])
    options.rest = own[end + 1 :]
    try:
        return int(options.run(options) or 0)
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext {options.command}: {e}", file=sys.stderr)
        return 1


# --- before a run ---


@command(
    "doctor",
    "is this machine ready? each problem with a remedy",
    arg("config", nargs="?", help="a YAML file: takes the settings below from it"),
    arg("--model", help="a local model: its logits and its template are looked at"),
    arg("--model_type", help="as for swift rlhf"),
    arg("--template", help="as for swift rlhf"),
    arg("--dataset", nargs="+", default=[], help="its first rows are looked at"),
    arg("--stop_words", nargs="+", default=[], help="as for swift rlhf"),
    arg("--server", nargs="+", default=[], metavar="HOST:PORT", help="of servers"),
    arg("--port", nargs="+", type=int, help="that have to be free (several ranks: 29500)"),
    arg("--json", action="store_true", help="for scripts"),
)
def doctor(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.check import vllm_load

    vllm_load.start()  # beside the imports that come
    from swift_grpo_ext.tools.check.doctor import examine, report, target_of

    return report(examine(target_of(options)), as_json=options.json)


@command(
    "check",
    "would this run start? settings, model, data, plugins, packages, GPUs",
    arg("config", nargs="+", help="a file, or NAME for NAME.train.yaml and NAME.rollout.yaml"),
    arg("--ranks", type=int, help="training processes (default: as ENV says)"),
    arg("--model", help="of both sides, instead of the files'"),
    arg("--gpus", metavar="LIST", help="of this machine, e.g. 0,1 (default: ENV's)"),
    arg("--settings-only", action="store_true", help="for another machine: look nothing up here"),
    arg("--quiet", action="store_true", help="errors and warnings only"),
    epilog="Arguments of swift rlhf behind -- win over the file's settings.",
)
def check(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.check.rules import check, errors_first
    from swift_grpo_ext.tools.check.settings import read_run

    gpus = None if options.gpus is None else [gpu for gpu in options.gpus.split(",") if gpu]
    failed = False
    for config in options.config:
        run = read_run(config, ranks=options.ranks, model=options.model, overrides=options.rest)
        findings = check(run)
        if not options.settings_only and not run.unread:
            from swift_grpo_ext.tools.check.lookup import look_up

            findings = errors_first([*findings, *look_up(run, gpus)])
        failed = failed or any(finding.level == "error" for finding in findings)
        shown = [f for f in findings if f.level != "note" or not options.quiet]
        if shown or not options.quiet:
            print("\n".join([config, *(f"  {finding}" for finding in shown)]))
    return int(failed)


@command(
    "selftest",
    "check each promise with your settings, model, rows and devices",
    arg("config", nargs="?", help="the YAML file of swift rlhf, or NAME as for check"),
    arg("rollout", nargs="?", help="that of swift rollout: its server is started and tried"),
    arg("--model", help="instead of the file's; with --dataset, no file is needed"),
    arg("--dataset", nargs="+", default=[], help="instead of the file's"),
    arg("--server", metavar="HOST:PORT", help="a swift rollout that runs already"),
    arg("--minutes", type=float, default=5.0, help="checks begin within them (default: 5)"),
    arg("--output", type=Path, default=Path("output/selftest"), help="default: %(default)s"),
    arg("--json", action="store_true", help="print JSON instead of the table"),
    epilog="Arguments of swift rlhf behind -- win over the file's settings. Exit status: 1 where a "
    "promise does not hold, 2 where none could be tried.",
)
def selftest(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.selftest.command import run

    return run(options)


@command(
    "init",
    "copy a preset and its launch script to start from",
    arg("directory", type=Path, nargs="?", help="where to"),
    arg("--preset", default="server_2x6_lora", help="which (--list shows them)"),
    arg("--list", action="store_true", help="show the presets, copy nothing"),
)
def init(options: argparse.Namespace) -> None:
    from swift_grpo_ext.tools.check import share

    if options.list:
        print("\n".join(f"{name:20} {share.title(name)}" for name in share.preset_names()))
        return
    if options.directory is None:
        raise ValueError("where to? swift-grpo-ext init DIRECTORY; --list shows the presets.")
    print(*share.copy_preset(options.preset, options.directory), sep="\n")
    print(f"\nIn {options.directory}: {share.command(options.preset)}")


@command("plugin-path", "the file to give to --external_plugins")
def plugin_path(options: argparse.Namespace) -> None:
    from swift_grpo_ext.tools.check import share

    print(share.PLUGIN_FILE)


@command(
    "flags",
    "list the flags that the plugin adds",
    arg("--markdown", action="store_true", help="as the documentation's table"),
)
def flags(options: argparse.Namespace) -> None:
    print(flag_table() if options.markdown else flag_list())


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

    def row(info: FlagInfo) -> str:
        values = info.type.replace("|", "\\|")
        return f"| `--{info.name}` | {values} | {show(info.default)} | {info.help} |"

    head = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join(head + [row(info) for info in flag_infos()])


# --- a run that has been ---


@command(
    "samples",
    "sum up, show or export a run's samples",
    arg("run_dir", help="the run's output folder, which holds `samples`"),
    arg("--output", help="write rows with their scores: FILE.parquet, FILE.jsonl"),
    arg("--where", metavar="CONDITION", help="only rows such as 'reward < 0.5'"),
    arg("--sort", metavar="COLUMN", help="such as reward; the least come first"),
    arg("--descending", action="store_true", help="the greatest come first"),
    arg("--limit", type=int, metavar="N", help="only the first N rows"),
)
def samples(options: argparse.Namespace) -> None:
    from swift_grpo_ext.tools import export

    names = ("where", "sort", "descending", "limit")
    selection = export.Selection(**{name: getattr(options, name) for name in names})
    if options.output is not None:
        num_rows = export.export(options.run_dir, options.output, selection)
        print(f"{num_rows:,} rows written to {options.output}")
    elif selection == export.Selection():
        print(export.summary(options.run_dir))
    else:
        print("\n".join(export.lines(options.run_dir, selection)))


@command(
    "report",
    "a run's curves, alarms and worst groups, as a page",
    arg("run_dir", help="the run's output folder"),
    arg("--output", help="folder for report.html and report.png (default: RUN_DIR)"),
)
def report(options: argparse.Namespace) -> None:
    from swift_grpo_ext.tools.view.report import write_report

    print(*write_report(options.run_dir, options.output), sep="\n")


@command(
    "view",
    "samples, rewards and curves of a run in a browser",
    arg("run_dir", nargs="+", help="a run's output folder, or two to look at together"),
    arg("--port", type=int, default=8462, help="0: any (default: %(default)s)"),
    arg("--output", metavar="FILE.html", help="write one page that opens offline instead"),
    arg("--groups", type=int, default=100, help="in that page (default: %(default)s)"),
    arg("--steps", metavar="A:B", default="", help="only these, in that page"),
)
def view(options: argparse.Namespace) -> None:
    if len(options.run_dir) > 2:
        raise ValueError(f"{len(options.run_dir)} runs: expected one or two.")
    if options.output is not None:
        from swift_grpo_ext.tools.view.offline import write_page

        print(write_page(options.run_dir, options.output, options.groups, options.steps))
    else:
        from swift_grpo_ext.tools.view.server import serve

        serve(options.run_dir, options.port)


@command(
    "replay",
    "draw a logged group again, token by token",
    arg("run_dir", help="the run's output folder: args.json, samples, checkpoints"),
    arg("--round", required=True, type=round_name, help="step and number, as 12.0; 12 means 12.0"),
    arg("--group", required=True, type=int, help="number in its round, from 0"),
    arg("--phase", choices=PHASES, default="train"),
    arg("--json", action="store_true", help="print JSON instead of a table"),
    arg(
        "--set",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a setting of args.json that is another here, such as model=DIR or "
        "vllm_max_model_len=512 (what a server was told); the value is JSON, or text",
    ),
)
def replay(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.replay.command import run

    return run(options)


@command(
    "diff",
    "where two runs part, and why; exit status 0 equal, 1 different, 2 nothing to compare",
    arg("run_a", help="a run's output folder"),
    arg("run_b", help="another's"),
    arg("--common", action="store_true", help="only rounds that both have"),
    arg("--tolerance", type=float, metavar="NATS", help="between log-probabilities"),
    arg("--json", action="store_true", help="for scripts"),
)
def diff(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.diff import run

    return run(options)


@command(
    "compare",
    "how much better runs score than others, prompt by prompt, with intervals",
    arg("--baseline", nargs="+", required=True, metavar="RUN", help="output folders"),
    arg("--candidate", nargs="+", required=True, metavar="RUN", help="paired by their --seed"),
    arg("--phase", choices=PHASES, default="train", help="default: %(default)s"),
    arg("--steps", metavar="A:B", default="", help="rounds of these only, both included"),
    arg("--reward", metavar="NAME", help="a reward function; default: the total"),
    arg("--resamples", type=int, default=10_000, help="of the bootstrap; default: %(default)s"),
    arg("--json", action="store_true", help="for scripts"),
)
def compare(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.paired import run

    return run(options)


@command(
    "audit",
    "do rollouts that any framework dumped share their noise?",
    arg("file", nargs="+", type=Path, help="of TRL, verl, slime, ms-swift: .parquet, .csv, .jsonl"),
    *(
        arg(f"--{name}", metavar="COLUMN", help=f"the column that holds the {name}")
        for name in ("step", "group", "prompt", "completion", "token-ids", "logprobs")
    ),
    arg("--alarm-p", type=float, default=1e-6, help="default: %(default)g"),
    arg("--json", action="store_true", help="for scripts"),
)
def audit(options: argparse.Namespace) -> int:
    from swift_grpo_ext.tools.audit import audit, report
    from swift_grpo_ext.tools.dumps import COLUMNS, read_dump

    names = {key: name for key in COLUMNS if (name := getattr(options, key, None))}
    result = audit(read_dump(options.file, names), options.alarm_p)
    print(report(result, as_json=options.json))
    return int(result.verdict == "shared noise")
