"""Makes our flags real flags of `swift rlhf` and `swift rollout`.

ms-swift imports `--external_plugins` inside `BaseArguments.__post_init__`, after argparse, and
hands on declared dataclass fields only. `BaseArguments._init_model_kwargs` is the first call after
the import. We have it change the object's class to a subclass with our flags as fields. It takes
their values from the words that ms-swift is parsing: the command line, or a script's list.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

import torch.distributed as dist
from swift.arguments import BaseArguments, RLHFArguments, RolloutArguments
from swift.utils import get_logger, set_default_ddp_config
from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

from swift_grpo_ext.checks import preflight, rules
from swift_grpo_ext.checks.finding import SettingsError, did_you_mean, enforce
from swift_grpo_ext.checks.left_out import left_out_rows_named
from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.flags import ExtFlags, flag_names
from swift_grpo_ext.record.log import check_output_dir
from swift_grpo_ext.registry import TRAINERS
from swift_grpo_ext.server import api_key
from swift_grpo_ext.stops.templates import check_stop_settings
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import verify_overrides
from swift_grpo_ext.upstream.determinism import prepare_process
from swift_grpo_ext.upstream.patches import PatchPhase, apply, patch, repair

if TYPE_CHECKING:
    from datasets import Dataset

logger = get_logger()


@dataclass
class RLHFExtArguments(ExtFlags, RLHFArguments):
    """`swift rlhf`'s arguments with our flags."""

    def _check_grpo(self) -> None:
        # The last check before the model is loaded: model and data are known by name here.
        super()._check_grpo()
        if self.rlhf_type in TRAINERS:
            # Cheap checks come first; the data set costs most.
            check_stop_settings(self)
            enforce(check_output_dir(self))
            enforce(preflight.check_model(self))
            with left_out_rows_named():
                datasets = super().load_dataset()
            apply(PatchPhase.TRAINING)  # rows are then encoded as in the training
            enforce(preflight.check_datasets(self, *datasets))
            self.__dict__["_loaded_datasets"] = datasets

    def load_dataset(self) -> tuple[Dataset, Dataset | None]:
        # Hand over the data that `_check_grpo` has loaded, and keep no reference.
        return self.__dict__.pop("_loaded_datasets", None) or super().load_dataset()


@dataclass
class RolloutExtArguments(ExtFlags, RolloutArguments):
    """`swift rollout`'s arguments with our flags."""

    sample_log: Literal["all", "tokens", "none"] = "none"
    """`none`, since a training with the plugin records the samples."""

    watches_weights: ClassVar[bool] = True
    """Whether the watch checks weights after each update. No GPU has run it yet; on GPUs it is on
    where `--rollout_mismatch` is given."""

    def _check_device_count(self) -> None:
        # ms-swift calls it once it knows the model; a server has no hook of its own for checks.
        enforce(preflight.check_model(self))
        # ms-swift has taken the next port where old connections hold this one for a minute.
        self.port: int = self.__dict__.pop("_given_port", 0) or self.port
        super()._check_device_count()


EXTENDED: dict[type, type] = {
    RLHFArguments: RLHFExtArguments,
    RolloutArguments: RolloutExtArguments,
}
"""Our class for each of ms-swift's. Subclasses of Megatron and Ray keep theirs: they have trainers
of their own."""


OFF = {"logits_shim": "off", "logps_shared_prompt": "false"}  # a flag's text for `False`


@repair(PatchPhase.REGISTRATION)
def extend_arguments() -> None:
    """Add the flags, also to a command line that is being parsed.

    Symptom: ms-swift refuses a plugin's flags as left-over arguments.
    Upstream: ms-swift 4.6, arguments/base_args/base_args.py and pipelines/base.py: plugins are
    imported once arguments are parsed. Can go when ms-swift imports plugins before it parses
    arguments.
    """
    verify_overrides(*EXTENDED.values())
    original = BaseArguments._init_model_kwargs

    @functools.wraps(original)
    def _init_model_kwargs(self: BaseArguments) -> None:
        upstream = next((u for u, ours in EXTENDED.items() if type(self) in (u, ours)), None)
        given = _adopt_command_line(self, upstream) if upstream else []
        if isinstance(self, ExtFlags):
            _check(self, given)
        elif getattr(self, "rlhf_type", None) in TRAINERS:
            logger.warning(
                f"swift-grpo-ext does not act in the training of {type(self).__name__}: Megatron "
                "and Ray have trainers of their own. It acts in `swift rollout --external_plugins "
                "...`, which they ask with --vllm_mode server (docs/launching.md). Leave "
                "--external_plugins out of the training."
            )
        original(self)

    patch(BaseArguments, _init_model_kwargs=_init_model_kwargs)


