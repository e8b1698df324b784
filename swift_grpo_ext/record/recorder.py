"""Makes a row for each sample once it is generated, in a training or a server. Rank 0 gathers the
rows of a round, writes them, and passes them to listeners.

Text that UTF-8 cannot hold (a lone half of a surrogate pair) is kept as its escape, `\\ud83d`.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swift_grpo_ext.media.pictures import media_name, utf8
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.record.log import RunInUseError, SampleLog, claim_session
from swift_grpo_ext.record.tables import DIVERSITY, REWARDS, DiversityRow, RewardRow, SampleRow
from swift_grpo_ext.rollout.conversation import Turn
from swift_grpo_ext.upstream.rows import TEACHER_COLUMNS, TEACHER_IMAGES

if TYPE_CHECKING:
    from swift_grpo_ext.rollout.sample import RolloutSample

logger = logging.getLogger(__name__)

MAX_COLUMN = 2000  # characters of a column's value that are recorded


class SampleRecorder:
    """Keeps each rank's samples until rank 0 gathers them. `kept` is `--sample_log`, `max_gb` is
    `--sample_log_gb`. With `keeps_diversity` the monitor's rows are written for any `kept`."""

    def __init__(
        self,
        run_dir: str,
        ranks: RankGroup,
        *,
        kept: str = "all",
        max_gb: float = 0.0,
        keeps_diversity: bool = False,
    ) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._max_bytes = int(max_gb * 1e9) or None
        self._keeps_samples, self._keeps_logprobs = kept != "none", kept == "all"
        self._keeps_any = self._keeps_samples or keeps_diversity
        self._session: int | None = None  # the same on all ranks; None before it begins
        self.log: SampleLog | None = None  # of a session, on rank 0
        # Samples of this rank since the last `write`; the thread that generates appends them.
        self._taken: deque[list[SampleRow]] = deque()
        # The same on every rank; only rank 0 calls them, with the samples of all ranks.
        self.listeners: list[Callable[[list[SampleRow]], None]] = []

    def open(self, *, start_step: int) -> None:
        """Begin a session at an optimizer step. All ranks call it together; later calls do nothing.
        Raise the errors of `claim_session` on rank 0, and `RolloutError` on other ranks."""
        if self._session is not None or not self._keeps_any:
            return
        session: int | None = None
        failure: Exception | None = None
        if self._ranks.rank == 0:
            try:
                session = claim_session(self._run_dir)
            except (RunInUseError, OSError) as e:
                failure = e
        self._session, *_ = self._ranks.all_gather_or_raise(session, failure)
        if session is not None:
            self.log = SampleLog(
                self._run_dir, session=session, start_step=start_step, max_bytes=self._max_bytes
            )

    def record(
        self,
        samples: Sequence[RolloutSample],
        turns_of_samples: Sequence[Sequence[Turn]],
        *,
        num_ranks: int,
        weight_version: int,
    ) -> None:
        """Record the samples that this rank has generated, each with its turns (one turn without a
        conversation). They belong to `num_ranks` ranks, in order, this one first. `weight_version`
        is the number of optimizer steps done on the weights that generated them."""
        rows = []
        for number, (sample, turns) in enumerate(zip(samples, turns_of_samples, strict=True)):
            # With --async_generate rank 0 generates for all: each rank's share has the same size.
            rank = self._ranks.rank + number * num_ranks // len(samples)
            views = {name: getattr(sample, name) for name in TEACHER_COLUMNS}
            views[TEACHER_IMAGES] = [*map(media_name, views[TEACHER_IMAGES] or ())] or None
            columns = other_columns({**sample.extra, **views})
            for turn, mask in zip(turns, masks_of(sample, turns), strict=True):
                rows.append(sample_row(turn, weight_version, columns, rank=rank, mask=mask))
        self.append(rows)

    def append(self, rows: list[SampleRow]) -> None:
        """Keep rows of this rank until the next `write`."""
        if self._keeps_samples or self.listeners:
            self._taken.append(rows)

    def write(self) -> None:
        """Gather the samples of all ranks on rank 0, and pass them to its writer thread and to
        listeners. All ranks call it together after each round. Raise `ValueError` on rank 0 if a
        sample's tokens and log-probabilities differ in number."""
        if not (self._keeps_samples or self.listeners):
            return
        own = self._take()
        # Rank 0 keeps its own out of the gather, which makes all shares as long as the longest.
        shares = self._ranks.gather([] if self._ranks.rank == 0 else own)
        if self._ranks.rank > 0:
            return
        rows = own + [row for share in shares for row in share]
        self._write(rows)
        for listener in self.listeners:
            listener(rows)

    def _take(self) -> list[SampleRow]:
        # Only the rows of now: with --async_generate a thread appends the next round meanwhile.
        return [row for _ in range(len(self._taken)) for row in self._taken.popleft()]

    def _write(self, rows: list[SampleRow]) -> None:
        if self.log is not None and self._keeps_samples:
            kept = rows if self._keeps_logprobs else [replace(row, logprobs=None) for row in rows]
            self.log.append(kept)

    def record_scores(self, rows: Sequence[RewardRow]) -> None:
        """Write the scores of all ranks' samples; wait until samples and scores are on disk."""
        if self.log is not None and self._keeps_samples:
            self.log.append(rows, REWARDS)
        self.flush()

    def record_diversity(self, row: DiversityRow) -> None:
        if self.log is not None:
            self.log.append([row], DIVERSITY)

    def flush(self) -> None:
        """Wait until all rows are on disk."""
        if self.log is not None:
            self.log.flush()

    def finish(self) -> None:
        """Write the rows that are left at the end of the training."""
        left = self._take()
        if self.log is not None:
            self._write(left)
            self.log.finish()
        elif left and self._session is not None and self._keeps_samples:
            logger.warning(
                "Rank %d has generated %d samples from %s on that are not in the run's record: the "
                "rollout failed before rank 0 had them.",
                *(self._ranks.rank, len(left), left[0].sample_id.round),
            )


