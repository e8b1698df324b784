"""From what a rollout returned to rows of the sample log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

MEDIA = ("images", "videos", "audios")
LONGEST_NAME = 2048
"""Characters; what is longer is content, not a path or a URL."""


def sample_row(
    sample_id: SampleId,
    sample: Any,
    output: Any,
    *,
    seed: int | None,
    fingerprint: str,
    rank: int,
    weight_version: int,
) -> SampleRow:
    """One completion, as it was drawn.

    Args:
        sample: ms-swift's sample, or the request of a later turn, with messages and media.
        output: ms-swift's `RolloutOutput` for it. All turns of a conversation that a server led are
            one completion.
        fingerprint: of the prompt.
        rank: the training rank that owns the sample.
        weight_version: optimizer steps behind the weights that drew it.
    """
    choice = output.response.choices[0]
    token_ids = list(chain(*output.response_token_ids)) or list(choice.token_ids or ())
    logprobs = _logprobs(output, choice)
    stop_reason = output.rollout_infos.get("stop_reason")
    return SampleRow(
        sample_id=sample_id,
        seed=seed,
        rank=rank,
        replica=str(output.rollout_infos.get("replica", "")),
        weight_version=weight_version,
        finish_reason=choice.finish_reason,
        stop_reason=None if stop_reason is None else str(stop_reason),
        token_ids=token_ids,
        # A conversation's tokens include those that the environment put between the turns.
        logprobs=logprobs if logprobs and len(logprobs) == len(token_ids) else None,
        text=choice.message.content if isinstance(choice.message.content, str) else "",
        fingerprint=fingerprint,
        prompt=json.dumps(sample.messages, ensure_ascii=False, default=repr),
        media=[name for kind in MEDIA for name in map(media_name, getattr(sample, kind) or ())],
    )


def _logprobs(output: Any, choice: Any) -> list[float] | None:
    if output.rollout_logprobs:
        return list(chain(*output.rollout_logprobs))
    content: Sequence[Any] = (choice.logprobs or {}).get("content") or ()
    return [token["logprob"] for token in content] or None


def media_name(media: Any) -> str:
    """A path or URL as it is; of content or pixels, a digest; of frames, the frames' names."""
    if isinstance(media, dict):
        media = media.get("path") or media.get("bytes")
    if isinstance(media, str) and len(media) <= LONGEST_NAME:
        return media
    if isinstance(media, (list, tuple)):
        return " ".join(map(media_name, media))
    if isinstance(media, str):
        media = media.encode()
    if hasattr(media, "tobytes"):  # a PIL image, an array; its `repr` holds its address or is cut
        form = [getattr(media, name, None) for name in ("mode", "size", "shape", "dtype")]
        media = repr(form).encode() + media.tobytes()
    content = media if isinstance(media, bytes) else repr(media).encode()
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"
