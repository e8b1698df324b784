"""A process of `swift-grpo-ext selftest`: build the training of some settings, and check it.

    python -m swift_grpo_ext.tools.selftest.worker JOB_AS_JSON

Each result is a line of JSON, written as soon as it is known: a process that is ended leaves what
it has.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.tools.harness import with_trainer
from swift_grpo_ext.tools.selftest.outcome import (
    ALL,
    REMEDIES,
    REPORT,
    SAME_TOKENS,
    NotTriedError,
    Result,
)

if TYPE_CHECKING:
    from swift_grpo_ext.tools.selftest.checks import Check
    from swift_grpo_ext.tools.selftest.rig import Rig
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process."""

    topology: str
    """The topology in words, as results name it."""

    argv: list[str]
    """The arguments of `swift rlhf`."""

    checks: list[str]
    results: str
    """The file for results."""

    first_round: str
    """The file with round 0: the first topology saves it, others compare theirs with it."""

    ranks: int = 1


def check_all(job: Job, trainer: RolloutGRPOTrainer) -> None:
    """Run the job's checks, and append the results to its file."""
    from swift_grpo_ext.tools.selftest.checks import CHECKS, check_same_tokens
    from swift_grpo_ext.tools.selftest.rig import Rig, reason_against

    reason = reason_against(trainer)
    rig = None if reason else Rig(trainer)
    first_round = Path(job.first_round)
    if rig is not None and job.checks == ALL:
        samples = pickle.dumps(rig.first_round)  # all ranks generate it
        if trainer.ranks.rank == 0:
            first_round.write_bytes(samples)
    checks: dict[str, Check] = {**CHECKS, SAME_TOKENS: partial(check_same_tokens, path=first_round)}
    for name in job.checks:
        result = attempt(rig, name, checks[name]) if rig else Result(check=name, reason=reason)
        if trainer.ranks.rank == 0:
            with Path(job.results).open("a", encoding="utf-8") as f:
                values = asdict(replace(result, topology=job.topology))
                f.write(json.dumps(values, ensure_ascii=False) + "\n")


def attempt(rig: Rig, name: str, check: Check) -> Result:
    """Run a check. Errors that say that a promise is broken are a result; others leave it open."""
    from swift_grpo_ext.ranks import RolloutError
    from swift_grpo_ext.training.group import DisagreementError
    from swift_grpo_ext.weights.update import WeightUpdateError

    values: dict[str, Any] = {}
    try:
        values, faults = check(rig)
    except (WeightUpdateError, DisagreementError, RolloutError) as e:
        faults = [f"{type(e).__name__}: {e}"]
    except NotTriedError as e:
        return Result(check=name, reason=str(e))
    except Exception as e:  # the other checks still have something to say
        reason = f"the check itself failed ({type(e).__name__}: {e})"
        return Result(check=name, reason=reason, remedy="Report it.")
    if not faults:
        return Result(check=name, status="holds", values=values)
    return Result(
        check=name,
        status="does not hold",
        values=values,
        reason="; ".join(faults),
        remedy=REMEDIES.get(name, REPORT),
    )


if __name__ == "__main__":
    job = Job(**json.loads(sys.argv[1]))
    with_trainer(job.argv, partial(check_all, job))
