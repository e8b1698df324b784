"""One group as a page shows it: its prompt and images, and its completions token by token; of a
conversation, turn by turn with what was said in between."""

from __future__ import annotations

import base64
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from swift_grpo_ext.checks.rows import media_content
from swift_grpo_ext.diversity.collision import shared_prefixes
from swift_grpo_ext.record.query import where_round
from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.tools.diff import Decode, find_decoder, read_args
from swift_grpo_ext.tools.replay.run import Drawn, why_not
from swift_grpo_ext.tools.runs import find_runs, run_name
from swift_grpo_ext.tools.view.log import Log, read_log
from swift_grpo_ext.tools.view.runs import (
    NotFoundError,
    Prompt,
    Run,
    describe,
    text_of,
)
from swift_grpo_ext.upstream.upright import apply_exif_orientation

SIDES = {"small": 112, "full": 2048}
"""Pixels of a shown image's longer side, at most."""


class Piece(NamedTuple):
    """A part of a completion: mostly one token."""

    text: str
    is_shared: bool = False
    """True in the beginning that another completion has, too."""

    logprob: float | None = None
    """The sum over the piece's tokens, in nats; None where it is unknown or infinite."""

    gap: float = 0.0
    """The largest |training - rollout| log-probability of the piece's tokens, in nats; 0 below what
    the record keeps."""

    is_masked: bool = False
    """True where one of its tokens is not trained on."""


