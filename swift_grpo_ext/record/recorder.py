"""Writes each sample down as it is generated, and shows it to listeners.

Text that UTF-8 cannot hold (a lone half of a surrogate pair) is kept as its escape, `\\ud83d`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.record.session import RunInUseError, claim_session
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.upstream.rows import COLUMNS, RowFormError, column_of, read_row

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
    from swift.rl_core.data import OnPolicySample

logger = logging.getLogger(__name__)

LONGEST_NAME = 2048
"""Characters; a longer string is a medium's content, not its path or URL."""


class SampleRecorder:
    """Writes this rank's samples to the sample log, beside the step, and shows them to listeners.

    Args:
        kept: `--sample_log`.
        max_gb: `--sample_log_gb`, of all ranks.
    """

    def __init__(
        self,
        run_dir: str,
        ranks: RankGroup,
        run_seed: int | None,
        *,
        kept: str = "all",
        max_gb: float = 0.0,
    ) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._run_seed = run_seed
        self._kept = kept
        self._max_gb = max_gb
        self.log: SampleLog | None = None
        """None with `--sample_log none`."""

        self._is_unreadable = False
        self.listeners: list[Callable[[list[SampleRow]], None]] = []

    def open(self, *, start_step: int) -> None:
        """Begin a session, on every rank together; calls after the first do nothing.

        Args:
            start_step: optimizer step at which the session begins.

        Raises:
            RunInUseError: another training writes its record to the folder.
        """
        if self.log is not None or self._kept == "none":
            return
        claimed, *_ = self._ranks.all_gather(self._claim() if self._ranks.rank == 0 else None)
        if isinstance(claimed, str):
            raise RunInUseError(claimed)
        if claimed is not None:
            self.log = SampleLog(
                self._run_dir,
                session=claimed,
                start_step=start_step,
                rank=self._ranks.rank,
                num_ranks=self._ranks.size,
                max_bytes=int(self._max_gb * BYTES_PER_GB) if self._max_gb else None,
            )

    def _claim(self) -> int | str | None:
        """Return the session's number, or why there is none: None where the next round asks again.

        No disk that fails ends the training.
        """
        try:
            return claim_session(self._run_dir)
        except RunInUseError as e:
            return str(e)
        except OSError as e:
            if not self._is_unreadable:
                logger.warning(
                    "%s cannot be read (%s): samples are not recorded until it can be. The "
                    "training goes on.",
                    *(self._run_dir, e),
                )
            self._is_unreadable = True
            return None

    def record(
        self,
        sample_ids: Sequence[SampleId],
        samples: Sequence[OnPolicySample | RolloutInferRequest],
        prompts: Sequence[str],
        outputs: Sequence[RolloutOutput],
        *,
        num_ranks: int,
        weight_version: int,
    ) -> None:
        """Write down what was generated, by a thread; `flush` waits for it.

        Args:
            samples: ms-swift's, or the requests of a later turn, with messages and media.
            prompts: hashes of the samples' prompts.
            outputs: the answers. All turns of a conversation that a server led are one completion.
            num_ranks: how many ranks' samples these are, in order, this rank's first.
            weight_version: optimizer steps behind the weights that generated them.
        """
        if len(outputs) != len(samples):
            return  # a server's scheduler made several training samples of one: none has a name
        rows = []
        generated = zip(sample_ids, samples, prompts, outputs, strict=True)
        for number, (sample_id, sample, prompt, output) in enumerate(generated):
            choice = output.response.choices[0]
            token_ids, logprobs = _tokens(output)
            stop_reason = output.rollout_infos.get("stop_reason")
            text = choice.message.content if isinstance(choice.message.content, str) else ""
            messages, media = _prompt_of(sample)
            row = SampleRow(
                sample_id=sample_id,
                seed=None if self._run_seed is None else sample_seed(self._run_seed, sample_id),
                rank=self._ranks.rank + number * num_ranks // len(samples),
                replica=str(output.rollout_infos.get("replica", "")),
                weight_version=weight_version,
                finish_reason=choice.finish_reason,
                stop_reason=None if stop_reason is None else _utf8(str(stop_reason)),
                token_ids=token_ids,
                logprobs=logprobs,
                text=_utf8(text),
                fingerprint=prompt,
                prompt=_utf8(json.dumps(messages, ensure_ascii=False, default=repr)),
                media=[media_name(each) for each in media],
            )
            rows.append(row)
        if self.log is not None:
            without_logprobs = self._kept == "tokens"  # the listeners get them all the same
            self.log.append([replace(r, logprobs=None) for r in rows] if without_logprobs else rows)
        for listener in self.listeners:
            listener(rows)

    def flush(self) -> None:
        """Wait until all samples and scores are on disk.

        Raises:
            ValueError: one of them has other counts than it should (`SampleLog.flush`).
        """
        if self.log is not None:
            self.log.flush()

    def finish(self) -> None:
        """Write what waits for a disk that failed, if that can be done now: the training ends."""
        if self.log is not None:
            self.log.finish()


def _tokens(output: RolloutOutput) -> tuple[list[int], list[float] | None]:
    """Return the token ids of a completion, over all turns, and their log-probabilities."""
    choice = output.response.choices[0]
    token_ids = list(chain(*output.response_token_ids)) or list(choice.token_ids or ())
    if output.rollout_logprobs:
        logprobs = list(chain(*output.rollout_logprobs))
    else:
        logprobs = [token["logprob"] for token in (choice.logprobs or {}).get("content") or ()]
    # A conversation's tokens include those that the environment put between the turns, which were
    # not sampled and have no log-probabilities.
    return token_ids, logprobs if logprobs and len(logprobs) == len(token_ids) else None


def _prompt_of(sample: OnPolicySample | RolloutInferRequest) -> tuple[Any, list[Any]]:
    """Return a sample's messages, with marks where parts of `content` were media, and all media."""
    try:
        read = read_row(sample)
    except RowFormError:  # of a scheduler that has requests of its own
        columns = (column_of(sample, name) or () for name in COLUMNS)
        return sample.messages, list(chain(*columns))
    return read.messages, [medium.value for medium in read.media]


def _utf8(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def media_name(media: Any) -> str:
    """Return a path or URL as it is, a digest of content or pixels, the frames' names of frames."""
    if isinstance(media, dict):
        media = media.get("path") or media.get("bytes")
    if isinstance(media, str) and len(media) <= LONGEST_NAME:
        return _utf8(media)
    if isinstance(media, (list, tuple)):
        return " ".join(map(media_name, media))
    if isinstance(media, str):
        media = media.encode("utf-8", errors="backslashreplace")
    if hasattr(media, "tobytes"):  # a PIL image, an array; its `repr` holds its address or is cut
        form = [getattr(media, name, None) for name in ("mode", "size", "shape", "dtype")]
        media = repr(form).encode() + media.tobytes()
    content = media if isinstance(media, bytes) else repr(media).encode()
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"
