"""Makes the values of a group's page: its prompt and images, and its completions by token. A
conversation is shown turn by turn, with the messages in between."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from swift_grpo_ext.checks.rows import media_content
from swift_grpo_ext.diversity.collision import shared_prefixes
from swift_grpo_ext.record.query import where_round
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.diff import Decode
from swift_grpo_ext.tools.view.runs import NotFoundError, Run, describe, parse
from swift_grpo_ext.upstream.encoding import apply_exif_orientation

SIDES = {"small": 112, "full": 2048}  # pixels of a shown image's longer side, at most


class Span(NamedTuple):
    """A part of a completion: mostly one token."""

    text: str
    is_shared: bool = False  # whether another completion has the same beginning up to its end
    logprob: float | None = None  # nats, over the span's tokens; None if unknown or infinite
    gap: float = 0.0  # the largest gap of its tokens, in nats; 0 if the record has none
    is_masked: bool = False  # whether one of its tokens is not trained on


def read_group(run: Run, round_: RoundId, group: int) -> dict[str, Any]:
    """Return the values of `group.html`; a sample is the list of its turns. Raises NotFoundError
    if the record has no such group."""
    place = f'{where_round(round_)} and "group" = {group:d}'
    rows = run.record.rows(f'select * from scored where {place} order by "index", turn')
    if not rows:
        raise NotFoundError(f"{round_} has no group {group}")
    samples = [[*turns] for _, turns in groupby(map(describe, rows), key=lambda r: r["index"])]
    for turns in samples:
        start = 0  # positions of gaps count over all turns of a conversation
        for turn in turns:
            gaps = (turn["gaps"] or {}).items()
            turn["gaps"] = {at - start: gap for at, gap in gaps}
            start += turn["num_tokens"]
    for number in range(max(map(len, samples))):
        _add_spans([turns[number] for turns in samples if number < len(turns)], run.decode)
    command = f"swift-grpo-ext replay {shlex.quote(str(run.run_dir))}"
    phase = "" if round_.phase == "train" else f" --phase {round_.phase}"
    return {
        "first": samples[0][0],
        "samples": samples,
        "has_one_prompt": len({turns[0]["fingerprint"] for turns in samples}) == 1,
        "has_tokens": run.decode is not None,
        "replay": f"{command} --round {round_.step}.{round_.number} --group {group}{phase}",
    }


def _add_spans(turns: Sequence[dict[str, Any]], decode: Decode | None) -> None:
    """Add the `spans` of its text to one turn of each sample of a group."""
    # Without a tokenizer, shared beginnings are found by characters.
    units = [[*map(ord, t["text"])] if decode is None else t["token_ids"] for t in turns]
    for turn, num_shared in zip(turns, shared_lengths(units), strict=True):
        turn["num_shared"] = num_shared
        if decode is None:
            text = turn["text"]
            turn["spans"] = [Span(text[:num_shared], is_shared=True), Span(text[num_shared:])]
        else:
            turn["spans"] = spans_of(turn, decode)


def shared_lengths(completions: Sequence[Sequence[int]]) -> list[int]:
    """Return the length in tokens of each completion's longest beginning that another one has."""
    shared = np.zeros(len(completions), int)
    for prefix in shared_prefixes([np.array(ids, int) for ids in completions]):
        shared[prefix.members] = np.maximum(shared[prefix.members], prefix.length)
    return [*map(int, shared)]


def spans_of(turn: Mapping[str, Any], decode: Decode) -> list[Span]:
    """Return a span for each token; tokens that only hold parts of a character share a span."""
    ids, logprobs, mask = turn["token_ids"], turn["logprobs"], turn["mask"]
    spans: list[Span] = []
    start = 0
    for end in range(1, len(ids) + 1):
        # Decode it after its predecessor: some tokenizers remove the leading space of a first
        # token.
        before = ids[max(start - 1, 0) : start]
        text = decode([*before, *ids[start:end]])[len(decode(before)) if before else 0 :]
        # A character has four bytes at most, so four tokens hold it.
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end - start < 4 and end < len(ids):
            continue
        logprob = sum(logprobs[start:end]) if logprobs else math.nan
        spans.append(
            Span(
                text=text,
                is_shared=end <= turn["num_shared"],
                logprob=logprob if math.isfinite(logprob) else None,
                gap=max(turn["gaps"].get(position, 0.0) for position in range(start, end)),
                is_masked=mask is not None and not all(mask[start:end]),
            )
        )
        start = end
    return spans


# --- images ---


def read_image(run: Run, address: Mapping[str, Any]) -> bytes:
    """Return the image that an address names by the identity of its sample and its `number` there,
    as PNG; raises NotFoundError."""
    # An address has no path: the page reads only images that the run's own record names.
    names = ("round", "group", "index", "turn", "number")
    round_, *place, number = (parse(address, name) for name in names)
    where = f'{where_round(round_)} and "group" = ? and "index" = ? and turn = ?'
    rows = run.record.rows(f"select media, pictures from samples where {where}", place)
    if not rows or not 0 <= number < len(rows[0]["media"]):
        raise NotFoundError(f"{round_} has no such medium")
    picture = rows[0]["pictures"][number] if rows[0]["pictures"] else None
    return image_bytes(picture or rows[0]["media"][number], address.get("size", ""))


def image_bytes(image: str | bytes, size: str) -> bytes:
    """Return an image as PNG; `size` is a key of `SIDES`.

    Args:
        image: its content, or a path of the record; a relative one begins where `view` was started.

    Raises:
        NotFoundError: it is no image on this machine, or it has more pixels than Pillow opens.
    """
    content = media_content(image)
    # A URL: nothing is fetched from elsewhere.
    if content is None:
        raise NotFoundError("the record holds its address only")
    name = content.name[:80] if isinstance(content, Path) else "a picture of the record"
    if isinstance(content, Path) and not content.is_file():  # to open a pipe could wait for ever
        raise NotFoundError(f"{name} is not on this machine")
    try:
        with Image.open(content) as opened:
            shown = apply_exif_orientation(opened).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:
        raise NotFoundError(f"{name} is no image that can be read ({e})") from e
    side = SIDES["small" if size == "small" else "full"]
    shown.thumbnail((side, side))
    # PNG can hold no script.
    buffer = io.BytesIO()
    shown.save(buffer, "PNG")
    return buffer.getvalue()
