"""A run's template and rows, as ms-swift loads them.

Each takes a model and data alone; a run's settings need not be whole.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from swift_grpo_ext.checks.finding import Findings, error, note, ok, warning
from swift_grpo_ext.checks.rows import MEDIA, check_rows
from swift_grpo_ext.tools.check.settings import Run, environment

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")

NUM_ROWS = 32
"""Rows of each data set that are looked at."""


def check_template(run: Run) -> Findings:
    """Say what ends a completion, and refuse stop words that the template would always emit."""
    from swift.model import get_processor
    from swift.model.model_meta import get_matched_model_meta
    from swift.template import get_template

    from swift_grpo_ext.stops.templates import check_template_stops, end_ids

    args = run.arguments("training" if run.training is not None else "rollout")
    folder = model_folder(args.model) if args.model else None
    if folder is None:
        return
    meta = get_matched_model_meta(args.model)  # by the hub's name, which the cache lacks
    try:
        model_type = args.model_type or (meta and meta.model_type)
        processor = get_processor(str(folder), model_type=model_type)
        template = get_template(processor, template_type=args.template)
    except (ValueError, KeyError, OSError) as e:
        text = " ".join(str(e).split())[:300]
        yield warning("template", text, "Give --model_type and --template, as for swift rlhf.")
        return
    words = getattr(args, "stop_words", None) or ()
    try:
        check_template_stops(SimpleNamespace(stop_words=words, stop_token_ids=[]), template)
    except ValueError as e:
        yield error("template", str(e), "Change --stop_words.")
        return
    ends = template.tokenizer.convert_ids_to_tokens(sorted(end_ids(template)))
    yield ok(
        "template",
        f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}; stop "
        f"words: {', '.join(map(repr, words)) or 'none'}.",
    )


def check_data(run: Run) -> Findings:
    """Load the first rows of each file with their images; leave ids of a hub to ms-swift."""
    from swift.dataset import load_dataset
    from swift.dataset.dataset_syntax import DatasetSyntax
    from swift.utils import json_parse_to_dict

    columns = json_parse_to_dict(run.train("columns")) if run.train("columns") else None
    deletes = run.train("truncation_strategy") == "delete"
    named = [(s, given) for s in ("dataset", "val_dataset") for given in run.train(s) or ()]
    # ENV may hold ROOT_IMAGE_DIR; what the shell says wins in ms-swift too.
    env = {name: str(value) for name, value in environment(run.training).items()}
    with patch.dict(os.environ, {**env, **os.environ}):
        for setting, given in named:
            name, path = f"{setting} {given}", DatasetSyntax.parse(given).dataset
            if not Path(path).expanduser().exists():
                if Path(path).suffix in DATA_SUFFIXES or path.startswith(("/", ".", "~")):
                    text = f"there is no such file in {Path.cwd()}, nor folder."
                    yield error(name, text, "Name a file of rows, or a hub id.")
                else:
                    yield note(name, "is no file here, so it is taken for a hub id.")
                continue
            try:
                loaded, _ = load_dataset(
                    [given], streaming=True, remove_unused_columns=False, columns=columns
                )
                first = list(islice(iter(loaded), NUM_ROWS))
            except Exception as e:  # `datasets` and ms-swift raise many kinds
                text = f"cannot be read ({type(e).__name__}: {' '.join(str(e).split())[:200]})."
                remedy = 'Expected rows such as {"messages": [...], "images": ["1.png"], ...}.'
                yield error(name, text, remedy)
                continue
            if not first:
                yield error(name, "holds no rows that ms-swift can use.", "Name another file.")
                continue
            # Here belongs the comparison of rows as training and as vLLM encode them.
            yield from check_rows(first, setting=name, expects_media=True, deletes_bad_rows=deletes)
            with_media = sum(any(row.get(kind) for kind in MEDIA) for row in first)
            text = f"{with_media} of the first {len(first)} rows hold images, videos or audios."
            yield note(name, text)


def model_folder(model: str) -> Path | None:
    """Return where a model's files are: its folder, or a hub's cache; None where nowhere here."""
    import huggingface_hub
    import modelscope

    if (folder := Path(model).expanduser()).is_dir():
        return folder
    for hub in (modelscope, huggingface_hub):
        with suppress(Exception):  # each has a type of its own for what is in no cache
            return Path(hub.snapshot_download(model, local_files_only=True))
    return None
