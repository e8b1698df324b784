"""What the cache of media holds, drops and names: exact values, without torch, vLLM or ms-swift."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

from swift_grpo_ext.media import cache
from swift_grpo_ext.media.cache import Sources, Store, Tally


@dataclass
class Value:
    num_bytes: int
    is_processed: bool = False
    is_changed: bool = False

    def check(self) -> None:
        if self.is_changed:
            raise RuntimeError("changed")


def ask(store: Store[Value], *names: str, size: int = 10) -> str:
    """The names of those that had to be made; those in capitals are processed."""
    made = []
    for name in names:

        def make(name: str = name) -> Value:
            made.append(name)
            return Value(size, is_processed=name.isupper())

        store.get(name, make)
    return "".join(made)


def held(store: Store[Value]) -> str:
    return "".join(sorted(map(str, store._futures)))


def test_what_is_held_is_not_made_again() -> None:
    store = Store[Value](100)
    assert ask(store, "a", "b", "a") == "ab"
    store.end_round()
    assert ask(store, "b", "c", "a") == "c"
    assert (store.num_hits, store.num_misses, store.num_bytes) == (3, 3, 30)


def test_a_round_drops_what_it_has_not_used_for_longest() -> None:
    store = Store[Value](30)
    assert ask(store, *"abcad") == "abcd"
    assert held(store) == "acd"


def test_what_earlier_rounds_used_goes_before_what_this_one_uses() -> None:
    store = Store[Value](30)
    ask(store, "a", "b")
    store.end_round()
    ask(store, "c", "d")
    assert held(store) == "acd"
    ask(store, "e")
    assert held(store) == "cde"


def test_processed_media_go_before_pixels() -> None:
    store = Store[Value](40)
    ask(store, *"aAbB")
    store.end_round()
    ask(store, "c")
    assert held(store) == "Aabc"
    ask(store, "d", "e")
    assert held(store) == "acde"


def test_an_epoch_larger_than_the_store_finds_what_was_kept() -> None:
    """A store of 6 and an epoch of 12: LRU would find nothing."""
    store, epoch, hits = Store[Value](60), "abcdefghijkl", []
    for _ in range(3):
        for start in range(0, len(epoch), 2):
            ask(store, *epoch[start : start + 2])
            store.end_round()
        hits.append(store.num_hits)
    assert hits == [0, 6, 12]


@pytest.mark.parametrize("max_bytes", [0, 5, 10, 35])
def test_the_bound_holds_after_every_call(max_bytes: int) -> None:
    store = Store[Value](max_bytes)
    for number in range(60):
        ask(store, "abcdefgHIJK"[number * 7 % 11], size=1 + number % 9)
        assert 0 <= store.num_bytes <= max_bytes
        assert store.num_bytes == sum(f.result().num_bytes for f in store._futures.values())
        if number % 4 == 0:
            store.end_round()


def test_what_never_fits_drives_nothing_out() -> None:
    store = Store[Value](20)
    ask(store, "a", "b")
    assert ask(store, "c", size=21) == "c"
    assert held(store) == "ab"


def test_threads_wait_for_the_one_that_makes() -> None:
    store, made, begun = Store[Value](100), [], threading.Event()

    def make() -> Value:
        made.append(begun.wait(10))
        return Value(1)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(store.get, "a", make) for _ in range(4)]
        begun.set()
        assert len({id(future.result()) for future in futures}) == 1
    assert made == [True]


def test_a_failure_is_forgotten() -> None:
    def fail() -> Value:
        raise OSError("truncated")

    store = Store[Value](100)
    for _ in range(2):
        with pytest.raises(OSError, match="truncated"):
            store.get("a", fail)
    assert (held(store), store.num_misses) == ("", 2)


def test_changed_entries_are_found_when_checked_and_when_dropped() -> None:
    store, value = Store[Value](10), Value(10)
    store.get("a", lambda: value)
    store.check()
    value.is_changed = True
    with pytest.raises(RuntimeError, match="changed"):
        store.check()
    with pytest.raises(RuntimeError, match="changed"):
        ask(store, "b")


def test_a_full_store_of_many_entries_is_as_fast_as_a_small_one() -> None:
    """To look through 20,000 entries for each of 2,000 new ones would take 10 seconds."""
    store, start = Store[Value](20_000), time.process_time()
    for number in range(22_000):
        store.get(number, lambda: Value(1))
        if number % 500 == 0:
            store.end_round()
    assert store.num_bytes == len(store._futures) == 20_000
    assert time.process_time() - start < 5


def test_a_closed_store_holds_nothing() -> None:
    store = Store[Value](100)
    ask(store, "a")
    store.close()
    assert ask(store, "a", "a") == "aa"
    assert (held(store), store.num_bytes) == ("", 0)


DATA = b"\x89PNG" + bytes(range(256)) * 2
NAME = xxhash.xxh3_128_digest(DATA)


def forms(path: Path) -> list[Any]:
    """All ways in which a row, or ms-swift on the way to an engine, gives one image."""
    text = base64.b64encode(DATA).decode()
    return [
        *(str(path), f" {path} ", f"file://{path}", {"path": str(path), "bytes": None}),
        *(DATA, {"bytes": DATA, "path": "elsewhere.png"}, {"bytes": DATA, "path": None}),
        *(text, f"data:image/png;base64,{text}"),
    ]


def test_an_image_has_one_name_however_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)
    sources = Sources()
    for round_ in range(2):
        assert [sources.image(form, round_) for form in forms(path)] == [NAME] * 9


def test_paths_are_found_as_ms_swift_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    assert Sources().image("a.png", 3) == ("a.png", 3)
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    assert Sources().image("a.png", 3) == NAME


@pytest.mark.parametrize("name", ["https://host/a.png", "missing.png", "a" * 257 + "!", ""])
def test_what_says_nothing_of_content_is_good_for_a_round(name: str) -> None:
    sources = Sources()
    assert sources.image(name, 1) == sources.image(name, 1) == (name, 1)
    assert sources.image(name, 2) == (name, 2)


def test_pixels_stay_as_they_are() -> None:
    pixels = object()
    assert Sources().image(pixels, 0) is pixels


def test_a_file_is_read_again_once_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_reads = tmp_path / "a.png", 0
    read = cache._digest_of_file

    def counted(path: Path) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return read(path)

    path.write_bytes(DATA)
    monkeypatch.setattr(cache, "_digest_of_file", counted)
    sources = Sources()
    for _ in range(3):  # it may change again before the file system's clock moves on
        assert sources.image(str(path), 0) == NAME
    assert num_reads == 3
    monkeypatch.setattr(cache.time, "time", lambda: path.stat().st_ctime + 3)
    for _ in range(3):
        assert sources.image(str(path), 0) == NAME
    assert num_reads == 4
    stat = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time
    assert sources.image(str(path), 0) == xxhash.xxh3_128_digest(DATA[::-1])


def test_a_long_file_is_named_without_being_held(tmp_path: Path) -> None:
    """Videos take hundreds of megabytes, which no bound of ours would count."""
    path, size = tmp_path / "long.mp4", 200 * 2**20
    with path.open("wb") as f:
        f.truncate(size)
    whole = xxhash.xxh3_128()
    for _ in range(200):
        whole.update(bytes(2**20))
    sources = Sources()
    tracemalloc.start()
    named = sources.video(str(path), 0)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert named == (str(path), whole.digest())
    assert peak < 10 * 2**20
    assert held < 10 * 2**10


def test_videos_are_named_by_path_and_content(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(DATA)
    asked = ({"video": [str(path), "b.mp4"], "fps": 2.0},)
    assert Sources().video(asked, 7) == ({"video": [(str(path), NAME), ("b.mp4", 7)], "fps": 2.0},)


def test_the_tally_of_a_round() -> None:
    tally = Tally()
    tally.asked.update(decoded=5, processed=4)
    tally.made.update(decoded=2, processed=1)
    assert tally.take() == {"decoded": 2, "processed": 1, "reused": 6}
    assert tally.take() == {"reused": 0}


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; import swift_grpo_ext.media.cache;"
        "sys.exit(bool({'torch', 'vllm', 'swift', 'PIL'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
