"""Rooms of the package import only what is below them; what serves any client knows no trainer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "swift_grpo_ext"


def room_of(module: str) -> str:
    """Return a module's folder, or the module itself at the top level; each tool is a room."""
    first, *rest = module.split(".")
    return f"tools.{rest[0]}" if first == "tools" and rest else first


@cache
def imports() -> set[tuple[str, str]]:
    """Return each import of one room by another, including imports in functions."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        own = room_of(module_of(path).removesuffix(".__init__"))
        for name in runtime_imports(path, in_calls=True, for_types=True):
            package, _, module = name.partition(".")
            if package == PACKAGE.name and room_of(module) != own:
                found.add((own, room_of(module)))
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_rooms_stand_one_above_the_other() -> None:
    graph: dict[str, set[str]] = {}
    for room, other in imports():
        graph.setdefault(room, set()).add(other)
    assert len(list(TopologicalSorter(graph).static_order())) > 15  # raises where there is a circle


def test_the_core_imports_no_tool_and_upstream_nothing_of_ours() -> None:
    below = [(room, other) for room, other in imports() if not room.startswith("tools")]
    assert [pair for pair in below if pair[1].startswith("tools") or pair[0] == "upstream"] == []


SERVED = ("server", "rollout.engine", "stops", "sampling", "record", "diversity")
"""Rooms, and one module, that serve any client."""

TRAINERS = ("swift.rlhf_trainers", "swift.trainers", "swift.callbacks", "trl")
CLIENT = "swift.rlhf_trainers.vllm_client"


def runtime_imports(path: Path, *, in_calls: bool, for_types: bool = False) -> Iterator[str]:
    """Yield the names that a module imports when it is loaded, or also in calls, or for types."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            continue
        if isinstance(node, ast.FunctionDef) and not in_calls:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def test_what_serves_any_client_knows_no_trainer() -> None:
    """ms-swift's next major version has other trainers, but today's engine and server."""
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    waiting = [name for name in modules if f"{name}.".startswith(tuple(f"{s}." for s in SERVED))]
    assert len(waiting) > 25
    served, met, found = set(waiting), set(waiting), []
    while waiting:
        module = waiting.pop()
        for name in runtime_imports(modules[module], in_calls=module in served):
            own = name.removeprefix(f"{PACKAGE.name}.")
            if own != name:
                for each in {own, own.rpartition(".")[0]} & modules.keys() - met:
                    met.add(each)
                    waiting.append(each)
            is_trainers = f"{name}.".startswith(tuple(f"{t}." for t in TRAINERS))
            is_trainers |= name.startswith(("transformers.Train", "transformers.trainer"))
            if is_trainers and CLIENT not in name:
                found.append((module, name))
    assert found == []
    assert not {name for name in met if name.startswith(("training", "monitor", "config"))}


def test_what_only_a_cpu_needs_is_a_leaf() -> None:
    """Only the plugin's entry and the parser of arguments import it; engines name its class."""
    assert {other for room, other in imports() if room == "cpu"} <= {"upstream", "weights"}
    users = {room for room, other in imports() if other == "cpu" and not room.startswith("tools")}
    assert users == {"registry", "command_line"}
