"""Tries reward functions on the first rows, with made-up completions, before a model is loaded.

ms-swift makes each by `orms[name](args=...)`, and calls it as `function(completions, **columns)`
after the first rollout (4.6, rl_core/grpo_algorithm.py, `compute_rewards_per_func`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from swift_grpo_ext.checks.finding import Findings, error, skipped, warning
from swift_grpo_ext.checks.rows import reason_of
from swift_grpo_ext.upstream.rows import short

MAX_SECONDS = 10  # for the made-up completions: a function may call a judge model
# Texts that any model may write. There are several: ms-swift spreads one value over all samples.
COMPLETIONS = ("I do not know.", "", "<think>Let me see.</think><answer>42</answer>")
# A column that servers with schedulers add (4.6, grpo_trainer.py:354).
FROM_SERVERS = "trajectory_inputs"

Row = Mapping[str, Any]


class TooSlowError(BaseException):
    """A reward function is too slow. Its own `except Exception` must not catch this."""


def check_rewards(
    names: Sequence[str],
    rows: Sequence[Row],
    args: object,
    *,
    setting: str,
    calls: bool = True,
) -> Findings:
    """Refuse reward functions that fail with the rows of a data set, for any completion. `rows` are
    the first ones, as ms-swift reads them; [] if a scheduler or a gym adds columns. Without
    `calls`, only the signatures of the functions are checked."""
    from swift.rewards import orms

    columns = columns_of(rows)
    given = {**columns, "trainer_state": None, FROM_SERVERS: None}
    for name in (name for name in names if name in orms):  # `rules_of_names` refuses the others
        made, subject, is_swifts = orms[name], f"reward_funcs {name}", _is_swifts(orms[name])
        try:
            # Making ms-swift's own classes loads nothing. A user's class may load a model: only its
            # signature is checked.
            make = made if is_swifts else inspect.signature(made).bind
            make(args=args)
        except Exception as e:
            text = f"ms-swift cannot make it by orms[{name!r}](args=...): {reason_of(e)}."
            remedy = "" if is_swifts else "Register a class with an __init__ that takes args."
            yield error(subject, text, remedy)
            continue
        try:
            if columns and inspect.isclass(made):  # a factory hides its result's signature
                inspect.signature(made.__call__).bind(None, COMPLETIONS, **given)
        except TypeError as e:
            there = ", ".join(rows[0])
            yield error(
                subject,
                f"does not fit ms-swift's call: {e}; --{setting} has the columns {there}.",
                """Add the column, or rename yours (--columns '{"YOURS": "NAME"}'). For columns """
                "that the function does not use, add **kwargs to its parameters.",
            )
            continue
        if columns and calls and not is_swifts and not _needs_more(made):
            yield from try_reward(subject, made, columns, args)


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the columns that reward functions get with made-up completions; {} if no row has
    messages."""
    from swift.dataset import RowPreprocessor
    from swift.rl_core.data import GRPOSample
    from swift.utils import remove_response

    usable = [row for row in rows if row.get("messages")]
    made_up = []
    # ms-swift's own classes give functions the same columns as a round does.
    for number, text in enumerate(COMPLETIONS if usable else ()):
        row = usable[number % len(usable)]
        sample = GRPOSample.from_row({**row, "messages": [dict(m) for m in row["messages"]]})
        remove_response(sample.messages)
        sample.messages.append({"role": "assistant", "content": text})
        sample.prompt_id = sample.request_id = f"made-up-{number}"
        sample.response_token_ids, sample.finish_reason = [0] * len(text.split()), "stop"
        made_up.append(sample.to_reward_row())
    columns: dict[str, list[Any]] = RowPreprocessor.rows_to_batched(made_up)
    return columns


def try_reward(
    subject: str, made: Callable[..., Any], columns: Mapping[str, Sequence[Any]], args: object
) -> Findings:
    """Call a reward function once, and check the number and the type of its values."""
    given = {"trainer_state": TrainerState(), **columns}
    try:
        with _time_limit(MAX_SECONDS):
            output = made(args=args)(list(COMPLETIONS), **given)
            if inspect.iscoroutine(output):
                output = asyncio.run(output)
            fault = values_fault(output)
    except TooSlowError:
        text = f"gave no values for {len(COMPLETIONS)} made-up completions within {MAX_SECONDS} s."
        yield skipped(subject, text, "Their number and type were not checked.")
    except Exception as e:  # a user's code raises anything
        # Only a warning: the rows or the made-up completions may cause it.
        # Name the last line in the file that defines the function, not one in a library.
        frames = traceback.extract_tb(e.__traceback__)
        file = getattr(inspect.getmodule(made), "__file__", None)
        last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        yield warning(
            subject,
            f"raised {type(e).__name__}: {e} ({Path(last.filename).name}, line {last.lineno}) for "
            f"the first rows with the made-up completions {', '.join(map(repr, COMPLETIONS))}.",
            "In a training this ends the run: let the function score any text.",
        )
    else:
        if fault:
            text = f"returned {fault} for {len(COMPLETIONS)} completions."
            yield error(subject, text, "Expected a list with a number, or None, for each.")


def values_fault(output: Any) -> str:
    """Return the fault of a reward function's values, in words; "" if there is none."""
    try:
        # As in ms-swift: None means "no score", and a tensor holds the values.
        values = [math.nan if value is None else value for value in output]
        shape = torch.tensor(values, dtype=torch.float32).shape
    except (TypeError, ValueError, RuntimeError):
        return f"{type(output).__name__} {short(output)}"
    return "" if shape == (len(COMPLETIONS),) else f"values of shape {[*shape]}"


def _is_swifts(made: object) -> bool:
    return (getattr(made, "__module__", None) or "").startswith("swift.")


def _needs_more(made: Callable[..., object]) -> bool:
    """Return whether a reward may need other ranks, a server's conversations, or a model."""
    if not _is_swifts(getattr(made, "__init__", None)):  # `ORM.__init__` loads nothing
        return True
    try:
        source = inspect.getsource(made)
    except (OSError, TypeError):
        return False
    return "distributed" in source or FROM_SERVERS in source


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise `TooSlowError` within the block after `seconds`."""

    # Only the main thread may set a signal's handler.
    def end(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
