"""Reports where each rank of a hanging run waits, before a collective's timeout ends the run.

A thread in each process checks whether a part of the step, or a wait for a server or a replica, has
begun or ended. If none has for `MINUTES`, the lowest rank that answers prints each rank's state.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

# Minutes without progress before a report, and between reports. A slow rollout is reported too.
MINUTES = 10.0
NUM_CHECKS = 10  # checks for progress in `MINUTES`

OURS = ("swift", "swift_grpo_ext")
LIBRARIES = (sysconfig.get_path("stdlib"), "/site-packages/", "/dist-packages/", "<")

_waits: dict[object, tuple[float, str]] = {}  # the start and the target of each wait


@contextmanager
def waiting(target: str) -> Iterator[None]:
    """Within the block, reports name `target` as the one that this process waits for."""
    key = object()
    _waits[key] = perf_counter(), target
    try:
        yield
    finally:
        del _waits[key]


class StallReports:
    """Within the block, reports stalls of this process. `part` returns the part of the step in the
    main thread, and when it began; a server has none."""

    def __init__(
        self, part: Callable[[], tuple[str, float]] | None = None, rank: int = 0, size: int = 1
    ) -> None:
        self._part, self._rank, self._size = part, rank, size
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        # The ranks exchange their states through torchrun's store. It needs no collective, so that
        # a stopped rank is reported too. A clone: while another thread waits for a key, the
        # original is blocked.
        store = dist.distributed_c10d._get_default_store().clone() if size > 1 else dist.HashStore()
        self._store = dist.PrefixStore("swift_grpo_ext/stalls", store)

    def __enter__(self) -> None:
        threading.Thread(target=self._check_progress, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _check_progress(self) -> None:
        seen, num_alike, before = None, 0, []
        while not self._ended.wait(60 * MINUTES / NUM_CHECKS):
            now = (self._part and self._part(), list(_waits))
            # A server has no part of a step: without waits it is idle.
            is_idle = self._part is None and not _waits
            seen, num_alike = now, 0 if is_idle or now != seen else num_alike + 1
            is_due = num_alike > 0 and num_alike % NUM_CHECKS == 0
            try:
                self._store.set(str(self._rank), json.dumps([perf_counter(), self._state()]))
                # Two checks before the report: each running rank publishes a state in between.
                if num_alike % NUM_CHECKS == NUM_CHECKS - 2:
                    before = self._read()
                elif is_due:
                    self._report(before, self._read())
            except Exception as e:  # the machine that hosts the store is gone
                if is_due:
                    _print([f"{_name([self._rank])}: {self._state()}; no store: {e}"])

    def _state(self) -> str:
        """Describe the main thread's place, and the waits of the process."""
        now, texts = perf_counter(), []
        if self._part is not None:
            part, since = self._part()
            place = _lines_of(self._thread)
            texts.append(f"{(now - since) / 60:.0f} min in `{part}`, at {place}")
        for since, target in sorted(_waits.values()):
            texts.append(f"waits for {target} ({(now - since) / 60:.0f} min)")
        return "; ".join(texts)

    # --- between ranks ---

    def _read(self) -> list[Any]:
        """Return the time and text of each rank's last state; None if it has published none."""
        keys = map(str, range(self._size))
        return [json.loads(self._store.get(k)) if self._store.check([k]) else None for k in keys]

    def _report(self, before: list[Any], after: list[Any]) -> None:
        # A running rank has published another time in between. Of these, the lowest prints.
        texts = {rank: now[1] for rank, now in enumerate(after) if now and now != before[rank]}
        if self._rank != min(texts, default=self._rank):
            return
        alike: dict[str, list[int]] = {}
        for rank, text in texts.items():
            alike.setdefault(text, []).append(rank)
        lines = [f"{_name(ranks)}: {text}" for text, ranks in alike.items()]
        if silent := [rank for rank in range(self._size) if rank not in texts]:
            lines.append(f"{_name(silent)}: no answer; stopped, or on a machine that is lost")
        _print(lines)


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _print(lines: Sequence[str]) -> None:
    head = f"\nNo part of the step has ended for {MINUTES:g} minutes."  # after a progress bar
    print("\n  ".join([head, *lines]), file=sys.stderr, flush=True)


def _lines_of(thread: int) -> str:
    """Return a thread's innermost lines: of the user, the plugin and ms-swift, and of a library."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    own = [
        frame
        for frame in frames
        if frame.f_globals.get("__name__", "").split(".")[0] in OURS
        or not any(each in frame.f_code.co_filename for each in LIBRARIES)
    ]
    shown = dict.fromkeys([*reversed(own[:2]), frames[0]])  # two: all collectives share the first
    return " > ".join(
        f"{f.f_code.co_name} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in shown
    )
