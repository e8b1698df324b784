"""Every upstream name and signature that we extend, pinned; unknown ones are refused by name."""

from __future__ import annotations

import importlib

import pytest

from swift_grpo_ext.upstream import contract
from swift_grpo_ext.upstream.contract import Pin, UnsupportedUpstreamError

EXTENDING = [
    *("diversity.monitor", "engine", "logps", "registry", "replay.draw", "template_stops"),
    *("upstream.dynamic_eos", "upstream.transformers_stops", "upstream.verified_weights"),
    *("trainer.batch", "trainer.checkpoints", "trainer.prompts", "trainer.rollouts"),
    *("trainer.trainer", "trainer.weights"),
    *("upstream.flags", "upstream.media", "upstream.server", "upstream.split_prefill"),
    "upstream.weight_sync",
]
PINS = [
    pytest.param(pin, id=f"{module}: {pin}")
    for module in EXTENDING
    for pin in importlib.import_module(f"swift_grpo_ext.{module}").PINS
]


@pytest.mark.parametrize("pin", PINS)
def test_upstream_is_what_we_know(pin: Pin) -> None:
    assert contract.mismatch(pin) is None


def test_a_missing_name_is_refused() -> None:
    pins = [Pin("swift.arguments", "BaseArguments._no_such_hook", ("self",))]
    with pytest.raises(UnsupportedUpstreamError, match=r"_no_such_hook is missing.*>=4\.6"):
        contract.verify(pins)


def test_another_signature_is_refused() -> None:
    pins = [Pin("swift.arguments", "BaseArguments.save_args", ("self", "folder"))]
    with pytest.raises(UnsupportedUpstreamError, match=r"takes \('self', 'output_dir'\), expected"):
        contract.verify(pins)


@pytest.mark.parametrize("installed", ["4.5.3", "4.7.0", "3.12.0"])
def test_another_ms_swift_is_refused(installed: str) -> None:
    with pytest.raises(UnsupportedUpstreamError, match=f"ms-swift {installed} is installed.*4\\.6"):
        contract.check_swift_version(installed)


@pytest.mark.parametrize("installed", ["4.6.0", "4.6.3", "4.6.1.dev0"])
def test_supported_ms_swift(installed: str) -> None:
    contract.check_swift_version(installed)
