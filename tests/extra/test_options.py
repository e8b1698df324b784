"""ms-swift's GRPO options with the plugin, several in each training (R1).

`docs/support.md` lists the options that this file tests. A colocated rank trains a few steps. Its
first round has the tokens of the plain run, losses are finite, gradients flow, and rollout and
training see the same weights and prompts in each round.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swift_grpo_ext.sampling.seeding import SampleId
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


@dataclass(frozen=True)
class Case:
    """Options of one training."""

    argv: tuple[str, ...]

    steps: int = 2

    rounds: tuple[str, ...] = ("0.0", "1.0")
    """Names of its training rounds."""

    is_exact: bool = True
    """Whether rollouts come from the distribution that training computes."""

    gap: float = SAME
    """Bound on any token's difference of log-probabilities, in nats, between rollout and training.
    A step moves the policy much further."""

    begins: tuple[str, ...] = ()
    """Metrics that are 0 in the first step and larger in the second: before the first update the
    policy equals its reference or teacher."""

    is_alike: bool = True
    """Whether prompts, their order and the first round's tokens are those of the plain run."""

    ranks: int = 1


def options(text: str, **more: Any) -> Case:
    return Case(tuple(text.split()), **more)


other = partial(options, is_alike=False)
"""Options that change prompts, their order, or the distribution that vLLM samples from."""

CASES: dict[str, Case] = {
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
    "compiled": options("--torch_compile true --freeze_vit true"),
    "modules_to_save": options(f"{' '.join(LORA)} --modules_to_save merger"),
    "freezing": options(
        "--freeze_vit true --freeze_aligner true --freeze_parameters_ratio 0.5 "
        "--trainable_parameters model.language_model.norm --max_epochs 1"
    ),
    "rlsd": options(
        "--dataset {taught} --advantage_reweight rlsd --rlsd_lambda 0.5 --rlsd_negative_only true "
        "--rlsd_reweight_clip_range 0.3 --rlsd_lambda_warmup_steps 1 --rlsd_lambda_decay_steps 10 "
        '--vllm_limit_mm_per_prompt {"image":2}',
        begins=("rlsd_lambda",),
    ),
    "sdar": options(
        "--dataset {taught} --sdar_loss_coef 0.1 --sdar_gate_beta 4.0 --teacher_model {model} "
        "--teacher_model_type qwen2_5_vl --teacher_model_revision master "
        "--teacher_adapters {adapter}"
    ),
    "chord": options(
        "--chord_sft_dataset {experts} --chord_sft_per_device_train_batch_size 2 "
        "--chord_mu_warmup_steps 1 --chord_mu_decay_steps 4 --chord_mu_peak 0.5 "
        "--chord_mu_valley 0.05 --chord_enable_phi_function true "
        "--ref_model {model} --ref_model_type qwen2_5_vl --ref_model_revision master --beta 0.1",
        begins=("kl",),
    ),
    "reward model": options(
        "--reward_funcs position cosine --reward_weights 1.0 0.5 0.5 --cosine_max_len 16 "
        "--cosine_min_len_value_wrong -0.4 --cosine_max_len_value_wrong -0.1 "
        "--cosine_min_len_value_correct 0.9 --cosine_max_len_value_correct 0.6 "
        "--reward_model {judge} --reward_model_type qwen2_5_vl --reward_model_revision master "
        "--reward_template qwen2_5_vl --reward_model_plugin default --reward_adapters {adapter}"
    ),
    "prompts": other(
        "--system Look! --response_prefix It --agent_template hermes --norm_bbox none "
        "--max_pixels 50176 --add_non_thinking_prefix false"
    ),
    "distribution": other(
        "--top_p 0.95 --top_k 500 --min_p 0.001 --repetition_penalty 1.05", is_exact=False
    ),
    "structure": other("--structured_outputs_regex [0-9]+", is_exact=False),
    "bfloat16": other("--torch_dtype bfloat16 --bf16 true", gap=0.3, ranks=2),
    "adapters": other(
        f"{' '.join(LORA)} --adapters {{adapter}} --ref_adapters {{adapter}} --beta 0.1 "
        "--multi_turn_scheduler ask_again --max_turns 2 --completion_length_limit_scope total",
        begins=("kl",),
    ),
    "order": other(
        "--dataset_shuffle false --train_dataloader_shuffle false --data_seed 7 "
        "--report_to tensorboard --save_only_model true --save_strategy steps --save_steps 1 "
        "--optimizer multimodal --vit_lr 1e-4 --aligner_lr 1e-3 --weight_decay 0.01"
    ),
    "evaluation": other(
        "--val_dataset {rows} --eval_on_start true --eval_strategy steps --eval_steps 1 "
        "--num_generations_eval 2 --per_device_eval_batch_size 6 --vllm_mm_processor_cache_gb 0 "
        "--vllm_disable_cascade_attn true --vllm_gpu_memory_utilization 0.5",
    ),
    "teacher": other(
        "--teacher_model {model} --teacher_model_type qwen2_5_vl --teacher_kl_coef 0.5 "
        "--offload_teacher_model true",
        begins=("teacher_kl",),
    ),
}


Places = dict[str, Path]


