"""ms-swift's GRPO options with the plugin, several in each training (R1).

Ranks that share an engine have the tokens of one rank's engine (S2, M4).
A colocated rank trains a few steps. Its first round has the tokens of the plain run, losses are
finite, gradients flow, and rollout and training see the same weights and prompts in each round.
"""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.distillation import teacher_server
from tests.rig.policy import SAME
from tests.rig.processes import free_port, rollout_server
from tests.rig.rounds import (
    LORA,
    Samples,
    assert_same,
    logged_steps,
    read_lines,
    server_argv,
    train,
    write_lines,
)

LEARN = ("--learning_rate", "1e-3")

CASES = {
    "bnpo": "--loss_type bnpo --delta 1.5 --epsilon 0.1 --epsilon_high 0.28 --overlong_filter true "
    "--scale_rewards batch --num_iterations 2",
    "dr_grpo": "--loss_type dr_grpo --scale_rewards none --importance_sampling_level sequence "
    "--log_entropy true --top_entropy_quantile 0.5 --log_completions true",
    "dapo": "--loss_type dapo --reward_funcs position soft_overlong --reward_weights 1.0 0.5 "
    "--soft_max_length 12 --soft_cache_length 4 --dynamic_sample true --max_resample_times 1",
    "sapo": "--loss_type sapo --tau_pos 1.5 --tau_neg 2.0 "
    "--importance_sampling_level sequence_token --rollout_importance_sampling_mode token_truncate "
    "--rollout_importance_sampling_threshold 1.5",
    "cispo": "--loss_type cispo --epsilon_high 4.0 --vllm_tensor_parallel_size 2 "
    "--rollout_importance_sampling_mode sequence_mask --off_policy_sequence_mask_delta 2.0",
    "real": "--loss_type real --real_tau 0.7 --rollout_importance_sampling_mode token_mask",
    "fipo": "--loss_type fipo --fipo_decay_rate 16 --fipo_clip_range 0.3 "
    "--fipo_clip_high_only false --fipo_safety_threshold 3.0 --log_rollout_offpolicy_metrics true "
    "--rollout_importance_sampling_mode sequence_truncate",
    "rloo": "--advantage_estimator rloo --kl_in_reward true --beta 0.1 --sync_ref_model true "
    "--ref_model_sync_steps 1 --ref_model_mixup_alpha 0.5",
    "reinforce_plus_plus": "--advantage_estimator reinforce_plus_plus --kl_in_reward false "
    "{lora} --use_rslora true --lora_rank 4 --lora_alpha 8 --lora_bias all --beta 0.1 "
    "--offload_model true --offload_optimizer true --move_model_batches 2",
    "gdpo": "--reward_funcs position repetition --reward_weights 1.0 0.5 --scale_rewards gdpo "
    "--repetition_n_grams 2 --repetition_max_penalty -0.5 --freeze_vit true --freeze_aligner true "
    "--freeze_parameters_ratio 0.5 --trainable_parameters model.language_model.norm --max_epochs 1",
    "generation batch": "--per_device_train_batch_size 6 --generation_batch_size 12 "
    "--vllm_enable_prefix_caching false --dataloader_num_workers 2 "
    "--dataloader_persistent_workers true --vllm_max_num_seqs 8",
    "DoRA": "{lora} --use_dora true --modules_to_save merger --gradient_checkpointing true "
    "--vit_gradient_checkpointing true",
    "compiled": "--torch_compile true --freeze_vit true",
    "rlsd": "--dataset {taught} --advantage_reweight rlsd --rlsd_lambda 0.5 "
    "--rlsd_negative_only true --rlsd_reweight_clip_range 0.3 --rlsd_lambda_warmup_steps 1 "
    '--rlsd_lambda_decay_steps 10 --vllm_limit_mm_per_prompt {"image":2}',
    "sdar": "--dataset {taught} --sdar_loss_coef 0.1 --sdar_gate_beta 4.0 --teacher_model {model} "
    "--teacher_model_type qwen2_5_vl --teacher_model_revision master --teacher_adapters {adapter}",
    "chord": "--chord_sft_dataset {experts} --chord_sft_per_device_train_batch_size 2 "
    "--chord_mu_warmup_steps 1 --chord_mu_decay_steps 4 --chord_mu_peak 0.5 "
    "--chord_mu_valley 0.05 --chord_enable_phi_function true "
    "--ref_model {model} --ref_model_type qwen2_5_vl --ref_model_revision master --beta 0.1",
    "reward model": "--reward_funcs position cosine --reward_weights 1.0 0.5 0.5 "
    "--cosine_min_len_value_wrong -0.4 --cosine_max_len_value_wrong -0.1 --cosine_max_len 16 "
    "--cosine_min_len_value_correct 0.9 --cosine_max_len_value_correct 0.6 "
    "--reward_model {judge} --reward_model_type qwen2_5_vl --reward_model_revision master "
    "--reward_template qwen2_5_vl --reward_model_plugin default --reward_adapters {adapter}",
}
"""Options that change no prompt of the first round and no token."""

