"""The plugin's flags are real flags, in command lines and in scripts, by `--external_plugins` or by
`register()` (R5)."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from swift.arguments import RLHFArguments, RolloutArguments
from swift.utils.utils import _patch_get_type_hints, parse_args
from transformers import HfArgumentParser

import swift_grpo_ext
from swift_grpo_ext import command_line
from swift_grpo_ext.checks import rules
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.check.glance import upstream_flags

PLUGIN = Path(__file__).resolve().parents[3] / "plugins/grpo_ext.py"
KINDS = pytest.mark.parametrize("registered", [False, True], ids=["by flag", "register() first"])


def parsed(argv: list[str] | None, *, registered: bool, names: Sequence[str] = ()) -> Any:
    """Parse a list, or this process's command line, in a forked child; return the values of our
    flags or the error. `names` are environment variables to return too."""
    found: Any = {}

    def stop(args: Any, given: list[str]) -> None:
        """Stop before the checks of settings, which need a model and data."""
        assert command_line.pending_arguments(RLHFArguments)[1] == []  # nothing for ms-swift
        found.update({name: getattr(args, name) for name in MEANT}, given=given)
        found.update({name: os.environ.get(name) for name in names})
        raise InterruptedError

    read, write = os.pipe()
    if (child := os.fork()) == 0:
        rules.check_arguments = stop
        try:
            if registered:
                swift_grpo_ext.register()
            with contextlib.suppress(InterruptedError):
                parse_args(RLHFArguments, argv)
        except BaseException as e:
            found = f"{type(e).__name__}: {e}"
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as file:
        return json.load(file)


BASE = ["--rlhf_type", "grpo", "--model", "none", "--external_plugins", str(PLUGIN)]
OURS = ["--stop_token_ids", "5", "7", "--logits-shim=strict", "--no_include_stop_str_in_output"]
MEANT = {
    **{"stop_token_ids": [5, 7], "logits_shim": "strict", "include_stop_str_in_output": False},
    "rollout_seed_mode": "sample",
}


@KINDS
def test_the_list_counts_and_else_the_command_line(
    registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *BASE, "--stop_token_ids", "9", "--nonsense"])
    found = parsed([*BASE, *OURS], registered=registered)
    given = ["rlhf_type", "model", "external_plugins", *MEANT]
    assert found == {**MEANT, "given": given[:-1]}
    monkeypatch.setattr(sys, "argv", ["script.py", *BASE, "--stop_token_ids", "9"])
    assert parsed(None, registered=registered)["stop_token_ids"] == [9]


SEVERAL = "--tuner_typ3 lora --max-lenght=512 --gpu_memory_utilization 0.5"
MISSPELT = {
    "--rollout_seed sample": ["--rollout_seed_mode"],  # no abbreviations of our flags
    SEVERAL: ["--tuner_type", "--max_length", "--vllm_gpu_memory_utilization"],
}


@KINDS
@pytest.mark.parametrize("given", MISSPELT)
def test_misspelt_flags_are_refused_all_at_once(registered: bool, given: str) -> None:
    found = parsed([*BASE, *given.split()], registered=registered)
    assert isinstance(found, str), found
    assert found.startswith("SettingsError: Unknown argument ")
    assert re.findall(r"did you mean (\S+)\?", found) == MISSPELT[given]
    assert f"left over: {given}. `swift-grpo-ext flags`" in found


def test_a_training_alone_takes_any_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift gives every training the same port: the second one on a machine died
    (EADDRINUSE)."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    argv = [*BASE, "--use_vllm", "true", "--vllm_mode", "colocate"]
    for given, taken in ((None, "0"), ("29500", "0"), ("29511", "29511")):
        if given:
            monkeypatch.setenv("MASTER_PORT", given)
        found = parsed(argv, registered=False, names=["MASTER_PORT", "WORLD_SIZE"])
        assert (found["MASTER_PORT"], found["WORLD_SIZE"]) == (taken, "1")
    # torchrun's agent already listens at its port.
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**started, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    found = parsed(argv, registered=False, names=["MASTER_PORT"])
    assert found["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("kind", [RLHFArguments, command_line.RLHFExtArguments])
def test_arguments_made_in_python_keep_their_values(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line of a script that makes arguments itself is not parsed."""
    swift_grpo_ext.register()
    monkeypatch.setattr(sys, "argv", ["script.py", *BASE, "--logits_shim", "strict"])
    args: Any = kind.__new__(kind)
    is_ours = kind is not RLHFArguments
    if is_ours:
        args.stop_token_ids = [5]
    args._init_model_kwargs()
    assert type(args) is command_line.RLHFExtArguments
    assert (args.logits_shim, args.stop_token_ids) == ("auto", [5] if is_ours else [])


def test_a_training_of_megatron_is_refused() -> None:
    # In a process of its own: stand-ins for Megatron's packages confuse what is imported here.
    command = [sys.executable, "-m", "tests.unit.project.megatron", str(PLUGIN)]
    error = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "error: --external_plugins names swift-grpo-ext" in error


# --- the parser ---


@pytest.mark.parametrize("upstream", [RLHFArguments, RolloutArguments])
def test_names_of_flags_are_known_without_ms_swift(upstream: type) -> None:
    """The tools read them from ms-swift's source: its import takes ten seconds."""
    extended = command_line.EXTENDED[upstream]
    known = {action.dest for action in command_line.Parser([extended])._actions} - {"help"}
    assert {*upstream_flags(), *flag_names()} >= known


@pytest.mark.parametrize("upstream", [RLHFArguments, RolloutArguments])
def test_no_flag_of_ours_is_one_of_ms_swifts_or_an_abbreviation(upstream: type) -> None:
    with _patch_get_type_hints():
        actions = HfArgumentParser([upstream])._actions
    theirs = [option for action in actions for option in action.option_strings]
    for name in flag_names():
        clashes = [o for o in theirs if o.startswith((f"--{name}", f"--{name.replace('_', '-')}"))]
        assert clashes == [], name


def test_yamls_booleans_are_what_was_typed() -> None:
    given = "--logits-shim False --seed 1 --logps_shared_prompt False"
    meant = "--logits-shim off --seed 1 --logps_shared_prompt false"
    flag = " --include_stop_str_in_output False"
    assert command_line.restore_off_values((given + flag).split()) == (meant + flag).split()


@pytest.mark.parametrize(
    ("extended", "default"),
    [(command_line.RLHFExtArguments, "all"), (command_line.RolloutExtArguments, "none")],
)
def test_a_server_keeps_a_record_where_it_is_told_to(extended: type, default: str) -> None:
    """A training with the plugin keeps one itself."""
    parser = command_line.Parser([extended], allow_abbrev=False)
    for argv, expected in (([], default), (["--sample_log", "tokens"], "tokens")):
        assert parser.parse_known_args(argv)[0].sample_log == expected
    with pytest.raises(ValueError, match=r"--sample_log_gb.*invalid float value: 'many'"):
        parser.parse_known_args(["--sample_log_gb", "many"])
