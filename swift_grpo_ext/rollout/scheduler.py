"""Which replica serves which request (SPEC G5). Pure.

Requests are spread whole, by estimated cost, the costliest first, each to the replica that would be
done with it soonest: Graham's LPT rule, with which equal replicas are done after at most 4/3 of the
best possible time (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969). A server with
several replicas counts as one that is so many times as fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CHARACTERS_PER_TOKEN = 4
BYTES_PER_IMAGE_TOKEN = 400
"""Of a compressed image, roughly: a 1024 x 1024 photograph is 300 to 600 kB and 1,369 tokens. Only
the comparison between prompts matters, and their completions weigh more."""

TOKENS_OF_UNSEEN_MEDIA = 1000
"""For an image, a video or an audio that is named by a path or a URL."""


def balance(costs: Sequence[float], capacities: Sequence[float]) -> list[list[int]]:
    """Indices of requests for each replica, in their own order.

    Args:
        costs: estimated cost of each request, any unit, positive.
        capacities: relative speed of each replica, positive (of a server: its replicas).

    Raises:
        ValueError: there is no replica.
    """
    if not capacities:
        raise ValueError("No replica is left to serve requests.")
    done_at = [0.0] * len(capacities)
    shares: list[list[int]] = [[] for _ in capacities]
    for request in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost = costs[request]
        ends = [done + cost / speed for done, speed in zip(done_at, capacities, strict=True)]
        soonest = ends.index(min(ends))
        done_at[soonest] = ends[soonest]
        shares[soonest].append(request)
    return [sorted(share) for share in shares]


def estimate_cost(request: Mapping[str, Any], count: int, max_tokens: int) -> float:
    """Tokens that a request will cost: its prompt once, and `count` completions.

    Args:
        request: the fields of ms-swift's `RolloutInferRequest`.
        count: number of samples.
        max_tokens: length limit of a completion.
    """
    words = sum(_text_length(message.get("content")) for message in request.get("messages") or ())
    media = [m for kind in ("images", "videos", "audios") for m in request.get(kind) or ()]
    prompt = words / CHARACTERS_PER_TOKEN + sum(map(_media_tokens, media))
    return prompt + count * max_tokens


def _text_length(content: Any) -> int:
    if isinstance(content, list):  # token ids, or parts of a message
        return CHARACTERS_PER_TOKEN * len(content)
    return len(content) if isinstance(content, str) else 0


def _media_tokens(media: Any) -> float:
    if isinstance(media, str) and len(media) > 4096:  # base64, not a path
        return len(media) * 3 / 4 / BYTES_PER_IMAGE_TOKEN
    return TOKENS_OF_UNSEEN_MEDIA
