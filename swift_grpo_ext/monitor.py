"""`--callbacks diversity`: looks for lost diversity and shared noise in each round's completions.

The recorder passes the samples of all ranks to rank 0, perhaps ahead of their step. Once their
round is scored (`score_listeners`), a thread of rank 0 analyzes them while the step goes on. At the
end of the step, and of each batch of an evaluation, rank 0 waits for its thread, and sends all
ranks what to log and whether to stop: no rank stops alone or at another step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from swift.callbacks import TrainerCallback
from swift.utils import get_logger
from transformers import TrainerControl

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.record.tables import DiversityRow, RewardRow, SampleRow
from swift_grpo_ext.sampling.seeding import Phase

if TYPE_CHECKING:
    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.training.rollouts import RolloutTraining

logger = get_logger()

# Below it vLLM decodes greedily (`_SAMPLING_EPS` in vllm/v1/sample/sampler.py).
GREEDY_TEMPERATURE = 1e-5

Scalars = list[tuple[Phase, dict[str, float]]]  # the values to log of each round, with its phase


class DiversityMonitor(TrainerCallback):
    """Analyzes each round's samples on rank 0, and logs and acts on the results on all ranks."""

    def __init__(self, args: RolloutGRPOConfig, trainer: RolloutTraining) -> None:
        """Subscribe to the trainer's samples and scores; the trainer has no accelerator yet.

        Raises:
            ValueError: the trainer is not one of ours.
        """
        super().__init__(args, trainer)
        if not hasattr(trainer, "recorder"):
            raise ValueError(
                "--callbacks diversity watches the rollouts of --rlhf_type grpo and gkd; "
                f"{type(trainer).__name__} has none. Leave it out."
            )
        trainer.recorder.listeners.append(self._receive)
        trainer.score_listeners.append(self._begin_analysis)
        is_greedy = args.temperature < GREEDY_TEMPERATURE
        if trainer.ranks.rank == 0 and (is_greedy or not args.use_vllm):
            logger.warning(
                "--callbacks diversity cannot test the noise of greedy decoding (--temperature 0), "
                "nor without log-probabilities (--use_vllm false): a round that looks collapsed is "
                "`unknown`, and no alarm. Metrics are logged."
            )
        self._analyzer = RoundAnalyzer(is_greedy=is_greedy, seed_mode=args.rollout_seed_mode)
        self._unscored: list[SampleRow] = []
        self._analyses: list[Future[list[DiversityRow]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diversity")
        self._last_alarm: dict[str, str] = {}  # the last round's verdict by phase; "" without alarm

    def _receive(self, rows: Sequence[SampleRow]) -> None:
        """Keep the samples of all ranks, on rank 0."""
        is_colocated = not self.args.use_vllm or self.args.vllm_mode == "colocate"
        size = self.args.vllm_tensor_parallel_size if self.args.use_vllm else 1
        for row in rows:
            # ms-swift's own rollouts do not name their engine: use the first of its ranks.
            engine = f"rank {row.rank - row.rank % size}" if is_colocated else ""
            # A later turn without tokens had no room for an answer. Two of them are no duplicates.
            if len(row.token_ids) or not row.sample_id.turn:
                self._unscored.append(replace(row, replica=row.replica or engine))

    def _begin_analysis(self, rows: Sequence[RewardRow] = ()) -> None:
        """Start the analysis of all ranks' samples and scores in the thread."""
        scores = {row.sample_id: row.reward for row in rows}
        samples, self._unscored = self._unscored, []
        if self.args.async_generate:
            # Samples of the next round, or of later groups of an evaluation, may have arrived
            # already. They wait for their scores.
            newest = {name.phase: (*name.round, name.group) for name in sorted(scores)}
            waiting, samples = samples, []
            for sample in waiting:
                name = sample.sample_id
                is_scored = (*name.round, name.group) <= newest.get(name.phase, ())
                (samples if is_scored else self._unscored).append(sample)
        if samples:
            known = {name: reward for name, reward in scores.items() if reward is not None}
            self._analyses.append(self._thread.submit(self._analyzer.analyze, samples, known))

    def on_step_end(
        self, args: object, state: object, control: TrainerControl, **kwargs: object
    ) -> None:
        """Log the analyses and act on them. All ranks call it, and raise if rank 0 does."""
        self._begin_analysis()  # of samples that got no score
        ranks = self.trainer.ranks
        decisions: list[tuple[Scalars, bool]] | Exception | None = None
        if ranks.rank == 0:
            try:
                decisions = [self._decide()] * ranks.size
            except Exception as e:  # other ranks wait in `scatter` for it
                decisions = RuntimeError(f"--callbacks diversity: {type(e).__name__}: {e}")
                decisions.__cause__ = e
        scalars, stops = ranks.scatter(decisions)
        for phase, values in scalars:
            for name, value in values.items():
                self.trainer._metrics[phase][name].append(value)
        if stops:
            # ms-swift saves before its loop checks whether to stop, at the end of this step.
            control.should_save = control.should_training_stop = True

    on_prediction_step = on_step_end  # after each batch of an evaluation

    def _decide(self) -> tuple[Scalars, bool]:
        """Record the thread's findings and warn of alarms; return what to log, and whether an alarm
        stops the run."""
        scalars: Scalars = []
        stops = False
        action = self.args.diversity_action
        analyses, self._analyses = self._analyses, []
        for row in (row for analysis in analyses for row in analysis.result()):
            self.trainer.recorder.record_diversity(row)
            phase = row.round.phase
            scalars.append((phase, row.scalars()))
            if row.alarm and action != "log" and self._last_alarm.get(phase) != row.verdict:
                shown = f"`swift-grpo-ext view {self.args.output_dir}` shows later ones"
                logger.warning(f"{row.alarm} ({shown}.)")
            stops |= bool(row.alarm) and action == "stop"
            self._last_alarm[phase] = row.verdict if row.alarm else ""
        return scalars, stops
