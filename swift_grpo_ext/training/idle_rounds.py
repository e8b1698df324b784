"""Rounds that train nothing are said once: a loss of 0 looks like rest, or like success."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from swift.utils import get_logger

from swift_grpo_ext.checks.finding import Finding, warning

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOConfig, GRPOTrainer

logger = get_logger()

Reason = Literal["", "masked", "cut", "equal"]

ROUNDS = 3
"""So many rounds in a row must train nothing."""

GROUPS = 50
"""Rewards must be equal within so many groups in a row, too. Groups of equal rewards are common
where prompts are easy: where nine of ten are, 50 follow one another by chance in 0.5% of cases."""


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
        "anew where prompts are too easy or too hard.",
    )
