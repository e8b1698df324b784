"""Pages speak of the newest releases that were tried; beside older ones they say too much."""

from __future__ import annotations

from swift_grpo_ext.upstream import contract


def is_newest(package: str) -> bool:
    """Whether a package's installed release is the newest of those that were tried."""
    name = {"swift": "ms-swift"}.get(package, package)
    installed = contract.tried_packages().get(name)
    return installed is None or installed.startswith(contract.TRIED[name][-1])