@pytest.fixture(scope="module")
def places(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The paths for the words in braces, by word."""
    folder = tmp_path_factory.mktemp("places")
    lines = read_lines(rows)
    question = "<image>Which digit is this? It is a {}."
    taught = [{**row, "teacher_prompt": question.format(row["solution"])} for row in lines]
    for number, row in enumerate(taught):
        row["teacher_prompt"] = row["teacher_prompt"] if number % 3 else None
        row["teacher_images"] = [*row["images"], *row["images"]] if number % 4 == 1 else None
    tagged = [{**row, "kind": ("even", "odd")[int(row["solution"]) % 2]} for row in lines]
    experts = [
        {**row, "messages": [*row["messages"], {"role": "assistant", "content": answer}]}
        for row in lines
        for answer in [f"<answer>{row['solution']}</answer>"]
    ]
    model = assets / "tiny_vlm"
    return {
        "rows": rows,
        "model": model,
        "taught": write_lines(folder / "taught.jsonl", taught),
        "tagged": write_lines(folder / "tagged.jsonl", tagged),
        "experts": write_lines(folder / "experts.jsonl", experts),
        "adapter": make_adapter(folder / "adapter", model),
        "judge": make_judge(folder / "judge", model),
    }


def make_adapter(folder: Path, model: Path) -> Path:
    """Save a LoRA that changes the language model a little."""
    model_config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = model_config.get("text_config", model_config)
    size, rank = text["hidden_size"], 4
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8}
    config |= {"target_modules": ["q_proj"], "base_model_name_or_path": str(model)}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(text["num_hidden_layers"]):
        name = f"base_model.model.model.language_model.layers.{layer}.self_attn.q_proj.lora"
        weights[f"{name}_A.weight"] = torch.randn(rank, size, generator=generator) * 0.1
        weights[f"{name}_B.weight"] = torch.randn(size, rank, generator=generator) * 0.1
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def make_judge(folder: Path, model: Path) -> Path:
    """Save the model as a reward model: its head gives one number."""
    shutil.copytree(model, folder, copy_function=os.symlink)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_options(
    name: str, assets: Path, places: Places, reference: Samples, tmp_path: Path
) -> None:
    case, rows = CASES[name], places["rows"]
    # `{name}` stands for a path; other braces are JSON.
    named = {f"{{{name}}}": str(path) for name, path in places.items()}
    argv = (*LEARN, *(named.get(word, word) for word in case.argv))
    samples = train(assets, rows, tmp_path, *argv, ranks=case.ranks, steps=case.steps)
    trained = {n: s for n, s in samples.items() if SampleId.parse(n).phase == "train"}
    assert {round_of(name) for name in trained} == set(case.rounds)
    if case.is_alike:
        first = {n: s for n, s in trained.items() if round_of(n) == "0.0"}
        assert_same(first, reference, range(1))
    assert_trains(tmp_path / "run", case)


SERVED = Case(("--temperature", "1.0"), begins=("teacher_kl",))


def test_servers_of_rollouts_and_of_a_teacher(assets: Path, places: Places, tmp_path: Path) -> None:
    """A plain `swift deploy` of the policy's first weights is the teacher: its log-probabilities
    equal the policy's until the first update. ms-swift assigns several teachers by tags of rows;
    both addresses here are this server's."""
    teacher_argv = [*server_argv(assets), "--infer_backend", "vllm"]
    del teacher_argv[2:4]  # without plugins
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "SWIFT_MEDIA_ALLOWED_DIRS": str(assets),
    }
    log = tmp_path / "teacher.log"
    with (
        rollout_server(*server_argv(assets), log=tmp_path / "server.log") as port,
        rollout_server(*teacher_argv, log=log, env=env, command="deploy") as teacher_port,
    ):
        teacher = f"http://127.0.0.1:{teacher_port}"
        teachers = [{"url": teacher, "tags": ["even"]}, {"url": teacher, "tags": ["odd"]}]
        train(
            assets, places["tagged"], tmp_path / "a", *LEARN, *SERVED.argv,
            *("--vllm_mode", "server", "--vllm_server_base_url", f"http://127.0.0.1:{port}"),
            *("--vllm_server_timeout", "60", "--vllm_server_group_port", str(free_port())),
            *("--vllm_server_pass_dataset", "true", "--enable_flattened_weight_sync", "false"),
            *("--teacher_model_server", json.dumps(teachers), "--teacher_tag_key", "kind"),
            *("--teacher_kl_coef", "0.5", "--log_completions", "true"),
            steps=2,
        )  # fmt: skip
    assert_trains(tmp_path / "a/run", SERVED)


def round_of(name: str) -> str:
    sample_id = SampleId.parse(name)
    return f"{sample_id.step}.{sample_id.number}"


def assert_trains(run: Path, case: Case) -> None:
    steps = logged_steps(run)
    assert len(steps) == case.steps
    for step in steps:
        assert math.isfinite(step["loss"])
        assert 0 < step["grad_norm"] < math.inf
        if case.is_exact and "rollout_gap/max" in step:
            assert step["rollout_gap/max"] < case.gap
    assert not case.is_exact or any("rollout_gap/max" in step for step in steps)
    for name in case.begins:
        assert abs(steps[0][name]) < 1e-6 < 1e-5 < steps[1][name], name
