"""Run the command `replay`, and show its result as a table or as JSON.

Light to import: what generates is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.record.query import read_group
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.diff import Difference, compare_sample, find_decoder, has_later_turns
from swift_grpo_ext.tools.replay.run import (
    Drawn,
    LeftOutError,
    check_samples,
    find_prompt,
    next_prompt,
    read_run,
    weights_of,
)
from swift_grpo_ext.tools.runs import find_run
from swift_grpo_ext.tools.streams import redirected

if TYPE_CHECKING:
    from swift_grpo_ext.rollout.wire import Completion
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

DIFFERENT = (
    "Tokens differ. Where the log-probabilities before them agree "
    "(to about 1e-5 in float32, 1e-2 in bfloat16), weights and prompt are the same, and kernels "
    "whose result depends on the batch have decided a near tie. Otherwise the sample saw other "
    "weights, another prompt, other media or settings. Neither log nor args.json holds environment "
    "variables (set MAX_PIXELS and the like as they were) or what only a server was told (give it "
    "with --set)."
)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A sample that was generated again."""

    name: str
    """Its `request_id`; of a conversation, with the turn."""

    num_tokens: int
    """As the log has it."""

    logprob_gap: float | None
    """The largest difference of log-probabilities before the first token that differs, in nats.
    It is near 0 where weights and prompt are the same; None where nothing can be compared."""

    difference: Difference | None
    """The first token that differs, in the log and generated again; None for equal ones."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A group that was generated again, as `--json` prints it."""

    run_dir: str
    weights: str
    weight_version: int
    equal: bool
    """All tokens of all samples are equal."""

    samples: list[Replayed]
    notes: list[str]
    """Hints at what may explain a difference, or was left out."""


def run(options: argparse.Namespace) -> int:
    """Replay a group; return 0 where all tokens are equal, 1 where some differ.

    Raises:
        OSError, ValueError: the group cannot be generated; the message says why.
    """
    with redirected(1, to=2):  # standard output is for the result
        replay = _replay(options)
    if options.json:
        print(json.dumps(asdict(replay), ensure_ascii=False, indent=2))
    else:
        show(replay)
    return 0 if replay.equal else 1


def _replay(options: argparse.Namespace) -> Replay:
    run = read_run(find_run(options.run_dir), dict(options.set))
    step, number = options.round
    logged = read_group(
        run.folder, phase=options.phase, step=step, number=number, group=options.group
    )
    drawn = [Drawn(row.sample_id, row.seed, row.weight_version) for row in logged]
    check_samples(drawn, run.settings)
    weights = weights_of(run, logged[0].weight_version)

    # They load ms-swift.
    from swift_grpo_ext.tools.replay.engine import (
        generate_again,
        request_columns,
        with_trainer_of,
    )

    has_turns = has_later_turns(logged)
    samples, notes = list[Replayed](), list[str]()

    def use(trainer: RolloutGRPOTrainer) -> None:
        data = trainer.train_dataset if options.phase == "train" else trainer.eval_dataset
        firsts = {row.fingerprint: row for row in logged if row.sample_id.turn == 0}
        prompts = {
            fingerprint: find_prompt(row, data or (), run.settings)
            for fingerprint, row in firsts.items()
        }
        asked, left_out = _later_prompts(logged, prompts, request_columns)
        notes.extend(left_out)
        completions = generate_again(trainer, asked)
        for (row, _), completion in zip(asked, completions, strict=True):
            samples.append(_replayed(row, completion, has_turns=has_turns))

    found = with_trainer_of(run, weights, use)
    equal = all(sample.difference is None for sample in samples)
    said = [finding.sentence for finding in found if finding.level == "error"]
    return Replay(
        run_dir=str(run.folder),
        weights=" + ".join(weights),
        weight_version=logged[0].weight_version,
        equal=equal,
        samples=samples,
        notes=[*([] if equal else [DIFFERENT]), *notes, *said],
    )


def _replayed(row: SampleRow, completion: Completion, *, has_turns: bool) -> Replayed:
    """Hold what was generated again against a sample."""
    logprobs = completion.logprobs
    again = replace(
        row,
        token_ids=[int(token_id) for token_id in completion.token_ids],
        logprobs=None if logprobs is None else [float(logprob) for logprob in logprobs],
    )
    difference, gap = compare_sample(row, again, has_turns=has_turns)
    turn = f" turn {row.sample_id.turn + 1}" if has_turns else ""
    return Replayed(
        name=f"{row.sample_id.request_id}{turn}",
        num_tokens=len(row.token_ids),
        logprob_gap=gap,
        difference=difference,
    )


def _later_prompts(
    logged: Sequence[SampleRow],
    prompts: Mapping[str, dict[str, Any]],
    request_columns: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> tuple[list[tuple[SampleRow, dict[str, Any]]], list[str]]:
    """Return the turns that can be generated again with their prompts, and notes of the others.

    Args:
        prompts: of first turns, by fingerprint.
        request_columns: gives the columns of a row in the form in which a scheduler has them.
    """
    asked: list[tuple[SampleRow, dict[str, Any]]] = []
    notes = []
    for _, turns in groupby(logged, key=lambda row: row.sample_id.index):
        first, *later = turns
        asked.append((first, prompts[first.fingerprint]))
        columns, before = request_columns(prompts[first.fingerprint]), first
        for row in later:
            name = f"{row.sample_id.request_id} turn {row.sample_id.turn + 1}"
            if not row.token_ids:
                notes.append(f"{name} is left out: it has no answer.")
                break
            try:
                columns = next_prompt(columns, before, row)
            except LeftOutError as e:
                rest = " (and those after it)" if row is not later[-1] else ""
                notes.append(f"{name}{rest} is left out: {e}.")
                break
            asked.append((row, columns))
            before = row
    return asked, notes


def show(replay: Replay) -> None:
    """Print a line for each sample."""
    print(f"Generated again with {replay.weights}:")
    decoder = find_decoder(Path(replay.run_dir))
    for sample in replay.samples:
        gap = sample.logprob_gap
        within = "" if gap is None else f", log-probabilities within {gap:.1e} nats"
        result = "equal"
        if sample.difference is not None:
            told = sample.difference.describe(("in the log", "now"), (decoder, decoder))
            result = f"first difference, {told}"
        print(f"  {sample.name}: {sample.num_tokens} tokens{within}; {result}")
    num_equal = sum(sample.difference is None for sample in replay.samples)
    print(f"{num_equal} of {len(replay.samples)} samples have equal tokens.")
    for note in replay.notes:
        print(f"Note: {note}")