OTHERS = {
    "distribution": "--top_p 0.95 --top_k 500 --min_p 0.001 --repetition_penalty 1.05 "
    "--structured_outputs_regex [0-9]+",
    "bfloat16": "--torch_dtype bfloat16 --bf16 true",
    "adapters": "{lora} --adapters {adapter} --ref_adapters {adapter} --beta 0.1 "
    "--multi_turn_scheduler ask_again --max_turns 2 --completion_length_limit_scope total",
    "evaluation": "--val_dataset {rows} --eval_on_start true --eval_strategy steps --eval_steps 1 "
    "--num_generations_eval 2 --per_device_eval_batch_size 6 --vllm_mm_processor_cache_gb 0 "
    "--vllm_disable_cascade_attn true --vllm_gpu_memory_utilization 0.5 "
    "--dataset_shuffle false --train_dataloader_shuffle false --data_seed 7 "
    "--report_to tensorboard --save_only_model true --save_strategy steps --save_steps 1 "
    "--optimizer multimodal --vit_lr 1e-4 --aligner_lr 1e-3 --weight_decay 0.01 "
    "--system Look! --response_prefix It --agent_template hermes --norm_bbox none "
    "--max_pixels 50176 --add_non_thinking_prefix false",
    "teacher": "--teacher_model {model} --teacher_model_type qwen2_5_vl --teacher_kl_coef 0.5 "
    "--offload_teacher_model true",
}
"""Options that change prompts, their order, or the distribution that vLLM samples from."""

if torch.cpu._is_avx512_supported():  # vLLM's cache of fp8 needs it
    OTHERS["cache of fp8"] = (
        '--vllm_engine_kwargs {"kv_cache_memory_bytes":134217728,"kv_cache_dtype":"fp8"}'
    )

TWO_RANKS = ("cispo", "bfloat16")
TWO_STEPS = ("bnpo", "generation batch")
"""These take two steps in each round."""

GAPS = {"distribution": math.inf, "bfloat16": 0.3, "cache of fp8": 2.0}
"""Bounds on any token's difference of log-probabilities, in nats, between rollout and training. A
step moves the policy much further. Infinite: rollouts do not come from the distribution that
training computes."""

BEGINS = {"rlsd": "rlsd_lambda", "chord": "kl", "adapters": "kl", "teacher": "teacher_kl"}
"""A metric that is 0 in the first step and larger in the second: before the first update the policy
equals its reference or teacher."""


Places = dict[str, Path]


