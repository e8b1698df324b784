"""What the command does, and its result as a table or as JSON.

Light to import: what draws is imported when the command runs.
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

from swift_grpo_ext.tools.replay.compare import Comparison, Token, compare

DIFFERENT = (
    "Tokens differ. Look at the log-probabilities before the difference. If they agree (to about "
    "1e-5 in float32, 1e-2 in bfloat16), weights and prompt are the same, and rounding has decided "
    "between two tokens that tied but for their noise: kernels of GPUs whose result depends on the "
    "batch do that. If not, the sample saw other weights, another prompt or other settings. "
    "Neither log nor args.json holds environment variables (set MAX_PIXELS and the like as they "
    "were), the data set's column `chat_template_kwargs`, or what only a server was told (give it "
    "with --set)."
)


def round_name(text: str) -> tuple[int, int]:
    """Step and number of a round."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a step and a number, such as 12.0")
    return int(match[1]), int(match[2] or 0)


def setting(text: str) -> tuple[str, Any]:
    """A name, and a value that is JSON or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A group that was drawn again: what `--json` prints."""

    run_dir: str
    weights: str
    weight_version: int
    equal: bool
    """Whether all tokens of all samples are equal."""

    samples: list[Comparison]
    notes: list[str]
    """What may explain a difference, or was left out."""


def run(options: argparse.Namespace) -> int:
    """Replay a group; returns 0 where all tokens are equal, 1 where some differ.

    Raises:
        OSError, ValueError: the group cannot be drawn; says why.
    """
    with _output_on_stderr():
        replay = _replay(options)
    if options.json:
        print(json.dumps(asdict(replay), ensure_ascii=False, indent=2))
    else:
        show(replay)
    return 0 if replay.equal else 1


def _replay(options: argparse.Namespace) -> Replay:
    from swift_grpo_ext.record.reader import read_group
    from swift_grpo_ext.tools.replay import prompts
    from swift_grpo_ext.tools.replay.run import ReplayError, first_turns, read_run, weights_of

    run = read_run(options.run_dir, dict(options.set))
    step, number = options.round
    logged = read_group(
        options.run_dir, phase=options.phase, step=step, number=number, group=options.group
    )
    rows = first_turns(logged, run.settings)
    weights = weights_of(run, rows[0].weight_version)
    found: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for row in {row.fingerprint: row for row in rows}.values():
        prompt = prompts.prompt_from_log(row)
        if prompt is None:
            from swift_grpo_ext.tools.replay.draw import data_rows  # ms-swift

            prompt = prompts.prompt_from_rows(row, data_rows(run.settings, options.phase))
        if prompt is None:
            raise ReplayError(prompts.lack_of_prompt(row, run.settings))
        found[row.fingerprint] = prompt
        notes += prompts.check_media(prompt, prompts.start_time(run))

    from swift_grpo_ext.tools.replay.draw import draw_again  # vLLM

    drawn, tokenizer = draw_again(run, weights, found, rows)
    samples = [
        compare(row, token_ids, logprobs, lambda token_id: str(tokenizer.decode([token_id])))
        for row, (token_ids, logprobs) in zip(rows, drawn, strict=True)
    ]
    equal = all(sample.equal for sample in samples)
    if not equal:
        notes.append(DIFFERENT)
    if len(logged) > len(rows):
        notes.append(
            f"{len(logged) - len(rows)} later turns of these conversations are not drawn again: "
            "their prompts hold answers of the scheduler or its tools, which the log lacks."
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


def show(replay: Replay) -> None:
    """Print a line for each sample: equal, or where it differs."""
    print(f"Drawn again with {replay.weights}:")
    for sample in replay.samples:
        print(f"  {sample.name}: {_result(sample)}")
    num_equal = sum(sample.equal for sample in replay.samples)
    print(f"{num_equal} of {len(replay.samples)} samples have equal tokens.")
    for note in replay.notes:
        print(f"Note: {note}")


def _result(sample: Comparison) -> str:
    gap, found = sample.logprob_gap, sample.difference
    within = "" if gap is None else f" (log-probabilities within {gap:.1e} nats)"
    if found is None:
        return f"{sample.num_logged} tokens, equal{within}"
    gap = found.probability_gap
    apart = "" if gap is None else f"; their probabilities lie {gap:.3g} apart"
    return (
        f"{sample.num_logged} tokens, {sample.num_drawn} drawn; equal before position "
        f"{found.position}{within}, where the log has {_shown(found.logged)} and the replay "
        f"{_shown(found.drawn)}{apart}"
    )


def _shown(token: Token | None) -> str:
    if token is None:
        return "ended"
    logprob = "" if token.logprob is None else f" {token.logprob:.3f}"
    return f"{token.text!r} ({token.token_id}){logprob}"
