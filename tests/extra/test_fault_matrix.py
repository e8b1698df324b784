"""After any fault in any phase a run has the tokens of an undisturbed one, or it ends with a named
cause and within its bound (F1 to F4). A large body holds nobody up."""

from __future__ import annotations

import threading
import time

import pytest
import requests

from tests.rig.server.forked import Cell, cells, check, deployed
from tests.rig.server.served import body_of


@pytest.mark.parametrize("cell", cells(in_pairs=False), ids=str)
def test_faults(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("num_images", [1, 400])
def test_health_is_not_held_up_while_a_large_body_arrives(num_images: int) -> None:
    """The bound is in CPU seconds of this process between two answers. It does not hold beside many
    other processes on few cores, where all threads wait for one another."""
    has_ended, spent = threading.Event(), []
    body = body_of(["A" * (400_000_000 // num_images)] * num_images)
    with deployed([1], 300.0) as (_, [url]):

        def ask() -> None:
            while not has_ended.is_set():
                start = time.process_time()
                assert requests.get(f"{url}/health/", timeout=60).ok
                spent.append(time.process_time() - start)
                time.sleep(0.01)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        headers = {"Content-Type": "application/json"}
        answer = requests.post(f"{url}/infer/", data=body, headers=headers, timeout=300)
        has_ended.set()
        asking.join(60)
    assert (answer.status_code, len(answer.json())) == (200, 1)
    assert max(spent) < 1.0
