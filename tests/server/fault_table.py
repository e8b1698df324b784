"""The faults that `test_fault_matrix.py` makes, as a table; pure.

    python -m tests.server.fault_table [--chinese]

prints it for `docs/launching.md` and `docs/launching_CN.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

GOES_ON = ""
CHANGED = "does not hold the trainer's weights"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one replica, or on the way to its server, and when."""

    action: str
    """kill, stop, delay, corrupt: of the replica. cut, lose: a connection, before the server has
    the request, or the answer to it."""

    method: str
    """Of the replica that meets it; a route, for connections; `idle` between two rounds."""

    call: int = 1
    """Which call of the method meets it, counted from 1."""

    replica: int = 0
    server: int = 0

    lives: int = 1
    """Of the replica's starts, how many meet it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A fault, the servers that meet it, and how the run is to end."""

    phase: str
    fault: Fault
    replicas: tuple[int, ...]
    """Of each server."""

    error: str
    """Words of the error that ends every rank; "" where the run goes on with the same tokens."""

    def __str__(self) -> str:
        where = f"{len(self.replicas)} servers" if len(self.replicas) > 1 else "1 server"
        f = self.fault
        return f"{f.action}-{self.phase}-{where}-{f.server}.{f.replica}".replace(" ", "-")


OF_REPLICAS = {
    # phase: the method and the call of it that meet the fault
    "connecting": ("init_communicator", 1),
    "weight update": ("update_flattened_params", 3),
    "loading": ("process_weights_after_loading", 2),
    "reset of caches": ("reset_prefix_cache", 2),
    "round": ("infer train", 2),
    "evaluation": ("infer eval", 1),
    "idle": ("idle", 1),
}
OF_CONNECTIONS = {
    "connecting": ("init_communicator", 1),
    "naming itself": ("get_engine_type", 2),
    "weight update": ("update_flattened_params", 3),
    "loading": ("process_weights_after_loading", 2),
    "reset of caches": ("reset_prefix_cache", 2),
    "round": ("infer", 2),
    "evaluation": ("infer", 3),
}
PHASES = tuple(dict.fromkeys(("connecting", "naming itself", *OF_REPLICAS)))
SKIPPED = {
    "delay": ("connecting", "loading", "evaluation", "idle"),
    "corrupt": ("connecting", "weight update", "idle"),
}
PLACES = (((2,), 0, 0), ((2,), 0, 1), ((1, 1), 0, 0), ((1, 1), 1, 0))
"""Replicas of each server, and the server and replica that meet the fault."""


def cells() -> Iterator[Cell]:
    """Each action in each phase, at one place or two, which take turns."""
    number = 0
    for action in ("kill", "stop", "delay", "corrupt", "cut", "lose"):
        phases = OF_CONNECTIONS if action in ("cut", "lose") else OF_REPLICAS
        for phase, (method, call) in phases.items():
            if phase in SKIPPED.get(action, ()):
                continue
            # Of a server's replicas the first is the host of the weights' group.
            is_twofold = action in ("kill", "corrupt") or (action, phase) == (
                "stop",
                "weight update",
            )
            for _ in range(2 if is_twofold else 1):
                replicas, server, replica = PLACES[number % 4]
                number += 3
                fault = Fault(
                    action=action, method=method, call=call, replica=replica, server=server
                )
                error = _error(action, phase)
                yield Cell(phase=phase, fault=fault, replicas=replicas, error=error)


def _error(action: str, phase: str) -> str:
    if phase == "connecting":  # ms-swift connects before plugins are there, and does not try again
        return "Connection aborted" if action in ("cut", "lose") else "timed out|has not answered"
    return CHANGED if (action, phase) == ("corrupt", "loading") else GOES_ON


WORDS = {
    "fault": ("fault", "故障"),
    "kill": ("a replica is killed", "副本被杀"),
    "stop": ("a replica stops (SIGSTOP)", "副本停住（SIGSTOP）"),
    "delay": ("a replica is slow", "副本变慢"),
    "corrupt": ("a replica answers something else", "副本答错"),
    "cut": ("the connection is cut before the request", "请求之前连接断开"),
    "lose": ("the answer is lost", "应答丢失"),
    "connecting": ("connecting", "连接"),
    "naming itself": ("naming itself", "自报身份"),
    "weight update": ("weight update", "权重同步"),
    "loading": ("loading", "加载权重"),
    "reset of caches": ("reset of caches", "重置缓存"),
    "round": ("round", "一轮"),
    "evaluation": ("evaluation", "评估"),
    "idle": ("idle", "空闲"),
    "goes on": ("the same tokens", "token 相同"),
    "ends": ("ends by name", "指名结束"),
    "upstream": ("ends with ms-swift's error", "以 ms-swift 的报错结束"),
}


def markdown(*, chinese: bool = False) -> str:
    """Actions by phases, with the number of cells."""

    def word(name: str) -> str:
        return WORDS[name][chinese]

    every = list(cells())
    lines = [[*map(word, ("fault", *PHASES))], ["---"] * (len(PHASES) + 1)]
    for action in dict.fromkeys(cell.fault.action for cell in every):
        row = [word(action)]
        for phase in PHASES:
            own = [c for c in every if (c.fault.action, c.phase) == (action, phase)]
            ends = "ends" if any(c.error for c in own) else "goes on"
            ends = "upstream" if phase == "connecting" and ends == "ends" else ends
            row.append(f"{word(ends)} ({len(own)})" if own else "")
        lines.append(row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(markdown(chinese="--chinese" in sys.argv))