def _check(args: BaseArguments, given: list[str]) -> None:
    """Check the process and the arguments, and prepare the process. The model is a name so far."""
    ours = [name for name in given if name in flag_names()]
    if isinstance(args, RLHFArguments) and args.rlhf_type not in TRAINERS:
        if ours:
            raise SettingsError(
                f"--{ours[0]} is read with --rlhf_type grpo and gkd only; received --rlhf_type "
                f"{args.rlhf_type}. Leave the flag out."
            )
        return
    # Keys come first: from here on `args` holds a mask in their place, for all logs.
    if isinstance(args, RolloutArguments):
        if "swift.pipelines.infer.rollout" in sys.modules:
            # A script may have called `register()` before it loaded the server.
            apply(PatchPhase.SERVER)
        api_key.take(args)
        vars(args)["_given_port"] = args.port
        vars(args)["watches_weights"] = not has_accelerator() or "rollout_mismatch" in given
        enforce(preflight.check_server_process(args.port))
    else:
        api_key.check_urls(args)
    if getattr(args, "rlhf_type", None) == "gkd" and args.use_vllm:
        # vLLM asks for a rank in the training process. ms-swift sets it for GRPO alone (4.6,
        # arguments/rlhf_args.py, `_init_grpo`).
        set_default_ddp_config()
    # ms-swift's port for one process (4.6, utils/torch_utils.py), which another training may hold.
    # torchrun, and a script that has made the group, have ports of their own.
    is_alone = os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_alone and os.environ.get("MASTER_PORT") == "29500" and not dist.is_initialized():
        os.environ["MASTER_PORT"] = "0"  # any free one
    enforce(rules.check_arguments(args, given))
    # The environment is set last, and before CUDA or vLLM read it.
    if getattr(args, "full_determinism", False):  # not an argument of servers
        prepare_process()
    apply_cpu_settings(args, given)


def _adopt_command_line(args: BaseArguments, upstream: type) -> list[str]:
    """Turn `args` into its extended class with our flags' values; return the names of the flags
    that were given, ours and ms-swift's."""
    given, left_over = being_parsed(type(args))
    argv = as_typed(given)
    # Parse again, with our class. Without abbreviations: one of ms-swift's flags could match ours.
    parser = Parser([EXTENDED[upstream]], allow_abbrev=False)
    values, unknown = parser.parse_known_args(argv)
    # ms-swift takes abbreviations, and would refuse the words that are left over here.
    _, unknown = Parser([upstream]).parse_known_args(unknown)
    if unknown and not args.ignore_args_error:
        tokens = [token for token in unknown if token.startswith("--")] or unknown[:1]
        known = [f"--{action.dest}" for action in parser._actions]
        hints = {token: did_you_mean(f"--{_name(token)}", known) for token in tokens}
        named = [f"{token} ({hint})" if hint else token for token, hint in hints.items()]
        raise SettingsError(
            f"Unknown argument {', '.join(named)}; left over: {' '.join(unknown)}. "
            "`swift-grpo-ext flags` lists our flags."
        )
    left_over[:] = unknown  # in place: at its end, ms-swift refuses the words in its own list
    if argv or type(args) is upstream:  # else Python has made it, with values of our flags
        args.__class__ = EXTENDED[upstream]
        for name in flag_names():
            setattr(args, name, getattr(values, name))
    by_option = {option: a.dest for a in parser._actions for option in a.option_strings}
    options = (token.partition("=")[0] for token in argv)
    return [by_option[option] for option in options if option in by_option]


def being_parsed(kind: type) -> tuple[list[str], list[str]]:
    """Return the arguments that are being parsed into `kind` (from the command line, a script or
    Ray) while ms-swift imports plugins, and ms-swift's own list of unknown arguments. Both are
    empty if Python code creates `kind`."""
    for frame, _ in traceback.walk_stack(None):  # no API has these local variables
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            names = frame.f_locals
            if kind in names["self"].dataclass_types:
                argv = sys.argv[1:] if names["args"] is None else names["args"]
                return list(argv), names["remaining_args"]
    return [], []


def as_typed(argv: list[str]) -> list[str]:
    """Undo YAML 1.1, which makes `False` of `off` and `false`, for flags that have texts for it."""
    pairs = pairwise(["", *argv])
    return [OFF.get(_name(flag), word) if word == "False" else word for flag, word in pairs]


def _name(token: str) -> str:
    """Return the flag that a token names, as ms-swift spells it; "" for a value."""
    return token[2:].partition("=")[0].replace("-", "_") if token.startswith("--") else ""


class Parser(HfArgumentParser):
    """Raises, where argparse would print five hundred flags; takes JSON as ms-swift does."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        with _patch_get_type_hints():  # ms-swift's: JSON for fields that are a dict or a text
            super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}. `swift-grpo-ext flags` lists our flags and their values.")
