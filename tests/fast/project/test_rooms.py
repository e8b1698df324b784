"""Rooms of the package import only what is below them."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "swift_grpo_ext"
IMPORTS = (ast.Import, ast.ImportFrom)


def room_of(module: str) -> str:
    """Return a module's folder, or the module itself at the top level; each tool is a room."""
    first, *rest = module.split(".")
    return f"tools.{rest[0]}" if first == "tools" and rest else first


@cache
def imports() -> set[tuple[str, str]]:
    """Return each import of one room by another, including imports in functions and for types."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        own = room_of(module.removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [
                alias.name for alias in getattr(node, "names", []) if isinstance(node, IMPORTS)
            ]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            inner = [
                name.partition(".")[2] for name in names if name.startswith(f"{PACKAGE.name}.")
            ]
            found |= {(own, room_of(name)) for name in inner if room_of(name) != own}
    return found


def test_rooms_stand_one_above_the_other() -> None:
    graph: dict[str, set[str]] = {}
    for room, other in imports():
        graph.setdefault(room, set()).add(other)
    assert len(list(TopologicalSorter(graph).static_order())) > 15  # raises where there is a circle


def test_the_core_imports_no_tool_and_upstream_nothing_of_ours() -> None:
    below = [(room, other) for room, other in imports() if not room.startswith("tools")]
    assert [pair for pair in below if pair[1].startswith("tools") or pair[0] == "upstream"] == []
