"""Every upstream name and signature that we extend, pinned; unknown ones are refused by name."""

from __future__ import annotations

import importlib

import pytest
from compat.pins import look, pins_by_module

from swift_grpo_ext.upstream import contract
from swift_grpo_ext.upstream.contract import Pin, UnsupportedUpstreamError

EXTENDING = pins_by_module()
PINS = [
    pytest.param(pin, id=f"{module}: {pin}") for module, pins in EXTENDING.items() for pin in pins
]
SAVE_ARGS = ("swift.arguments", "BaseArguments.save_args")


@pytest.mark.parametrize("pin", PINS)
def test_upstream_is_what_we_know(pin: Pin) -> None:
    assert contract.mismatch(pin) is None


def test_the_modules_that_extend_upstream_are_found() -> None:
    assert {"rollout.engine", "registry", "training.trainer", "upstream.server"} <= set(EXTENDING)
    assert not {"sampling.seeding", "sampling.groups", "rollout.wire", "upstream.contract"} & set(
        EXTENDING
    )
    for module, pins in EXTENDING.items():
        assert pins == importlib.import_module(f"swift_grpo_ext.{module}").PINS


def test_all_that_can_be_seen_holds() -> None:
    looked = look()
    assert looked["held"] == len({pin for pins in EXTENDING.values() for pin in pins})
    assert (looked["wrong"], looked["unseen"], looked["refusal"]) == ([], 0, None)


def test_a_missing_name_is_refused() -> None:
    pins = [Pin("swift.arguments", "BaseArguments._no_such_hook", ("self",))]
    with pytest.raises(UnsupportedUpstreamError, match=r"_no_such_hook is missing.*>=4\.5\.3"):
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


@pytest.mark.parametrize("installed", ["4.4.2", "4.5.2", "4.7.0", "3.12.0"])
def test_another_ms_swift_is_refused(installed: str) -> None:
    with pytest.raises(UnsupportedUpstreamError, match=f"ms-swift {installed} is installed.*4\\.7"):
        contract.check_swift_version(installed)


@pytest.mark.parametrize("installed", ["4.5.3", "4.6.0", "4.6.3", "4.6.1.dev0"])
def test_supported_ms_swift(installed: str) -> None:
    contract.check_swift_version(installed)
