"""Cases of `scripts/gpu.sh` that end in every way. Without torch, a process starts at once."""

from __future__ import annotations

import os
import time

from scripts.gpu.found import Comparison, Found


def passes() -> Found:
    return Found([Comparison("a number", 1.0, 1.0)], [{"way": "plain", "ms": 1.5, "peak": None}])


def fails() -> Found:
    return Found([Comparison("near", 0.1, 1.0), Comparison("no number", float("nan"), 1.0)])


def leaves_alone() -> Found:
    return Found(not_tried="left alone: <windows>")


def raises() -> Found:
    raise ValueError("a <wrong> shape")


def says_nothing() -> Found:
    return Found()


def dies() -> Found:
    os._exit(3)


def hangs() -> Found:
    time.sleep(600)
    return Found()
