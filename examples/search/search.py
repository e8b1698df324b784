"""A search tool for conversations with several turns.

`swift rlhf` and `swift rollout` both load this file (examples/presets/search_2x6). The environment
variable SEARCH_CORPUS names a file of JSON lines with `title` and `text`. Passages are ranked with
BM25 (Robertson and Zaragoza 2009). To use a search service, replace `Searcher`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

QUERY = re.compile(r"<search>(.*?)</search>\s*$", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUM_PASSAGES = 3
K1, B = 1.5, 0.75


class Searcher:
    """Ranks the passages of a corpus by BM25."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = passages
        self._counts = [Counter(words(passage)) for passage in passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / max(len(passages), 1)
        self._document_frequencies = Counter(word for counts in self._counts for word in counts)

    def find(self, query: str, most: int = NUM_PASSAGES) -> list[str]:
        """Return at most `most` passages that contain a word of the query, the best first."""
        query_words = set(words(query))
        scores = {i: self._score(query_words, i) for i in range(len(self._passages))}
        best = sorted((i for i in scores if scores[i] > 0), key=lambda i: (-scores[i], i))
        return [self._passages[i] for i in best[:most]]

    def _score(self, query_words: set[str], i: int) -> float:
        norm = K1 * (1 - B + B * self._lengths[i] / self._mean_length)
        counts = self._counts[i]
        return sum(
            self._idf(word) * counts[word] * (K1 + 1) / (counts[word] + norm)
            for word in query_words & counts.keys()
        )

    def _idf(self, word: str) -> float:
        frequency = self._document_frequencies[word]
        return math.log(1 + (len(self._passages) - frequency + 0.5) / (frequency + 0.5))


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def corpus() -> Searcher:
    """Read the corpus, once in each process."""
    path = os.environ.get("SEARCH_CORPUS")
    if not path:
        raise ValueError("SEARCH_CORPUS is not set. Name a file of JSON lines with title and text.")
    rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return Searcher([f"{row['title']}: {row['text']}" for row in rows])


class SearchScheduler(MultiTurnScheduler):
    """Answers `<search>...</search>` with passages; a turn without a query is the last one."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        has_query = QUERY.search(response_choice.message.content or "") is not None
        return not has_query or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        query = QUERY.search(response_choice.message.content)
        passages = corpus().find(query[1]) if query else []
        result = "\n".join(passages) or "Nothing was found."
        infer_request.messages.append({"role": "user", "content": f"<result>{result}</result>"})
        return {"infer_request": infer_request}


class SearchAnswer(ORM):
    """Give 1 if the words of the last answer are those of the row's `solution`, else 0."""

    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        answers = [ANSWER.findall(completion) for completion in completions]
        return [
            float(bool(own) and words(own[-1]) == words(truth))
            for own, truth in zip(answers, solution, strict=True)
        ]


multi_turns["search"] = SearchScheduler
orms["search_answer"] = SearchAnswer
