"""A run's data sets: can they be read, are their media there, and do reward functions take them?"""

from __future__ import annotations

import json
from itertools import chain, islice, zip_longest
from pathlib import Path

from swift_grpo_ext.checks.finding import Findings, error, note, skipped
from swift_grpo_ext.checks.left_out import NUM_STREAMED, Preprocessed, check_left_out, watched
from swift_grpo_ext.checks.rewards import check_rewards, leads_conversations
from swift_grpo_ext.checks.rows import Row, check_rows, media_of
from swift_grpo_ext.tools.check.glance import DATA_SUFFIXES, LOCAL, file_of
from swift_grpo_ext.tools.check.settings import Run

MAX_BYTES = 2**28
"""Bytes of a file of JSON lines that are parsed to their end."""


def check_data(run: Run, loaded: dict[str, list[Row]]) -> Findings:
    """Look at the first rows of each data set that is a file, with their media."""
    yield from read_data(run, loaded)
    template = run.templates.get("training")
    for setting, rows in loaded.items():
        with run.environment("training"):
            yield from check_rows(
                rows,
                setting=setting,
                expects_media=template is None or template.model_meta.is_multimodal,
                deletes_bad_rows=run.train("truncation_strategy") == "delete",
                template=template,
            )
        with_media = sum(bool(media_of(row)) for row in rows)
        text = f"{with_media} of the first {len(rows)} rows hold images, videos or audios."
        yield note(setting, text)


def read_data(run: Run, loaded: dict[str, list[Row]]) -> Findings:
    """Read the first rows of each data set that is a file; ids of a hub are left to ms-swift."""
    for name in ("dataset", "val_dataset"):
        for given in run.train(name) or ():
            setting, path = f"{name} {given}", file_of(given)
            if path.exists():
                yield from read_rows(run, given, setting, path, loaded)
            elif not (path.suffix in DATA_SUFFIXES or given.startswith(LOCAL)):
                text = "is no file here, so it is taken for a hub id, and its rows are not known."
                yield skipped(setting, text)


def read_rows(
    run: Run, given: str, setting: str, path: Path, loaded: dict[str, list[Row]]
) -> Findings:
    """Read the first rows of a file as ms-swift does; name the line that is no JSON."""
    from swift.dataset import load_dataset
    from swift.utils import json_parse_to_dict

    columns = json_parse_to_dict(run.train("columns")) if run.train("columns") else None
    if path.suffix == ".jsonl" and (problem := broken_line(path)):
        yield error(setting, f"cannot be read: {problem}.", "Correct the line, or leave it out.")
        return
    preprocessed: list[Preprocessed] = []
    try:
        with run.environment("training"), watched(preprocessed.append):  # ENV has ROOT_IMAGE_DIR
            streamed, _ = load_dataset(
                [given], streaming=True, remove_unused_columns=False, columns=columns
            )
            rows = list(islice(iter(streamed), NUM_STREAMED))
        found = [check_left_out(each, setting, is_empty=not rows) for each in preprocessed]
        yield from chain.from_iterable(found)
    except Exception as e:  # `datasets` and ms-swift raise many kinds
        text = f"cannot be read ({type(e).__name__}: {' '.join(str(e).split())[:200]})."
        remedy = 'Expected rows such as {"messages": [...], "images": ["1.png"], ...}.'
        yield error(setting, text, remedy)
        return
    if rows:
        loaded[setting] = rows


def broken_line(path: Path) -> str:
    """Say which line of a file of JSON lines is no JSON; "" where all are that are looked at."""
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            size += len(line)
            if size > MAX_BYTES:
                break
            try:
                if line.strip():
                    json.loads(line)
            except ValueError as e:
                beginning = line[:60].decode(errors="replace").strip()
                return f"line {number} is no JSON ({str(e).partition(': line 1 ')[0]}): {beginning}"
    return ""


def check_reward_columns(run: Run, loaded: dict[str, list[Row]]) -> Findings:
    """Call reward functions as the training would, with rows of its data sets."""
    args = run.arguments("training")
    is_led = leads_conversations(args)
    for name in ("dataset", "val_dataset"):
        given = run.train(name) or ()
        known = [rows for setting, rows in loaded.items() if setting.startswith(f"{name} ")]
        if known or name == "dataset":
            yield from check_rewards(
                run.train("reward_funcs") or (),
                [row for rows in zip_longest(*known) for row in rows if row is not None],
                args,
                setting=" ".join([name, *given]),
                knows_all_columns=len(known) == len(given) and not is_led,
                calls=name == "dataset" and not is_led,
                makes_all=True,
            )
