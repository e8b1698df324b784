"""Three hundred rounds against a server whose replicas echo: memory and files stay level."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from swift_grpo_ext.server import routes
from tests.server.forked import RANKS, Training, deployed, frozen, use_fork
from tests.stack.processes import free_port

pytestmark = [pytest.mark.stack, pytest.mark.extra]

ROUNDS = 300
WARM_UP = 30
GROWTH = 1.05


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    routes.install()
    use_fork(monkeypatch)
    with frozen():
        yield


def test_memory_and_files_stay_level() -> None:
    """Of trainer and server, which share a process here, and of both replicas."""
    samples: list[list[tuple[int, int]]] = []
    with deployed((2,), 20.0, None, 0) as ([running], urls):
        watched = [psutil.Process(), *(psutil.Process(p.pid) for p in running.processes)]

        def between(step: int) -> None:
            if step % 10 == 0:
                samples.append([(p.memory_info().rss, p.num_fds()) for p in watched])

        outcome = Training(urls, [free_port()], 20.0, between).run(ROUNDS)
    assert [type(tokens) for tokens in outcome] == [list] * RANKS, outcome
    warm, *later = samples[WARM_UP // 10 :]
    for sample in later:
        for (memory, files), (memory_before, files_before) in zip(sample, warm, strict=True):
            assert memory < GROWTH * memory_before
            assert files <= files_before + 1  # a connection may come and go
