"""A process of `swift-grpo-ext selftest`: builds the training of some settings, and checks it.

    python -m swift_grpo_ext.tools.selftest.worker JOB.json
    python -m swift_grpo_ext.tools.selftest.worker --settings ARGUMENTS OF swift rlhf

`run_with_trainer` is `swift rlhf` up to where it would train. Each result is a line of JSON,
written as soon as it is known: a process that is ended leaves what it has found. With `--settings`
it ends where a model would be loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from swift_grpo_ext.tools.selftest.result import Result, untried

BUDGET = "the budget was spent (--minutes)"
COMPARE, INVARIANT = "same tokens", "invariant kernels"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is to do."""

    argv: list[str]
    """Of `swift rlhf`."""

    checks: list[str]
    topology: str
    deadline: float
    """In seconds since 1970."""

    results: str
    """File for the results."""

    rounds: str
    """File with round 0: the first process writes it, others compare theirs with it."""


def main(path: Path) -> None:
    job = Job(**json.loads(path.read_text(encoding="utf-8")))

    def emit(result: Result) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            with Path(job.results).open("a", encoding="utf-8") as f:
                f.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")

    run_with_trainer(job.argv, partial(_check, job, emit))


def run_with_trainer(argv: Sequence[str], use: Callable[[Any], None]) -> None:
    """`swift rlhf ARGV`; `use` is given the trainer instead of training.

    Args:
        argv: the path of a YAML file may come first, as in `swift rlhf`.
    """
    from swift.cli.main import parse_yaml_args
    from swift.cli.utils import try_use_single_device_mode

    import swift_grpo_ext

    given = list(argv)
    parse_yaml_args(given)
    try_use_single_device_mode()
    swift_grpo_ext.register()
    from swift.pipelines.train.rlhf import SwiftRLHF

    class Selftest(SwiftRLHF):
        def train(self, trainer: Any) -> dict[str, Any]:
            use(trainer)
            return {}

    Selftest(given).main()


def take_settings(argv: Sequence[str]) -> None:
    """Parse and check arguments as `swift rlhf` does, without a server, which may not run yet."""
    import swift_grpo_ext

    swift_grpo_ext.register()
    from swift.pipelines.train.rlhf import SwiftRLHF
    from swift.utils import parse_args

    SwiftRLHF.args_class._init_external_vllm = lambda self: None
    parse_args(SwiftRLHF.args_class, list(argv))


def _check(job: Job, emit: Callable[[Result], None], trainer: Any) -> None:
    from swift_grpo_ext.tools.selftest.rig import Rig

    # What keeps a canary from being drawn keeps checks from it.
    if reason := trainer._reason_against_canary():
        for name in job.checks:
            emit(untried(reason, name=name, topology=job.topology))
        return
    rig = Rig(trainer, job.topology, job.deadline)
    run_checks(rig, job.checks, checks(Path(job.rounds)), emit)


Check = Callable[[Any], Result]


def checks(rounds: Path) -> Mapping[str, Check]:
    """All there are, the quick ones first."""
    from swift_grpo_ext.tools.selftest import costs, seeds, training

    def check_seeds(rig: Any) -> Result:
        seeds.save_round(rig, rounds)
        return seeds.check_seeds(rig)

    return {
        "prompts": training.check_prompts,
        "seeds": check_seeds,
        "stops": training.check_stops,
        "agreement": training.check_agreement,
        "batch invariance": seeds.check_invariance,
        "weights": costs.check_weights,
        "logits": costs.check_logits,
        "vision": costs.check_vision,
        "speed": costs.check_speed,
        COMPARE: lambda rig: seeds.check_same_tokens(rig, rounds),
        INVARIANT: seeds.check_invariant_kernels,
    }


ALL = (
    *("prompts", "seeds", "stops", "agreement", "batch invariance"),
    *("weights", "logits", "vision", "speed"),
)
"""The checks of the first topology."""


def run_checks(
    rig: Any, names: Sequence[str], known: Mapping[str, Check], emit: Callable[[Result], None]
) -> None:
    """Run checks in their order, as long as the budget lasts."""
    for name in names:
        start = time.perf_counter()
        result = untried(BUDGET) if rig.is_over else attempt(rig, known[name])
        seconds = round(time.perf_counter() - start, 1)
        emit(replace(result, name=name, topology=rig.topology, seconds=seconds))


def attempt(rig: Any, check: Check) -> Result:
    """A check's result; errors that say a promise is broken are one, others leave it open."""
    import torch

    from swift_grpo_ext.rollout.rank_group import RolloutError
    from swift_grpo_ext.training.agreement import DisagreementError
    from swift_grpo_ext.weights.checksums import WeightUpdateError

    try:
        return check(rig)
    except (WeightUpdateError, DisagreementError, RolloutError) as e:
        return Result(status="does not hold", reason=f"{type(e).__name__}: {e}")
    except torch.OutOfMemoryError as e:
        remedy = "Make --vllm_gpu_memory_utilization smaller, or set --sleep_level 1."
        return untried(f"no memory is left: {str(e).splitlines()[0]}", remedy)
    except Exception as e:  # the other checks still have something to say
        return untried(f"the check itself failed ({type(e).__name__}: {e})", "Report it.")


if __name__ == "__main__":
    if sys.argv[1] == "--settings":
        take_settings(sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
