"""The command: which group, drawn again, shown as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from swift_grpo_ext.record.reader import read_group
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.replay.compare import Comparison, Difference, Token, Tokens, compare
from swift_grpo_ext.replay.prompts import (
    began,
    check_media,
    lack_of_prompt,
    prompt_from_log,
    prompt_from_rows,
)
from swift_grpo_ext.replay.run import (
    ReplayError,
    Run,
    check_settings,
    first_turns,
    later_turns_note,
    read_run,
    weights_of,
)
from swift_grpo_ext.sampling.groups import describe, request_id

Decode = Callable[[int], str]

DIFFERENT = (
    "Tokens differ. Where the log-probabilities before the difference agree (to about 1e-5 in "
    "float32, 1e-2 in bfloat16), weights and prompt are the same, and rounding has decided between "
    "two tokens that tied but for their noise: kernels of GPUs whose result depends on the batch "
    "do that. Where they do not agree, the sample saw other weights, another prompt or other "
    "settings. Neither log nor args.json holds environment variables (MAX_PIXELS and the like: set "
    "them as they were), the data set's column `chat_template_kwargs`, or what only a server was "
    "told (give it with --set)."
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A group that was drawn again."""

    run_dir: str
    weights: str
    weight_version: int
    samples: list[Comparison]
    notes: list[str]
    """What may explain a difference, or was left out."""

    decode: Decode
    """The text of one token."""

    @property
    def is_equal(self) -> bool:
        return all(sample.is_equal for sample in self.samples)


def run(options: argparse.Namespace) -> int:
    """Replay a group; returns 0 where all tokens are equal, 1 where some differ or none could be
    drawn."""
    try:
        with _output_on_stderr():
            replay = _replay(options)
    except (OSError, ValueError) as e:
        print(f"swift-grpo-ext replay: {e}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(as_json(replay), ensure_ascii=False, indent=2))
    else:
        show(replay)
    return 0 if replay.is_equal else 1


def _replay(options: argparse.Namespace) -> Replay:
    step, number = options.round
    run = read_run(options.run_dir, dict(options.set))
    check_settings(run.settings)
    logged = read_group(
        options.run_dir, phase=options.phase, step=step, number=number, group=options.group
    )
    rows = first_turns(logged, run.settings)
    version = rows[0].weight_version
    weights = weights_of(run, version)
    prompts = {row.fingerprint: row for row in rows}
    found = {name: _prompt(run, row, options.phase) for name, row in prompts.items()}
    notes = [note for prompt in found.values() for note in check_media(prompt, began(run))]

    from swift_grpo_ext.replay.draw import draw_again  # vLLM

    drawn, tokenizer = draw_again(run, weights, found, rows)
    comparisons = [_compare(row, tokens) for row, tokens in zip(rows, drawn, strict=True)]
    if not all(comparison.is_equal for comparison in comparisons):
        notes.append(DIFFERENT)
    return Replay(
        run_dir=str(options.run_dir),
        weights=str(weights),
        weight_version=version,
        samples=comparisons,
        notes=[*notes, *filter(None, [later_turns_note(logged)])],
        decode=lambda token_id: str(tokenizer.decode([token_id])),
    )


def _prompt(run: Run, row: SampleRow, phase: str) -> Mapping[str, Any]:
    prompt = prompt_from_log(row)
    if prompt is None:
        from swift_grpo_ext.replay.draw import data_rows  # ms-swift

        prompt = prompt_from_rows(row, data_rows(run.settings, phase))
    if prompt is None:
        raise ReplayError(lack_of_prompt(row, run.settings))
    return prompt


def _compare(row: SampleRow, drawn: Tokens) -> Comparison:
    assert row.seed is not None
    return compare(
        row.sample_id, row.seed, Tokens(token_ids=row.token_ids, logprobs=row.logprobs), drawn
    )


@contextmanager
def _output_on_stderr() -> Iterator[None]:
    """ms-swift and vLLM write their progress to standard output, which is for the result."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def as_json(replay: Replay) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "run_dir": replay.run_dir,
        "weights": replay.weights,
        "weight_version": replay.weight_version,
        "equal": replay.is_equal,
        "samples": [_sample_json(sample, replay.decode) for sample in replay.samples],
        "notes": replay.notes,
    }


def _sample_json(sample: Comparison, decode: Decode) -> dict[str, Any]:
    difference = sample.difference
    return {
        "name": request_id(sample.sample_id),
        "seed": sample.seed,
        "equal": sample.is_equal,
        "num_logged": sample.num_logged,
        "num_drawn": sample.num_drawn,
        "logprob_gap": sample.logprob_gap,
        "difference": None
        if difference is None
        else {
            "position": difference.position,
            "logged": _token_json(difference.logged, decode),
            "drawn": _token_json(difference.drawn, decode),
            "probability_gap": difference.probability_gap,
        },
    }


def _token_json(token: Token | None, decode: Decode) -> dict[str, Any] | None:
    return None if token is None else {**asdict(token), "text": decode(token.token_id)}


def show(replay: Replay) -> None:
    """Print a table: for each sample, equal or where it differs."""
    from rich.console import Console
    from rich.table import Table

    first = replay.samples[0].sample_id
    table = Table(
        title=f"{describe(first).rpartition(',')[0]}, drawn again with {replay.weights}",
        caption="gap before: the largest difference of log-probabilities, in nats, before tokens "
        "differ; gap of p: of the two tokens' probabilities",
    )
    for column in ("sample", "tokens", "gap before", "differ at", "logged", "drawn", "gap of p"):
        table.add_column(column, justify="left" if column in ("logged", "drawn") else "right")
    for sample in replay.samples:
        table.add_row(*_cells(sample, replay.decode))
    console = Console(highlight=False, markup=False)
    console.print(table)
    num_equal = sum(sample.is_equal for sample in replay.samples)
    console.print(f"{num_equal} of {len(replay.samples)} samples have equal tokens.")
    for note in replay.notes:
        console.print(f"Note: {note}")


def _cells(sample: Comparison, decode: Decode) -> Sequence[str]:
    gap = "" if sample.logprob_gap is None else f"{sample.logprob_gap:.1e}"
    lengths = str(sample.num_logged)
    if sample.num_drawn != sample.num_logged:
        lengths += f" / {sample.num_drawn}"
    return (
        str(sample.sample_id.index),
        lengths,
        gap,
        *_difference_cells(sample.difference, decode),
    )


def _difference_cells(difference: Difference | None, decode: Decode) -> Sequence[str]:
    if difference is None:
        return ("nowhere", "", "", "")
    gap = difference.probability_gap
    return (
        str(difference.position),
        _token_cell(difference.logged, decode),
        _token_cell(difference.drawn, decode),
        "" if gap is None else f"{gap:.3g}",
    )


def _token_cell(token: Token | None, decode: Decode) -> str:
    if token is None:
        return "(ended)"
    logprob = "" if token.logprob is None else f" {token.logprob:.3f}"
    return f"{decode(token.token_id)!r} ({token.token_id}){logprob}"