def sample_row(
    turn: Turn,
    weight_version: int,
    columns: str | None,
    *,
    rank: int = 0,
    mask: list[bool] | None = None,
) -> SampleRow:
    """Return the row of a turn."""
    completion = turn.completion
    stop_reason, logprobs = completion.stop_reason, completion.logprobs
    # Arrays pickle fast; to mypy they are no sequences.
    token_ids: Any = np.asarray(completion.token_ids, np.int32)
    known_logprobs: Any = None if logprobs is None else np.asarray(logprobs, np.float32)
    pictures = [picture.webp for picture in turn.media]
    return SampleRow(
        sample_id=turn.sample_id,
        seed=completion.seed,
        rank=rank,
        replica=completion.replica,
        weight_version=weight_version,
        finish_reason=completion.finish_reason,
        stop_reason=None if stop_reason is None else utf8(str(stop_reason)),
        token_ids=token_ids,
        logprobs=known_logprobs,
        text=utf8(completion.text),
        fingerprint=turn.fingerprint,
        prompt=utf8(json.dumps(turn.messages, ensure_ascii=False, default=repr)),
        media=[picture.name for picture in turn.media],
        pictures=pictures if any(pictures) else None,
        mask=mask,
        engine_seconds=turn.engine_seconds,
        tool_seconds=turn.tool_seconds,
        columns=columns,
    )


def view_command(run_dir: str) -> str:
    """Return the command that shows a run."""
    return f"swift-grpo-ext view {shlex.quote(run_dir)}"


def other_columns(extra: Mapping[str, object]) -> str | None:
    """Return a data row's other columns as JSON; None without any."""
    kept = {}
    for name, value in extra.items():
        if value is not None and not name.startswith("_"):
            text = value if isinstance(value, str) else json.dumps(value, default=repr)
            is_long = len(text) > MAX_COLUMN
            kept[name] = f"{text[:MAX_COLUMN]} …" if is_long else value
    return utf8(json.dumps(kept, ensure_ascii=False, default=repr)) if kept else None


def masks_of(sample: RolloutSample, turns: Sequence[Turn]) -> list[list[bool] | None]:
    """Return for each turn the mask of trained tokens; None if all are trained on, or unknown."""
    # A scheduler may join turns: then the ids of one cannot be told apart.
    ids, masks = sample.response_token_ids or [], sample.response_loss_mask or []
    if not len(ids) == len(masks) == sum(turn.is_answered for turn in turns):
        return [None] * len(turns)
    answers = zip(ids, masks, strict=True)
    return [_mask_of(turn, *next(answers)) if turn.is_answered else None for turn in turns]


def _mask_of(turn: Turn, ids: Sequence[int], mask: Sequence[int]) -> list[bool] | None:
    # ms-swift 4.6 puts a template's response prefix (`<think>`) before the sampled tokens
    # (rollout/multi_turn.py, `get_response_token_data`). Schedulers append the environment's
    # tokens, or cut the answer: tokens that are gone are not trained on.
    sampled, ids = list(turn.completion.token_ids), list(ids)
    start = ids.index(sampled[0]) if sampled[0] in ids else 0
    answer = zip(sampled, ids[start:], list(mask)[start:], strict=False)
    kept = [bool(is_trained) and token == own for own, token, is_trained in answer]
    kept += [False] * (len(sampled) - len(kept))
    return None if all(kept) else kept
