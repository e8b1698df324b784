"""A search tool for conversations of several turns: the model asks, the tool answers, it goes on.

A plugin of its own, for `swift rlhf` and `swift rollout` alike (examples/presets/search_2x6). The
corpus is a file of JSON lines with `title` and `text`, named by the environment variable
SEARCH_CORPUS; passages are ranked with BM25 (Robertson and Zaragoza 2009). Put another `Searcher`
in its place to ask a service.
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
    """Passages of a corpus, ranked by BM25.

    Args:
        passages: the texts.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = passages
        self._counts = [Counter(words(passage)) for passage in passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / max(len(passages), 1)
        self._holders = Counter(word for counts in self._counts for word in counts)

    def find(self, query: str, most: int = NUM_PASSAGES) -> list[str]:
        """At most so many passages that hold a word of the query, the best first."""
        asked = set(words(query))
        scores = {i: self._score(asked, i) for i in range(len(self._passages))}
        best = sorted((i for i in scores if scores[i] > 0), key=lambda i: (-scores[i], i))
        return [self._passages[i] for i in best[:most]]

    def _score(self, asked: set[str], i: int) -> float:
        norm = K1 * (1 - B + B * self._lengths[i] / self._mean_length)
        counts = self._counts[i]
        return sum(
            self._rarity(word) * counts[word] * (K1 + 1) / (counts[word] + norm)
            for word in asked & counts.keys()
        )

    def _rarity(self, word: str) -> float:
        holders = self._holders[word]
        return math.log(1 + (len(self._passages) - holders + 0.5) / (holders + 0.5))


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def corpus() -> Searcher:
    """The corpus that SEARCH_CORPUS names; read once a process."""
    path = os.environ.get("SEARCH_CORPUS")
    if not path:
        raise ValueError("SEARCH_CORPUS is not set: name a file of JSON lines with title and text.")
    rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return Searcher([f"{row['title']}: {row['text']}" for row in rows])


class SearchScheduler(MultiTurnScheduler):
    """Answers each `<search>...</search>` with passages; ends with the turn that asks nothing."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        asks = QUERY.search(response_choice.message.content or "") is not None
        return not asks or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        query = QUERY.search(response_choice.message.content)
        passages = corpus().find(query[1]) if query else []
        result = "\n".join(passages) or "Nothing was found."
        infer_request.messages.append({"role": "user", "content": f"<result>{result}</result>"})
        return {"infer_request": infer_request}


class SearchAnswer(ORM):
    """1 where the last answer is the row's `solution`, case and spaces aside, else 0."""

    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        answers = [ANSWER.findall(completion) for completion in completions]
        return [
            float(bool(found) and words(found[-1]) == words(truth))
            for found, truth in zip(answers, solution, strict=True)
        ]


multi_turns["search"] = SearchScheduler
orms["search_answer"] = SearchAnswer
