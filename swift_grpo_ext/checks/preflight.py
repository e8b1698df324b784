"""Checks in `swift rlhf` and `swift rollout` before a model is loaded: bad input ends early.

`check_process`, `rules.check_arguments` and `check_round` run as soon as the arguments are parsed,
`check_model` and `check_datasets` once ms-swift knows the model and has loaded the data.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist
from swift.utils import is_local_master

from swift_grpo_ext.checks import rules
from swift_grpo_ext.checks.finding import Findings, error
from swift_grpo_ext.checks.rewards import COMPLETIONS, check_rewards
from swift_grpo_ext.checks.rows import check_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from swift.arguments import RLHFArguments, RolloutArguments
    from swift.template import Template

    Arguments: TypeAlias = RLHFArguments | RolloutArguments


def check_process(args: Arguments) -> Findings:
    """Refuse ports that are taken, and a server among ranks."""
    if not rules.serves(args):
        port = os.environ.get("MASTER_PORT", "")
        # torch would say so after a minute, in thirty lines.
        if is_alone() and port.isdecimal() and not port_is_free(int(port)):
            text = "is in use on this machine."
            yield error(f"MASTER_PORT {port}", text, "Leave it out: any free port is then taken.")
        return
    # ms-swift would take it for a rank, and wait for the others until a `--ddp_timeout` of months.
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if {*names} <= os.environ.keys() and os.environ["WORLD_SIZE"] != "1":
        yield error(
            "`swift rollout`",
            f"is one process, whatever its replicas, and found torchrun's {', '.join(names)}.",
            f"Start it with env {' '.join(f'-u {name}' for name in names)} swift rollout ...",
        )
    # ms-swift quietly takes the next free port, where no trainer looks for it (deploy_args.py).
    if not port_is_free(args.port):
        yield error(
            f"port {args.port}",
            "is in use on this machine.",
            "Stop what listens there, or give another, as --vllm_server_port to `swift rlhf` too.",
        )


def is_alone() -> bool:
    """Return whether a training is one process that will listen at MASTER_PORT itself, in place of
    torchrun or of a script that has made the group."""
    is_one = os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_one and not dist.is_initialized()


def port_is_free(port: int) -> bool:
    """Return whether a process may listen there, also beside connections that have ended."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def round_of(args: RLHFArguments | SimpleNamespace, num_ranks: int) -> SimpleNamespace:
    """Return a training's arguments with the sizes of a round, as ms-swift works them out for so
    many processes; raise its `ValueError` where groups do not fill a round."""
    from swift.rlhf_trainers.args_mixin import RolloutTrainerArgumentsMixin

    sizes = SimpleNamespace(**{**vars(args), "world_size": num_ranks})
    if sizes.rlhf_type == "gkd":
        sizes.num_generations = 1
    # As ms-swift fills them in before that (rlhf_args.py, `_set_default`; sft_args.py).
    sizes.gradient_accumulation_steps = sizes.gradient_accumulation_steps or 1
    sizes.eval_strategy = sizes.eval_strategy or sizes.save_strategy
    if not (sizes.val_dataset or sizes.split_dataset_ratio or sizes.eval_dataset):
        sizes.eval_strategy = "no"
    RolloutTrainerArgumentsMixin._init_generation_batch_params(sizes)
    return sizes


def check_round(args: RLHFArguments | SimpleNamespace, num_ranks: int) -> Findings:
    """Refuse a round that groups do not fill, which ms-swift does once it has loaded the data."""
    parallel = args.vllm_tensor_parallel_size
    if args.vllm_mode == "colocate" and num_ranks % parallel:
        yield error(
            f"vllm_tensor_parallel_size {parallel}",
            f"does not divide the {num_ranks} training ranks, over which an engine is spread.",
            "Change it, or the number of ranks (NPROC_PER_NODE x NNODES).",
        )
    try:
        round_of(args, num_ranks)
    except ValueError as e:
        yield error(
            f"num_generations {args.num_generations}",
            str(e),
            f"A round is --per_device_train_batch_size {args.per_device_train_batch_size} x "
            f"{num_ranks} ranks x --steps_per_generation, by default --gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps or 1}.",
        )


def check_model(args: Arguments) -> Findings:
    """Refuse what does not go with this model, and adapters that servers would refuse."""
    yield from rules.rules_of_model(args)
    # Known on the first rank alone; the launcher ends the others with it.
    if client := getattr(args, "vllm_client", None):
        client.get_engine_type()
        yield from rules.rules_of_adapters(args, client.enable_lora)


def check_datasets(
    args: RLHFArguments, train_dataset: Dataset, eval_dataset: Dataset | None
) -> Findings:
    """Refuse data sets with rows that cannot be encoded, with too few rows for a generation batch,
    and without the columns that reward functions ask for."""
    yield from rules.rules_of_data(args, train_dataset, eval_dataset)
    # One rank of each machine looks at rows, as its disk may hold their media; the others end too.
    if not is_local_master():
        return
    yield from check_rewarded(args, train_dataset)
    template = _template(args)
    # Rewards may need what a scheduler or a gym adds to rows.
    is_led = bool(args.multi_turn_scheduler or args.use_gym_env or args.gym_env)
    for setting, dataset in (("dataset", train_dataset), ("val_dataset", eval_dataset)):
        if dataset is not None:
            yield from check_rows(
                dataset,
                setting=setting,
                expects_media=args.model_meta.is_multimodal,
                deletes_bad_rows=args.truncation_strategy == "delete",
                tells_duplicates=dataset is train_dataset,
                template=template,
            )
            if args.rlhf_type != "grpo":
                continue
            yield from check_rewards(
                args.reward_funcs or (),
                [dataset[i] for i in range(min(len(dataset), len(COMPLETIONS)))],
                args.training_args,
                setting=setting,
                knows_all_columns=not is_led,
                # Once is enough: functions are the same for both.
                calls=dataset is train_dataset and not is_led,
            )


def check_rewarded(args: RLHFArguments, dataset: Dataset) -> Findings:
    """Refuse a training in which nothing rewards: ms-swift 4.6 takes a view for a teacher that no
    row has (grpo_trainer.py, `_has_teacher`), and trains on zeros."""
    names = ("reward_funcs", "reward_model", "teacher_model", "teacher_model_server")
    is_rewarded = any(getattr(args, name, None) for name in (*names, "use_gym_env", "gym_env"))
    client = getattr(args, "vllm_client", None)  # of the first rank
    may_have_gym = args.vllm_mode == "server" and (client is None or client.use_gym_env)
    has_views = "teacher_prompt" in next(iter(dataset), {})
    if args.rlhf_type == "grpo" and not (is_rewarded or may_have_gym or has_views):
        yield error("reward_funcs", "is missing: name at least one reward function.")


def _template(args: RLHFArguments) -> Template | None:
    """Return the template of the training, before there is a model; None where the model is not on
    this machine, or takes no media."""
    if not args.model_meta.is_multimodal or not Path(args.model_dir or "").is_dir():
        return None
    from swift.model import get_processor

    # Not by `args.get_model_processor`: Unsloth's loads the model.
    processor = get_processor(
        args.model_dir, model_type=args.model_type, new_special_tokens=args.new_special_tokens
    )
    template: Template = args.get_template(processor)
    template.set_mode("train")
    return template
