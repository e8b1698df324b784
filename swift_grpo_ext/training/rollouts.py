"""How a round is drawn: samples named, requests described, each sample written down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from swift.utils import get_logger

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.record.log import SampleLog, next_session
from swift_grpo_ext.record.row import SampleRow, sample_row
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.groups import (
    count_duplicates,
    fingerprint,
    parse_request_id,
    request_id,
)
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed

if TYPE_CHECKING:
    from swift_grpo_ext.rollout.draw import RankBatch

logger = get_logger()


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What a run's flags say of its rollouts."""

    draws: bool
    """Whether rounds are drawn our way; else ms-swift's, with its seeds."""

    run_seed: int | None
    """`--seed`; None where the engine makes the seeds."""

    grouped: bool
    """Whether a group may be one request."""

    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool

    @classmethod
    def of(cls, args: Any) -> RolloutSettings:
        """Of the training's arguments."""
        has_seeds = args.use_vllm and args.rollout_seed_mode == "sample"
        return cls(
            draws=bool(args.use_vllm and (has_seeds or args.rollout_group_requests)),
            run_seed=args.seed if has_seeds else None,
            grouped=args.rollout_group_requests,
            stop_token_ids=tuple(args.stop_token_ids),
            include_stop_str_in_output=args.include_stop_str_in_output,
        )

    def metadata(
        self, sample_id: SampleId, count: int = 1, *, packed: bool = False
    ) -> RequestMetadata:
        """Of a request for so many samples, the first of them named."""
        return RequestMetadata(
            sample_id=sample_id,
            count=count,
            run_seed=self.run_seed,
            packed=packed,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def with_metadata(self, samples: Sequence[Any], requests: list[Any]) -> list[Any]:
        """The requests of samples, each with the metadata of its sample."""
        for sample, request in zip(samples, requests, strict=True):
            if request is not sample:  # else it is a later turn's, and has its metadata
                metadata = self.metadata(parse_request_id(sample.request_id))
                wire.write_metadata(request.data_dict, metadata)
        return requests

    def rank_batch(
        self,
        sample_ids: Sequence[SampleId],
        prompts: Sequence[str],
        *,
        request: Callable[[int], Any],
        packed: bool,
    ) -> RankBatch:
        """What this rank wants drawn; see `RankBatch`."""
        from swift_grpo_ext.rollout.draw import RankBatch

        return RankBatch(
            sample_ids=sample_ids,
            fingerprints=prompts,
            request=request,
            metadata=partial(self.metadata, packed=packed),
            grouped=self.grouped,
        )


def name_samples(samples: Sequence[Any], sample_ids: Sequence[SampleId]) -> None:
    """Give ms-swift's samples their ids: of the sample, and of the group that it belongs to."""
    for sample, sample_id in zip(samples, sample_ids, strict=True):
        sample.request_id = request_id(sample_id)
        sample.prompt_id = sample.request_id.rpartition("-")[0]


def begin_turn(sample: Any, scheduler: str | None) -> SampleId:
    """The id of a sample, or of a multi-turn conversation's request for its next turn, which is
    told that the turn begins.

    Args:
        scheduler: `--multi_turn_scheduler`, for the error.

    Raises:
        ValueError: a scheduler made a request without metadata.
    """
    if hasattr(sample, "request_id"):
        return parse_request_id(sample.request_id)
    metadata = wire.read_metadata(sample.data_dict)
    if metadata is None:
        raise ValueError(
            f"--multi_turn_scheduler {scheduler}: its `step` returned a "
            f"request without `data_dict['{wire.KEY}']`, from which its seed is made. Return "
            "the request that it was given, or a copy with the same `data_dict`."
        )
    metadata = metadata.next_turn()
    wire.write_metadata(sample.data_dict, metadata)
    return metadata.sample_id


class DuplicateCheck:
    """`--duplicate_prompts`: whether a prompt stands twice in a generation batch.

    Args:
        action: `allow`, `warn` or `error`.
    """

    def __init__(self, action: str, ranks: RankGroup) -> None:
        self._action = action
        self._ranks = ranks
        self._has_warned = False

    def check(self, samples: Sequence[Any], sample_ids: Sequence[SampleId]) -> None:
        """Every rank calls it, with its samples.

        Raises:
            ValueError: with `error`, where a prompt stands twice.
        """
        if self._action == "allow":
            return
        pairs = zip(samples, sample_ids, strict=True)
        own = [fingerprint(sample) for sample, sample_id in pairs if sample_id.index == 0]
        prompts = [prompt for prompts in self._ranks.all_gather(own) for prompt in prompts]
        duplicates = count_duplicates(prompts)
        if duplicates == 0 or (self._action == "warn" and self._has_warned):
            return
        message = (
            f"{sample_ids[0]}: {duplicates} of {len(prompts)} prompts of the generation "
            "batch stand in it twice, media included; each is a group of its own, with its own "
            "noise."
        )
        if self._action == "error":
            raise ValueError(f"--duplicate_prompts error: {message} Remove them from the data set.")
        self._has_warned = True
        logger.warning(f"{message} (--duplicate_prompts warn: said once.)")


class UnevenGroupsWarning:
    """Warns once of groups whose rows differ (SPEC G3)."""

    def __init__(self) -> None:
        self._has_warned = False

    def warn(self, unequal: Sequence[SampleId]) -> None:
        if unequal and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"{len(unequal)} groups hold rows that differ, the first in "
                f"{unequal[0]}: each sample is a request. Advantages compare "
                "the samples of a group; a custom sampler must repeat each row --num_generations "
                "times. (Said once.)"
            )


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
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sample-log")
        self._unwritten: deque[Future[None]] = deque()

    def open(self, *, start_step: int) -> None:
        """Every rank calls it before samples are drawn; calls after the first do nothing.

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
        samples: Sequence[Any],
        prompts: Sequence[str],
        outputs: Sequence[Any],
        *,
        num_ranks: int,
        weight_version: int,
    ) -> None:
        """Write down what was drawn, by a thread; `flush` waits for it.

        Args:
            prompts: fingerprints of the samples' prompts.
            num_ranks: whose samples these are, in order, this rank's first.
            weight_version: optimizer steps behind the weights that they were drawn with.
        """
        if len(outputs) != len(samples):
            return  # a server's scheduler made several training samples of one: none has a name
        seed = self._run_seed
        drawn = zip(sample_ids, samples, prompts, outputs, strict=True)
        rows = [
            sample_row(
                sample_id, sample, output,
                seed=None if seed is None else sample_seed(seed, sample_id),
                fingerprint=prompt,
                rank=self._ranks.rank + number * num_ranks // len(samples),
                weight_version=weight_version,
            )
            for number, (sample_id, sample, prompt, output) in enumerate(drawn)
        ]  # fmt: skip
        self.write(rows)
        for listener in self.listeners:
            listener(rows)

    def write(self, rows: list[SampleRow]) -> None:
        """Have a thread write rows to the sample log, as far as it keeps them."""
        if self.log is not None:
            kept = [replace(row, logprobs=None) for row in rows] if self._kept == "tokens" else rows
            self._unwritten.append(self._writer.submit(self.log.append, kept))

    def flush(self) -> None:
        """Wait until all samples are on disk.

        Raises:
            OSError, ValueError: one of them could not be written (`SampleLog.append`).
        """
        while self._unwritten:
            self._unwritten.popleft().result()
