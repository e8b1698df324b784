"""Logs one line at the start of a training and one at its end, also if it fails."""

from __future__ import annotations

from collections import Counter
from math import isinf
from statistics import fmean
from typing import TYPE_CHECKING

from swift.utils import get_logger

from swift_grpo_ext.record.recorder import view_command
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.training.gap import sampling_shift
from swift_grpo_ext.version import __version__

if TYPE_CHECKING:
    from swift_grpo_ext.training.rollouts import RolloutTraining

logger = get_logger()


class RunSummary:
    """Logs both lines on rank 0."""

    def __init__(self, trainer: RolloutTraining, num_dropouts: int) -> None:
        self._trainer = trainer
        self._num_dropouts = num_dropouts  # dropouts that were set to 0
        self._rounds: set[RoundId] = set()
        trainer.score_listeners.append(
            lambda rows: self._rounds.update(row.sample_id.round for row in rows)
        )

    def begin(self) -> None:
        if self._trainer.ranks.rank == 0:
            view = view_command(self._trainer.args.output_dir)
            states = "; ".join(active_features(self._trainer, self._num_dropouts))
            logger.info(f"swift-grpo-ext {__version__}: {states}. Look at it meanwhile: {view}")

    def end(self) -> None:
        # Without a round, the training failed at its start; its error is enough.
        if self._trainer.ranks.rank or not self._rounds:
            return
        logs, args = self._trainer.state.log_history, self._trainer.args
        numbers = Counter(name.phase for name in self._rounds)
        found = [f"{numbers['train']} rounds of training, {numbers['eval']} of evaluation"]
        if gaps := [log for log in logs if "rollout_gap/mean" in log]:
            mean = fmean(gap["rollout_gap/mean"] for gap in gaps)
            most = max(gap["rollout_gap/max"] for gap in gaps)
            known = f"rounding explains {self._trainer.gap_limit:.2g}"
            found.append(f"a rollout gap of {mean:.2g} nats ({known}), {most:.2g} at most")
        if "diversity" in args.callbacks:
            kinds = ("diversity/broken", "diversity/collapse")
            steps = [log["step"] for log in logs if any(log.get(kind) for kind in kinds)]
            found.append(
                f"alarms of diversity at {len(steps)} steps, from step {min(steps)} on"
                if steps
                else "no alarm of diversity"
            )
        logger.info(f"Seen by swift-grpo-ext: {'; '.join(found)}.")


def active_features(trainer: RolloutTraining, num_dropouts: int) -> list[str]:
    """Describe which of the plugin's features are on."""
    args, shares = trainer.args, trainer.completion_logps.shares_prompts
    is_seeded = args.use_vllm and args.rollout_seed_mode == "sample"
    read = "once a group where that saves time" if shares else "for each sample"
    watches = "diversity" in args.callbacks
    return [
        "a seed for each sample" if is_seeded else "ms-swift's own seeds and requests",
        f"training reads prompts {read}",
        *(() if trainer.needs_old_logps() else ["the loss's pass serves as the old policy's"]),
        *([f"{num_dropouts} dropouts are off (--lora_dropout is ignored)"] if num_dropouts else ()),
        f"the rollout gap is {'measured' if isinf(sampling_shift(args)) else 'held to a limit'}",
        "diversity is watched" if watches else "diversity is not watched (--callbacks diversity)",
        "no record" if args.sample_log == "none" else "samples are recorded",
    ]
