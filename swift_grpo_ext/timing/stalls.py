"""Names who waits for whom in a run that hangs, before a collective's timeout ends it.

A thread in each process looks whether a part of the step, or a wait for a server or a replica, has
begun or ended. Where none has for `MINUTES`, the first rank that answers prints what each rank
runs. The ranks exchange this through torchrun's store, which needs no collective. So a rank that is
stopped is named, too.
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

MINUTES = 10.0
"""Without progress before a report, and between reports. A rollout that takes longer gets one."""

LOOKS = 10  # within `MINUTES`

OURS = ("swift", "swift_grpo_ext")
LIBRARIES = (sysconfig.get_path("stdlib"), "/site-packages/", "/dist-packages/", "<")

_waits: dict[object, tuple[float, str]] = {}  # when each began, and for what


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Have reports name what the caller waits for."""
    key = object()
    _waits[key] = perf_counter(), what
    try:
        yield
    finally:
        del _waits[key]


class StallReports:
    """A context in which a process is looked at. `part` returns the part of the step that its main
    thread runs, and when that began; a server has none, and is idle while it waits for nothing."""

    def __init__(
        self, part: Callable[[], tuple[str, float]] | None = None, rank: int = 0, size: int = 1
    ) -> None:
        self._part, self._rank, self._size = part, rank, size
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        # A clone: another thread's wait for a key would hold the store.
        store = dist.distributed_c10d._get_default_store().clone() if size > 1 else dist.HashStore()
        self._store = dist.PrefixStore("swift_grpo_ext/stalls", store)

    def __enter__(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _look(self) -> None:
        seen, num_alike, before = None, 0, []
        while not self._ended.wait(60 * MINUTES / LOOKS):
            now = (self._part and self._part(), list(_waits))
            is_idle = self._part is None and not _waits
            seen, num_alike = now, 0 if is_idle or now != seen else num_alike + 1
            is_due = num_alike > 0 and num_alike % LOOKS == 0
            try:
                self._store.set(str(self._rank), json.dumps([perf_counter(), self._state()]))
                # Two looks before the report: each rank that runs has published one in between.
                if num_alike % LOOKS == LOOKS - 2:
                    before = self._read()
                elif is_due:
                    self._report(before, self._read())
            except Exception as e:  # the store has ended, with its machine
                if is_due:
                    _print([f"{_name([self._rank])}: {self._state()}; no store: {e}"])

    def _state(self) -> str:
        """Describe where the main thread is, and what the process waits for."""
        now, texts = perf_counter(), []
        if self._part is not None:
            part, since = self._part()
            place = _lines_of(self._thread)
            texts.append(f"{(now - since) / 60:.0f} min in `{part}`, at {place}")
        for since, what in sorted(_waits.values()):
            texts.append(f"waits for {what} ({(now - since) / 60:.0f} min)")
        return "; ".join(texts)

    # --- between ranks ---

    def _read(self) -> list[Any]:
        """Return the time and text of each rank's last look; None where it has published none."""
        keys = map(str, range(self._size))
        return [json.loads(self._store.get(k)) if self._store.check([k]) else None for k in keys]

    def _report(self, before: list[Any], after: list[Any]) -> None:
        texts = {rank: look[1] for rank, look in enumerate(after) if look and look != before[rank]}
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
    head = f"\nNo part of the step has ended for {MINUTES:g} minutes."  # behind a progress bar
    print("\n  ".join([head, *lines]), file=sys.stderr, flush=True)


def _lines_of(thread: int) -> str:
    """Return the innermost lines of a thread: of the user's, the plugin's or ms-swift's code, and
    of a library that this calls."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    own = [
        frame
        for frame in frames
        if frame.f_globals.get("__name__", "").split(".")[0] in OURS
        or not any(each in frame.f_code.co_filename for each in LIBRARIES)
    ]
    shown = dict.fromkeys([*reversed(own[:2]), frames[0]])  # collectives have one frame in common
    return " > ".join(
        f"{f.f_code.co_name} ({Path(f.f_code.co_filename).name}:{f.f_lineno})" for f in shown
    )
