"""`--callbacks diversity`: analyzes every round's completions for lost diversity and shared noise.

The trainer hands each rank's samples over as they are drawn (`sample_listeners`), perhaps from
another thread. When their round is scored (`score_listeners`), rank 0 gathers them. A thread of
each rank makes arrays of them, and that of rank 0 analyzes them, while the step goes on. When the
step ends, and after each batch of an evaluation, rank 0 waits for its thread. It tells all ranks
what to log and whether to stop: each round is logged with its own step, and no rank stops alone or
at another step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from swift.callbacks import TrainerCallback
from swift.utils import get_logger

from swift_grpo_ext.diversity.analyzer import AnalyzerSettings, RoundAnalyzer
from swift_grpo_ext.diversity.record import RecordFile, RoundRecord
from swift_grpo_ext.diversity.sample import Sample, sample_from_row
from swift_grpo_ext.record.rewards import RewardRow
from swift_grpo_ext.record.row import SampleRow

logger = get_logger()

GREEDY_TEMPERATURE = 1e-5
"""Below which vLLM decodes greedily (`_SAMPLING_EPS` in vllm/v1/sample/sampler.py)."""


@dataclass
class Decision:
    """What rank 0 sends to all ranks."""

    scalars: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Phase and values to log, of each round."""

    stop: bool = False
    error: str | None = None
    """Why rank 0 failed; None if it did not."""


class DiversityMonitor(TrainerCallback):
    """See the module."""

    def __init__(self, args: Any, trainer: Any) -> None:
        """Listen to the trainer, which is not ready yet: it has no accelerator.

        Raises:
            ValueError: the trainer is not our GRPO trainer.
        """
        super().__init__(args, trainer)
        if not hasattr(trainer, "sample_listeners"):
            raise ValueError(
                f"--callbacks diversity watches the rollouts of --rlhf_type grpo; this is a "
                f"{type(trainer).__name__}, which has none. Leave it out."
            )
        trainer.sample_listeners.append(self._receive)
        trainer.score_listeners.append(self._begin_analysis)
        self._is_greedy = args.temperature < GREEDY_TEMPERATURE
        self._pending: deque[Future[list[Sample]]] = deque()
        self._analyzer = RoundAnalyzer(
            AnalyzerSettings(
                alarm_p=args.diversity_alarm_p,
                patience=args.diversity_patience,
                is_greedy=self._is_greedy,
                seed_mode=args.rollout_seed_mode,
                correct_reward=args.diversity_correct_reward,
            )
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diversity")
        self._analyses: list[Future[list[RoundRecord]]] = []
        """Of rank 0, in their order."""

        self._file: RecordFile | None = None
        self._num_alarms = {"broken": 0, "collapse": 0}
        self._last_alarm: dict[str, str] = {}
        """Verdict of the alarm that the last round gave, by phase; empty for none."""

    # --- hooks of ms-swift ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._file = RecordFile(args.output_dir, start_step=state.global_step)
        if self._is_greedy:
            reason = f"--temperature {self.args.temperature} decodes greedily"
        elif not self.args.use_vllm:
            reason = "--use_vllm false gives no log-probabilities"
        else:
            return
        logger.warning(
            f"--callbacks diversity: {reason}, so that broken randomness cannot be told from a "
            "collapsed policy; metrics are logged."
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._process_pending(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._process_pending(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._process_pending(control)
        if any(self._num_alarms.values()):
            logger.warning(
                f"diversity: {self._num_alarms['broken']} rounds of this session with broken "
                f"randomness, {self._num_alarms['collapse']} with a collapsed policy: "
                f"`swift-grpo-ext report {args.output_dir}` shows them."
            )

    # --- samples in ---

    def _receive(self, rows: Sequence[SampleRow]) -> None:
        self._pending.append(self._thread.submit(self._to_samples, rows))

    def _to_samples(self, rows: Sequence[SampleRow]) -> list[Sample]:
        return [self._with_replica(sample_from_row(row)) for row in rows]

    def _with_replica(self, sample: Sample) -> Sample:
        """ms-swift's own rollouts do not name the engine; colocated, the rank does."""
        args, rank = self.args, sample.origin.rank
        if sample.origin.replica or (args.use_vllm and args.vllm_mode == "server"):
            return sample
        size = args.vllm_tensor_parallel_size if args.use_vllm else 1
        origin = replace(sample.origin, replica=f"rank {rank - rank % size}")
        return replace(sample, origin=origin)

    def _take_pending(self) -> list[Sample]:
        samples: list[Sample] = []
        while self._pending:
            samples += self._pending.popleft().result()
        return samples

    # --- findings out ---

    def _begin_analysis(self, rows: Sequence[RewardRow] = ()) -> None:
        """Have rank 0's thread analyze the samples that arrived since the last call; every rank
        calls it together.

        Args:
            rows: how this rank's samples scored.
        """
        scores = {row.sample_id: row.reward for row in rows if row.reward is not None}
        gathered = self.trainer.ranks.gather((self._take_pending(), scores))
        samples = [sample for of_rank, _ in gathered or () for sample in of_rank]
        if samples:
            scores = {name: reward for _, of_rank in gathered for name, reward in of_rank.items()}
            self._analyses.append(self._thread.submit(self._analyzer.analyze, samples, scores))

    def _process_pending(self, control: Any) -> None:
        """Act on all samples that have arrived; every rank calls it together."""
        ranks = self.trainer.ranks
        self._begin_analysis()
        error: Exception | None = None
        decision = Decision()
        if ranks.rank == 0:
            analyses, self._analyses = self._analyses, []
            try:
                decision = self._decide([r for analysis in analyses for r in analysis.result()])
            except Exception as e:  # not raised yet: the other ranks wait for the decision
                error, decision = e, Decision(error=f"{type(e).__name__}: {e}")
        decision = ranks.scatter([decision] * ranks.size if ranks.rank == 0 else None)
        if error:
            raise error
        if decision.error:
            raise RuntimeError(f"--callbacks diversity failed on rank 0: {decision.error}")
        for phase, scalars in decision.scalars:
            metrics = self.trainer._metrics[phase]
            for name, value in scalars.items():
                metrics[name].append(value)
        if decision.stop:
            # ms-swift saves before its loop checks whether to stop, at the end of this step.
            control.should_save = True
            control.should_training_stop = True

    def _decide(self, records: Iterable[RoundRecord]) -> Decision:
        decision = Decision()
        for record in records:
            if self._file:
                self._file.append(record)
            decision.scalars.append((record.phase, record.scalars()))
            self._warn_once(record)
            decision.stop |= bool(record.alarm) and self.args.diversity_action == "stop"
        return decision

    def _warn_once(self, record: RoundRecord) -> None:
        """Print an alarm when it begins, not in each of its rounds."""
        if record.alarm:
            self._num_alarms[record.verdict] += 1
            is_new = self._last_alarm.get(record.phase) != record.verdict
            if is_new and self.args.diversity_action != "log":
                logger.warning(f"{record.alarm} (Said once; see diversity.jsonl.)")
        self._last_alarm[record.phase] = record.verdict if record.alarm else ""
