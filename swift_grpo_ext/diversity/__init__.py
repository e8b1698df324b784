"""The diversity monitor: a collapsed policy, or broken randomness?

Rounds in, alarms out, all pure: `drawn` is one completion as the statistics take it, `metrics` and
`ngrams` measure how samples differ, `collision`, `prefixes` and `memory` test whether they were
drawn with noise of their own, `verdict` puts both together, `watch` makes records and alarms of
it, `record` keeps them in a file. `monitor` is ms-swift's callback. `report` is `swift-grpo-ext
report`, with `series` and `charts` for its curves and `aligned` for its groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_grpo_ext.diversity.monitor import DiversityMonitor as DiversityMonitor


def __getattr__(name: str) -> Any:
    if name == "DiversityMonitor":  # not before it is asked for: it needs ms-swift
        from swift_grpo_ext.diversity.monitor import DiversityMonitor

        return DiversityMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
