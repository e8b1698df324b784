"""How flags of ours become real flags of `swift rlhf` and `swift rollout`.

ms-swift imports `--external_plugins` inside `BaseArguments.__post_init__`, after argparse, and
hands on declared dataclass fields only. `BaseArguments._init_model_kwargs`, the first call after
the import, therefore turns the object into our subclass of its own class, which declares our flags
as fields, with the values of what ms-swift is parsing: the command line, or a script's list. Where
`register()` is called before that (Python scripts), the pipelines' `args_class` is ours already;
the same rules hold.

Upstream: ms-swift 4.6, arguments/base_args/base_args.py and pipelines/base.py. Can go when ms-swift
imports plugins before it parses arguments.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import logging
import shlex
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from swift.arguments import BaseArguments, RLHFArguments, RolloutArguments
from swift.utils import get_logger
from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

from swift_grpo_ext.checks import preflight
from swift_grpo_ext.checks.finding import enforce
from swift_grpo_ext.flags import ExtFlags, flag_infos, flag_names
from swift_grpo_ext.server import api_key
from swift_grpo_ext.server.new_tokens import check_model_tokens
from swift_grpo_ext.stops.templates import check_stop_settings
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.cpu import apply_cpu_settings
from swift_grpo_ext.upstream.patches import patch

logger = get_logger()

# ids of the arguments whose left-over command line was checked, and holds nothing but our flags. No
# attribute of theirs: ms-swift writes all of them to args.json.
_checked: set[int] = set()


class _StrictArguments:
    """Makes left-over arguments harmless to ms-swift once we have checked that they are ours."""

    @property
    def ignore_args_error(self) -> bool:
        return id(self) in _checked or self.__dict__.get("ignore_args_error", False)

    @ignore_args_error.setter
    def ignore_args_error(self, value: bool) -> None:
        self.__dict__["ignore_args_error"] = value


@dataclass
class RLHFExtArguments(_StrictArguments, ExtFlags, RLHFArguments):
    """`swift rlhf`'s arguments with our flags."""

    def _check_grpo(self) -> None:
        # The last check before the model is loaded: model and data are known by name here.
        super()._check_grpo()
        if self.rlhf_type == "grpo":
            check_model_tokens(self)
            check_stop_settings(self)
            enforce(preflight.check_speculation(self))
            datasets = super().load_dataset()
            enforce(preflight.check_datasets(self, *datasets))
            self.__dict__["_loaded_datasets"] = datasets

    def load_dataset(self) -> tuple[Any, Any]:
        # Handed over once: what `_check_grpo` has loaded is not loaded again, nor kept.
        return self.__dict__.pop("_loaded_datasets", None) or super().load_dataset()


@dataclass
class RolloutExtArguments(_StrictArguments, ExtFlags, RolloutArguments):
    """`swift rollout`'s arguments with our flags."""

    def _check_device_count(self) -> None:
        check_model_tokens(self)
        enforce(preflight.check_speculation(self))
        # Without an accelerator there are no devices to count: replicas share cores and memory.
        if has_accelerator():
            super()._check_device_count()


EXTENDED: dict[type, type] = {
    RLHFArguments: RLHFExtArguments,
    RolloutArguments: RolloutExtArguments,
}


def install() -> None:
    """Hang the flags in, for command lines parsed before now and after."""
    original = BaseArguments._init_model_kwargs

    @functools.wraps(original)
    def _init_model_kwargs(self: Any) -> None:
        upstream = next((u for u, ours in EXTENDED.items() if type(self) in (u, ours)), None)
        given = _adopt_command_line(self, upstream) if upstream else []
        if isinstance(self, ExtFlags):
            _check(self, given)
        elif not isinstance(self, RLHFArguments) and getattr(self, "rlhf_type", None) == "grpo":
            logger.warning(
                f"swift-grpo-ext does not act on {type(self).__name__}: Megatron GRPO and "
                "ms-swift's Ray pipelines have trainers of their own. Seeds, stops, checks, the "
                "record and the monitor are ms-swift's, and its noise may freeze (docs/seeds.md). "
                "Train with `swift rlhf --rlhf_type grpo`, or leave --external_plugins out."
            )
        original(self)

    patch(BaseArguments, _init_model_kwargs=_init_model_kwargs)
    from swift.pipelines.train.rlhf import SwiftRLHF

    patch(SwiftRLHF, args_class=RLHFExtArguments)
    # The rollout pipeline needs vLLM, and is loaded only where `swift rollout` runs.
    rollout = sys.modules.get("swift.pipelines.infer.rollout")
    if rollout is not None:
        patch(rollout.SwiftRolloutDeploy, args_class=RolloutExtArguments)


