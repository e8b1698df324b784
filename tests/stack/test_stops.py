"""Completions end where they must, and text is made only where a stop string needs it, on sync and
async engines and on servers (T1, T2, T3, T4, T6)."""

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


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    tokenizer.add_special_tokens({"additional_special_tokens": [NEW_TOKEN]})
    return tokenizer


@pytest.fixture(scope="module")
def speller(assets: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that spells known tokens with the real Qwen tokenizer."""
    folder = tmp_path_factory.mktemp("speller") / "model"
    return write_speller(assets / "tiny_vlm", folder, sequences(tokenizer))


@pytest.fixture(scope="module", params=["sync", "async"])
def answers(request: pytest.FixtureRequest, speller: Path) -> Any:
    """The answers of an engine."""
    output = speller.parent / f"{request.param}.json"
    program = [sys.executable, "-m", "tests.rig.stop_engines"]
    command = [*program, str(speller), request.param, str(output)]
    with started(command, output.with_suffix(".log")) as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("include", [True, False])
def test_a_completion_ends_where_it_must(
    case: Case, include: bool, answers: dict[str, Any], tokenizer: Any
) -> None:
    spelled = case.token_ids(tokenizer)
    token_ids = [*spelled[1:], END][: case.num_tokens]
    expected = {
        "text": case.text if include else case.bare,
        "token_ids": token_ids,
        "finish_reason": "length" if case.reason is None else "stop",
        "stop_reason": case.reason,
        # Neighbours differ by 0.3 nats and more; float32 adds up 151,935 small numbers.
        "logprobs": pytest.approx(
            expected_logprobs(sequences(tokenizer), [spelled[0], *token_ids]), abs=0.01
        ),
    }
    # Two samples of the colocated engine, and two of the server.
    assert answers[f"{case.name}/{include}"]["completions"] == [expected] * 4


def test_vllm_makes_text_only_where_a_stop_string_is_looked_for_in_it(
    answers: dict[str, Any],
) -> None:
    """Stop tokens, stop strings that are special tokens, and the template's own need no text."""
    for case in CASES:
        needs_text = not all(word in ("<|box_start|>", NEW_TOKEN) for word in case.words)
        for include in (True, False):
            assert answers[f"{case.name}/{include}"]["detokenized"] == [needs_text]
