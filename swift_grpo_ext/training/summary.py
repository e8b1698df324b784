"""A training's log has one line of this plugin as it begins, and one block as it ends.

The block comes from a training that fails, too: what it has seen is where to look first. Between
them, rounds that train nothing are said once: a loss of 0 looks like rest, or like success.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isinf
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from swift.utils import get_logger

from swift_grpo_ext.checks.finding import Finding, warning
from swift_grpo_ext.record.recorder import view_command
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.timing.advice import summary
from swift_grpo_ext.training.gap import sampling_shift
from swift_grpo_ext.version import __version__

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOConfig, GRPOTrainer

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.logits.logps import CompletionLogps
    from swift_grpo_ext.media.encoder_cache import EncoderCache
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

logger = get_logger()

Reason = Literal["", "masked", "cut", "equal"]

ROUNDS = 3
"""So many rounds in a row must train nothing."""

GROUPS = 50
"""Rewards must be equal within so many groups in a row, too. Groups of equal rewards are common
where prompts are easy: where nine of ten are, 50 follow one another by chance in 0.5% of cases."""


class RunSummary:
    """Rank 0's line and block; the trainer calls `begin` and `end` around a training."""

    def __init__(self, trainer: RolloutGRPOTrainer, states: Sequence[str], limit: float) -> None:
        """Listen to the trainer's scores.

        Args:
            states: what is on, and what is off and why (`what_is_on`).
            limit: the mean rollout gap, in nats, that rounding explains.
        """
        self._trainer, self._states, self._limit = trainer, states, limit
        self._rounds: set[RoundId] = set()
        trainer.score_listeners.append(
            lambda rows: self._rounds.update(row.sample_id.round for row in rows)
        )

    def begin(self) -> None:
        """Say what is on, and how to look at the run."""
        if self._trainer.ranks.rank == 0:
            view = view_command(self._trainer.args.output_dir)
            states = "; ".join(self._states)
            logger.info(f"swift-grpo-ext {__version__}: {states}. Look at it meanwhile: {view}")

    def end(self) -> None:
        """Say what was seen, and what would be faster."""
        # Without a round the training has failed at its start, and its error says all.
        if self._trainer.ranks.rank or not self._rounds:
            return
        logs, args = self._trainer.state.log_history, self._trainer.args
        numbers = Counter(name.phase for name in self._rounds)
        found = [f"{numbers['train']} rounds of training, {numbers['eval']} of evaluation"]
        if gaps := [log for log in logs if "rollout_gap/mean" in log]:
            mean = fmean(gap["rollout_gap/mean"] for gap in gaps)
            most = max(gap["rollout_gap/max"] for gap in gaps)
            known = f"rounding explains {self._limit:.2g}"
            found.append(f"a rollout gap of {mean:.2g} nats ({known}), {most:.2g} at most")
        if "diversity" in args.callbacks:
            kinds = ("diversity/broken", "diversity/collapse")
            steps = [log["step"] for log in logs if any(log.get(kind) for kind in kinds)]
            found.append(
                f"alarms of diversity at {len(steps)} steps, from step {min(steps)} on"
                if steps
                else "no alarm of diversity"
            )
        seen = f"Seen by swift-grpo-ext: {'; '.join(found)}."
        logger.info(f"{seen}\n{summary(logs, vars(args))}".strip())


def what_is_on(
    args: RolloutGRPOConfig,
    logps: CompletionLogps,
    encoder: EncoderCache,
    num_dropouts: int,
) -> list[str]:
    """Say what the plugin does in a training."""
    is_seeded = args.use_vllm and args.rollout_seed_mode == "sample"
    read = "once a group where that saves time" if logps.shares_prompts else "for each sample"
    towers = dict.fromkeys(tower.name for tower in encoder.towers)
    watches = "diversity" in args.callbacks
    return [
        "a seed for each sample" if is_seeded else "ms-swift's own seeds and requests",
        f"training reads prompts {read}",
        *(f"{name} encodes each image once" for name in towers),
        *([f"{num_dropouts} dropouts are off (--lora_dropout is ignored)"] if num_dropouts else ()),
        f"the rollout gap is {'measured' if isinf(sampling_shift(args)) else 'held to a limit'}",
        "diversity is watched" if watches else "diversity is not watched (--callbacks diversity)",
        "no record" if args.sample_log == "none" else "samples are recorded",
    ]


# --- rounds that train nothing ---


def idle_reason(metrics: Mapping[str, float], args: GRPOConfig, *, is_multi_turn: bool) -> Reason:
    """Return why a round trains nothing; "" where it trains something.

    Args:
        metrics: of the round, by ms-swift's names. They are those of all ranks.
        is_multi_turn: whether a conversation makes several samples. ms-swift then counts as cut
            those of the last turn alone.
    """
    if metrics.get("completions/max_length") == 0:  # of tokens that count (`completion_mask`)
        return "masked"
    is_cut = metrics.get("completions/clipped_ratio") == 1 and not is_multi_turn
    if args.overlong_filter and is_cut:
        return "cut"
    # `gdpo` scales each function for itself: parts may differ where sums are equal.
    is_equal = metrics.get("frac_reward_zero_std") == 1 and args.scale_rewards != "gdpo"
    return "equal" if is_equal else ""


class IdleRounds:
    """Counts a training's rounds that train nothing, and warns once for each reason."""

    def __init__(self) -> None:
        self._reason: Reason = ""
        self._num_rounds = 0
        self._said: set[Reason] = set()

    def judge(self, trainer: GRPOTrainer) -> None:
        """Look at the training round that `trainer` has just scored; the same on each rank."""
        # A teacher (ms-swift 4.6) and CHORD's answers are learned from whatever rewards are.
        has_teacher = getattr(trainer, "_has_teacher", False)
        if has_teacher or getattr(trainer, "chord_sft_iterator", None) is not None:
            return
        args = trainer.args
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
        reason = idle_reason(metrics, args, is_multi_turn=trainer.dynamic_num_samples)
        self._num_rounds = self._num_rounds + 1 if reason == self._reason else 1
        self._reason = reason
        groups = args.generation_batch_size // args.num_generations * self._num_rounds
        is_long = self._num_rounds >= ROUNDS and (reason != "equal" or groups >= GROUPS)
        if reason and is_long and reason not in self._said:
            self._said.add(reason)
            found = _finding(reason, metrics, args, f"{self._num_rounds} rounds in a row")
            logger.warning(found.sentence)


def _finding(
    reason: Reason, metrics: Mapping[str, float], args: GRPOConfig, rounds: str
) -> Finding:
    if reason == "masked":
        return warning(
            "loss_scale",
            f"in {rounds} no token of any completion counts: the loss is 0, and nothing is "
            "trained.",
            "See which tokens it leaves, and a scheduler's `response_loss_mask`.",
        )
    if reason == "cut":
        return warning(
            "overlong_filter true",
            f"all completions of {rounds} were cut at --max_completion_length "
            f"{args.max_completion_length}, and cut ones are left out: the loss is 0, and nothing "
            "is trained.",
            "Raise --max_completion_length, or leave --overlong_filter out.",
        )
    what = "nothing but the KL term of --beta" if args.beta else "nothing"
    return warning(
        "reward_funcs",
        f"in {rounds} all rewards of each group are equal ({metrics.get('reward', 0):g} in the "
        f"last round's mean): advantages are 0, and {what} is trained.",
        "`swift-grpo-ext view` shows completions beside their rewards; --dynamic_sample true draws "
        "other prompts where these are too easy or too hard.",
    )
