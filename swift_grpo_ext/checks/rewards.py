"""Reward functions, tried on the first rows with made-up completions before a model is loaded.

ms-swift makes each by `orms[name](args=...)`, and calls it as `function(completions, **columns)`
after the first rollout (4.6, rl_core/grpo_algorithm.py, `compute_rewards_per_func`). A column that
no row has, and values of another number or type, are errors. All else that a function raises is a
warning: rows and completions may be to blame.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from swift_grpo_ext.checks.finding import Findings, error, skipped, warning
from swift_grpo_ext.upstream.rows import short

MAX_SECONDS = 10  # for the made-up completions: a judge may sit behind a function
COMPLETIONS = ("I do not know.", "", "<think>Let me see.</think><answer>42</answer>")
"""Any model gives such at times. They are several: ms-swift spreads one value over all samples."""

PACKAGE_OF_REWARD = {"accuracy": "math_verify", "cosine": "math_verify", "toolbench": "rouge"}
"""Packages that rewards of ms-swift import once the model is loaded."""

FROM_SERVERS = "trajectory_inputs"
"""A server that leads conversations adds it (4.6, grpo_trainer.py:354); settings may not tell."""

Row = Mapping[str, Any]


class TooSlowError(BaseException):
    """A reward function is too slow. Its own `except Exception` must not catch this."""


def check_rewards(
    names: Sequence[str],
    rows: Sequence[Row],
    args: object,
    *,
    setting: str,
    knows_all_columns: bool = True,
    calls: bool = True,
) -> Findings:
    """Refuse reward functions that fail with the rows of a data set, for any completion.

    Args:
        names: `rules_of_names` refuses unregistered ones.
        rows: the first ones, as ms-swift reads them; [] where they are not known.
        knows_all_columns: False where other data sets, or a scheduler, may add columns.
        calls: functions are called; else their signatures alone are looked at.
    """
    from swift.rewards import orms

    columns = columns_of(rows)
    for name, made in ((name, orms[name]) for name in names if name in orms):
        subject, module = f"reward_funcs {name}", PACKAGE_OF_REWARD.get(name)
        if module and _is_swifts(made) and find_spec(module) is None:
            text = f"needs the package {module}, which is not installed."
            yield error(subject, text, f"pip install {module}")
        elif reason := misfit(made, args=args):
            text = f"cannot be made as ms-swift does, by orms[{name!r}](args=...): {reason}."
            yield error(subject, text, "Register a class whose __init__, if any, takes args.")
        elif problems := [*check_call(subject, made, columns, rows, setting)]:
            for problem in problems:
                # A column that is missing here may come from elsewhere.
                yield problem if knows_all_columns else replace(problem, level="warning")
        elif columns and calls and not _is_swifts(made) and not _needs_more(made):
            yield from try_reward(subject, made, columns, args)


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what reward functions are given with made-up completions; {} without messages."""
    from swift.dataset import RowPreprocessor
    from swift.rl_core.data import GRPOSample
    from swift.utils import remove_response

    usable = [row for row in rows if row.get("messages")]
    # Joined data sets hold None where one of them lacks a column.
    joined: Row = {name: None for row in usable for name in row}
    made_up = []
    # By ms-swift's own classes, so that functions see the very columns of a round.
    for number, text in enumerate(COMPLETIONS if usable else ()):
        row = {**joined, **usable[number % len(usable)]}
        sample = GRPOSample.from_row({**row, "messages": [dict(m) for m in row["messages"]]})
        remove_response(sample.messages)
        sample.messages.append({"role": "assistant", "content": text})
        sample.prompt_id = sample.request_id = f"made-up-{number}"
        sample.response_token_ids, sample.finish_reason = [0] * len(text.split()), "stop"
        made_up.append(sample.to_reward_row())
    columns: dict[str, list[Any]] = RowPreprocessor.rows_to_batched(made_up)
    return columns


def misfit(function: Any, *given: object, **named: object) -> str:
    """Return why a call does not fit a signature; "" where it does, or there is no signature."""
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError as e:
        return str(e)
    except ValueError:  # written in C
        pass
    return ""


def check_call(
    subject: str,
    made: Callable[..., object],
    columns: Mapping[str, Any],
    rows: Sequence[Row],
    setting: str,
) -> Findings:
    """Refuse parameters that no column fills, and a function that does not take every column."""
    if not columns or not inspect.isclass(made):  # a function that makes one tells nothing of it
        return
    given = {**columns, "trainer_state": None, FROM_SERVERS: None}
    # Behind `self` and the completions, which are given by their place.
    parameters = [*inspect.signature(made.__call__).parameters.values()][2:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        there = ", ".join({name: 0 for row in rows for name in row})
        yield error(
            subject,
            f"asks for `{'` and `'.join(missing)}`, and --{setting} has the columns {there}.",
            f"""Add the column, or rename yours: --columns '{{"YOURS": "{missing[0]}"}}'.""",
        )
    elif reason := misfit(made.__call__, None, COMPLETIONS, **given):
        text = f"does not take all that ms-swift passes by name: {reason}."
        yield error(subject, text, "Add **kwargs to its parameters.")


def try_reward(
    subject: str, made: Callable[..., Any], columns: Mapping[str, Sequence[Any]], args: object
) -> Findings:
    """Call a reward function once, and look at the number and the type of its values."""
    given = {"trainer_state": TrainerState(), **columns}
    try:
        with _at_most(MAX_SECONDS):
            output = made(args=args)(list(COMPLETIONS), **given)
            if inspect.iscoroutine(output):
                output = asyncio.run(output)
            fault = values_fault(output)
    except TooSlowError:
        text = f"gave no values for {len(COMPLETIONS)} made-up completions within {MAX_SECONDS} s."
        yield skipped(subject, text, "Their number and type are not known.")
    except Exception as e:  # a user's code raises anything
        # The last line of the file that defines the function, rather than of a library.
        frames = traceback.extract_tb(e.__traceback__)
        file = getattr(inspect.getmodule(made), "__file__", None)
        last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        yield warning(
            subject,
            f"raised {type(e).__name__}: {e} ({Path(last.filename).name}, line {last.lineno}) for "
            f"the first rows with the made-up completions {', '.join(map(repr, COMPLETIONS))}.",
            "In a training it ends the run: have it score whatever a model may write.",
        )
    else:
        if fault:
            text = f"returned {fault} for {len(COMPLETIONS)} completions."
            yield error(subject, text, "Expected a list with a number, or None, for each.")


def values_fault(output: Any) -> str:
    """Return what is wrong with the values of a reward function; "" where nothing is."""
    try:
        # As ms-swift does: None stands for "not judged", and a tensor is made of the rest.
        values = [math.nan if value is None else value for value in output]
        shape = torch.tensor(values, dtype=torch.float32).shape
    except (TypeError, ValueError, RuntimeError):
        return f"{type(output).__name__} {short(output)}"
    return "" if shape == (len(COMPLETIONS),) else f"values of shape {[*shape]}"


def _is_swifts(made: object) -> bool:
    return (getattr(made, "__module__", None) or "").startswith("swift.")


def _needs_more(made: Callable[..., object]) -> bool:
    """Return whether a reward may need other ranks, a server's conversations, or a model."""
    # The `__init__` of ms-swift's `ORM` loads nothing. No signal comes in another thread.
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and _is_swifts(getattr(made, "__init__", None))):
        return True
    try:
        source = inspect.getsource(made)
    except (OSError, TypeError):
        return False
    return "distributed" in source or FROM_SERVERS in source


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise `TooSlowError` within the block after so many seconds, in the main thread."""

    def end(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
