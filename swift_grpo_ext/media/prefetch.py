"""Decode and process the media of the next round while this one trains.

What is made early stands in the cache under the names that the round will ask for, so that nothing
else knows of it: a round finds its media there, or makes them as it does without.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from swift_grpo_ext.checks.rows import encoding_error
from swift_grpo_ext.media.hooks import media_hooks


class MediaPrefetch:
    """Fills a cache with the media of rows, in one thread, which raises nothing.

    A row that cannot be encoded is left to the round that needs it. The thread ends where the next
    row would drive out one that it has made, and at the end of the process after the row at hand.
    """

    def __init__(self, cache: Any) -> None:
        self._media = _Ahead(cache)
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()

    def start(self, template: Any, rows: Sequence[Any]) -> None:
        """Begin, once `wait` has been called, while no `media_hooks` of `template` are open."""
        if not rows:
            return
        if self._tokenizer is None:  # a fast one may refuse a second thread ("Already borrowed")
            self._tokenizer = copy.deepcopy(template.tokenizer)
        self._is_stopped.clear()
        twin = _twin(template, self._tokenizer)
        self._thread = threading.Thread(target=self._fill, args=(twin, rows), name="media prefetch")
        self._thread.start()

    def stop(self) -> None:
        """Begin no other row."""
        self._is_stopped.set()

    def wait(self) -> None:
        """Stop, and let the row at hand be made."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def take_made(self) -> Counter[str]:
        """After `wait`: what was made since the last call, by kind."""
        made, self._media.made = self._media.made, Counter()
        return made

    def _fill(self, twin: Any, rows: Sequence[Any]) -> None:
        cache, most = self._media.cache, 0
        num_lost = cache.num_lost
        with media_hooks(twin, self._media):
            for row in rows:
                held = cache.num_round_bytes
                is_full = cache.num_lost > num_lost or held + most > cache.max_bytes
                if is_full or self._is_over():
                    return
                encoding_error(twin, row)
                most = max(most, cache.num_round_bytes - held)

    def _is_over(self) -> bool:
        return self._is_stopped.is_set() or not threading.main_thread().is_alive()


class _Ahead:
    """`Media` that counts what is made, and not what is asked for: the round has yet to ask."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.made: Counter[str] = Counter()

    def image_source(self, image: Any) -> Any:
        return self.cache.image_source(image)

    def video_source(self, asked: Any) -> Any:
        return self.cache.video_source(asked)

    def share(self, parts: Any, make: Callable[[], Any], kind: str = "") -> Any:
        return self.cache.share(parts, make, kind, self.count)

    def count(self, kind: str, *, made: bool, times: int = 1) -> None:
        if kind and made:
            self.made[kind] += times


def _twin(template: Any, tokenizer: Any) -> Any:
    """A copy that a thread may hook and change."""
    twin = copy.copy(template)
    if template.processor is template.tokenizer:
        twin.processor = tokenizer
        return twin
    twin.processor = copy.copy(template.processor)
    twin.processor.tokenizer = tokenizer
    for name in ("image_processor", "video_processor"):
        if hasattr(twin.processor, name):
            setattr(twin.processor, name, copy.copy(getattr(twin.processor, name)))
    return twin