class RunView(Run):
    """A run with what the pages of its groups need: tokenizer and images."""

    _log = Log()

    @property
    def name(self) -> str:
        return run_name(self.run_dir)

    @property
    def logdir(self) -> str:
        """Return where `--report_to tensorboard`, ms-swift's default, writes."""
        return shlex.quote(str(read_args(self.run_dir).get("logging_dir") or self.run_dir / "runs"))

    @property
    def state(self) -> str:
        """Return the state of the log; `live` where samples are there before the first log."""
        state = self.log.state
        return "live" if state == "waiting" and self.facts.rounds else state

    @property
    def log(self) -> Log:
        """Return what the run has logged; its file is read again only after a change."""
        self._log = read_log(self.run_dir, self._log)
        return self._log

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Look for what is new on disk; return True if anything was. A folder that was served
        before its training began may get the run in a folder of its own (`--add_version`)."""
        if not self.facts.rounds and not self.log.steps:
            with suppress(OSError):
                [folder] = find_runs(self.run_dir)[:1]
                if folder != self.run_dir:
                    self.follow(folder)
        return super().refresh(seconds)

    @cached_property
    def decode(self) -> Decode | None:
        """The tokenizer of a checkpoint, or of the model; None where neither is on this machine."""
        return find_decoder(self.run_dir)

    def group(
        self, name: RoundId, group: int, earlier: Sequence[tuple[RoundId, int, int]] = ()
    ) -> dict[str, Any]:
        """Return a group as `group.html` shows it.

        Args:
            earlier: round, group and index of samples of other groups that stand beside it, as far
                as the record still has them.

        Raises:
            NotFoundError: the record has no such group.
        """
        turns = self._turns(name, group)
        prompt = turns[0]["asked"]
        firsts = {turn["fingerprint"] for turn in turns if not turn["turn"]}
        drawn = [
            Drawn(SampleId(**{c: t[c] for c in SAMPLE_ID_COLUMNS}), t["seed"], t["weight_version"])
            for t in turns
        ]
        for other, number, index in earlier:
            with suppress(NotFoundError):
                beside = self._turns(other, number)
                turns += [{**t, "is_earlier": True} for t in beside if t["index"] == index]
        for position in {turn["turn"] for turn in turns}:
            self._add_pieces([turn for turn in turns if turn["turn"] == position])
        phase = "" if name.phase == "train" else f" --phase {name.phase}"
        place = f"--round {name.step}.{name.number} --group {group}{phase}"
        return {
            "round": ".".join(map(str, name)),
            "group": group,
            "prompt": said(prompt, None),
            "columns": turns[0]["columns"],
            "media": prompt.media,
            "samples": _samples(turns),
            "rounding": is_rounding(turns),
            "has_turns": any(turn["turn"] for turn in turns),
            "has_one_prompt": len(firsts) == 1,
            "has_masks": any(turn["num_masked"] for turn in turns),
            "has_tokens": self.decode is not None,
            "replay_obstacle": why_not(self.run_dir, drawn),
            "replay": f"swift-grpo-ext replay {shlex.quote(str(self.run_dir))} {place}",
        }

    def _add_pieces(self, turns: Sequence[dict[str, Any]]) -> None:
        """Give the samples of a group, or of them one turn each, the `pieces` of their texts."""
        # Without a tokenizer, the characters of the texts tell which beginnings are shared.
        units = [[*map(ord, t["text"])] if self.decode is None else t["token_ids"] for t in turns]
        for turn, num_shared in zip(turns, shared_lengths(units), strict=True):
            if self.decode is not None:
                turn["pieces"] = pieces(
                    *(turn["token_ids"], turn["logprobs"], self.decode, num_shared, turn["gaps"]),
                    turn["mask"],
                )
            else:
                beginning, rest = turn["text"][:num_shared], turn["text"][num_shared:]
                is_masked = bool(turn["num_masked"]) and turn["num_masked"] == turn["num_tokens"]
                turn["pieces"] = [
                    Piece(beginning, is_shared=True, is_masked=is_masked),
                    Piece(rest, is_masked=is_masked),
                ]

    def _turns(self, name: RoundId, group: int) -> list[dict[str, Any]]:
        """Return a group's completions by index and turn, with tokens, their gaps by position, and
        what was said before; raises NotFoundError where the record has no such group."""
        place = f'{where_round(name)} and "group" = {group:d}'
        rows = self.record.rows(f'select * from scored where {place} order by "index", turn')
        if not rows:
            raise NotFoundError(f"{name} has no group {group}")
        turns: list[dict[str, Any]] = []
        for row in rows:
            described = describe(row)
            # Positions of gaps count over all turns of a conversation.
            start = turns[-1]["end"] if row["turn"] and turns else 0
            end = start + row["num_tokens"]
            gaps = (row["gaps"] or {}).items()
            made = {
                "start": start,
                "end": end,
                "gaps": {at - start: gap for at, gap in gaps if start <= at < end},
                "num_masked": sum(not is_trained for is_trained in row["mask"] or ()),
                "said": said(described["asked"], row["pictures"]),
                "is_earlier": False,
            }
            turns.append({**described, **made})
        return turns

    def medium_name(
        self, name: RoundId, group: int, number: int, index: int | None = None, turn: int = 0
    ) -> str:
        """Return the name of one medium of a group's prompt, or of what was added for one turn;
        raises NotFoundError."""
        place = f'{where_round(name)} and "group" = {group:d}'
        if index is not None:
            place += f' and "index" = {index:d} and turn = {turn:d}'
        query = f'select media from samples where {place} order by "index", turn limit 1'
        media: list[str] = next((row["media"] for row in self.record.rows(query)), [])
        if not 0 <= number < len(media):
            raise NotFoundError(f"{name} group {group} has no medium {number}")
        return str(media[number])


def is_rounding(samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether rewards are all equal and advantages are not 0: ms-swift (4.6, rl_core/
    advantage.py) divides what float32 leaves of a reward less the mean, 1e-7 of it, by a standard
    deviation of 0 + 1e-4."""
    rewards = {sample["reward"] for sample in samples}
    return len(rewards) == 1 and any(0 < abs(sample["advantage"] or 0) < 0.01 for sample in samples)


class Said(NamedTuple):
    """A message of a prompt, with the media that stand in it."""

    role: str
    text: str
    """Return its text without the marks of its media, which the page shows beside it."""

    media: list[tuple[int, str, str]]
    """Number in the prompt, name, and the picture that the record has, as an address (`data:`);
    empty without one."""