def _check(args: Any, given: list[str]) -> None:
    ours = [name for name in given if name in flag_names()]
    if isinstance(args, RLHFArguments) and args.rlhf_type != "grpo":
        if ours:
            raise ValueError(
                f"--{ours[0]} is read with --rlhf_type grpo only; received --rlhf_type "
                f"{args.rlhf_type}. Leave the flag out."
            )
        return
    if isinstance(args, RolloutArguments):
        if "swift.pipelines.infer.rollout" in sys.modules:
            # A script may have called `register()` before it loaded the server.
            from swift_grpo_ext.server import routes

            routes.install_where_served()
        api_key.take(args, on_command_line="api_key" in given)
    else:
        api_key.check_urls(args)
    preflight.choose_master_port()
    enforce(preflight.check_process(args))
    enforce(preflight.check_arguments(args, given))
    apply_cpu_settings(args, given)


def _adopt_command_line(args: Any, upstream: type) -> list[str]:
    """Turn `args` into its extended class with our flags' values; returns the flags given."""
    extended = EXTENDED[upstream]
    argv = off_again(_command_line(type(args)))
    parser = Parser([extended], allow_abbrev=False)
    namespace, leftover = parser.parse_known_args(argv)
    # ms-swift takes abbreviations of its own flags.
    _, leftover = Parser([upstream]).parse_known_args(leftover)
    if leftover and not args.ignore_args_error:
        _refuse(leftover, parser)
    if argv or type(args) is upstream:  # else made in Python, with values of our flags
        args.__class__ = extended
        for name in flag_names():
            setattr(args, name, getattr(namespace, name))
    _checked.add(id(args))
    logger.addFilter(_reword_leftovers)
    return _given(argv, parser)


def _command_line(kind: type) -> list[str]:
    """Return what is being parsed into arguments of that class; [] where Python makes them.

    Plugins are imported in the middle of it: only the call that is under way knows what it was
    given, the command line, a script's list, or Ray's.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            given = frame.f_locals
            if kind in given["self"].dataclass_types:
                return list(sys.argv[1:] if given["args"] is None else given["args"])
        frame = frame.f_back
    return []


def off_again(argv: list[str]) -> list[str]:
    """Undo what YAML 1.1 does to the `off` of our flags: a boolean, which arrives as `False`."""
    takes_off = {info.name for info in flag_infos() if "off" in info.type.split(" | ")}
    pairs = zip(["", *argv], argv, strict=False)
    return [
        "off" if now == "False" and _name(before) in takes_off else now for before, now in pairs
    ]


def _name(token: str) -> str:
    """Return the flag that a token names, as ms-swift spells it; "" for a value."""
    return token[2:].partition("=")[0].replace("-", "_") if token.startswith("--") else ""


def _given(argv: list[str], parser: HfArgumentParser) -> list[str]:
    """Return the names of all flags on a command line, ours and ms-swift's."""
    by_option = {option: a.dest for a in parser._actions for option in a.option_strings}
    options = (token.partition("=")[0] for token in argv if token.startswith("--"))
    return [by_option[option] for option in options if option in by_option]


class Parser(HfArgumentParser):
    """Raises instead of printing the usage of five hundred flags; takes JSON as ms-swift does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _patch_get_type_hints():
            super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. `swift-grpo-ext flags` lists our flags and their values.")


def _refuse(leftover: list[str], parser: HfArgumentParser) -> NoReturn:
    known = [o[2:] for a in parser._actions for o in a.option_strings if "-" not in o[2:]]
    unknown = next((t for t in leftover if t.startswith("--")), leftover[0])
    near = difflib.get_close_matches(_name(unknown), known, n=1, cutoff=0.6)
    hint = f"did you mean --{near[0]}?" if near else "`swift-grpo-ext flags` lists our flags."
    raise ValueError(f"Unknown argument {unknown} (left over: {' '.join(leftover)}); {hint}")


def _reword_leftovers(record: logging.LogRecord) -> bool:
    """Say that our flags are flags: ms-swift warns of `remaining_argv`, as if it ignored them."""
    what, _, argv = str(record.msg).partition(": ")
    if what == "remaining_argv":
        record.msg = f"Flags of swift-grpo-ext: {shlex.join(ast.literal_eval(argv))}"
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
