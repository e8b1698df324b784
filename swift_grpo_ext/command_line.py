"""Makes our flags real flags of `swift rlhf` and `swift rollout`.

ms-swift imports `--external_plugins` in `BaseArguments.__post_init__`, after argparse, and passes
on declared dataclass fields only. The first call after the import is `_init_model_kwargs`. We make
this call change the object's class to a subclass with our flags as fields. The flags' values come
from the arguments that ms-swift is parsing: the command line, or a script's list.
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
from swift.utils import set_default_ddp_config
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


@dataclass
class RLHFExtArguments(ExtFlags, RLHFArguments):
    """`swift rlhf`'s arguments with our flags."""

    def _check_grpo(self) -> None:
        # The last check before the model is loaded. The names of model and data are known here.
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
    """The default is `none`, since a training with the plugin records the samples."""

    watches_weights: ClassVar[bool] = True
    """The watch checks weights after each update if this is true. It is untested on GPUs; there it
    is on only if `--rollout_mismatch` is given."""

    def _check_device_count(self) -> None:
        # ms-swift calls this method once it knows the model. It has no hook for a server's checks.
        enforce(preflight.check_model(self))
        # If closed connections still hold the port (for a minute), ms-swift has taken the next one.
        self.port: int = self.__dict__.pop("_given_port", 0) or self.port
        super()._check_device_count()


EXTENDED: dict[type, type] = {
    RLHFArguments: RLHFExtArguments,
    RolloutArguments: RolloutExtArguments,
}
"""Maps ms-swift's arguments classes to ours. Subclasses for Megatron and Ray are not extended: they
have other trainers."""


OFF = {"logits_shim": "off", "logps_shared_prompt": "false"}  # YAML reads these values as `False`


@repair(PatchPhase.REGISTRATION)
def extend_arguments() -> None:
    """Add the flags, also to a command line that is being parsed.

    Symptom: ms-swift refuses a plugin's flags as left-over arguments.
    Upstream: ms-swift 4.6, arguments/base_args/base_args.py and pipelines/base.py: plugins are
    imported after the arguments are parsed. Can go when they are imported before that.
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
            # A warning would be overlooked, and the training would lack what the user asked for.
            raise SettingsError(
                f"--external_plugins names swift-grpo-ext in a training of {type(self).__name__}: "
                "the trainers and engines of Megatron and Ray would have none of its seeds, "
                "records and checks. Leave it out of the training (`swift rollout` may have it, "
                "docs/launching.md), or use `swift rlhf`."
            )
        original(self)

    patch(BaseArguments, _init_model_kwargs=_init_model_kwargs)


def _check(args: BaseArguments, given: list[str]) -> None:
    """Check the process and the arguments, and prepare the process, before the model is loaded."""
    ours = [name for name in given if name in flag_names()]
    if isinstance(args, RLHFArguments) and args.rlhf_type not in TRAINERS:
        if ours:
            raise SettingsError(
                f"--{ours[0]} is read with --rlhf_type grpo and gkd only; received --rlhf_type "
                f"{args.rlhf_type}. Leave the flag out."
            )
        return
    # Keys come first: a mask replaces them in `args`, so that no log shows them.
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
        # vLLM needs a rank in the training process. ms-swift only sets it for GRPO (4.6,
        # arguments/rlhf_args.py, `_init_grpo`).
        set_default_ddp_config()
    # For one process, ms-swift uses port 29500 (4.6, utils/torch_utils.py), which another training
    # may hold. torchrun, or a script that has made the group, has chosen its own port.
    is_alone = os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_alone and os.environ.get("MASTER_PORT") == "29500" and not dist.is_initialized():
        os.environ["MASTER_PORT"] = "0"  # any free one
    enforce(rules.check_arguments(args, given))
    # Set the environment last, but before CUDA and vLLM read it.
    if getattr(args, "full_determinism", False):  # not an argument of servers
        prepare_process()
    apply_cpu_settings(args, given)


def _adopt_command_line(args: BaseArguments, upstream: type) -> list[str]:
    """Turn `args` into its extended class with our flags' values; return the names of the flags
    that were given, ours and ms-swift's."""
    given, left_over = pending_arguments(type(args))
    argv = restore_off_values(given)
    # Parse again, with our class. Without abbreviations: one of ms-swift's flags could match ours.
    parser = Parser([EXTENDED[upstream]], allow_abbrev=False)
    values, unknown = parser.parse_known_args(argv)
    # ms-swift accepts abbreviations: parse the remaining arguments with its own class.
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
    left_over[:] = unknown  # in place: ms-swift later rejects the arguments in this list
    if argv or type(args) is upstream:  # else Python code made it, with our flags
        args.__class__ = EXTENDED[upstream]
        for name in flag_names():
            setattr(args, name, getattr(values, name))
    by_option = {option: a.dest for a in parser._actions for option in a.option_strings}
    options = (token.partition("=")[0] for token in argv)
    return [by_option[option] for option in options if option in by_option]


def pending_arguments(kind: type) -> tuple[list[str], list[str]]:
    """Return the arguments that are being parsed into `kind` (from the command line, a script or
    Ray) while ms-swift imports plugins, and ms-swift's own list of unknown arguments. Both are
    empty if Python code creates `kind`."""
    for frame, _ in traceback.walk_stack(None):  # no API returns these local variables
        if frame.f_code is HfArgumentParser.parse_args_into_dataclasses.__code__:
            names = frame.f_locals
            if kind in names["self"].dataclass_types:
                argv = sys.argv[1:] if names["args"] is None else names["args"]
                return list(argv), names["remaining_args"]
    return [], []


def restore_off_values(argv: list[str]) -> list[str]:
    """Restore the values `off` and `false` of our flags, which YAML 1.1 reads as `False`."""
    pairs = pairwise(["", *argv])
    return [OFF.get(_name(flag), word) if word == "False" else word for flag, word in pairs]


def _name(token: str) -> str:
    """Return the name of a flag's token in ms-swift's spelling; "" for a value."""
    return token[2:].partition("=")[0].replace("-", "_") if token.startswith("--") else ""


class Parser(HfArgumentParser):
    """Parses JSON like ms-swift, and raises errors: argparse would print five hundred flags."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        with _patch_get_type_hints():  # ms-swift's: accepts JSON for fields of type `dict | str`
            super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}. `swift-grpo-ext flags` lists our flags and their values.")