def said(prompt: Prompt, pictures: Sequence[bytes | None] | None) -> list[Said]:
    """Return the messages of a prompt with their media: images by their marks, in order; what no
    mark stands for is with the last message."""
    media = []
    for number, name in enumerate(prompt.media):
        picture = pictures[number] if pictures else None
        encoded = base64.b64encode(picture).decode() if picture else ""
        media.append((number, name, encoded and f"data:image/webp;base64,{encoded}"))
    messages = []
    for place, message in enumerate(prompt.messages, 1):
        is_last = place == len(prompt.messages)
        count = len(media) if is_last else text_of(message).count("<image>")
        said_of = text_of(message, has_marks=not prompt.media)
        messages.append(Said(str(message.get("role", "")), said_of, media[:count]))
        media = media[count:]
    return messages


def _samples(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each sample once, as its first turn, with its `turns` and their sums."""
    samples = []
    for _, sample_turns in groupby(turns, key=lambda t: (t["round"], t["group"], t["index"])):
        own = list(sample_turns)
        sums = ("num_tokens", "engine_seconds", "tool_seconds")
        total = {f"all_{name}": sum(turn[name] for turn in own) for name in sums}
        samples.append({**own[0], **total, "turns": own})
    return samples


def shared_lengths(completions: Sequence[Sequence[int]]) -> list[int]:
    """Return how many tokens of each completion's beginning another one shares, at most."""
    shared = np.zeros(len(completions), int)
    for prefix in shared_prefixes([np.array(ids, int) for ids in completions]):
        shared[prefix.members] = np.maximum(shared[prefix.members], prefix.length)
    lengths: list[int] = shared.tolist()
    return lengths


def pieces(
    ids: Sequence[int],
    logprobs: Sequence[float] | None,
    decode: Decode,
    num_shared: int,
    gaps: dict[int, float],
    mask: Sequence[bool] | None = None,
) -> list[Piece]:
    """Return the text of each token; tokens that hold parts of a character only make one piece."""
    parts: list[Piece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        # Behind its predecessor, as some tokenizers take a first token's leading space away.
        before = ids[max(start - 1, 0) : start]
        text = decode([*before, *ids[start:end]])[len(decode(before)) if before else 0 :]
        # A character has four bytes at most, so no longer than four tokens are held together.
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end - start < 4 and end < len(ids):
            continue
        known = logprobs[start:end] if logprobs else []
        is_known = bool(known) and all(map(math.isfinite, known))
        parts.append(
            Piece(
                text=text,
                is_shared=end <= num_shared,
                logprob=sum(known) if is_known else None,
                gap=max(gaps.get(position, 0.0) for position in range(start, end)),
                is_masked=mask is not None and not all(mask[start:end]),
            )
        )
        start = end
    return parts


def image_bytes(name: str, size: str) -> bytes:
    """Return an image as PNG, which can hold no script.

    A page names an image by its prompt's group and its number there, never by a path: only what the
    run's own record names is read, and only if it is an image. Nothing is fetched from elsewhere.

    Args:
        name: as the record has it; a relative one is looked for where the page was started.
        size: a key of `SIDES`.

    Raises:
        NotFoundError: it is no image on this machine, or it has more pixels than Pillow opens.
    """
    path = media_content(name)
    if not isinstance(path, Path):
        raise NotFoundError("the record holds its digest or its address only")
    if not path.is_file():  # to open a pipe could wait for ever
        raise NotFoundError(f"{path.name[:80]} is not on this machine")
    try:
        with Image.open(path) as image:
            shown = apply_exif_orientation(image).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:
        raise NotFoundError(f"{path.name[:80]} is no image that can be read ({e})") from e
    side = SIDES["small" if size == "small" else "full"]
    shown.thumbnail((side, side))
    buffer = io.BytesIO()
    shown.save(buffer, "PNG")
    return buffer.getvalue()
