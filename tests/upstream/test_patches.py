"""Every lasting patch of ms-swift, vLLM, transformers and torch goes one way."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.upstream import patches
from swift_grpo_ext.upstream.patches import patch

PACKAGE = Path(inspect.getfile(patches)).parents[1]
UPSTREAM = ("swift", "vllm", "transformers", "torch", "PIL", "peft", "accelerate", "trl")
REGISTRATIONS = {"TrainerFactory.TRAINER_MAPPING", "TrainerFactory.TRAINING_ARGS_MAPPING"}
REGISTRATIONS |= {"callbacks_map", "orms", "multi_turns"}
"""Places that ms-swift has for plugins."""


def of_upstream(tree: ast.Module) -> set[str]:
    """The names in a module that stand for something of upstream's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            roots = ((alias, alias.name.split(".")[0]) for alias in node.names)
            names |= {alias.asname or root for alias, root in roots if root in UPSTREAM}
    return names


def assigned_to(tree: ast.Module) -> Iterator[ast.expr]:
    """What assignments and calls of `setattr` change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
            yield from (t.value for t in targets if isinstance(t, (ast.Attribute, ast.Subscript)))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            yield node.args[0]


def test_nothing_of_upstreams_is_changed_but_by_patch() -> None:
    changed = []
    others = {*PACKAGE.glob("tools/**/*.py"), *PACKAGE.glob("share/**/*.py")}  # examples are linked
    for path in set(PACKAGE.rglob("*.py")) - others:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = of_upstream(tree)
        for target in assigned_to(tree):
            root = next(iter(n.id for n in ast.walk(target) if isinstance(n, ast.Name)), "")
            if root in names and ast.unparse(target) not in REGISTRATIONS:
                changed.append(f"{path.relative_to(PACKAGE)}:{target.lineno} {ast.unparse(target)}")
    assert changed == []


def test_what_is_not_pinned_is_refused() -> None:
    class CPUWorker:
        pass

    patch(CPUWorker, _get_autobind_cpu_ids="replaced")
    assert vars(CPUWorker)["_get_autobind_cpu_ids"] == "replaced"
    with pytest.raises(LookupError, match=r"^CPUWorker\.other stands in no table of .*\.pins"):
        patch(CPUWorker, other=1)
    module: Any = SimpleNamespace(__name__="any.package.vllm_client")
    patch(module, synchronize=len)
    assert module.synchronize is len
