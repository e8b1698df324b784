"""ms-swift's GRPO options with the plugin, several in each training (SPEC R1).

What `docs/recipes.md` calls tested by this file. A colocated rank trains a few steps. Its first
round has the tokens of the plain run, its losses are finite, gradients flow, and rollout and
training see the same weights and prompts in each round.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.sampling.groups import parse_request_id
from tests.stack.rounds import LORA, Samples, assert_same, train

pytestmark = [pytest.mark.stack, pytest.mark.extra]

LEARN = ("--learning_rate", "1e-3")


@dataclass(frozen=True)
class Case:
    """Options of one training."""

    argv: tuple[str, ...]

    steps: int = 2

    rounds: tuple[str, ...] = ("0.0", "1.0")
    """Names of the training rounds that it draws."""

    is_exact: bool = True
    """Whether rollouts come from the distribution that training sees."""

    gap: float = 1e-3
    """Nats: the largest difference of log-probabilities of rollout and training, of any token. The
    policy moves much further in a step."""


def options(text: str, **more: Any) -> Case:
    return Case(tuple(text.split()), **more)


ALIKE: dict[str, Case] = {
    "bnpo": options(
        "--loss_type bnpo --delta 1.5 --epsilon 0.1 --epsilon_high 0.28 --overlong_filter true "
        "--scale_rewards batch --num_iterations 2",
        steps=4,
        rounds=("0.0", "2.0"),
    ),
    "dr_grpo": options(
        "--loss_type dr_grpo --scale_rewards none --importance_sampling_level sequence "
        "--log_entropy true --top_entropy_quantile 0.5 --log_completions true"
    ),
    "dapo": options(
        "--loss_type dapo --reward_funcs position soft_overlong --reward_weights 1.0 0.5 "
        "--soft_max_length 12 --soft_cache_length 4 --dynamic_sample true --max_resample_times 1"
    ),
    "sapo": options(
        "--loss_type sapo --tau_pos 1.5 --tau_neg 2.0 --importance_sampling_level sequence_token "
        "--rollout_importance_sampling_mode token_truncate "
        "--rollout_importance_sampling_threshold 1.5"
    ),
    "cispo": options(
        "--loss_type cispo --epsilon_high 4.0 --rollout_importance_sampling_mode sequence_mask "
        "--off_policy_sequence_mask_delta 2.0"
    ),
    "real": options(
        "--loss_type real --real_tau 0.7 --rollout_importance_sampling_mode token_mask"
    ),
    "fipo": options(
        "--loss_type fipo --fipo_decay_rate 16 --fipo_clip_range 0.3 --fipo_clip_high_only false "
        "--fipo_safety_threshold 3.0 --log_rollout_offpolicy_metrics true "
        "--rollout_importance_sampling_mode sequence_truncate"
    ),
    "rloo": options(
        "--advantage_estimator rloo --kl_in_reward true --beta 0.1 --sync_ref_model true "
        "--ref_model_sync_steps 1 --ref_model_mixup_alpha 0.5"
    ),
    "reinforce_plus_plus": options(
        "--advantage_estimator reinforce_plus_plus --kl_in_reward false --beta 0.1 "
        f"{' '.join(LORA)} --use_rslora true --lora_rank 4 --lora_alpha 8 --lora_bias all"
    ),
    "gdpo": options(
        "--reward_funcs position repetition --reward_weights 1.0 0.5 --scale_rewards gdpo "
        "--repetition_n_grams 2 --repetition_max_penalty -0.5"
    ),
    "generation batch": options(
        "--per_device_train_batch_size 6 --generation_batch_size 12 "
        "--vllm_enable_prefix_caching false --dataloader_num_workers 2 "
        "--dataloader_persistent_workers true --vllm_max_num_seqs 8",
        steps=4,
        rounds=("0.0", "2.0"),
    ),
    "offload": options(
        f"{' '.join(LORA)} --offload_model true --offload_optimizer true --move_model_batches 2"
    ),
    "DoRA": options(
        f"{' '.join(LORA)} --use_dora true --gradient_checkpointing true "
        "--vit_gradient_checkpointing true"
    ),
    "modules_to_save": options(f"{' '.join(LORA)} --modules_to_save merger"),
    "freezing": options(
        "--freeze_vit true --freeze_aligner true --freeze_parameters_ratio 0.5 "
        "--trainable_parameters model.language_model.norm --max_epochs 1"
    ),
}
"""Options that leave the prompts and the first round's noise as they are."""


OTHER: dict[str, Case] = {
    "prompts": options(
        "--system Look! --response_prefix It --agent_template hermes --norm_bbox none "
        "--max_pixels 50176 --add_non_thinking_prefix false"
    ),
    "distribution": options(
        "--top_p 0.95 --top_k 500 --min_p 0.001 --repetition_penalty 1.05", is_exact=False
    ),
    "structure": options("--structured_outputs_regex [0-9]+", is_exact=False),
    "bfloat16": options("--torch_dtype bfloat16 --bf16 true", gap=0.3),
    "order": options(
        "--dataset_shuffle false --train_dataloader_shuffle false --data_seed 7 "
        "--report_to tensorboard --save_only_model true --save_strategy steps --save_steps 1 "
        "--optimizer multimodal --vit_lr 1e-4 --aligner_lr 1e-3 --weight_decay 0.01"
    ),
    "evaluation": options(
        "--val_dataset {rows} --eval_on_start true --eval_strategy steps --eval_steps 1 "
        "--num_generations_eval 2 --per_device_eval_batch_size 6 --vllm_mm_processor_cache_gb 0 "
        "--vllm_disable_cascade_attn true --vllm_gpu_memory_utilization 0.5",
    ),
    "teacher": options(
        "--teacher_model {model} --teacher_model_type qwen2_5_vl --teacher_kl_coef 0.5 "
        "--offload_teacher_model true"
    ),
}
"""Options that change the prompts, their order, or the distribution that is drawn from."""


@pytest.mark.parametrize("name", ALIKE)
def test_options_leave_rollouts_alone(
    name: str, assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    case = ALIKE[name]
    samples = train(assets, rows, tmp_path / "a", *LEARN, *case.argv, steps=case.steps)
    assert {round_of(sample) for sample in samples} == set(case.rounds)
    assert_same({n: s for n, s in samples.items() if round_of(n) == "0.0"}, reference, range(1))
    assert_trains(tmp_path / "a/run", case)


@pytest.mark.parametrize("name", OTHER)
def test_options_that_change_rollouts(name: str, assets: Path, rows: Path, tmp_path: Path) -> None:
    case = OTHER[name]
    places = {"rows": rows, "model": assets / "tiny_vlm"}
    argv = [word.format(**places) if "{" in word else word for word in case.argv]
    samples = train(assets, rows, tmp_path / "a", *LEARN, *argv, steps=case.steps)
    trained = {n for n in samples if parse_request_id(n).phase == "train"}
    assert {round_of(name) for name in trained} == set(case.rounds)
    assert_trains(tmp_path / "a/run", case)


def round_of(name: str) -> str:
    sample_id = parse_request_id(name)
    return f"{sample_id.step}.{sample_id.number}"


def assert_trains(run: Path, case: Case) -> None:
    lines = (run / "logging.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "loss" in step]
    assert len(steps) == case.steps
    for step in steps:
        assert math.isfinite(step["loss"])
        assert 0 < step["grad_norm"] < math.inf
        if case.is_exact and "rollout_gap/max" in step:
            assert step["rollout_gap/max"] < case.gap
    assert not case.is_exact or any("rollout_gap/max" in step for step in steps)
