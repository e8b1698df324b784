"""All upstream names and signatures that we extend are pinned; others are refused by name, and
untried releases are named [I2]."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.command_line import RLHFExtArguments, RolloutExtArguments
from swift_grpo_ext.cpu.receiver import CPUWeightSyncWorkerExtension
from swift_grpo_ext.monitor import DiversityMonitor
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.scheduler import WatchedScheduler
from swift_grpo_ext.training import RolloutGKDTrainer, RolloutGRPOTrainer
from swift_grpo_ext.upstream import contract, pins
from swift_grpo_ext.upstream.contract import (
    UnsupportedUpstreamError,
    mismatch,
    override_mismatches,
)

EXTENDED = (
    RolloutGRPOTrainer,
    RolloutGKDTrainer,
    RolloutEngine,
    DiversityMonitor,
    WatchedScheduler,
    CPUWeightSyncWorkerExtension,
    RLHFExtArguments,
    RolloutExtArguments,
)

SAVE_ARGS = "swift.arguments:BaseArguments.save_args"


@pytest.mark.parametrize("pin", pins.NEEDED, ids=lambda pin: pin.split()[0])
def test_upstream_is_what_we_know(pin: str) -> None:
    assert mismatch(pin) is None


@pytest.mark.parametrize("ours", EXTENDED, ids=lambda ours: ours.__name__)
def test_what_we_override_is_called_so(ours: type) -> None:
    assert override_mismatches(ours) == []


class Upstream:
    """Stands for a class of ms-swift."""

    def renamed(self, samples: Any) -> None: ...

    def longer(self, samples: Any, flag: Any) -> None: ...

    def optional(self, samples: Any, flag: bool = False) -> None: ...

    def same(self, samples: Any, *, flag: bool) -> None: ...


class Ours(Upstream):
    def renamed(self, inputs: Any) -> None: ...  # type: ignore[override]

    def longer(self, samples: Any) -> None: ...  # type: ignore[override]

    def optional(self, samples: Any) -> None: ...  # type: ignore[override]

    def same(self, samples: Any, **kwargs: Any) -> None: ...

    def gone(self) -> None:
        super().gone()  # type: ignore[misc]

    def own(self) -> None: ...


class Derived(Ours):
    def own(self) -> None:
        super().own()


Upstream.__module__ = "swift.rlhf_trainers"
Ours.__module__ = Derived.__module__ = "swift_grpo_ext.training"


def test_an_override_that_upstream_does_not_call_so_is_named() -> None:
    place = "swift.rlhf_trainers.Upstream"
    assert override_mismatches(Derived) == override_mismatches(Ours)
    assert override_mismatches(Ours) == [
        f"{place}.renamed takes ('self', 'samples'), expected ('self', 'inputs')",
        f"{place}.longer takes flag too",
        f"{place}.gone is missing",
    ]
    with pytest.raises(UnsupportedUpstreamError, match=r"renamed takes .*; .*longer takes flag"):
        contract.verify_overrides(Ours, Ours)


def test_training_needs_no_vllm() -> None:
    without_vllm = (*pins.COMMAND_LINE, *pins.TRAINER)
    assert not [pin for pin in without_vllm if pin.startswith("vllm")]


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (
            "swift.arguments:BaseArguments._no_such_hook self",
            r"^ms-swift 4.*_no_such_hook is missing.*4\.6",
        ),
        (f"{SAVE_ARGS} self x", r"takes \('self', 'output_dir'\), expected"),
        (f"{SAVE_ARGS} self", ""),
        (SAVE_ARGS, ""),
    ],
)
def test_what_upstream_lacks_is_refused_by_name(pin: str, message: str) -> None:
    if message:
        with pytest.raises(UnsupportedUpstreamError, match=message):
            contract.verify([pin])
    else:
        contract.verify([pin])


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"ms-swift": "4.6.0", "vllm": "0.32.0", "transformers": "5.19.0"}, []),
        ({"ms-swift": "4.6.0", "vllm": "0.25.1+cu130"}, []),
        ({"vllm": "0.23.0.post2"}, []),
        ({"vllm": "0.24.0"}, ["vllm 0.24.0 (nearest: 0.23.0 and 0.25.1)"]),
        ({"vllm": "0.33.0"}, ["vllm 0.33.0 (nearest: 0.32.0)"]),
        ({"ms-swift": "4.6.0.dev0"}, ["ms-swift 4.6.0.dev0 (nearest: 4.6.0)"]),
        ({"ms-swift": "4.6.0", "vllm": "0.9"}, ["vllm 0.9 (nearest: 0.23.0)"]),
    ],
)
def test_what_was_never_tried_is_named(installed: dict[str, str], words: list[str]) -> None:
    assert contract.untried(installed) == words
