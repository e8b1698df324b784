"""Every change of ms-swift, vLLM, transformers and torch is made by `patch`, with its reason."""

from __future__ import annotations

import ast
import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext import cpu
from swift_grpo_ext.upstream import patches
from swift_grpo_ext.upstream.contract import UnsupportedUpstreamError
from swift_grpo_ext.upstream.patches import PatchPhase, Repair, patch, repair, replaced, wrapped

PACKAGE = Path(inspect.getfile(patches)).parents[1]
UPSTREAM = ("swift", "vllm", "transformers", "torch", "PIL", "peft", "accelerate", "trl")
REGISTRATIONS = {"TrainerFactory.TRAINER_MAPPING", "TrainerFactory.TRAINING_ARGS_MAPPING"}
REGISTRATIONS |= {"callbacks_map", "orms", "multi_turns"}
"""ms-swift's registries for plugins."""

SETTINGS = {"cudnn.deterministic", "cudnn.benchmark", "layer.cpu_linear", "sys.excepthook"}
"""Attributes that upstream, or Python, lets others set."""

cpu.register()


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the core's modules except `patches.py`, as `room.name` with their trees. Tools change
    nothing, and `share` has links."""
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        if names[0] not in ("tools", "share") and names != ("upstream", "patches"):
            yield ".".join(names), ast.parse(path.read_text(encoding="utf-8"))


def of_upstream(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from upstream."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            roots = ((alias, alias.name.split(".")[0]) for alias in node.names)
            names |= {alias.asname or root for alias, root in roots if root in UPSTREAM}
    return names


def changes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield attributes and entries that are assigned or deleted, and objects of `setattr`, with the
    new values."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            value = None if isinstance(node, ast.Delete) else node.value
            for target in targets:
                if not isinstance(target, ast.Tuple):
                    pairs.append((target, value))
                elif isinstance(value, ast.Tuple):
                    pairs.extend(zip(target.elts, value.elts, strict=True))
                else:
                    pairs.extend((each, value) for each in target.elts)
            for target, value in pairs:
                if isinstance(target, (ast.Attribute, ast.Subscript)):
                    yield target, value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            yield node.args[0], node.args[2]


def root_of(target: ast.expr) -> str:
    """Return the name at the root of an expression of attributes, entries and calls."""
    while isinstance(target, (ast.Attribute, ast.Subscript, ast.Call)):
        target = target.func if isinstance(target, ast.Call) else target.value
    return target.id if isinstance(target, ast.Name) else ""


def is_code(value: ast.expr | None, functions: set[str]) -> bool:
    """Return whether a value is a lambda, a function of the module, or made from one."""
    if isinstance(value, ast.Call):
        value = value.func if getattr(value.func, "id", "") not in MAKERS else ast.Lambda()
        return isinstance(value, ast.Lambda)
    return isinstance(value, ast.Lambda) or getattr(value, "id", "") in functions


def functions_of(tree: ast.AST) -> set[str]:
    """Return the names of a module's functions, inner ones too, but no methods."""
    names = set[str]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not isinstance(tree, ast.ClassDef):
            names.add(node.name)
        names |= functions_of(node)
    return names


MAKERS = {"partial", "MethodType", "partialmethod", "staticmethod", "classmethod"}


def test_nothing_of_upstreams_is_changed_but_by_patch() -> None:
    """Modules, classes, and methods of objects are changed by `patch` alone."""
    changed = []
    for module, tree in modules():
        names = of_upstream(tree)
        functions = functions_of(tree)
        for target, value in changes(tree):
            entry = ast.unparse(target.value) if isinstance(target, ast.Subscript) else ""
            if entry in REGISTRATIONS or ast.unparse(target) in SETTINGS:
                continue
            is_method = is_code(value, functions) and root_of(target) != "self"
            if root_of(target) in names or is_method:
                changed.append(f"{module}:{target.lineno} {ast.unparse(target)}")
        for node in ast.walk(tree):  # a deletion would undo a change made by hand
            deleted = node.targets if isinstance(node, ast.Delete) else ()
            changed += [f"{module}: {ast.unparse(n)}" for n in deleted if is_foreign(n)]
            is_deleting = isinstance(node, ast.Call) and ast.unparse(node.func) == "delattr"
            changed += [f"{module}: {ast.unparse(node)}"] * is_deleting
    assert changed == []


def is_foreign(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and root_of(target) != "self"


@pytest.mark.parametrize(
    "code",
    [
        "from swift.template import Template\nTemplate.encode = 1",
        "import vllm\nvllm.envs.A, b = 1, 2",
        "from vllm import envs\nsetattr(envs, 'A', 1)",
        "tower.forward = lambda x: x",
        "def f(): ...\nlayer.merge, layer.unmerge = f, 1",
        "def f(): ...\nsetattr(layer, 'merge', f)",
        "engine.generate = partial(engine.generate, 1)",
        "def f(): ...\ninterface['sdpa'] = f",
    ],
)
def test_what_goes_around_is_found(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "modules", lambda: [("room.module", ast.parse(code))])
    with pytest.raises(AssertionError, match=r"room\.module"):
        test_nothing_of_upstreams_is_changed_but_by_patch()


def changers() -> dict[str, ast.AST]:
    """Return each function or class that calls `patch`, as `room.module:name`, with its tree."""
    return {
        f"{module}:{getattr(around, 'name', '')}": around
        for module, tree in modules()
        for around in tree.body
        for node in ast.walk(around)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "patch"
    }


def repairs() -> dict[str, ast.AST]:
    """Return the functions that call `patch` or have `@repair`."""
    decorated: dict[str, ast.AST] = {
        f"{module}:{node.name}": node
        for module, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).startswith("repair(") for each in node.decorator_list)
    }
    return changers() | decorated


