"""Defines all our flags: meaning, type and default.

The parsers, `swift-grpo-ext flags` and the documentation's table are made from this dataclass;
`checks/rules.py` has the ranges of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(kw_only=True)
class ExtFlags:
    """All our flags, as a base class that extends ms-swift's arguments classes."""

    rollout_seed_mode: Literal["sample", "engine"] = "sample"
    """`sample`: every sample has a seed of its own, made from `--seed` and its place in the run,
    and a group is one request. `engine`: ms-swift's own seeds and requests. `swift rollout` reads
    it for clients without the plugin: `sample` gives each of their requests a seed."""

    rollout_mismatch: Literal["stop", "warn"] = "stop"
    """Decides what happens if rollout and training disagree: training sees another prompt than the
    rollout saw, or an engine does not sample with the trainer's weights. `warn` goes on, for
    templates that ms-swift writes differently for vLLM. `swift rollout` reads it for clients
    without the plugin: after a weight update that has left garbage, `stop` generates nothing."""

    rollout_timeout: float = 1800.0
    """Seconds that a replica may take for an answer (a round's completions, a weight update) before
    it counts as lost. A server waits 2.5 times as long, and the training 3 times. `swift rollout`
    reads it too. The smaller of both sides' values applies."""

    tool_timeout: float = 1800.0
    """Seconds that a multi-turn scheduler (its tools, its environment) may take between two turns
    of a conversation. A longer time ends the run with an error that names the scheduler. These
    seconds do not count in `--rollout_timeout`. `swift rollout` reads it for its own scheduler."""

    sample_log: Literal["all", "tokens", "none"] = "all"
    """What the sample log keeps. `tokens` leaves out log-probabilities. `none` writes neither
    samples nor scores. `swift rollout` records its samples if it is given this flag; its default is
    `none`."""

    sample_log_gb: float = 0.0
    """Gigabytes that samples and scores of all sessions may take together. Beyond them the oldest
    rounds are removed. 0: no bound."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside `--stop_words`."""

    include_stop_str_in_output: bool = True
    """Whether the text that reward functions see ends with the stop string, or right before it."""

    logits_shim: Literal["auto", "strict", "off"] = "auto"
    """Compute logits for completion positions only, whichever keyword the model has. If no method
    works, `auto` slices all logits, and `strict` stops. `off` is ms-swift's own behaviour."""

    logps_shared_prompt: Literal["auto", "false"] = "auto"
    """`auto`: each training pass reads a group's prompt once, images included, followed by its
    samples in one row, if that is expected to save a tenth of the pass. Results differ by rounding.
    Other batches are computed as in ms-swift. `false`: prompts are read once for each sample."""

    router_replay_mode: Literal["disabled", "R3"] = "disabled"
    """`R3`: training uses the experts that the rollout chose for each token. Servers need
    `--vllm_engine_kwargs '{"enable_return_routed_experts": true}'`."""

    diversity_action: Literal["log", "warn", "stop"] = "warn"
    """What an alarm does: `log` records it, `warn` prints it too, `stop` ends the run with a
    checkpoint."""


def flag_names() -> list[str]:
    return [flag.name for flag in fields(ExtFlags)]
