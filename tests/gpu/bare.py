"""Python as on a machine with torch, transformers and peft alone.

A folder with a `sitecustomize.py` goes first in `PYTHONPATH`. It hides all packages that these do
not ask for: to import one fails as if it were not installed.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALLED = ("torch", "transformers", "peft", "accelerate", "numpy", "triton")

HIDING = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden}


class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(name, path, target)


sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


def make_bare(folder: Path) -> set[str]:
    """Write the `sitecustomize.py`; return the modules that it hides."""
    kept = set[str]()
    pending = list(INSTALLED)
    while pending:
        name = canonicalize_name(pending.pop())
        if name in kept:
            continue
        kept.add(name)
        try:
            asked = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        pending += [r.name for r in asked if not r.marker or r.marker.evaluate({"extra": ""})]
    ours = {"swift_grpo_ext", "scripts", "tests", "plugins"}
    hidden = {
        module
        for module, packages in packages_distributions().items()
        if not kept.intersection(map(canonicalize_name, packages))
    } - ours
    hidden -= sys.stdlib_module_names
    (folder / "sitecustomize.py").write_text(HIDING.format(hidden=sorted(hidden)))
    return hidden