RELEASE = r"(ms-swift|vLLM|transformers) \d[\d.]+"
# Release and place, as "vLLM 0.32, v1/worker/cpu_worker.py".
WHY = rf"Symptom: .{{40,}} Upstream: {RELEASE}( to [\d.]+)?, [\w/]+(\.py\b)?.* Can go when .+\.$"


@pytest.mark.parametrize(("name", "tree"), repairs().items(), ids=repairs())
def test_a_repair_says_why_it_is_there(name: str, tree: ast.AST) -> None:
    assert isinstance(tree, ast.FunctionDef)
    assert re.search(WHY, " ".join((ast.get_docstring(tree) or "").split()))


def registered() -> list[Repair]:
    """Import all modules with repairs; return the repairs."""
    for name in repairs():
        import_module(f"swift_grpo_ext.{name.partition(':')[0]}")
    return list(patches.REPAIRS)


@pytest.mark.parametrize("each", registered(), ids=lambda each: each.function.__name__)
def test_a_repair_is_found_in_its_phases(each: Repair) -> None:
    module = each.function.__module__.removeprefix("swift_grpo_ext.")
    for phase in each.phases:
        assert module in patches.MODULES[phase]
    assert not inspect.signature(each.function).parameters


def test_what_upstream_lacks_or_calls_otherwise_is_refused() -> None:
    class Template:
        length = 1

        def encode(self, inputs: Any, return_length: bool = False) -> None: ...

        @staticmethod
        def load(image: Any) -> None: ...

    def wrapper(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> None: ...

    def other_name(self: Any, sample: Any, **kwargs: Any) -> None: ...

    patch(
        Template,
        encode=wraps(Template.encode)(wrapper),
        length=2,
        load=staticmethod(lambda image: image),
    )
    assert Template.length == 2
    patch(Template(), encode=lambda inputs: None)
    missing = r"Template\.decode is missing"
    for values, message in (
        ({"decode": wrapper}, missing),
        ({"encode": wraps(wrapper)(other_name)}, r"encode takes .* expected \('self', 'sample'\)"),
        ({"load": staticmethod(lambda: None)}, r"Template\.load takes \w+ too"),
        ({"length": 3, "decode": wrapper}, missing),
    ):
        with pytest.raises(UnsupportedUpstreamError, match=message):
            patch(Template, **values)
    assert Template.length == 2, "a part of them was replaced"


def test_a_repair_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(patches, "REPAIRS", [])
    here = dict.fromkeys((PatchPhase.ENGINE, PatchPhase.WORKER), ("test_patches",))
    monkeypatch.setattr(patches, "MODULES", here)
    monkeypatch.setattr(patches, "import_module", lambda _: SimpleNamespace(__name__=__name__))

    @repair(PatchPhase.ENGINE, PatchPhase.WORKER)
    def change() -> None:
        made.append("change")

    @repair(PatchPhase.ENGINE)
    def elsewhere() -> None:
        made.append("of a module that is not listed")

    elsewhere.__module__ = "swift_grpo_ext.cpu.engines"
    for phase in (PatchPhase.TRAINING, PatchPhase.WORKER, PatchPhase.ENGINE, PatchPhase.ENGINE):
        patches.apply(phase)
    assert made == ["change"]


@pytest.mark.parametrize("optional", [True, False])
def test_an_optional_repair_is_left_out_where_upstream_is_another(
    optional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "REPAIRS", [])

    @repair(PatchPhase.ENGINE, optional=optional)
    def change() -> None:
        patch(ModuleType("vllm.module"), gone=1)

    if optional:
        assert not patches.make(change)
    else:
        with pytest.raises(UnsupportedUpstreamError, match=r"vllm\.module\.gone is missing"):
            patches.make(change)


# --- for a block ---


class Upstream:
    @staticmethod
    def double(number: int) -> int:
        return 2 * number


@pytest.mark.parametrize("owner", [Upstream, Upstream(), SimpleNamespace(double=Upstream.double)])
def test_blocks_overlap_and_end_in_any_order(owner: Any) -> None:
    """The block that began last counts, also after an error. At the end nothing is changed."""
    before = dict(vars(owner))
    first, second = (wrapped(owner, "double", lambda up, n, k=k: up(n) + k) for k in (1, 10))
    first.__enter__()
    second.__enter__()
    assert owner.double(3) == 17
    first.__exit__(None, None, None)
    assert owner.double(3) == 17
    with suppress(KeyError), replaced(owner, "double", lambda n: n):
        assert owner.double(3) == 3
        raise KeyError
    assert owner.double(3) == 17
    second.__exit__(None, None, None)
    assert dict(vars(owner)) == before
    assert owner.double(3) == 6


def test_blocks_of_many_threads_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, failures = dict(vars(Upstream)), list[int]()

    def work() -> None:
        for _ in range(200):
            with wrapped(Upstream, "double", lambda up, n: up(n)):
                if Upstream.double(2) != 4:
                    failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert dict(vars(Upstream)) == before
    # We keep no old value either: a later block restores the value that it found.
    monkeypatch.setattr(Upstream, "double", abs)
    with replaced(Upstream, "double", float):
        pass
    assert Upstream.double is abs
