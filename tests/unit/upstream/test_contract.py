"""All upstream names and signatures that we extend are pinned; others are refused by name, and
untried releases are named [I2]."""

from typing import Any

import pytest

from swift_grpo_ext.cpu.receiver import CPUWeightSyncWorkerExtension
from swift_grpo_ext.upstream import contract, pins
from swift_grpo_ext.upstream.contract import (
    UnsupportedUpstreamError,
    mismatch,
    override_mismatches,
)

SAVE_ARGS = "swift.arguments:BaseArguments.save_args"


def test_upstream_is_what_we_know() -> None:
    """Importing our other classes compares them."""
    assert [text for pin in pins.NEEDED if (text := mismatch(pin))] == []
    assert override_mismatches(CPUWeightSyncWorkerExtension) == []


Upstream = type(
    "Upstream",
    (),
    {
        "__module__": "swift.rlhf_trainers",
        "renamed": lambda self, samples: None,
        "longer": lambda self, samples, flag: None,
        "optional": lambda self, samples, flag=False: None,
        "same": lambda self, samples, *, flag: None,
    },
)
OURS: dict[str, Any] = {
    "__module__": "swift_grpo_ext.training",
    "renamed": lambda self, inputs: None,
    "longer": lambda self, samples: None,
    "optional": lambda self, samples: None,
    "same": lambda self, samples, **kwargs: None,
    "gone": lambda self: super().gone(),
    "own": lambda self: None,
}
Ours = type("Ours", (Upstream,), OURS)
OURS = {"__module__": OURS["__module__"], "own": lambda self: super().own()}
Derived = type("Derived", (Ours,), OURS)


def test_an_override_that_upstream_does_not_call_so_is_named() -> None:
    place = "swift.rlhf_trainers.Upstream"
    assert override_mismatches(Derived) == [
        f"{place}.renamed takes ('self', 'samples'), expected ('self', 'inputs')",
        f"{place}.longer takes flag too",
        f"{place}.gone is missing",
    ]
    with pytest.raises(UnsupportedUpstreamError, match=r"renamed takes .*; .*longer takes flag"):
        contract.verify_overrides(Ours, Ours)


def test_what_upstream_lacks_is_refused_by_name() -> None:
    missing = "swift.arguments:BaseArguments._no_such_hook self"
    with pytest.raises(
        UnsupportedUpstreamError, match=r"^ms-swift 4.*_no_such_hook is missing.*4\.6"
    ):
        contract.verify([SAVE_ARGS, missing])
    assert mismatch(f"{SAVE_ARGS} self") is None
    assert "takes ('self', 'output_dir'), expected" in str(mismatch(f"{SAVE_ARGS} self x"))


def test_training_needs_no_vllm() -> None:
    without_vllm = (*pins.COMMAND_LINE, *pins.TRAINER)
    assert not [pin for pin in without_vllm if pin.startswith("vllm")]


def test_what_was_never_tried_is_named() -> None:
    known = {"ms-swift": "4.6.0", "vllm": "0.32.0", "transformers": "5.19.0"}
    for changes, words in (
        ({"vllm": "0.25.1+cu130"}, []),
        ({"vllm": "0.23.0.post2"}, []),
        ({"vllm": "0.24.0"}, ["vllm 0.24.0 (nearest: 0.23.0 and 0.25.1)"]),
        ({"vllm": "0.33.0"}, ["vllm 0.33.0 (nearest: 0.32.0)"]),
        ({"ms-swift": "4.6.0.dev0"}, ["ms-swift 4.6.0.dev0 (nearest: 4.6.0)"]),
        ({"vllm": "0.9"}, ["vllm 0.9 (nearest: 0.23.0)"]),
    ):
        assert contract.untried(known | changes) == words
