"""`--callbacks diversity`: watches every round's completions for lost diversity and shared noise.

The trainer tells each rank's samples as they are drawn (`sample_listeners`), perhaps from another
thread. When a step ends, and after each batch of an evaluation, the main rank gathers and judges
them, and tells all ranks what to log and whether to stop, so that no rank stops alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from swift.callbacks import TrainerCallback
from swift.utils import get_logger

from swift_grpo_ext.diversity.drawn import DrawnSample, drawn_sample
from swift_grpo_ext.diversity.record import RecordFile, RoundRecord
from swift_grpo_ext.diversity.watch import RoundWatch, WatchSettings
from swift_grpo_ext.record.row import SampleRow

logger = get_logger()

GREEDY_TEMPERATURE = 1e-5
"""Below which vLLM decodes greedily (`_SAMPLING_EPS` in vllm/v1/sample/sampler.py)."""


@dataclass
class Told:
    """What the main rank tells all ranks."""

    scalars: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Phase and values to log, of each round."""

    stop: bool = False
    error: str | None = None


class DiversityMonitor(TrainerCallback):
    """See the module."""

    def __init__(self, args: Any, trainer: Any) -> None:
        """Hang onto the trainer, which is not ready yet: it has no accelerator.

        Raises:
            ValueError: the trainer is not our GRPO trainer.
        """
        super().__init__(args, trainer)
        if not hasattr(trainer, "sample_listeners"):
            raise ValueError(
                f"--callbacks diversity watches the rollouts of --rlhf_type grpo; this is a "
                f"{type(trainer).__name__}, which has none. Leave it out."
            )
        trainer.sample_listeners.append(self._collect)
        self._action = args.diversity_action
        self._inbox: deque[list[DrawnSample]] = deque()
        self._watch = RoundWatch(
            WatchSettings(
                alarm_p=args.diversity_alarm_p,
                patience=args.diversity_patience,
                is_greedy=args.temperature < GREEDY_TEMPERATURE,
                seed_mode=args.rollout_seed_mode,
            )
        )
        self._file: RecordFile | None = None
        self._num_alarms = {"broken": 0, "collapse": 0}
        self._alarming: dict[str, str] = {}

    # --- what ms-swift calls ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file = RecordFile(args.output_dir, start_step=state.global_step)
            if reason := self._untested_reason():
                logger.warning(
                    f"--callbacks diversity: {reason}, so that broken randomness cannot be told "
                    "from a collapsed policy; metrics are logged."
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(control)
        if any(self._num_alarms.values()):
            found = self._num_alarms
            logger.warning(
                f"diversity: {found['broken']} rounds of this session with broken randomness, "
                f"{found['collapse']} with a collapsed policy: `swift-grpo-ext report "
                f"{args.output_dir}` shows them."
            )

    # --- samples in ---

    def _collect(self, rows: Sequence[SampleRow]) -> None:
        self._inbox.append([self._with_replica(drawn_sample(row)) for row in rows])

    def _with_replica(self, sample: DrawnSample) -> DrawnSample:
        """ms-swift's own rollouts do not say which engine drew; in colocation the rank does."""
        args, rank = self.args, sample.origin.rank
        if sample.origin.replica or (args.use_vllm and args.vllm_mode == "server"):
            return sample
        size = args.vllm_tensor_parallel_size if args.use_vllm else 1
        origin = replace(sample.origin, replica=f"rank {rank - rank % size}")
        return replace(sample, origin=origin)

    def _drain(self) -> list[DrawnSample]:
        samples: list[DrawnSample] = []
        while self._inbox:
            samples += self._inbox.popleft()
        return samples

    # --- findings out ---

    def _look(self, control: Any) -> None:
        """Judge what was drawn since the last look; every rank calls it at the same time."""
        samples = self._gather(self._drain())
        error: Exception | None = None
        told = Told()
        if samples is not None:
            try:
                told = self._tell(self._watch.watch(samples))
            except Exception as e:  # not raised yet: the other ranks wait to be told
                error, told = e, Told(error=f"{type(e).__name__}: {e}")
        told = self._broadcast(told)
        if error:
            raise error
        if told.error:
            raise RuntimeError(f"--callbacks diversity failed on rank 0: {told.error}")
        for phase, scalars in told.scalars:
            metrics = self.trainer._metrics[phase]
            for name, value in scalars.items():
                metrics[name].append(value)
        if told.stop:
            # Saving comes before the loop looks whether to stop, at the end of this step.
            control.should_save = True
            control.should_training_stop = True

    def _tell(self, records: Iterable[RoundRecord]) -> Told:
        told = Told()
        for record in records:
            if self._file:
                self._file.append(record)
            told.scalars.append((record.phase, record.scalars()))
            self._sound(record)
            told.stop |= bool(record.alarm) and self._action == "stop"
        return told

    def _sound(self, record: RoundRecord) -> None:
        """Say an alarm once, until it has ended."""
        if record.alarm:
            self._num_alarms[record.verdict] += 1
            if self._action != "log" and self._alarming.get(record.phase) != record.verdict:
                logger.warning(f"{record.alarm} (Said once; see diversity.jsonl.)")
        self._alarming[record.phase] = record.verdict if record.alarm else ""

    def _untested_reason(self) -> str | None:
        if self.args.temperature < GREEDY_TEMPERATURE:
            return f"--temperature {self.args.temperature} decodes greedily"
        if not self.args.use_vllm:
            return "--use_vllm false gives no log-probabilities"
        return None

    @staticmethod
    def _gather(samples: list[DrawnSample]) -> list[DrawnSample] | None:
        """All ranks' samples, in the order of ranks, on the main rank; None on others."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return samples
        is_main = dist.get_rank() == 0
        shares: list[Any] | None = [None] * dist.get_world_size() if is_main else None
        dist.gather_object(samples, shares, dst=0)
        return None if shares is None else [sample for share in shares for sample in share]

    @staticmethod
    def _broadcast(told: Told) -> Told:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return told
        values = [told]
        dist.broadcast_object_list(values, src=0)
        return values[0]
