"""The rooms of the package: which imports which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "swift_grpo_ext"


def room_of(module: str) -> str:
    """The folder that a module stands in, or the module itself where it stands in none; a tool's
    room begins with `tools.`."""
    first, *rest = module.split(".")
    return f"tools.{rest[0]}" if first == "tools" and rest else first


def imports() -> Iterator[tuple[str, str]]:
    """Every import of one room by another, those within functions included."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        own = room_of(module.removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            package, _, name = node.module.partition(".")
            if package != PACKAGE.name:
                continue
            names = [f"{name}.{alias.name}" if name else alias.name for alias in node.names]
            yield from ((own, other) for other in map(room_of, names) if other != own)


def test_rooms_stand_one_above_the_other() -> None:
    graph: dict[str, set[str]] = {}
    for room, other in imports():
        graph.setdefault(room, set()).add(other)
    assert len(list(TopologicalSorter(graph).static_order())) > 15  # raises where there is a circle


def test_the_core_imports_no_tool_and_upstream_nothing_of_ours() -> None:
    below = [(room, other) for room, other in imports() if not room.startswith("tools")]
    assert [pair for pair in below if pair[1].startswith("tools")] == []
    assert [pair for pair in below if pair[0] == "upstream"] == []


def test_what_only_a_cpu_needs_is_a_leaf() -> None:
    """The core meets it where the plugin enters and where arguments are made; engines name it."""
    assert {other for room, other in imports() if room == "cpu"} <= {"upstream", "weights"}
    users = {room for room, other in imports() if other == "cpu" and not room.startswith("tools")}
    assert users == {"registry", "command_line"}
