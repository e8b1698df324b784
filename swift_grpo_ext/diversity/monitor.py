"""`--callbacks diversity`: analyzes every round's completions for lost diversity and shared noise.

The trainer hands each rank's samples over as they are generated (`sample_listeners`), perhaps from
another thread. When their round is scored (`score_listeners`), rank 0 gathers them, and a thread of
rank 0 analyzes them while the step goes on. When the step ends, and after each batch of an
evaluation, rank 0 waits for its thread. It tells all ranks what to log and whether to stop: each
round is logged with its own step, and no rank stops alone or at another step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from swift.callbacks import TrainerCallback
from swift.utils import get_logger
from transformers import TrainerControl, TrainerState

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.diversity.record import RecordFile, RoundRecord
from swift_grpo_ext.diversity.sample import Sample, sample_from_row
from swift_grpo_ext.record.rewards import RewardRow
from swift_grpo_ext.record.row import SampleRow

if TYPE_CHECKING:
    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

logger = get_logger()

GREEDY_TEMPERATURE = 1e-5
"""Below which vLLM decodes greedily (`_SAMPLING_EPS` in vllm/v1/sample/sampler.py)."""


@dataclass
class Decision:
    """Rank 0's message to all ranks."""

    scalars: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Phase and values to log, of each round."""

    stop: bool = False
    error: str | None = None
    """Why rank 0 failed; None if it did not."""


class DiversityMonitor(TrainerCallback):
    """See the module."""

    def __init__(self, args: RolloutGRPOConfig, trainer: RolloutGRPOTrainer) -> None:
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
        self._analyzer = RoundAnalyzer(
            alarm_p=args.diversity_alarm_p,
            is_greedy=self._is_greedy,
            seed_mode=args.rollout_seed_mode,
        )
        self._pending: deque[Sample] = deque()  # appended to by the thread that generates
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diversity")
        self._analyses: list[Future[list[RoundRecord]]] = []
        """Those of rank 0, in their order."""

        self._file: RecordFile | None = None
        self._num_alarms = Counter[str]()
        self._last_alarm: dict[str, str] = {}
        """Verdict of the alarm that the last round gave, by phase; empty for none."""

    # --- hooks of ms-swift ---

    def on_train_begin(
        self, args: RolloutGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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

    def on_step_end(
        self, args: RolloutGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._process_pending(control)

    def on_prediction_step(
        self, args: RolloutGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._process_pending(control)

    def on_train_end(
        self, args: RolloutGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._process_pending(control)
        if self._num_alarms:
            logger.warning(
                f"diversity: {self._num_alarms['broken']} rounds of this session with broken "
                f"randomness, {self._num_alarms['collapse']} with a collapsed policy: "
                f"`swift-grpo-ext view {args.output_dir}` shows them."
            )

    # --- samples in ---

    def _receive(self, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            sample = sample_from_row(row)
            is_colocated = not self.args.use_vllm or self.args.vllm_mode == "colocate"
            if not sample.origin.replica and is_colocated:
                # ms-swift's own rollouts do not name the engine; colocated, the rank does.
                size = self.args.vllm_tensor_parallel_size if self.args.use_vllm else 1
                first_rank = row.rank - row.rank % size
                origin = replace(sample.origin, replica=f"rank {first_rank}")
                sample = replace(sample, origin=origin)
            self._pending.append(sample)

    # --- results out ---

    def _begin_analysis(self, rows: Sequence[RewardRow] = ()) -> None:
        """Have rank 0's thread analyze the samples that arrived since the last call; every rank
        calls it together.

        Args:
            rows: how this rank's samples scored.
        """
        arrived = [self._pending.popleft() for _ in range(len(self._pending))]
        scores = {row.sample_id: row.reward for row in rows if row.reward is not None}
        gathered = self.trainer.ranks.gather((arrived, scores)) or ()
        samples = [sample for of_rank, _ in gathered for sample in of_rank]
        if samples:
            all_scores = {
                name: reward for _, of_rank in gathered for name, reward in of_rank.items()
            }
            self._analyses.append(self._thread.submit(self._analyzer.analyze, samples, all_scores))

    def _process_pending(self, control: TrainerControl) -> None:
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
            for name, value in scalars.items():
                self.trainer._metrics[phase][name].append(value)
        if decision.stop:
            # ms-swift saves before its loop checks whether to stop, at the end of this step.
            control.should_save = True
            control.should_training_stop = True

    def _decide(self, records: Iterable[RoundRecord]) -> Decision:
        """Write the rounds down, and warn of an alarm when it begins, not in each of its rounds."""
        decision = Decision()
        for record in records:
            if self._file:
                self._file.append(record)
            decision.scalars.append((record.phase, record.scalars()))
            if record.alarm:
                self._num_alarms[record.verdict] += 1
                is_new = self._last_alarm.get(record.phase) != record.verdict
                if is_new and self.args.diversity_action != "log":
                    logger.warning(f"{record.alarm} (Said once; see diversity.jsonl.)")
                decision.stop |= self.args.diversity_action == "stop"
            self._last_alarm[record.phase] = record.verdict if record.alarm else ""
        return decision
