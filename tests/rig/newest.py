"""Pages describe the newest releases that were tried; older releases lack some of it."""

from __future__ import annotations

from swift_grpo_ext.upstream import contract


def is_newest(package: str) -> bool:
    """Return whether the installed release of a package is the newest one that was tried."""
    name = {"swift": "ms-swift"}.get(package, package)
    installed = contract.tried_packages().get(name)
    return installed is None or installed.startswith(contract.TRIED[name][-1])
