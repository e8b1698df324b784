"""Checks in `swift rlhf` and `swift rollout` before a model is loaded: bad input ends early.

`check_server_process` and `rules.check_arguments` run once arguments are parsed, `check_model` once
ms-swift knows the model, and `check_datasets` once it has loaded the data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from swift.utils import is_local_master

from swift_grpo_ext.checks import rules
from swift_grpo_ext.checks.finding import Findings, error
from swift_grpo_ext.checks.rewards import COMPLETIONS, check_rewards
from swift_grpo_ext.checks.rows import check_rows
from swift_grpo_ext.upstream.placeholders import placeholder_texts

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.arguments import RLHFArguments

    from swift_grpo_ext.checks.rules import Arguments


def check_server_process(port: int) -> Findings:
    """Refuse a server among ranks, and a port that is taken."""
    # As a rank, ms-swift would wait for the others, for months by default (`--ddp_timeout`).
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if {*names} <= os.environ.keys() and os.environ["WORLD_SIZE"] != "1":
        yield error(
            "`swift rollout`",
            "is one process, with any number of replicas, and found torchrun's "
            f"{', '.join(names)}.",
            f"Start it with env {' '.join(f'-u {name}' for name in names)} swift rollout ...",
        )
    # ms-swift would take the next free port without a warning, and no trainer looks there
    # (deploy_args.py).
    sockets = psutil.net_connections("tcp")
    listening = (each.laddr for each in sockets if each.status == psutil.CONN_LISTEN)
    if any(address and address.port == port for address in listening):
        yield error(
            f"port {port}",
            "is in use on this machine.",
            "Stop the process that listens there, or give another port, as --vllm_server_port to "
            "`swift rlhf` too.",
        )


def check_model(args: Arguments) -> Findings:
    """Refuse settings that this model does not allow, and adapters that engines do not take."""
    yield from rules.rules_of_model(args)
    # Rank 0 of a training asks its servers. If it fails, the launcher ends the other ranks.
    if client := getattr(args, "vllm_client", None):
        client.get_engine_type()
        yield from rules.rules_of_adapters(args, client.enable_lora)
    elif rules.serves(args) or args.vllm_mode != "server":
        yield from rules.rules_of_adapters(args, args.vllm_enable_lora)


def check_datasets(
    args: RLHFArguments, train_dataset: Dataset, eval_dataset: Dataset | None
) -> Findings:
    """Refuse data sets with broken rows, with too few rows for a batch, and without the columns
    that reward functions need."""
    yield from rules.rules_of_data(args, train_dataset, eval_dataset)
    # One rank of each machine checks rows, since disks may differ. Its error ends the others.
    if not is_local_master():
        return
    yield from check_rewarded(args, train_dataset)
    placeholders = _placeholders(args)
    # A scheduler or a gym may add columns that rewards need.
    may_add_columns = bool(args.multi_turn_scheduler or args.use_gym_env or args.gym_env)
    for setting, dataset in (("dataset", train_dataset), ("val_dataset", eval_dataset)):
        if dataset is None:
            continue
        yield from check_rows(
            dataset,
            setting=setting,
            expects_media=args.model_meta.is_multimodal,
            deletes_bad_rows=args.truncation_strategy == "delete",
            placeholders=placeholders,
        )
        num_rows = 0 if may_add_columns else min(len(dataset), len(COMPLETIONS))
        yield from check_rewards(
            (args.reward_funcs or ()) if args.rlhf_type == "grpo" else (),
            [dataset[i] for i in range(num_rows)],
            args.training_args,
            setting=setting,
            calls=dataset is train_dataset,  # once: both have the same functions
        )


def check_rewarded(args: RLHFArguments, dataset: Dataset) -> Findings:
    """Refuse a training without any reward."""
    # ms-swift 4.6 then expects a teacher's view in each row (grpo_trainer.py, `_has_teacher`), and
    # trains with rewards of 0.
    names = ("reward_model", "teacher_model", "teacher_model_server", "use_gym_env", "gym_env")
    is_rewarded = any(getattr(args, name, None) for name in ("reward_funcs", *names))
    client = getattr(args, "vllm_client", None)  # of the first rank
    may_have_gym = args.vllm_mode == "server" and (client is None or client.use_gym_env)
    has_views = "teacher_prompt" in next(iter(dataset), {})
    if args.rlhf_type == "grpo" and not (is_rewarded or may_have_gym or has_views):
        yield error("reward_funcs", "is missing: name at least one reward function.")


def _placeholders(args: RLHFArguments) -> list[str]:
    """Return a model's own tokens for media; [] for a text model, and for a model on a hub."""
    if not args.model_meta.is_multimodal or not Path(args.model_dir or "").is_dir():
        return []
    from swift.model import get_processor

    # Not by `args.get_model_processor`: Unsloth's loads the model.
    processor = get_processor(
        args.model_dir, model_type=args.model_type, new_special_tokens=args.new_special_tokens
    )
    return placeholder_texts(args.get_template(processor))
