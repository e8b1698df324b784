"""What a run does, in one block at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift_grpo_ext.flags import chunk_size, show
from swift_grpo_ext.version import __version__


def banner(args: Any, *, num_dropouts: int) -> str:
    """The settings of the plugin that hold in this run, one a line.

    Args:
        args: of the training.
        num_dropouts: places of the model in which dropout was switched off.
    """
    lines = {
        "seeds": _seeds(args),
        "rollouts": _rollouts(args),
        "stops": _stops(args),
        "dropout": _dropout(num_dropouts),
        "logits": _logits(args),
        "sample log": str(Path(args.output_dir) / "samples"),
        "monitor": _monitor(args),
    }
    width = max(map(len, lines))
    rows = [f"  {name:{width}}  {text}" for name, text in lines.items()]
    return "\n".join([f"swift-grpo-ext {__version__}", *rows])


def _seeds(args: Any) -> str:
    if not args.use_vllm:
        return f"one generator per rank, which --seed {args.seed} sets (--use_vllm false)"
    if args.rollout_seed_mode == "engine":
        return "ms-swift's own (--rollout_seed_mode engine)"
    return f"one per sample, from --seed {args.seed} and the sample's round, group and index"


def _rollouts(args: Any) -> str:
    if not args.use_vllm:
        return "transformers (--use_vllm false): --rollout_group_requests has no effect"
    if args.rollout_group_requests:
        requests = f"one request per group of {args.num_generations}"
    else:
        requests = "one request per sample (--rollout_group_requests false)"
    return f"vLLM, {args.vllm_mode}: {requests}"


def _stops(args: Any) -> str:
    stops = [repr(word) for word in args.stop_words] + [f"id {i}" for i in args.stop_token_ids]
    if not stops:
        return "the template's end of turn"
    where = "in the text" if args.include_stop_str_in_output else "cut from the text"
    return f"the template's end of turn, {', '.join(stops)} ({where})"


def _dropout(num_dropouts: int) -> str:
    if not num_dropouts:
        return "none in the model"
    return (
        f"switched off in {num_dropouts} places (--lora_dropout is ignored), since importance "
        "ratios would differ from 1 at equal weights"
    )


def _logits(args: Any) -> str:
    size = chunk_size(args.logps_chunk_size)
    if args.logits_shim == "off" and size == 0:
        return "ms-swift's own (--logits_shim off)"
    chunks = f", {size} at a time" if size else ", as many at a time as fit" * (size is None)
    once = ", the prompt of a group read once" * args.logps_shared_prompt
    return f"of completion positions (--logits_shim {args.logits_shim}){chunks}{once}"


def _monitor(args: Any) -> str:
    if "diversity" not in args.callbacks:
        return "off (--callbacks diversity switches it on)"
    alarms = f"p < {show(args.diversity_alarm_p)} or collapsed rounds in a row"
    return f"on; an alarm at {alarms} (--diversity_action {args.diversity_action})"
