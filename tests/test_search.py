"""The search example: passages are ranked, searches answered, answers rewarded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[1] / "examples/search/search.py"
PASSAGES = [
    "Eiffel Tower: built in Paris in 1889",
    "Paris: the capital of France, on the Seine",
    "Rhine: a river",
]


@pytest.fixture(scope="module")
def search() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("When was the tower in Paris built?", [0, 1]),
        ("capital of FRANCE", [1]),
        ("river", [2]),
        ("zebra", []),
        ("", []),
    ],
)
def test_passages_are_ranked(search: ModuleType, query: str, found: list[int]) -> None:
    searcher = search.Searcher(PASSAGES)
    results = searcher.find(query)
    assert results[: len(found)] == [PASSAGES[i] for i in found]
    assert len(results) >= len(found)
    assert bool(results) == bool(found)


def test_a_rare_word_counts_more(search: ModuleType) -> None:
    searcher = search.Searcher(["common rare", "common common common", "common other"])
    assert searcher.find("common rare", most=1) == ["common rare"]


def test_an_empty_corpus(search: ModuleType) -> None:
    assert search.Searcher([]).find("word") == []


def scheduler(search: ModuleType) -> Any:
    return search.SearchScheduler(max_turns=3)


def choice(text: str, finish_reason: str = "stop") -> SimpleNamespace:
    return SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=finish_reason)


def test_a_search_is_answered(
    search: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [dict(zip(("title", "text"), p.split(": "), strict=True)) for p in PASSAGES]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv("SEARCH_CORPUS", str(corpus))
    search.corpus.cache_clear()
    request = SimpleNamespace(messages=[{"role": "user", "content": "Which river?"}])
    turn = choice("I look it up. <search>river</search>")
    assert not scheduler(search).check_finished(request, turn, 1)
    result = scheduler(search).step(request, turn, 1)["infer_request"]
    assert result.messages[-1] == {"role": "user", "content": "<result>Rhine: a river</result>"}
    nothing = scheduler(search).step(request, choice("<search>zebra</search>"), 1)
    assert nothing["infer_request"].messages[-1]["content"] == "<result>Nothing was found.</result>"


@pytest.mark.parametrize(
    ("text", "finish_reason", "turn", "finished"),
    [
        ("<search>a</search>", "stop", 1, False),
        ("<search>a</search>\n\n", "stop", 1, False),
        ("<search>a</search>", "stop", 3, True),
        ("<search>a</search>", "length", 1, True),
        ("<search>a</search> and so <answer>b</answer>", "stop", 1, True),
        ("<answer>b</answer>", "stop", 1, True),
        ("", "stop", 1, True),
    ],
)
def test_a_conversation_ends(
    search: ModuleType, text: str, finish_reason: str, turn: int, finished: bool
) -> None:
    request = SimpleNamespace(messages=[])
    assert scheduler(search).check_finished(request, choice(text, finish_reason), turn) is finished


def test_no_corpus(search: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEARCH_CORPUS", raising=False)
    search.corpus.cache_clear()
    with pytest.raises(ValueError, match="SEARCH_CORPUS is not set: name a file"):
        search.corpus()


def test_the_last_answer_is_rewarded(search: ModuleType) -> None:
    completions = [
        "<answer>the  Rhine</answer>",
        "<answer>Seine</answer> no: <answer>The Rhine.</answer>",
        "<answer>Seine</answer>",
        "The Rhine",
    ]
    rewards = search.SearchAnswer()(completions, solution=["The Rhine"] * 4)
    assert rewards == [1.0, 1.0, 0.0, 0.0]
