"""Every change of ms-swift, vLLM, transformers and torch is made by `patch`, and refused where
upstream is another [I2]."""

import ast
import inspect
import re
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
from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair, replaced, wrapped

PACKAGE = Path(inspect.getfile(patches)).parents[1]
UPSTREAM = ("swift", "vllm", "transformers", "torch", "PIL", "peft", "accelerate", "trl")
ALLOWED = {"TrainerFactory.TRAINER_MAPPING", "TrainerFactory.TRAINING_ARGS_MAPPING"}
ALLOWED |= {"callbacks_map", "orms", "multi_turns"}
ALLOWED |= {"cudnn.deterministic", "cudnn.benchmark", "layer.cpu_linear", "sys.excepthook"}
"""ms-swift's registries for plugins, and attributes that upstream, or Python, lets others set."""

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
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                module = getattr(node, "module", None) or alias.name
                name = alias.asname or alias.name.split(".")[0]
                names |= {name} if module.split(".")[0] in UPSTREAM else set()
    return names


def unpatched(tree: ast.Module) -> list[str]:
    """Return what a module sets or deletes of upstream's modules and classes."""
    upstream, found = of_upstream(tree), []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                targets = [part for target in targets for part in getattr(target, "elts", [target])]
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, name, *_]):
                targets = [ast.Attribute(owner, ast.unparse(name))]
            case _:
                targets = []
        for text in map(ast.unparse, targets):
            is_part = re.split(r"\W", text)[0] in upstream - {text}
            if is_part and not ALLOWED & {text, text.partition("[")[0]}:
                found.append(text)
    return found


def test_nothing_of_upstreams_is_changed_but_by_patch() -> None:
    assert {module: found for module, tree in modules() if (found := unpatched(tree))} == {}


def test_a_repair_is_found_in_its_phases() -> None:
    for module, tree in modules():
        if "@repair(" in ast.unparse(tree):
            import_module(f"swift_grpo_ext.{module}")
    for each in patches.REPAIRS:
        module = each.function.__module__.removeprefix("swift_grpo_ext.")
        assert all(module in patches.MODULES[phase] for phase in each.phases), each
        assert not inspect.signature(each.function).parameters, each


class Template:
    length = 1

    def encode(self, inputs: Any, return_length: bool = False) -> None: ...

    @staticmethod
    def load(image: Any) -> None: ...


def test_what_upstream_lacks_or_calls_otherwise_is_refused() -> None:
    """Then nothing is replaced."""
    encode = wraps(Template.encode)(lambda self, inputs, *args, **kwargs: None)
    patch(Template, encode=encode, length=2, load=staticmethod(lambda image: image))
    assert Template.length == 2
    patch(Template(), encode=lambda inputs: None)
    missing = r"Template\.decode is missing"
    for values, message in (
        ({"decode": encode}, missing),
        ({"load": staticmethod(lambda: None)}, r"Template\.load takes \w+ too"),
        ({"length": 3, "decode": encode}, missing),
    ):
        with pytest.raises(UnsupportedUpstreamError, match=message):
            patch(Template, **values)
    assert Template.length == 2


def test_a_repair_is_made_once_and_an_optional_one_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    def unfit() -> None:
        patch(ModuleType("vllm.module"), gone=1)

    repair(optional=True)(unfit)
    assert not patches.make(unfit)
    repair()(needed := lambda: unfit())
    with pytest.raises(UnsupportedUpstreamError, match=r"vllm\.module\.gone is missing"):
        patches.make(needed)


# --- for a block ---


class Upstream:
    @staticmethod
    def double(number: int) -> int:
        return 2 * number


@pytest.mark.parametrize("owner", [Upstream, Upstream(), SimpleNamespace(double=Upstream.double)])
def test_blocks_overlap_and_end_in_any_order(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # We keep no old value either: a later block restores the value that it found.
    monkeypatch.setattr(owner, "double", abs)
    with replaced(owner, "double", float):
        pass
    assert owner.double is abs
