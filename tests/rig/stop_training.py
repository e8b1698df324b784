"""A model whose answer to any prompt is ` find it</search>` with two line breaks in its last token,
then `More` and a new token; and the record of a training whose completions stop."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from swift_grpo_ext.record.query import read_samples
from tests.rig.rounds import BATCH, read_lines
from tests.rig.spelled import PROMPTS_END, write_speller
from tests.rig.stop_cases import SEARCH, token_ids

STEPS = 2
NEW_ID = 151665


def write_searcher(assets: Path, folder: Path) -> tuple[Path, list[int]]:
    """Return the folder of the model, and the tokens of its answer."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    answer = [*token_ids(SEARCH, tokenizer), NEW_ID]
    return write_speller(assets / "tiny_vlm", folder, [[PROMPTS_END, *answer]]), answer


def assert_ends(run: Path, token_ids: list[int], text: str, reason: str | int) -> None:
    """Assert that rewards and record have this end of each sample, which is not truncated."""
    num_samples = STEPS * BATCH
    rewarded = read_lines(run / "record/rewards.jsonl")
    assert rewarded == [[text, reason, token_ids, False]] * num_samples
    row = {"text": text, "token_ids": token_ids, "finish_reason": "stop"}
    row["stop_reason"] = str(reason)
    assert read_samples(run / "run", columns=list(row)).to_pylist() == [row] * num_samples
