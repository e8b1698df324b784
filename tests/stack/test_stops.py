"""Stops in real engines, on a model that spells known tokens with the real Qwen tokenizer.

For each case of `stop_cases`, text, ids, log-probabilities, finish reason and matched stop are
equal in vLLM's sync and async engine, and in every form of answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.rig.processes import started
from tests.rig.spelled import END, expected_logprobs, write_speller
from tests.rig.stop_cases import CASES, NEW_TOKEN, Case, sequences
from tests.rig.stop_engines import COUNT

NUM_FORMS = 3
"""Forms of an answer (`stop_engines.py`)."""


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    tokenizer.add_special_tokens({"additional_special_tokens": [NEW_TOKEN]})
    return tokenizer


@pytest.fixture(scope="module")
def speller(assets: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speller") / "model"
    return write_speller(assets / "tiny_vlm", folder, sequences(tokenizer))


@pytest.fixture(scope="module", params=["sync", "async"])
def answers(request: pytest.FixtureRequest, speller: Path) -> dict[str, Any]:
    """The answers of an engine."""
    engine = request.param
    output = speller.parent / f"{engine}.json"
    command = [sys.executable, "-m", "tests.rig.stop_engines", str(speller), engine, str(output)]
    with started(command, speller.parent / f"{engine}.log") as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    results: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("include", [True, False])
def test_a_completion_ends_where_it_must(
    case: Case, include: bool, answers: dict[str, Any], tokenizer: Any
) -> None:
    spelled = case.token_ids(tokenizer)
    token_ids = [*spelled[1:], END][: case.num_tokens]
    logprobs = expected_logprobs(sequences(tokenizer), [spelled[0], *token_ids])
    completions = [
        completion
        for form in answers[f"{case.name}/{include}"]["forms"].values()
        for completion in form
    ]
    assert len(completions) == NUM_FORMS * COUNT
    for completion in completions:
        # Neighbours differ by 0.3 nats and more; float32 adds up 151,935 small numbers.
        assert completion.pop("logprobs") == pytest.approx(logprobs, abs=0.01)
        assert completion == {
            "text": case.text if include else case.bare,
            "token_ids": token_ids,
            "finish_reason": case.finish_reason,
            "stop_reason": case.reason,
        }


def test_vllm_makes_text_only_where_a_stop_string_is_looked_for_in_it(
    answers: dict[str, Any],
) -> None:
    """T6: stop tokens, stop strings that are special tokens, and the template's own need no
    text."""
    for case in CASES:
        needs_text = not all(word in ("<|box_start|>", NEW_TOKEN) for word in case.words)
        for include in (True, False):
            assert answers[f"{case.name}/{include}"]["detokenized"] == [needs_text]
