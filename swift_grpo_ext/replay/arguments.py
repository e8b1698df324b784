"""The command's arguments. Light: what the command needs is imported when it runs."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from swift_grpo_ext.sampling.seeding import PHASES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments, and what runs it."""
    parser.add_argument("run_dir", help="the run's output folder: args.json, samples, checkpoints")
    parser.add_argument(
        "--round", required=True, type=round_name, help="step and number, as 12.0; 12 means 12.0"
    )
    parser.add_argument("--group", required=True, type=int, help="number in its round, from 0")
    parser.add_argument("--phase", choices=PHASES, default="train")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a setting of args.json that is another here, such as model=DIR or "
        "vllm_max_model_len=512 (what a server was told); the value is JSON, or text",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from swift_grpo_ext.replay import command

    return command.run(options)


def round_name(text: str) -> tuple[int, int]:
    """Step and number of a round."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a step and a number, such as 12.0")
    return int(match[1]), int(match[2] or 0)


def setting(text: str) -> tuple[str, Any]:
    """A name, and a value that is JSON or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
