"""Values by the content they were made of, kept within a bound of bytes (`--media_cache_gb`).

`Store` knows nothing of images: entries say how many bytes they hold. It serves several threads:
one makes a value, the others wait for it. `Sources` names what media are loaded from by content,
so that a file that was replaced is another medium. Neither needs torch, vLLM or ms-swift.
"""

from __future__ import annotations

import base64
import binascii
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import xxhash

LONGEST_PATH = 4096
LONGEST_NAME = 256
"""Characters. A longer string that names no file is base64."""

MOST_FILES = 2**16
"""Digests that are remembered; one takes about 250 bytes."""

BLOCK_BYTES = 2**20

SECONDS_UNTIL_SETTLED = 2.0
"""A file that changed less than this ago may change again within the same tick of its clock."""


class Entry(Protocol):
    """What a `Store` holds of a value."""

    num_bytes: int
    is_processed: bool
    """Whether it was made of pixels that may be in the store too. It is larger, and goes first."""

    def check(self) -> None:
        """Raise where somebody changed the value."""


E = TypeVar("E", bound=Entry)


class Store(Generic[E]):
    """Entries by key, of `max_bytes` at most together; 0 holds nothing.

    What goes first, where they do not fit: entries that this round has not used, processed ones
    before pixels, and the last used first; then those of this round, the last used last. Epochs
    ask for each medium once: what was kept longest is what the next epoch asks for soonest, and to
    drop that first (LRU) would leave a data set larger than the store without any hit.
    Each call takes constant time, and the end of a round what the round has used.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_lost = 0
        """Entries that did not stay until the end of a round that used them."""
        self.round = 0
        self._futures: dict[Hashable, Future[E]] = {}
        # Keys in the order of their last use: of this round, and of earlier ones by `is_processed`.
        self._fresh: OrderedDict[Hashable, None] = OrderedDict()
        self._stale: dict[bool, OrderedDict[Hashable, None]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        self._lock = threading.Lock()
        self._is_open = True

    def get(self, key: Hashable, make: Callable[[], E]) -> E:
        """The entry of `key`, made now unless it is held or being made.

        What `make` raises is raised in all who wait for it, and then forgotten.
        """
        future, is_mine = self._claim(key)
        if is_mine:
            self._fulfil(key, future, make)
        return future.result()

    @property
    def num_round_bytes(self) -> int:
        """Of the entries that this round has used."""
        with self._lock:
            held = [self._futures[key] for key in self._fresh]
            return sum(future.result().num_bytes for future in held if future.done())

    def end_round(self) -> None:
        """From now on, what the round has used may go before what the next one uses."""
        with self._lock:
            self.round += 1
            for key in [key for key in self._fresh if self._futures[key].done()]:
                del self._fresh[key]
                self._stale[self._futures[key].result().is_processed][key] = None

    def check(self) -> None:
        """`check` all entries."""
        with self._lock:
            entries = [future.result() for future in self._futures.values() if future.done()]
        for entry in entries:
            entry.check()

    def close(self) -> None:
        """Drop everything; from now on, all is made anew."""
        with self._lock:
            self._is_open = False
            self._futures.clear()
            for keys in (self._fresh, *self._stale.values()):
                keys.clear()
            self.num_bytes = 0

    def _claim(self, key: Hashable) -> tuple[Future[E], bool]:
        with self._lock:
            future = self._futures.get(key)
            is_mine = future is None
            self.num_hits += not is_mine
            self.num_misses += is_mine
            future = future or Future()
            if self._is_open:
                self._forget(key)
                self._futures[key] = future
                self._fresh[key] = None
            return future, is_mine

    def _fulfil(self, key: Hashable, future: Future[E], make: Callable[[], E]) -> None:
        try:
            entry = make()
        except BaseException as e:  # the others wait for it, whatever it is
            with self._lock:
                self._forget(key)
            future.set_exception(e)
            return
        with self._lock:
            future.set_result(entry)
            if self._futures.get(key) is future:
                self.num_bytes += entry.num_bytes
                if entry.num_bytes > self.max_bytes:
                    self._drop(key)  # it drives nothing else out
                while self.num_bytes > self.max_bytes:
                    self._drop(self._next_to_go())

    def _next_to_go(self) -> Hashable:
        for stale in (self._stale[True], self._stale[False]):
            if stale:
                return next(reversed(stale))
        return next(key for key in self._fresh if self._futures[key].done())

    def _drop(self, key: Hashable) -> None:
        entry = self._futures[key].result()
        self.num_lost += key in self._fresh
        self._forget(key)
        self.num_bytes -= entry.num_bytes
        entry.check()

    def _forget(self, key: Hashable) -> None:
        self._futures.pop(key, None)
        for keys in (self._fresh, *self._stale.values()):
            keys.pop(key, None)


class Sources:
    """What media are loaded from, named by content.

    An address, and a name that is no file's, say nothing of content: they are good for one round.
    Threads may use it: two may read one file at the same time, and agree.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[str, tuple[tuple[int, ...], bytes]] = OrderedDict()

    def image(self, source: Any, round_: int) -> Any:
        """The digest of an image's encoded bytes, however it is given; what is no file stays.

        ms-swift hands rows of bytes to an engine in base64 and to training as they are (4.6,
        rl_core/data.py, `to_infer_request`), and paths with and without a dictionary around.
        """
        if type(source) is dict and "bytes" in source:
            source = source["bytes"] or source.get("path")
        if isinstance(source, str):
            path = _find(source)
            source = path or _decoded(source) or (source, round_)
        if isinstance(source, Path):
            return self._of_file(source)
        return _digest(source) if isinstance(source, bytes) else source

    def video(self, source: Any, round_: int) -> Any:
        """What a loader of videos is asked for, with the digest of each file beside its path."""
        if isinstance(source, str):
            path = _find(source)
            return source, round_ if path is None else self._of_file(path)
        if type(source) in (list, tuple):
            return type(source)(self.video(item, round_) for item in source)
        if type(source) is dict:
            return {key: self.video(item, round_) for key, item in source.items()}
        return source

    def _of_file(self, path: Path) -> bytes:
        stat = path.stat()
        state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = self._digests.get(str(path))
        if known is not None and known[0] == state:
            return known[1]
        digest = _digest_of_file(path)
        if abs(time.time() - stat.st_ctime) > SECONDS_UNTIL_SETTLED:
            self._digests[str(path)] = state, digest
            if len(self._digests) > MOST_FILES:
                self._digests.popitem(last=False)
        return digest


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)  # SHA-256 takes 20 times as long


