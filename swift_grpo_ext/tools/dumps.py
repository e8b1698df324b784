"""Rollouts that any framework dumped, as samples in steps and groups. Pure.

Understood are Parquet, CSV, JSON and JSON lines, with a row for each completion; lines that hold a
whole table (ms-swift's `completions.jsonl`: a list for each column); and wide rows (verl's
validation tables: `input_1`, `output_1`, `input_2`, ...). Columns are found by the names that TRL,
verl, slime, ms-swift and this project give them, or are named by the caller.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from swift_grpo_ext.diversity.record import read_json_lines
from swift_grpo_ext.diversity.sample import Origin, Sample
from swift_grpo_ext.sampling.seeding import SampleId

COLUMNS = {
    "step": ("step", "gen_step", "global_step", "global_steps", "rollout_id", "iteration"),
    "phase": ("phase",),
    "number": ("number",),
    "group": ("group_index", "group_id", "group", "uid", "prompt_id"),
    "prompt": ("prompt", "input", "prompts", "messages", "question", "query"),
    "completion": ("completion", "output", "response", "completions", "responses", "text"),
    "token_ids": (
        *("token_ids", "completion_ids", "response_ids", "response_token_ids", "output_ids"),
        *("output_token_ids", "tokens"),
    ),
    "logprobs": (
        *("rollout_log_probs", "rollout_logprobs", "logprobs", "completion_logprobs"),
        *("sampling_per_token_logps", "output_token_logprobs", "log_probs"),
    ),
}
"""Names that columns have, the likeliest first."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What the files hold."""

    steps: list[list[Sample]]
    """Samples by step, in the order of the files. Samples of one prompt have one hash; a
    sample's group and index count in its step, in order."""

    columns: dict[str, str]
    """The columns that were read, by what they hold."""

    repeats_rows: bool
    """Whether a table stood in one line: ms-swift's, which repeats rows of earlier steps."""


def read_dump(paths: Sequence[Path], names: Mapping[str, str]) -> Dump:
    """Read all rows.

    Args:
        paths: files, in the order of the training.
        names: of columns, by the keys of `COLUMNS`, where they are not found by themselves.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file's suffix or format is unknown, or a column is missing; names it.
    """
    lines = [line for path in paths for line in _read_rows(path)]
    rows = [row for line in lines for row in _expand(line)]
    columns = _find_columns([*dict.fromkeys(chain(*rows))], names, paths)
    steps: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        step = [str(row.get(columns[key])) for key in ("phase", "step", "number") if key in columns]
        steps.setdefault("/".join(step), []).append(row)
    samples = [_samples(number, of_step, columns) for number, of_step in enumerate(steps.values())]
    return Dump(steps=samples, columns=columns, repeats_rows=any(map(_is_table, lines)))


def _find_columns(
    present: Sequence[str], names: Mapping[str, str], paths: Sequence[Path]
) -> dict[str, str]:
    columns = {
        key: name for key, known in COLUMNS.items() for name in reversed(known) if name in present
    }
    for key, name in names.items():
        if name not in present:
            raise ValueError(f"--{key.replace('_', '-')} {name}: expected one of {present}.")
        columns[key] = name
    text = "completion" in columns or "token_ids" in columns
    if not text or not {"prompt", "group"} & columns.keys():
        lacks = "completions" if not text else "prompts"
        raise ValueError(
            f"{' '.join(map(str, paths))}: no column of {present} holds {lacks}. Name it with "
            f"--{'completion' if not text else 'prompt'}."
        )
    return columns


# --- files ---


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        try:
            yield from pq.read_table(path).to_pylist()
        except ValueError as e:  # pyarrow's, for damaged files
            raise ValueError(f"{path} cannot be read as Parquet ({e}).") from e
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    elif path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        yield from rows if isinstance(rows, list) else [rows]
    elif path.suffix == ".jsonl":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist.")
        yield from read_json_lines(path, dict)
    else:
        raise ValueError(f"{path}: expected a file that ends with .parquet, .csv, .json or .jsonl.")


def _is_table(row: Mapping[str, Any]) -> bool:
    texts = next((row[name] for name in COLUMNS["completion"] if name in row), None)
    return isinstance(texts, list) and all(isinstance(text, str) for text in texts)


def _expand(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a table in one line, or of a wide row; else the row itself."""
    if _is_table(row):
        columns = {name: values for name, values in row.items() if isinstance(values, list)}
        for i in range(max(map(len, columns.values()))):
            yield {n: values[i] if i < len(values) else None for n, values in columns.items()}
        return
    numbers = [m[1] for name in row if (m := re.fullmatch(r"output_(\d+)", name))]
    if not numbers:
        yield row
    for number in numbers:
        own = {n.removesuffix(f"_{number}"): v for n, v in row.items() if n.endswith(f"_{number}")}
        yield {"step": row.get("step"), **own}


# --- samples ---


def _samples(
    step: int, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]
) -> list[Sample]:
    groups: dict[str, tuple[int, count[int]]] = {}
    samples = []
    for row in rows:
        values = {key: row.get(name) for key, name in columns.items()}
        prompt = _key(values["prompt"] if "prompt" in columns else values["group"])
        group = _key(values["group"]) if "group" in columns else prompt
        number, indices = groups.setdefault(group, (len(groups), count()))
        index = next(indices)
        sample_id = SampleId(phase="train", step=step, number=0, group=number, index=index)
        text = _text(values.get("completion"))
        logprobs = _numbers(values.get("logprobs"))
        token_ids = _numbers(values.get("token_ids"))
        if token_ids is None or (logprobs is not None and len(token_ids) < len(logprobs)):
            logprobs = None
        elif logprobs is not None:  # slime's tokens begin with the prompt's
            token_ids = token_ids[len(token_ids) - len(logprobs) :]
        ids = list(map(ord, text)) if token_ids is None else token_ids
        samples.append(
            Sample(
                origin=Origin(sample_id=sample_id, seed=None, rank=0, replica=""),
                prompt_hash=prompt,
                token_ids=np.asarray(ids, np.int64).astype(np.int32),
                logprobs=None if logprobs is None else np.asarray(logprobs, np.float64),
                text=text,
            )
        )
    return samples


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _text(value: Any) -> str:
    """A completion's text; of messages, the contents."""
    if isinstance(value, list):
        return "\n".join(_text(v.get("content") if isinstance(v, Mapping) else v) for v in value)
    return "" if value is None else str(value)


def _numbers(values: Any) -> list[float] | None:
    """A list of numbers, also as JSON text, by turns, or as pairs and objects of log-probabilities
    (SGLang's `[logprob, id, text]`, OpenAI's `{"logprob": ...}`)."""
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError:
            return None
    if not isinstance(values, (list, tuple)) or not values:
        return None
    if all(isinstance(v, (list, tuple)) for v in values):
        is_tuple = all(len(v) > 1 and isinstance(v[0], float) and type(v[1]) is int for v in values)
        values = [v[0] for v in values] if is_tuple else [item for v in values for item in v]
    values = [v.get("logprob") if isinstance(v, Mapping) else v for v in values]
    return [math.nan if v is None else v for v in values]
