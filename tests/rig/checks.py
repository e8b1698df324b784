"""Arguments for checks, and the sentences of their findings."""

from collections.abc import Iterable
from typing import Any

from swift_grpo_ext.checks.finding import Finding

GIVEN: dict[str, Any] = {
    **{"model": "org/name", "tuner_type": "full", "num_generations": 8, "temperature": 1.0},
    **{"dataset": ["rows.jsonl"], "vllm_enforce_eager": True, "model_dir": "/none"},
}


def arguments(training: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return arguments of `swift rlhf`, or of `swift rollout` if `changes` has a port. Their model
    is not on this machine. `training` has changes of ms-swift's training arguments."""
    from tests.rig.arguments import command_line_arguments, training_arguments

    if "port" in changes:
        given = {"model": "org/name", "vllm_enforce_eager": True}
        return command_line_arguments("rollout", **{**given, **changes})
    args = command_line_arguments("rlhf", **{**GIVEN, **changes})
    args.training_args = training_arguments(**{"generation_batch_size": 16, **(training or {})})
    return args


def said(findings: Iterable[Finding]) -> list[str]:
    return [f"{finding.level}: {finding.sentence}" for finding in findings]


def assert_says(findings: Iterable[Finding], expected: str | None) -> None:
    """Assert the beginning of the only finding, with `...` for any text between; None expects
    none."""
    sentences = said(findings)
    assert len(sentences) == (expected is not None), sentences
    if expected is not None:
        beginning, *parts = expected.split("...")
        assert sentences[0].startswith(beginning), sentences[0]
        assert all(part in sentences[0] for part in parts), sentences[0]