def _digest_of_file(path: Path) -> bytes:
    """`_digest` of a file's bytes, of which one block is held at a time."""
    whole = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
    return whole.digest()


def _decoded(source: str) -> bytes | None:
    """The bytes of base64, with or without the head of a `data:` address; None for other text."""
    data = source.partition(";base64,")[2] if source.startswith("data:") else source
    if len(data) <= LONGEST_NAME:
        return None
    with suppress(binascii.Error, ValueError):
        return base64.b64decode(data, validate=True)
    return None


def _find(source: str) -> Path | None:
    """The file that ms-swift 4.6 would open (template/vision_utils.py, `_check_path`)."""
    text = source.strip().removeprefix("file://")
    if not text or len(text) > LONGEST_PATH or text.startswith(("http", "data:")):
        return None
    for folder in ("", os.environ.get("ROOT_IMAGE_DIR", "")):
        with suppress(OSError, ValueError, RuntimeError):  # base64 is no path
            path = (Path(folder) / text).expanduser()
            if path.is_file():
                return path.absolute()
    return None


class Tally:
    """Of a round: how often media were asked for, and made, by kind (`decoded`, `processed`)."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.made: Counter[str] = Counter()

    def take(self) -> Counter[str]:
        """What was made by kind, and all that was `reused`, since the last call."""
        asked, made = self.asked, self.made
        self.asked, self.made = Counter(), Counter()
        return Counter({**made, "reused": asked.total() - made.total()})
