"""Data sets that a training cannot use as it is asked to, and settings that a model does not allow,
are named once they are known (M1, R6)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.checks import preflight
from swift_grpo_ext.checks.rules import rules_of_data, rules_of_model
from tests.rig.checks import arguments, assert_says

STEPS, EPOCH = {"eval_strategy": "steps"}, {"eval_strategy": "epoch"}
ONE = {"num_generations_eval": 1}
FILE = {"val_dataset": ["v.jsonl"]}


def test_rows_that_fill_no_batch() -> None:
    """A batch has 8 prompts, and 4 in an evaluation."""
    for num_rows, num_eval, training, changes, expected in (
        (16, 8, STEPS, {}, None),
        (7, None, {}, {}, "error: --dataset rows.jsonl: 7 rows are fewer than the 8"),
        (16, 5, STEPS, {}, "warning: --split_dataset_ratio: 1 of 5 rows are left out of each eval"),
        (16, 5, STEPS, FILE, "warning: --val_dataset: 1 of 5 rows are left out"),
        (16, 6, STEPS, ONE, "error: "),
        (16, 8, STEPS, ONE, None),
        (16, 3, EPOCH, {}, "error: --split_dataset_ratio: 3 rows make no batch"),
        (16, 5, {}, {}, None),
        (16, 5, {}, FILE, "warning: --val_dataset v.jsonl: is never evaluated"),
    ):
        sizes = {"per_device_eval_batch_size": 8, "eval_strategy": "no"}
        args = arguments({**sizes, **training}, **{"num_generations": 2, **changes})
        rows = None if num_eval is None else range(num_eval)
        assert_says(rules_of_data(args, range(num_rows), rows), expected)


def test_checkpoints_in_the_middle_of_a_round() -> None:
    """The gradients of two batches make an update. Such a checkpoint breaks R9."""
    for training, updates in (
        ({}, 0),
        ({"num_iterations": 2}, 2),
        ({"num_iterations": 2, "save_steps": 4}, 0),
        ({"num_iterations": 2, "save_strategy": "epoch"}, 0),
        ({"num_iterations": 2, "save_steps": 0.5}, 0),
        ({"steps_per_generation": 6}, 3),
    ):
        settings = {"steps_per_generation": 2, "save_steps": 1, **training}
        args = arguments(settings, full_determinism=True)
        expected = (
            f"warning: --full_determinism true: ...one rollout serves {updates} updates, and "
            f"--save_steps 1 saves between them...a multiple of {updates}."
        )
        assert_says(rules_of_data(args, range(9), None), expected if updates else None)
        args.full_determinism = False
        assert_says(rules_of_data(args, range(9), None), None)


QUESTION = [{"role": "user", "content": "Which digit?"}]
GOOD = [{"messages": QUESTION, "images": ["http://x"]}, {"messages": [], "images": []}]
BAD = [*GOOD, {"messages": QUESTION, "images": ["/none.png"]}]
TEXT: list[dict[str, Any]] = [{"messages": QUESTION}, {"messages": [], "videos": []}]
ANSWERED = {**GOOD[0], "messages": [*QUESTION, {"role": "assistant", "content": "7"}]}
UNREWARDED: dict[str, Any] = {"reward_funcs": []}


def test_data_sets() -> None:
    cases: list[tuple[Any, ...]] = [
        (GOOD, GOOD, {}, None),
        (BAD, GOOD, {}, "error: --dataset: the row"),
        (GOOD, BAD, {}, "error: --val_dataset: the row"),
        (BAD, None, {"truncation_strategy": "delete"}, "warning: --dataset: 1 of 3 rows cannot be"),
        (TEXT, None, {}, "warning: --dataset: no row holds `images`"),
        ([*TEXT, {"audios": ["http://x"]}], None, {}, None),  # one row is enough
        (TEXT, None, {"model_meta": SimpleNamespace(is_multimodal=False)}, None),
        ([GOOD[0], ANSWERED], None, {}, "warning: --dataset: 1 of 2 rows repeat an"),
        (GOOD, None, UNREWARDED, "error: --reward_funcs: is missing"),
        (GOOD, None, {**UNREWARDED, "gym_env": "maze"}, None),
        (GOOD, None, {**UNREWARDED, "teacher_model": "org/teacher"}, None),
        (GOOD, None, {**UNREWARDED, "vllm_mode": "server"}, None),  # with a gym, perhaps
        ([{**GOOD[0], "teacher_prompt": "?"}, GOOD[1]], None, UNREWARDED, None),
    ]
    for rows, eval_rows, changes, expected in cases:
        assert_says(preflight.check_datasets(arguments(**changes), rows, eval_rows), expected)


def test_one_rank_of_a_machine_looks_at_rows(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders in a text would end the run in the first training forward."""
    args = arguments(model_dir=str(assets / "tiny_vlm"))
    typed = {"role": "user", "content": "<image><|vision_start|><|image_pad|><|vision_end|>Which?"}
    rows: Any = [*GOOD, {"messages": [typed], "images": ["http://x"]}]
    refused = "error: --dataset: the row that asks '<image><|vision_start|>...holds '<|image_pad|>'"
    for rank, expected in (("0", refused), ("1", None)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert_says(preflight.check_datasets(args, rows, None), expected)


CONFIG = {"method": "ngram", "num_speculative_tokens": 2}
SPECULATES = {"vllm_engine_kwargs": {"speculative_config": CONFIG}}
REFUSED = "error: --vllm_speculative_config {'method': 'ngram'"
REPLAY = {"router_replay_mode": "R3"}
NO_EXPERTS = "error: --router_replay_mode R3: expected a mixture of experts...; qwen3_vl has no"


def test_models() -> None:
    """A speculation cannot leave placeholders out: vLLM would refuse the first request."""
    cases: list[tuple[Any, ...]] = [
        ({"port": 8000, "vllm_speculative_config": CONFIG}, True, False, REFUSED),
        ({"port": 8000, "vllm_speculative_config": CONFIG}, False, False, None),
        ({"port": 8000}, True, False, None),
        (SPECULATES, True, False, REFUSED),
        (SPECULATES, False, False, None),
        ({"vllm_speculative_config": CONFIG}, True, False, None),  # a training does not read it
        (REPLAY, True, True, None),
        (REPLAY, True, False, NO_EXPERTS),
    ]
    for changes, is_multimodal, has_experts, expected in cases:
        args = arguments(**changes)
        args.model_meta = SimpleNamespace(is_multimodal=is_multimodal, model_type="qwen3_vl")
        args.model_info = SimpleNamespace(is_moe_model=has_experts)
        assert_says(rules_of_model(args), expected)


def test_new_tokens_need_free_rows_of_the_model_on_disk(assets: Path) -> None:
    """The tiny model has 151,936 rows, and its tokenizer 151,665 tokens."""
    new = [f"<|new-{i}|>" for i in range(272)]
    refused = (
        "error: --new_special_tokens <|new-0|> ...: 272 new tokens do not fit ..."
        "(151936 rows, 151665 taken, 271 free)...Save a model that has them"
    )
    for tokens, changes, expected in (
        ([*new[1:], "<|endoftext|>"], {}, None),
        (new, {"use_vllm": False}, None),
        ([], {"model_dir": "nothing is read"}, None),
        (new, {}, refused),
        (new, {"port": 0}, refused),
    ):
        model = {"model_dir": str(assets / "tiny_vlm"), "new_special_tokens": tokens}
        assert_says(rules_of_model(arguments(**{**model, **changes})), expected)
