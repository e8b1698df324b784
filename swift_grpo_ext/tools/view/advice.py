"""Names the settings that would shorten a large part of a run's step, for its page.

A healthy run gets no advice. An advised setting saves about a tenth of a step. `advice.json` holds
the words as [English, Chinese].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swift_grpo_ext.timing import PARTS

MAX_ADVICES = 3

GENERATE = 0.3
"""Of a step, without graphs: they take a third of it off at the least."""

PASSES = 0.4
"""On an H100 a model of 3 billion parameters spends 19% of a step in passes that read a prompt of
1,400 tokens once for 8 answers of 256, and 60% in those that read it 8 times."""

COPIES = 0.1
"""7 GB to pinned memory and back take 0.7 s, 4% of such a step."""

TURNS = 0.3
"""Rollout and passes each take this share at least: side by side, the shorter one costs nothing."""

WAIT = 0.2
"""Ranks with answers of alike lengths end within some percent of one another."""


WORDS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("advice.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Advice:
    """A setting that would save time."""

    share: float
    """The share of the step that it is about."""

    texts: list[str]
    """In English and in Chinese: the part, its share, and the setting with its value."""


def mean_step(logs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of `time/*` over a run's logs; {} where none has them. The first log is left
    out where there are more: a run begins with work that it does once."""
    timed = [log for log in logs if "time/rollout" in log]
    timed = timed[1:] or timed
    names = {name for log in timed for name in log if name.startswith("time/")}
    return {name: fmean(log[name] for log in timed if name in log) for name in sorted(names)}


def advise(means: Mapping[str, float], settings: Mapping[str, Any]) -> list[Advice]:
    """Return the advice for a run, what is about most first.

    Args:
        means: of a step, as `mean_step` returns them.
        settings: the run's, by the names of `args.json`; none where they are not known.
    """
    step = sum(means.get(f"time/{part}", 0.0) for part in PARTS)
    shares = {name.removeprefix("time/"): value / step for name, value in means.items() if step}
    found = _advices(shares, settings) if step and settings else ()
    return sorted(found, key=lambda advice: -advice.share)[:MAX_ADVICES]


def _advices(shares: Mapping[str, float], settings: Mapping[str, Any]) -> Iterator[Advice]:
    mode = settings.get("vllm_mode") if settings.get("use_vllm") else None
    is_on_device = mode == "colocate" and not settings.get("use_cpu")
    passes = shares["logps"] + shares["loss"]

    if shares["generate"] >= GENERATE and is_on_device and settings.get("vllm_enforce_eager"):
        yield _advice("graphs", shares["generate"])

    is_read_once = settings.get("logps_shared_prompt") == "auto"
    # Without `--logps_shared_prompt` a larger batch reads each prompt as often.
    if passes >= PASSES and is_read_once and (sizes := _larger_batch(settings)):
        yield _advice("batch_size", passes, **sizes)

    copies = shares["wake"] + shares["sleep"]
    if copies >= COPIES and is_on_device and settings.get("sleep_level") == 1:
        # The base under an adapter that the engine holds apart is sent once, at the start.
        is_sent_anew = settings.get("tuner_type") != "lora" or not settings.get("vllm_enable_lora")
        yield _advice("drop_weights" if is_sent_anew else "keep_weights", copies)

    # ms-swift takes no scheduler with --async_generate.
    may_overlap = not settings.get("async_generate") and not settings.get("multi_turn_scheduler")
    hidden = min(shares["rollout"], passes)
    if hidden >= TURNS and mode == "server" and may_overlap:
        told = {"rollout": f"{shares['rollout']:.0%}", "passes": f"{passes:.0%}"}
        yield _advice("take_turns", hidden, **told)

    if shares.get("wait", 0.0) >= WAIT and mode == "colocate":
        size = settings.get("vllm_tensor_parallel_size")
        length = settings.get("max_completion_length")
        yield _advice("longest", shares["wait"], size=size, length=length)


def _larger_batch(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the smallest batch that holds a group, or as much of one as accumulation leaves; {}
    where none is larger."""
    size, group = settings["per_device_train_batch_size"], settings.get("num_generations", 1)
    steps = settings.get("gradient_accumulation_steps") or 1
    if (settings.get("steps_per_generation") or steps) != steps:
        return {}  # several updates are made of a round: that is not about time alone
    factors = [n for n in range(1, steps + 1) if steps % n == 0]
    factor = next((n for n in factors if size * n >= group), steps)
    if factor == 1:
        return {}
    new = {"new_size": size * factor, "new_steps": steps // factor}
    return {"size": size, "group": group, "steps": steps, **new}


def _advice(key: str, share: float, **values: object) -> Advice:
    return Advice(share, [text.format(share=f"{share:.0%}", **values) for text in WORDS[key]])
