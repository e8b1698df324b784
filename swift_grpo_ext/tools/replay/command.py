"""Run the command `replay`, and show its result as text or as JSON.

Light to import: what generates is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from swift_grpo_ext.record.query import read_group
from swift_grpo_ext.tools.diff import Difference, compare_sample, find_decoder
from swift_grpo_ext.tools.harness import standard_output
from swift_grpo_ext.tools.replay.run import (
    check_samples,
    find_prompt,
    read_run,
    weights_of,
)
from swift_grpo_ext.tools.runs import find_run

if TYPE_CHECKING:
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

DIFFERENT = (
    "Tokens differ. Where the log-probabilities before them agree "
    "(to about 1e-5 in float32, 1e-2 in bfloat16), weights and prompt are the same, and kernels "
    "whose result depends on the batch have decided a near tie. Otherwise the sample saw other "
    "weights, another prompt, other media or settings. Neither record nor args.json holds "
    "environment variables (set MAX_PIXELS and the like as they were) or the settings of a server "
    "(give these with --set)."
)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A sample that was generated again."""

    name: str  # its `request_id`
    num_tokens: int  # in the record

    logprob_gap: float | None
    """The largest difference of log-probabilities before the first token that differs, in nats.
    It is near 0 where weights and prompt are the same; None where nothing can be compared."""

    difference: Difference | None  # the first token that differs: recorded, and generated again


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A group that was generated again, as `--json` prints it."""

    run_dir: str
    weights: str
    weight_version: int
    equal: bool  # all tokens of all samples
    samples: list[Replayed]
    notes: list[str]  # what may explain a difference, and what was left out


def run(options: argparse.Namespace) -> int:
    """Replay a group; return 0 where all tokens are equal, 1 where some differ.

    Raises:
        OSError, ValueError: the group cannot be generated; the message says why.
    """
    with standard_output() as out:
        replay = _replay(options)
        if options.json:
            print(json.dumps(asdict(replay), ensure_ascii=False, indent=2), file=out)
        else:
            show(replay, out)
    return 0 if replay.equal else 1


def _replay(options: argparse.Namespace) -> Replay:
    run = read_run(find_run(options.run_dir), dict(options.set))
    step, number = options.round
    recorded = read_group(
        run.folder, phase=options.phase, step=step, number=number, group=options.group
    )
    version = recorded[0].weight_version
    check_samples(recorded, run.settings)
    weights = weights_of(run, version)

    from swift_grpo_ext.tools.replay.engine import generate_again, with_trainer_of

    samples, notes = list[Replayed](), list[str]()
    firsts = [row for row in recorded if not row.sample_id.turn]
    if len(firsts) < len(recorded):
        notes.append("Later turns of conversations are not generated again.")

    def use(trainer: RolloutGRPOTrainer) -> None:
        data = trainer.train_dataset if options.phase == "train" else trainer.eval_dataset
        prompts = {
            fingerprint: find_prompt(row, data or (), run.settings)
            for fingerprint, row in {row.fingerprint: row for row in firsts}.items()
        }
        asked = [(row, prompts[row.fingerprint]) for row in firsts]
        for row, completion in zip(firsts, generate_again(trainer, asked), strict=True):
            logprobs = completion.logprobs
            before = {"token_ids": row.token_ids, "logprobs": row.logprobs}
            again = {
                "token_ids": [*map(int, completion.token_ids)],
                "logprobs": None if logprobs is None else [*map(float, logprobs)],
            }
            difference, gap = compare_sample(row.sample_id, before, again)
            name, num_tokens = row.sample_id.request_id, len(row.token_ids)
            samples.append(
                Replayed(name=name, num_tokens=num_tokens, logprob_gap=gap, difference=difference)
            )

    found = with_trainer_of(run, weights, use)
    equal = all(sample.difference is None for sample in samples)
    errors = [finding.sentence for finding in found if finding.level == "error"]
    return Replay(
        run_dir=str(run.folder),
        weights=" + ".join(weights),
        weight_version=version,
        equal=equal,
        samples=samples,
        notes=[*([] if equal else [DIFFERENT]), *notes, *errors],
    )


def show(replay: Replay, out: TextIO) -> None:
    """Print a line for each sample."""
    print(f"Generated again with {replay.weights}:", file=out)
    decoder = find_decoder(Path(replay.run_dir))
    for sample in replay.samples:
        gap = sample.logprob_gap
        within = "" if gap is None else f", log-probabilities within {gap:.1e} nats"
        result = "equal"
        if sample.difference is not None:
            told = sample.difference.describe(("in the record", "now"), (decoder, decoder))
            result = f"first difference, {told}"
        print(f"  {sample.name}: {sample.num_tokens} tokens{within}; {result}", file=out)
    num_equal = sum(sample.difference is None for sample in replay.samples)
    print(f"{num_equal} of {len(replay.samples)} samples have equal tokens.", file=out)
    for note in replay.notes:
        print(f"Note: {note}", file=out)
