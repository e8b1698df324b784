"""Writes each sample down as it is generated, and shows it to listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.record.log import SampleLog, next_session
from swift_grpo_ext.record.row import SampleRow, sample_row
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
    from swift.rl_core.data import OnPolicySample


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

        self.listeners: list[Callable[[list[SampleRow]], None]] = []

    def open(self, *, start_step: int) -> None:
        """Begin a session, on every rank together; calls after the first do nothing.

        Args:
            start_step: optimizer step at which the session begins.
        """
        if self.log is None and self._kept != "none":
            own = next_session(self._run_dir) if self._ranks.rank == 0 else -1
            session, *_ = self._ranks.all_gather(own)
            own_bytes = int(self._max_gb * BYTES_PER_GB / self._ranks.size)
            self.log = SampleLog(
                self._run_dir,
                session=session,
                start_step=start_step,
                rank=self._ranks.rank,
                max_bytes=own_bytes if self._max_gb else None,
            )

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
            prompts: hashes of the samples' prompts.
            num_ranks: how many ranks' samples these are, in order, this rank's first.
            weight_version: optimizer steps behind the weights that generated them.
        """
        if len(outputs) != len(samples):
            return  # a server's scheduler made several training samples of one: none has a name
        rows = []
        generated = zip(sample_ids, samples, prompts, outputs, strict=True)
        for number, (sample_id, sample, prompt, output) in enumerate(generated):
            seed = None if self._run_seed is None else sample_seed(self._run_seed, sample_id)
            rank = self._ranks.rank + number * num_ranks // len(samples)
            row = sample_row(
                sample_id,
                sample,
                output,
                seed=seed,
                fingerprint=prompt,
                rank=rank,
                weight_version=weight_version,
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
