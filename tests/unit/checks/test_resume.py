"""Only whole checkpoints are resumed from, and the last of them is named."""

from __future__ import annotations

from pathlib import Path

from swift_grpo_ext.checks.rules import check_arguments
from tests.rig.arguments import command_line_arguments


def checkpoint(run: Path, step: int, state: str | None) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    if state is not None:
        (folder / "trainer_state.json").write_text(state, encoding="utf-8")
    return folder


def refused(folder: Path | None, *, only_model: bool = False) -> str:
    given = None if folder is None else str(folder)
    changes = {"resume_from_checkpoint": given, "resume_only_model": only_model}
    args = command_line_arguments("rlhf", **changes, vllm_enforce_eager=True)
    return "".join(finding.sentence for finding in check_arguments(args, ()))


def test_only_whole_checkpoints_are_resumed_from(tmp_path: Path) -> None:
    missing = checkpoint(tmp_path, 10, None)
    assert refused(missing) == (
        f"--resume_from_checkpoint {missing}: is no whole checkpoint: its trainer_state.json "
        "is missing or cut short. Start without it."
    )
    whole = checkpoint(tmp_path, 9, '{"global_step": 9}')
    cut_short = checkpoint(tmp_path, 11, '{"global_st')
    checkpoint(tmp_path, 8, '{"global_step": 8}')
    checkpoint(tmp_path, 70, "[]")
    checkpoint(tmp_path, 71, "{}")
    (tmp_path / "checkpoint-best").mkdir()
    remedy = f"Resume from {whole}, the last whole one."
    assert refused(cut_short).endswith(f"is missing or cut short. {remedy}")
    assert refused(None) == refused(whole) == refused(missing, only_model=True) == ""
