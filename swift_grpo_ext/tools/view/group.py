"""One group as a page shows it: prompt, images, completions token by token, and how to draw it
again."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS
from swift_grpo_ext.tools.replay.compare import first_difference
from swift_grpo_ext.tools.view import media
from swift_grpo_ext.tools.view.queries import describe, read_messages
from swift_grpo_ext.tools.view.table import Follower, Round, Snapshot

MAX_TOKENS = 20_000
"""Of one completion, token by token; the rest is left out, and the page says so."""

Piece = tuple[str, int, float | None]
"""A text, how many tokens it is made of, and their log-probability in nats (None: unknown)."""

Decode = Callable[[Sequence[int]], str]


class RunView:
    """A run, with what its groups need beside the record."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.follower = Follower(run_dir)
        self.run_dir = Path(run_dir)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def snapshot(self) -> Snapshot:
        return self.follower.snapshot

    @cached_property
    def limits(self) -> dict[str, int] | None:
        return media.processor_limits(self.run_dir, self.follower.settings)

    @cached_property
    def decode(self) -> Decode | None:
        """From the tokenizer of a checkpoint, or of the model; None where neither is here."""
        from tokenizers import Tokenizer

        model = Path(str(self.follower.settings.get("model", "")))
        for folder in (*sorted(self.run_dir.glob("checkpoint-*")), model):
            try:
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception:  # the package raises no narrower class
                continue
            return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
        return None

    def group(self, name: RoundName, group: int) -> dict[str, Any]:
        """Raises KeyError where the record has no such group."""
        snapshot = self.snapshot
        of_round = snapshot.round(name)
        rows = of_round.rows.filter(pc.equal(of_round.rows["group"], group)).to_pylist()
        if not rows or snapshot.index is None:
            raise KeyError(f"{name} {group}")
        [tokens] = snapshot.index.read_rounds([name], [*SAMPLE_ID_COLUMNS, "token_ids", "logprobs"])
        tokens = tokens.filter(pc.equal(tokens["group"], group)).to_pylist()
        has_turns = any(t["turn"] for t in tokens)  # positions count over all of them
        gaps = {} if has_turns else self._gaps(name, group)
        of_sample = {(t["index"], t["turn"]): t for t in tokens}
        found = [of_sample[row["index"], row["turn"]] for row in rows]
        shared = shared_lengths([t["token_ids"] for t in found])
        prompt, names = of_round.prompts[rows[0]["fingerprint"]]
        return {
            "round": ".".join(map(str, name)),
            "group": group,
            "prompt": read_messages(prompt),
            "media": [self.medium(medium) for medium in names],
            "samples": [
                {
                    **describe(of_round, row),
                    **self._tokens(t, num_shared),
                    "gaps": gaps.get(row["index"]),
                }
                for row, t, num_shared in zip(rows, found, shared, strict=True)
            ],
            "replay": self.replay_command(name, group),
        }

    def _gaps(self, name: RoundName, group: int) -> dict[int, dict[int, float]]:
        """By a sample's index, the gaps of tokens by position (`RewardRow.gaps`)."""
        scores = self.snapshot.scores
        if scores is None or name not in scores.rounds:
            return {}
        [rows] = scores.read_rounds([name], ["group", "index", "gaps"])
        found = rows.filter(pc.equal(rows["group"], group)).to_pylist()
        return {row["index"]: dict(row["gaps"]) for row in found if row["gaps"] is not None}

    def _tokens(self, row: dict[str, Any], num_shared: int) -> dict[str, Any]:
        ids, logprobs = row["token_ids"][:MAX_TOKENS], row["logprobs"]
        return {
            "pieces": pieces(ids, logprobs, self.decode) if self.decode else None,
            "num_shared": num_shared,
            "is_cut": len(row["token_ids"]) > MAX_TOKENS,
        }

    def medium(self, name: str) -> dict[str, Any]:
        """What is known of one: its file's name, sizes in pixels, or why it cannot be shown."""
        answer: dict[str, Any] = {"name": os.path.basename(name)[:200]}  # noqa: PTH119 (no path)
        try:
            size = media.image_size(name)
        except media.NoImageError as e:
            return {**answer, "problem": str(e)}
        seen = media.seen_size(*size, self.limits) if self.limits else None
        return {**answer, "size": size, "seen": seen}

    def medium_name(self, name: RoundName, group: int, number: int) -> str:
        """The name of an image of a group's prompt; raises KeyError or IndexError."""
        of_round = self.snapshot.round(name)
        return _media_of(of_round, group)[number]

    def replay_command(self, name: RoundName, group: int) -> str:
        phase = "" if name.phase == "train" else f" --phase {name.phase}"
        place = f"--round {name.step}.{name.number} --group {group}{phase}"
        return f"swift-grpo-ext replay {shlex.quote(str(self.run_dir))} {place}"


def _media_of(of_round: Round, group: int) -> list[str]:
    at = pc.index(of_round.rows["group"], group).as_py()
    if at < 0:
        raise KeyError(group)
    return of_round.prompts[of_round.rows["fingerprint"][at].as_py()][1]


def shared_lengths(completions: Sequence[Sequence[int]]) -> list[int]:
    """Of each completion, how many tokens its beginning shares with another one's at most.

    In sorted order, a completion shares most with one of its neighbours.
    """
    order = sorted(range(len(completions)), key=lambda number: list(completions[number]))
    shared = [0] * len(completions)
    for one, other in pairwise(order):
        position = first_difference(completions[one], completions[other])
        common = len(completions[one]) if position is None else position
        shared[one], shared[other] = max(shared[one], common), max(shared[other], common)
    return shared


def pieces(ids: Sequence[int], logprobs: Sequence[float] | None, decode: Decode) -> list[Piece]:
    """The text of each token. Tokens that hold parts of a character only make one piece."""
    found: list[Piece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        # Behind its predecessor, as some tokenizers take a first token's leading space away.
        before = ids[max(start - 1, 0) : start]
        text = decode([*before, *ids[start:end]])[len(decode(before)) if before else 0 :]
        # A character has four bytes at most, so no longer than four tokens are held together.
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end - start < 4 and end < len(ids):
            continue
        known = logprobs[start:end] if logprobs else []
        total = sum(known) if known and all(map(math.isfinite, known)) else None
        found.append((text, end - start, total))
        start = end
    return found
