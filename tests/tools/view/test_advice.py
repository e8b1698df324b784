"""What is said of a run's time: nothing of a healthy one, and each remedy where it helps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.timing import PARTS, ROLLOUT_PARTS
from swift_grpo_ext.tools.view import advice
from swift_grpo_ext.tools.view.advice import advise, mean_step

HEALTHY = {
    "time/rollout": 8.1, "time/wake": 0.4, "time/send": 0.4, "time/generate": 6.8,
    "time/sleep": 0.3, "time/rewards": 0.1, "time/batch": 0.4, "time/logps": 1.3, "time/loss": 2.0,
    "time/optimizer": 0.6, "time/rest": 0.2, "time/wait": 0.3,
}  # fmt: skip
"""Seconds of a step on an H100 (docs/benchmarks.md)."""

SETTINGS: dict[str, Any] = {
    "use_cpu": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enforce_eager": False,
    "vllm_tensor_parallel_size": 1,
    "sleep_level": 1,
    "tuner_type": "full",
    "async_generate": False,
    "multi_turn_scheduler": None,
    "logps_shared_prompt": "auto",
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": None,
    "max_completion_length": 1024,
}

LONG_PASSES = {"time/logps": 5.1, "time/loss": 7.6}
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32}
ADAPTERS = {"tuner_type": "lora", "vllm_enable_lora": True}
SERVED = {"vllm_mode": "server", "sleep_level": 0}

GIVEN = [
    ({}, {"vllm_enforce_eager": True}, ["time/generate", "54%", "--vllm_enforce_eager is true"]),
    (
        LONG_PASSES,
        ONE_BY_ONE,
        ["57%", "--per_device_train_batch_size is 1", "group of 8", "to 8", "from 32 to 4"],
    ),
    (  # as much of a group as there is
        LONG_PASSES,
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        ["is 2", "Set it to 4", "from 2 to 1"],
    ),
    (  # three batches of four hold a group, and two cannot be made of twelve rows
        LONG_PASSES,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
        ["Set it to 12", "from 3 to 1"],
    ),
    ({"time/wake": 1.0, "time/sleep": 0.5}, {}, ["12%", "--sleep_level is 1", "With 2"]),
    ({"time/wake": 1.0, "time/sleep": 0.5}, {"tuner_type": "lora"}, ["With 2"]),  # merged
    ({"time/wake": 1.0, "time/sleep": 0.5}, ADAPTERS, ["With 0"]),
    ({"time/wake": 1.0, "time/sleep": 0.5}, {**ADAPTERS, "tuner_type": "lora_llm"}, ["With 2"]),
    (
        {"time/rollout": 8.0, **LONG_PASSES},
        SERVED,
        ["time/rollout is 36%", "58%", "--async_generate is false", "before the last update"],
    ),
    (
        {"time/wait": 3.0},
        {},
        ["time/wait", "24%", "--vllm_tensor_parallel_size is 1", "--max_completion_length is 1024"],
    ),
]


@pytest.mark.parametrize(("more", "settings", "words"), GIVEN, ids=lambda value: str(value)[:40])
def test_each_remedy_is_told_with_part_share_and_setting(
    more: dict[str, float], settings: dict[str, Any], words: list[str]
) -> None:
    given = advise({**HEALTHY, **more}, {**SETTINGS, **settings})
    assert len(given) == 1
    english, chinese = given[0].texts
    assert [word for word in words if word not in english] == []
    assert re.findall(r"--\w+", english) == re.findall(r"--\w+", chinese)


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({}, {}),
        ({}, {**SERVED, "vllm_enforce_eager": True}),  # of the server's own command
        ({}, {"use_cpu": True, "vllm_enforce_eager": True}),
        ({"time/generate": 3.0}, {"vllm_enforce_eager": True}),
        ({}, ONE_BY_ONE),  # passes are short
        (LONG_PASSES, {}),  # a group is in one batch
        (LONG_PASSES, {**ONE_BY_ONE, "logps_shared_prompt": "false"}),
        (LONG_PASSES, {**ONE_BY_ONE, "steps_per_generation": 64}),
        (LONG_PASSES, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}),
        ({"time/wake": 1.0, "time/sleep": 0.5}, {"sleep_level": 2}),
        ({"time/wake": 1.0, "time/sleep": 0.5}, {"use_cpu": True}),
        ({"time/batch": 4.0}, {}),  # no setting shortens it
        ({"time/rollout": 8.0, **LONG_PASSES}, {**SERVED, "async_generate": True}),
        ({"time/rollout": 8.0, **LONG_PASSES}, {**SERVED, "multi_turn_scheduler": "tools"}),
        ({}, SERVED),
        ({"time/wait": 3.0}, SERVED),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_healthy_run_and_one_that_a_setting_cannot_help_get_no_advice(
    more: dict[str, float], settings: dict[str, Any]
) -> None:
    assert advise({**HEALTHY, **more}, {**SETTINGS, **settings}) == []


def test_the_three_largest_are_told() -> None:
    slow = {**HEALTHY, **LONG_PASSES, "time/rollout": 25.0, "time/generate": 14.0}
    slow |= {"time/wake": 4.0, "time/sleep": 3.0, "time/wait": 9.0}
    settings = {**SETTINGS, **ONE_BY_ONE, "vllm_enforce_eager": True}
    given = advise(slow, {**settings, "vllm_enforce_eager": False})
    assert [a.share for a in given] == sorted((a.share for a in given), reverse=True)
    given = advise(slow | {"time/logps": 11.0}, settings)
    assert len(given) == advice.MAX_ADVICES
    assert "time/logps" in given[0].texts[0]


def test_the_first_log_is_left_out_where_there_are_more() -> None:
    first = dict.fromkeys(HEALTHY, 1000.0)
    logs = [first, {"eval_loss": 1.0}, HEALTHY, {**HEALTHY, "time/loss": 4.0}, {"train_loss": 0.0}]
    means = mean_step(logs)
    assert means == {**HEALTHY, "time/loss": 3.0}
    assert mean_step([first]) == first
    assert mean_step([{"loss": 0.1}]) == {}


def test_words_are_in_both_languages_and_parts_known() -> None:
    path = Path(advice.__file__).with_name("advice.json")
    for english, chinese in json.loads(path.read_text(encoding="utf-8")).values():
        for part in (*PARTS, *ROLLOUT_PARTS, "wait"):
            assert (f"time/{part}" in english) == (f"time/{part}" in chinese)
