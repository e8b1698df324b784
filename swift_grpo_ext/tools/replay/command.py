"""Run the command `replay`, and show its result as a table or as JSON.

Light to import: what generates is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from swift_grpo_ext.record.reader import read_group
from swift_grpo_ext.tools.replay.compare import Comparison, Token, compare
from swift_grpo_ext.tools.replay.run import find_prompt, first_turns, read_run, weights_of

DIFFERENT = (
    "Tokens differ. Where the log-probabilities before the difference agree (to about 1e-5 in "
    "float32, 1e-2 in bfloat16), weights and prompt are the same, and kernels whose result depends "
    "on the batch have decided a near tie. Otherwise the sample saw other weights, another prompt, "
    "other media or settings. Neither log nor args.json holds environment variables (set "
    "MAX_PIXELS and the like as they were) or what only a server was told (give it with --set)."
)


def round_name(text: str) -> tuple[int, int]:
    """Parse the step and the number of a round."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a step and a number, such as 12.0")
    return int(match[1]), int(match[2] or 0)


def setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value is JSON or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A group that was generated again, as `--json` prints it."""

    run_dir: str
    weights: str
    weight_version: int
    equal: bool
    """All tokens of all samples are equal."""

    samples: list[Comparison]
    notes: list[str]
    """Hints at what may explain a difference, or was left out."""


def run(options: argparse.Namespace) -> int:
    """Replay a group; return 0 where all tokens are equal, 1 where some differ.

    Raises:
        OSError, ValueError: the group cannot be generated; the message says why.
    """
    with _output_on_stderr():
        replay = _replay(options)
    if options.json:
        print(json.dumps(asdict(replay), ensure_ascii=False, indent=2))
    else:
        show(replay)
    return 0 if replay.equal else 1


def _replay(options: argparse.Namespace) -> Replay:
    run = read_run(options.run_dir, dict(options.set))
    step, number = options.round
    logged = read_group(
        options.run_dir, phase=options.phase, step=step, number=number, group=options.group
    )
    rows = first_turns(logged, run.settings)
    weights = weights_of(run, rows[0].weight_version)

    from swift_grpo_ext.tools.replay.engine import base_arguments, generate_again  # loads vLLM

    train, evaluated = base_arguments(run.settings, run.settings["model"]).load_dataset()
    data = train if options.phase == "train" else evaluated
    prompts = {
        row.fingerprint: find_prompt(row, data or (), run.settings)
        for row in {row.fingerprint: row for row in rows}.values()
    }
    completions, decode = generate_again(run, weights, prompts, rows)
    samples = [
        compare(row, list(c.token_ids), c.logprobs, lambda token_id: decode([token_id]))
        for row, c in zip(rows, completions, strict=True)
    ]
    equal = all(sample.position is None for sample in samples)
    notes = [] if equal else [DIFFERENT]
    if len(logged) > len(rows):
        notes.append(
            f"{len(logged) - len(rows)} later turns of these conversations are left out: their "
            "prompts hold answers of the scheduler or its tools, which the log lacks."
        )
    return Replay(
        run_dir=str(options.run_dir),
        weights=" + ".join(weights),
        weight_version=rows[0].weight_version,
        equal=equal,
        samples=samples,
        notes=notes,
    )


@contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Keep standard output for the result: ms-swift and vLLM write their progress to it."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def show(replay: Replay) -> None:
    """Print a line for each sample."""
    print(f"Generated again with {replay.weights}:")
    for sample in replay.samples:
        gap = sample.logprob_gap
        within = "" if gap is None else f" (log-probabilities within {gap:.1e} nats)"
        result = f"{sample.num_logged} tokens, equal{within}"
        if sample.position is not None:
            result = (
                f"{sample.num_logged} tokens, {sample.num_generated} generated; equal before "
                f"position {sample.position}{within}, where the log has {_words(sample.logged)} "
                f"and the replay {_words(sample.generated)}"
            )
        print(f"  {sample.name}: {result}")
    num_equal = sum(sample.position is None for sample in replay.samples)
    print(f"{num_equal} of {len(replay.samples)} samples have equal tokens.")
    for note in replay.notes:
        print(f"Note: {note}")


def _words(token: Token | None) -> str:
    if token is None:
        return "ended"
    logprob = "" if token.logprob is None else f" {token.logprob:.3f}"
    return f"{token.text!r} ({token.token_id}){logprob}"
