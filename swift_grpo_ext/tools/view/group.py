"""One group as a page shows it: its prompt and images, and its completions token by token."""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
from PIL import Image

from swift_grpo_ext.checks.rows import media_content
from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS
from swift_grpo_ext.tools.view.queries import describe, read_messages
from swift_grpo_ext.tools.view.runs import Follower

SIDES = {"small": 112, "full": 2048}
"""Pixels of a shown image's longer side, at most."""

Decode = Callable[[Sequence[int]], str]


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


class RunView(Follower):
    """A run that is followed, with what the pages of its groups need: tokenizer and images."""

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @cached_property
    def decode(self) -> Decode | None:
        """The tokenizer of a checkpoint, or of the model; None where neither is on this machine."""
        from tokenizers import Tokenizer

        folders = sorted(self.run_dir.glob("checkpoint-*"))
        with suppress(OSError, ValueError, KeyError):
            settings = json.loads((self.run_dir / "args.json").read_text(encoding="utf-8"))
            folders.append(Path(settings["model"]))
        for folder in folders:
            try:
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception:  # the package raises no narrower class
                continue
            return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
        return None

    def group(
        self, name: RoundName, group: int, earlier: Sequence[tuple[RoundName, int, int]] = ()
    ) -> dict[str, Any]:
        """Return a group as `group.html` shows it.

        Args:
            earlier: round, group and index of samples of other groups that stand beside it, as far
                as the record still has them.

        Raises:
            KeyError: the record has no such group.
        """
        samples = self._samples(name, group)
        gaps = self._gaps(name, group, samples)
        for sample in samples:
            sample["gaps"] = gaps.get(sample["index"], {})
        prompt = self.snapshot.rounds[name].prompts[samples[0]["fingerprint"]]
        for other, number, index in earlier:
            with suppress(KeyError):
                samples += [s for s in self._samples(other, number) if s["index"] == index]
        # Without a tokenizer, the texts tell which beginnings are shared.
        unit = "text" if self.decode is None else "token_ids"
        shared = shared_lengths([sample[unit] for sample in samples])
        for sample, num_shared in zip(samples, shared, strict=True):
            sample["is_earlier"] = (sample["round"], sample["group"]) != (_text(name), group)
            if self.decode is None:
                text = sample["text"]
                sample["pieces"] = [
                    Piece(text[:num_shared], is_shared=True),
                    Piece(text[num_shared:]),
                ]
            else:
                sample["pieces"] = pieces(
                    sample["token_ids"],
                    sample["logprobs"],
                    self.decode,
                    num_shared,
                    sample.get("gaps", {}),
                )
        phase = "" if name.phase == "train" else f" --phase {name.phase}"
        place = f"--round {name.step}.{name.number} --group {group}{phase}"
        return {
            "round": _text(name),
            "group": group,
            "prompt": read_messages(prompt.text),
            "media": prompt.media,
            "samples": samples,
            "has_tokens": self.decode is not None,
            "replay": f"swift-grpo-ext replay {shlex.quote(str(self.run_dir))} {place}",
        }

    def _samples(self, name: RoundName, group: int) -> list[dict[str, Any]]:
        """Return a group's samples by index and turn, with their tokens; raises KeyError."""
        snapshot = self.snapshot
        rows = snapshot.rounds[name].rows
        rows = rows.filter(pc.equal(rows["group"], group))
        if not rows.num_rows or snapshot.samples is None:
            raise KeyError(f"{_text(name)} {group}")
        columns = [*SAMPLE_ID_COLUMNS, "token_ids", "logprobs"]
        [tokens] = snapshot.samples.read_rounds([name], columns)
        tokens = tokens.filter(pc.equal(tokens["group"], group))
        pairs = zip(rows.to_pylist(), tokens.to_pylist(), strict=True)
        return [{**describe(snapshot, row), **of_row} for row, of_row in pairs]

    def _gaps(
        self, name: RoundName, group: int, samples: Sequence[dict[str, Any]]
    ) -> dict[int, dict[int, float]]:
        """Return, by a sample's index, the gaps of its tokens by position (`RewardRow.gaps`)."""
        scores = self.snapshot.scores
        has_turns = any(sample["turn"] for sample in samples)  # positions count over all of them
        if scores is None or name not in scores.rounds or has_turns:
            return {}
        [rows] = scores.read_rounds([name], ["group", "index", "gaps"])
        rows = rows.filter(pc.equal(rows["group"], group))
        return {row["index"]: dict(row["gaps"] or ()) for row in rows.to_pylist()}

    def medium_name(self, name: RoundName, group: int, number: int) -> str:
        """Return the name of one medium of a group's prompt; raises KeyError or IndexError."""
        of_round = self.snapshot.rounds[name]
        at = pc.index(of_round.rows["group"], group).as_py()
        if at < 0 or number < 0:
            raise KeyError(group)
        return of_round.prompts[of_round.rows["fingerprint"][at].as_py()].media[number]


def _text(name: RoundName) -> str:
    return ".".join(map(str, name))


def shared_lengths(completions: Sequence[Sequence[int] | str]) -> list[int]:
    """Return how many tokens (or characters) of each completion's beginning another one shares, at
    most.

    In sorted order, a completion shares most with one of its neighbours.
    """
    order = sorted(range(len(completions)), key=lambda number: list(completions[number]))
    shared = [0] * len(completions)
    for one, other in pairwise(order):
        pairs = enumerate(zip_longest(completions[one], completions[other]))
        differing = (position for position, (a, b) in pairs if a != b)
        common = next(differing, len(completions[one]))
        shared[one], shared[other] = max(shared[one], common), max(shared[other], common)
    return shared


def pieces(
    ids: Sequence[int],
    logprobs: Sequence[float] | None,
    decode: Decode,
    num_shared: int = 0,
    gaps: dict[int, float] | None = None,
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
                gap=max((gaps or {}).get(position, 0.0) for position in range(start, end)),
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
        ValueError: it is no image on this machine, or it has more pixels than Pillow opens.
    """
    path = media_content(name)
    if not isinstance(path, Path):
        raise ValueError("The record holds its digest or its address only.")
    if not path.is_file():  # to open a pipe could wait for ever
        raise ValueError(f"{path.name[:80]} is not on this machine.")
    try:
        with Image.open(path) as image:
            shown = image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:
        raise ValueError(f"{path.name[:80]} is no image that can be read ({e}).") from e
    shown.thumbnail((SIDES[size], SIDES[size]))
    buffer = io.BytesIO()
    shown.save(buffer, "PNG")
    return buffer.getvalue()
