"""Every change of ms-swift, vLLM, transformers and torch goes one way, and says why."""

from __future__ import annotations

import ast
import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.cpu.patches import CPU_PATCHES
from swift_grpo_ext.upstream import patches, pins
from swift_grpo_ext.upstream.contract import Pin
from swift_grpo_ext.upstream.patches import Moment, Patch, patch, patch_entry, replaced, wrapped

PACKAGE = Path(inspect.getfile(patches)).parents[1]
UPSTREAM = ("swift", "vllm", "transformers", "torch", "PIL", "peft", "accelerate", "trl")
REGISTRATIONS = {"TrainerFactory.TRAINER_MAPPING", "TrainerFactory.TRAINING_ARGS_MAPPING"}
REGISTRATIONS |= {"callbacks_map", "orms", "multi_turns"}
"""Places that ms-swift has for plugins."""

SETTINGS = {"cudnn.deterministic", "cudnn.benchmark", "layer.cpu_linear", "sys.excepthook"}
"""Attributes that upstream, or Python, has for others to set."""

ALL = list({each.function: each for each in (*patches.PATCHES, *CPU_PATCHES)}.values())


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The core's modules but `patches.py`, each as `room.name` with its tree. Tools change nothing,
    and examples are linked."""
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        if names[0] not in ("tools", "share") and names != ("upstream", "patches"):
            yield ".".join(names), ast.parse(path.read_text(encoding="utf-8"))


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


def changes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The attributes and entries that are assigned or deleted, and the objects of `setattr`, with
    the new values."""
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
    """The name that an attribute, an entry, or what a call returns, is reached from."""
    while isinstance(target, (ast.Attribute, ast.Subscript, ast.Call)):
        target = target.func if isinstance(target, ast.Call) else target.value
    return target.id if isinstance(target, ast.Name) else ""


def is_code(value: ast.expr | None, functions: set[str]) -> bool:
    """Whether a value is a function: a lambda, one that the module defines, or one made of it."""
    if isinstance(value, ast.Call):
        value = value.func if getattr(value.func, "id", "") not in MAKERS else ast.Lambda()
        return isinstance(value, ast.Lambda)
    return isinstance(value, ast.Lambda) or getattr(value, "id", "") in functions


def functions_of(tree: ast.AST) -> set[str]:
    """The names of a module's functions, inner ones too, but of no methods."""
    names = set[str]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not isinstance(tree, ast.ClassDef):
            names.add(node.name)
        names |= functions_of(node)
    return names


MAKERS = {"partial", "MethodType", "partialmethod", "staticmethod", "classmethod"}


def test_nothing_of_upstreams_is_changed_but_by_patch() -> None:
    """Neither its modules and classes, nor the methods of its objects."""
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
        for node in ast.walk(tree):  # what was replaced by hand is put back so
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


def calls_of_patch() -> Iterator[tuple[str, ast.Call]]:
    """Each call of `patch` and `patch_entry`, with the function or class around it."""
    for module, tree in modules():
        for around in tree.body:
            for node in ast.walk(around):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("patch"):
                    yield f"{module}:{getattr(around, 'name', '')}", node


def test_every_patch_is_listed_and_pinned() -> None:
    """The functions that change upstream are those of the lists, and what they name is pinned."""
    calls = list(calls_of_patch())
    assert {around for around, _ in calls} <= {each.function for each in ALL}
    pinned = {str(pin).rpartition(".")[2] for pin in (*pins.ALL, *pins.UNVERIFIED)}
    pinned |= {str(pin).rpartition(".")[2] for each in ALL for pin in each.needs}
    assert {word.arg for _, call in calls for word in call.keywords if word.arg} <= pinned


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_a_patch_says_why_it_is_there(each: Patch) -> None:
    assert callable(resolve_name(f"swift_grpo_ext.{each.function}"))
    assert each.moments
    assert len(each.symptom) > 40
    # Release and place, as "vLLM 0.32, v1/worker/cpu_worker.py".
    release = r"(ms-swift|vLLM|transformers) \d[\d.]+"
    assert re.match(rf"{release}( to [\d.]+)?, [\w/]+(\.py\b)?", each.upstream)
    assert each.until
    assert not each.until.endswith(".")
    is_called = each.moments == (Moment.CALLED,)
    takes = inspect.signature(resolve_name(f"swift_grpo_ext.{each.function}")).parameters
    assert is_called or not takes


def test_what_is_not_pinned_is_refused() -> None:
    class Template:
        pass

    class Derived(Template):
        pass

    class AttentionInterface(dict[str, Any]):
        pass

    module = ModuleType("any.package.vllm_client")
    for owner, name in ((Template, "_truncate"), (Derived(), "_truncate"), (module, "synchronize")):
        patch(owner, **{name: "replaced"})
        assert vars(owner)[name] == "replaced"
    registry = AttentionInterface()
    patch_entry(registry, "sdpa", 1)
    assert registry == {"sdpa": 1}
    with pytest.raises(LookupError, match=r"^Template\.other stands in no table of .*\.pins"):
        patch(Template, other=1)
    with pytest.raises(LookupError, match=r"^dict\.__setitem__ stands"):
        patch_entry({}, "sdpa", 1)


@pytest.mark.parametrize(("name", "times"), [("get_processor", 1), ("no_such_function", 0)])
def test_a_patch_is_made_once_where_its_names_are(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    each = Patch(
        function="upstream.encoding:supply_video_loader",
        moments=(Moment.ENGINE, Moment.WORKER),
        symptom="",
        upstream=name,
        until="",
        needs=(Pin("vllm.transformers_utils.processor", name),),
    )
    monkeypatch.setattr(patches, "PATCHES", [each])
    monkeypatch.setattr(patches, "resolve_name", lambda path: lambda: made.append(path))
    for moment in (Moment.TRAINING, Moment.WORKER, Moment.ENGINE, Moment.ENGINE):
        patches.apply(moment)
    assert made == ["swift_grpo_ext.upstream.encoding:supply_video_loader"] * times


# --- for a block ---


class Upstream:
    @staticmethod
    def double(number: int) -> int:
        return 2 * number


@pytest.mark.parametrize("owner", [Upstream, Upstream(), SimpleNamespace(double=Upstream.double)])
def test_blocks_overlap_and_end_in_any_order(owner: Any) -> None:
    """The last that began counts, also after an error; then all is as it was."""
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
    # Nor in our own memory: what stands there later is what a later block puts back.
    monkeypatch.setattr(Upstream, "double", abs)
    with replaced(Upstream, "double", float):
        pass
    assert Upstream.double is abs
