"""A round's samples on one rank, and the report of each rank that one gather brings together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swift.utils import get_logger

from swift_grpo_ext.sampling.prompt_hash import count_duplicates
from swift_grpo_ext.sampling.seeding import SampleId

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.rollout.sample import RolloutSample
    from swift_grpo_ext.training.gap import RoundGap

logger = get_logger()


@dataclass
class Round:
    """The samples of one rank that are about to be trained on."""

    samples: Sequence[RolloutSample]
    """Those that this rank generated, or was dealt by dynamic sampling."""

    micro_batches: Sequence[tuple[Sequence[RolloutSample], GRPOBatch]]
    """With sequence parallelism they hold other ranks' samples too."""

    values: Sequence[Sequence[float]] = ()
    """[samples][reward functions]."""

    @property
    def is_measured(self) -> bool:
        """Whether the log-probabilities of all micro-batches are known."""
        return all(batch.old_per_token_logps is not None for _, batch in self.micro_batches)


@dataclass(frozen=True)
class RoundReport:
    """Observations of one rank in a round, in plain values."""

    gap: RoundGap

    prompt_hashes: list[str] = field(default_factory=list)
    """Those of the groups that begin on this rank."""

    trained: list[SampleId] = field(default_factory=list)
    """The samples that this rank goes on with, with `--dynamic_sample true`."""

    sharing_failed: bool = False
    """A packed pass has changed log-probabilities (`logits/proof.py`)."""

    num_replayed: tuple[float, float] = (0.0, 0.0)
    """How many of the replayed choices of experts training would have made too, and how many there
    were (`--router_replay_mode R3`)."""


def warn_duplicates(reports: Sequence[RoundReport], sample: SampleId) -> None:
    """Warn once where the generation batch of `sample` holds a prompt twice (G4)."""
    hashes = [one for report in reports for one in report.prompt_hashes]
    if num_duplicates := count_duplicates(hashes):
        logger.warning_once(
            f"{sample.round}: {num_duplicates} of {len(hashes)} prompts of the generation batch "
            "stand in it twice, media included. Each is a group of its own, with its own noise.",
            hash_id="duplicates",
        )