@pytest.fixture(scope="module")
def places(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The paths for the words in braces, by word."""
    folder, model = tmp_path_factory.mktemp("places"), assets / "tiny_vlm"
    taught, tagged, experts = [], [], []
    for number, row in enumerate(read_lines(rows)):
        digit, images = row["solution"], row["images"]
        prompt = f"<image>Which digit is this? It is a {digit}." if number % 3 else None
        shown = [*images, *images] if number % 4 == 1 else None
        taught.append({**row, "teacher_prompt": prompt, "teacher_images": shown})
        tagged.append({**row, "kind": ("even", "odd")[int(digit) % 2]})
        answer = {"role": "assistant", "content": f"<answer>{digit}</answer>"}
        experts.append({**row, "messages": [*row["messages"], answer]})
    # A LoRA that changes the language model a little.
    torch.manual_seed(0)
    kinds = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    lora = LoraConfig(r=4, **kinds, init_lora_weights=False)
    adapted = get_peft_model(AutoModelForImageTextToText.from_pretrained(model), lora)
    adapted.save_pretrained(folder / "adapter")
    # The model as a reward model: its head gives one number.
    judge = folder / "judge"
    shutil.copytree(model, judge, copy_function=os.symlink)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    (judge / "config.json").unlink()
    (judge / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = {"taught": taught, "tagged": tagged, "experts": experts}
    paths = {name: write_lines(folder / f"{name}.jsonl", lines) for name, lines in made.items()}
    return {**paths, "rows": rows, "model": model, "adapter": folder / "adapter", "judge": judge}


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_options(
    name: str, assets: Path, places: Places, reference: Samples, tmp_path: Path
) -> None:
    # `{name}` stands for a path; other braces are JSON.
    text = (CASES | OTHERS)[name].replace("{lora}", " ".join(LORA))
    named = {f"{{{name}}}": str(path) for name, path in places.items()}
    argv = (*LEARN, *(named.get(word, word) for word in text.split()))
    ranks, steps = 1 + (name in TWO_RANKS), 2 + 2 * (name in TWO_STEPS)
    samples = train(assets, places["rows"], tmp_path, *argv, ranks=ranks, steps=steps)
    trained = {n: i for n in samples if (i := SampleId.parse(n)).phase == "train"}
    assert {(i.step, i.number) for i in trained.values()} == {(0, 0), (steps // 2, 0)}
    if name in CASES:
        first = {n: samples[n] for n, sample_id in trained.items() if sample_id.step == 0}
        assert_same(first, reference, range(1))
    assert_trains(tmp_path / "run", steps, GAPS.get(name, SAME), BEGINS.get(name))


def assert_trains(
    run: Path, num_steps: int, limit: float = SAME, metric: str | None = None
) -> None:
    steps = logged_steps(run)
    assert len(steps) == num_steps
    for step in steps:
        assert math.isfinite(step["loss"])
        assert 0 < step["grad_norm"] < math.inf
    gaps = [step["rollout_gap/max"] for step in steps if "rollout_gap/max" in step]
    assert limit == math.inf or 0 < max(gaps) < limit
    if metric:
        assert abs(steps[0][metric]) < 1e-6 < 1e-5 < steps[1][metric]


def test_all_completions_are_cut(assets: Path, rows: Path, tmp_path: Path) -> None:
    """A training goes on although it has nothing to learn from."""
    argv = ("--overlong_filter", "true", "--max_completion_length", "1")
    train(assets, rows, tmp_path, *argv, *LEARN, *LORA, steps=2)
    steps = logged_steps(tmp_path / "run")
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0, 0)] * 2


def test_servers_of_rollouts_and_of_a_teacher(assets: Path, places: Places, tmp_path: Path) -> None:
    """The teacher has the policy's first weights: its log-probabilities equal the policy's until
    the first update. ms-swift assigns several teachers by tags of rows; both addresses here are
    this server's."""
    with (
        rollout_server(*server_argv(assets), log=tmp_path / "server.log") as port,
        teacher_server(assets, tmp_path / "teacher.log") as teacher_port,
    ):
        teacher = f"http://127.0.0.1:{teacher_port}"
        teachers = [{"url": teacher, "tags": ["even"]}, {"url": teacher, "tags": ["odd"]}]
        argv = (
            *(*LEARN, "--temperature", "1.0", "--log_completions", "true"),
            *("--vllm_mode", "server", "--vllm_server_base_url", f"http://127.0.0.1:{port}"),
            *("--vllm_server_timeout", "60", "--vllm_server_group_port", str(free_port())),
            *("--vllm_server_pass_dataset", "true", "--enable_flattened_weight_sync", "false"),
            *("--teacher_model_server", json.dumps(teachers), "--teacher_tag_key", "kind"),
            *("--teacher_kl_coef", "0.5"),
        )
        train(assets, places["tagged"], tmp_path / "a", *argv, steps=2)
    assert_trains(tmp_path / "a/run", 2, metric="teacher_kl")
