"""The bench of whole steps asks a GPU for settings that exist, and its ways take turns."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.arguments import RLHFArguments

from scripts.bench import measure
from scripts.bench.measure import Measures, interleave
from swift_grpo_ext.flags import ExtFlags
from tests.conftest import ROOT


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command's module; it imports others of its folder."""
    monkeypatch.syspath_prepend(ROOT / "scripts/bench")
    import step

    return step


def test_a_gpu_is_asked_for_what_pays_there(step: Any) -> None:
    """Each flag exists, and graphs are captured for the batch."""

    def flags(*words: str) -> dict[str, list[str]]:
        options = step.parse(step.GPU, ["--size", "3b", *words])
        options.model = Path("/model")
        argv = step.swift_argv("ours", options, step.GPU, Path("/rows.jsonl"), 256)[3:]
        found: dict[str, list[str]] = {}
        for word in argv:
            if word.startswith("--"):
                values = found[word.removeprefix("--")] = []
            else:
                values.append(word)
        return found

    known = {f.name for cls in (RLHFArguments, ExtFlags) for f in dataclasses.fields(cls)}
    assert flags().keys() <= known
    graphs = json.loads(flags()["vllm_engine_kwargs"][0])["compilation_config"]
    assert graphs["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert graphs["cudagraph_capture_sizes"] == [8, 16, 24, 32]
    assert (flags()["torch_dtype"], flags()["gradient_checkpointing"]) == (["bfloat16"], ["true"])
    eager = flags("--eager", "--", "--attn_impl", "eager")
    assert (eager["vllm_enforce_eager"], eager["attn_impl"]) == (["true"], ["eager"])
    assert not {"vllm_enforce_eager", "use_cpu"} & flags().keys()
    assert "vllm_engine_kwargs" not in eager


def test_ways_take_turns_in_an_order_that_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int]] = []

    def turn(way: str, repetition: int) -> Measures:
        turns.append((way, repetition))
        return {"seconds": float(repetition)}

    ways = {way: partial(turn, way) for way in "ab"}
    found = interleave(ways, 2, "turns")
    assert turns == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {way: [{"seconds": 1.0}, {"seconds": 2.0}] for way in "ab"}
    # Without time for more, the repetition that warms up counts.
    clock = iter([0.0, 1.0, 9.0])
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = interleave(ways, 2, "turns", max_seconds=5.0)
    assert found == {way: [{"seconds": 0.0}] for way in "ab"}
