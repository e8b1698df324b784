"""The block that a run begins with says what holds, and with which flag."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.training.banner import banner
from swift_grpo_ext.version import __version__
from tests.arguments import training_arguments

DEFAULTS: dict[str, Any] = {"num_generations": 8, "output_dir": "output/x"}


def text(num_dropouts: int = 0, **changes: Any) -> str:
    return banner(training_arguments(**DEFAULTS | changes), num_dropouts=num_dropouts)


def test_a_run_with_defaults() -> None:
    assert text() == (
        f"swift-grpo-ext {__version__}\n"
        "  seeds       one per sample, from --seed 42 and the sample's round, group and index\n"
        "  rollouts    vLLM, colocate: one request per group of 8\n"
        "  stops       the template's end of turn\n"
        "  dropout     none in the model\n"
        "  logits      of completion positions (--logits_shim auto)\n"
        "  sample log  output/x/samples\n"
        "  monitor     off (--callbacks diversity switches it on)"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"rollout_seed_mode": "engine"},
            "seeds       ms-swift's own (--rollout_seed_mode engine)",
        ),
        (
            {"use_vllm": False},
            "seeds       one generator per rank, which --seed 42 sets (--use_vllm false)",
        ),
        (
            {"use_vllm": False},
            "rollouts    transformers (--use_vllm false): --rollout_group_requests has no effect",
        ),
        (
            {"vllm_mode": "server", "rollout_group_requests": False},
            "rollouts    vLLM, server: one request per sample (--rollout_group_requests false)",
        ),
        (
            {"stop_words": ["</s>", "\n"], "stop_token_ids": [7]},
            r"stops       the template's end of turn, '</s>', '\n', id 7 (in the text)",
        ),
        (
            {"stop_token_ids": [7], "include_stop_str_in_output": False},
            "stops       the template's end of turn, id 7 (cut from the text)",
        ),
        (
            {"num_dropouts": 4},
            "dropout     switched off in 4 places (--lora_dropout is ignored), since importance "
            "ratios would differ from 1 at equal weights",
        ),
        ({"logits_shim": "off"}, "logits      ms-swift's own (--logits_shim off)"),
        (
            {"logps_chunk_size": "auto"},
            "logits      of completion positions (--logits_shim auto), as many at a time as fit",
        ),
        (
            {"logits_shim": "off", "logps_chunk_size": 512},
            "logits      of completion positions (--logits_shim off), 512 at a time",
        ),
        (
            {"logps_shared_prompt": True},
            "logits      of completion positions (--logits_shim auto), the prompt of a group read "
            "once",
        ),
        (
            {"callbacks": ["diversity"]},
            "monitor     on; an alarm at p < 1e-06 or collapsed rounds in a row ("
            "--diversity_action warn)",
        ),
    ],
)
def test_what_a_setting_changes(changes: dict[str, Any], line: str) -> None:
    assert f"  {line}" in text(**changes).splitlines()
