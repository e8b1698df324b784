"""A data set's rows: their media, and how training and vLLM encode them, without a model.

A rollout's request goes all the way that it goes in a run, through ms-swift's template and engine,
what we add, and vLLM's own processing; only the core of the engine, which would load the model, is
left out. Each side has its own settings: template, system prompt, lengths, and environment
variables such as MAX_PIXELS. So what `--rollout_mismatch stop` would end a run for is known without
a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count, groupby
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import torch

from swift_grpo_ext.checks.finding import Findings, error, note, ok, warning
from swift_grpo_ext.checks.rows import (
    Row,
    RowError,
    early_fault,
    encoding_error,
    encoding_fault,
    name_of,
)
from swift_grpo_ext.rollout.positions import position_model, positions_in
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.tools.check.glance import Side
from swift_grpo_ext.tools.check.lookup import UNKNOWN_MODEL, make_template, model_folder
from swift_grpo_ext.tools.check.settings import Run
from swift_grpo_ext.training.batch import (
    POSITIONS_REMEDY,
    first_misplaced,
    positions_in_training,
)
from swift_grpo_ext.training.encode import REMEDY, SHOWN, encode_whole, spans_of
from swift_grpo_ext.upstream.patches import replaced
from swift_grpo_ext.upstream.placeholders import placeholder_ids, placeholder_texts
from swift_grpo_ext.upstream.rows import COLUMNS

if TYPE_CHECKING:
    from swift.template import Template
    from vllm.v1.engine import EngineCoreRequest

    from swift_grpo_ext.rollout.engine import RolloutEngine

NUM_FIRST, NUM_DRAWN = 16, 16
"""Rows that are encoded: the first, and some of those behind them, drawn by `--data_seed`."""

SHOWN_ROWS = 3
"""Rows that are named of each kind of fault; the others are counted."""

SHOWN_DIFFERENCES = 3
"""Places that are named of a row."""

PROCESSING = ("hf_overrides", "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs")
"""Entries of `--vllm_engine_kwargs` that change what vLLM makes of a request."""


# --- what is said ---


def check_encoding(run: Run, loaded: Mapping[str, Sequence[Row]]) -> Findings:
    """Compare some rows as training and vLLM encode them."""
    if loaded and (encoder := make_encoder(run)):
        for setting, rows in loaded.items():
            yield from compare_rows(encoder, rows, setting=setting, run=run)


def compare_rows(encoder: RowEncoder, rows: Sequence[Row], *, setting: str, run: Run) -> Findings:
    """Encode rows on both sides and say what differs, and what does not fit."""
    rest = rows[NUM_FIRST:]
    drawn = Random(run.train("data_seed")).sample(rest, min(NUM_DRAWN, len(rest)))
    encoded: list[EncodedRow] = []
    faults: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    """By side and type of the error, the rows that cannot be encoded, with the reason."""
    for row in [*rows[:NUM_FIRST], *drawn]:
        with run.environment("training"):
            if early_fault(row, encoder.template, encoder.placeholder_texts):
                continue  # said by `check_rows`
        if reason := encoder.refusal(row):
            faults.setdefault(("training", reason.partition(":")[0]), []).append((row, reason))
            continue
        try:
            encoded.append(encoder.encode(row))
        except Exception as e:  # templates, processors and vLLM raise many kinds
            fault = e.fault if isinstance(e, RowError) else encoding_fault(row, e)
            faults.setdefault(("a rollout", fault.partition(":")[0]), []).append((row, fault))
    deletes = run.train("truncation_strategy") == "delete"
    for (side, _), rows_faults in faults.items():
        first, reason = rows_faults[0]
        more = f", like {len(rows_faults) - 1} more," if len(rows_faults) > 1 else ""
        text = f"{name_of(first)}{more} cannot be encoded for {side} ({reason})."
        if side == "a rollout":
            yield error(setting, text, "Correct it, or leave it out.")
        elif deletes:
            yield warning(setting, f"{text} Others take its place (--truncation_strategy delete).")
        else:
            yield error(setting, text, "Correct it, or --truncation_strategy delete.")
    if encoded:
        yield from differences_of(encoder, encoded, setting, run)
        yield from lengths_of(encoder, encoded, setting, run)


def differences_of(
    encoder: RowEncoder, encoded: Sequence[EncodedRow], setting: str, run: Run
) -> Findings:
    """Name the rows whose prompts differ, and the tokens; or say that none does."""
    differing = [row for row in encoded if row.differences]
    say = error if run.train("rollout_mismatch") == "stop" else warning
    for number, row in enumerate(differing[:SHOWN_ROWS]):
        places = [
            f"from token {place.at} on the rollout has {encoder.words(place.rollout)} where "
            f"training has {encoder.words(place.training)}"
            for place in row.differences[:SHOWN_DIFFERENCES]
        ]
        if len(row.differences) > SHOWN_DIFFERENCES:
            places.append(f"{len(row.differences) - SHOWN_DIFFERENCES} more places")
        yield say(
            setting,
            f"{name_of(row.row)} has a prompt of {len(row.rollout)} tokens in the rollout "
            f"({', '.join(row.media) or 'no media'}) and of {len(row.training)} in training: "
            f"{'; '.join(places)}.",
            "" if number else REMEDY,
        )
    if len(differing) > SHOWN_ROWS:
        text = f"{len(differing) - SHOWN_ROWS} more of {len(encoded)} rows differ."
        yield say(setting, text)
    misplaced = [row for row in encoded if row.misplaced and not row.differences]
    for row in misplaced[:SHOWN_ROWS]:
        text = f"{name_of(row.row)} has the same tokens at other positions, {row.misplaced}."
        yield say(setting, text, POSITIONS_REMEDY)
    if not (differing or misplaced):
        num_media = sum(len(row.media) for row in encoded)
        yield ok(
            setting,
            f"{len(encoded)} rows with {num_media} media are equal in rollout and training, in "
            + ("tokens and positions." if encoder.compares_positions else "tokens."),
        )


def lengths_of(
    encoder: RowEncoder, encoded: Sequence[EncodedRow], setting: str, run: Run
) -> Findings:
    """Name media of which a cut takes the text, and prompts that leave a completion no room."""
    for row in [row for row in encoded if row.num_behind_cut][:SHOWN_ROWS]:
        yield warning(
            setting,
            f"{name_of(row.row)} is truncated to --max_length {encoder.max_length}: "
            f"{row.num_behind_cut} of its {len(row.media)} media lost the text around them.",
            "Raise --max_length, or have such prompts replaced with --truncation_strategy delete.",
        )
    longest = max(encoded, key=lambda row: len(row.rollout))
    num_prompt, num_completion = len(longest.rollout), int(run.train("max_completion_length"))
    text = (
        f"prompts have {min(len(row.rollout) for row in encoded)} to {num_prompt} tokens "
        f"(--max_length {encoder.max_length} counts a medium as one); with "
        f"--max_completion_length {num_completion} a sample takes up to "
        f"{num_prompt + num_completion} of {encoder.max_model_len} (--vllm_max_model_len)."
    )
    room = encoder.max_model_len - num_prompt
    if room < num_completion:
        more = f"Completions of {name_of(longest.row)} end after {room} tokens."
        remedy = "Raise --vllm_max_model_len, or lower --max_length."
        yield warning(setting, f"{text} {more}", remedy)
    else:
        yield note(setting, text)


# --- one row, on both sides ---


@dataclass(frozen=True)
class Difference:
    """A place at which two prompts differ."""

    at: int
    """It begins at the rollout's token of this number."""

    rollout: list[int]
    training: list[int]


@dataclass(frozen=True)
class EncodedRow:
    """A row's prompt on both sides."""

    row: Row
    rollout: list[int]
    training: list[int]
    """Training is given the rollout's line breaks and cuts where it can be."""

    differences: list[Difference]
    misplaced: str
    """From which token on both sides have other positions; "" where they agree."""

    media: list[str]
    """The rollout shows these, each with its size and its tokens."""

    num_behind_cut: int
    """So many media stand in the text that `--max_length` cuts, and stay in the prompt."""


class RowEncoder:
    """Encodes rows for training and for rollouts, as the settings of a run say."""

    def __init__(
        self, run: Run, folders: Mapping[Side, Path], templates: Mapping[Side, Template]
    ) -> None:
        # A server that was not described has the training's settings.
        self._rollout_side: Side = "rollout" if run.has_servers and run.rollout else "training"
        self._run = run
        self.template = templates["training"]
        # An engine sets another mode, also of the training's own.
        template = copy(templates[self._rollout_side])
        with self._run.environment(self._rollout_side):
            args = run.arguments(self._rollout_side)
            self.engine, self.core = make_engine(folders[self._rollout_side], template, args)
        self._placeholders = placeholder_ids(self.template)
        self.placeholder_texts = placeholder_texts(self.template)
        self._ids = map(str, count())
        self._position_model = position_model(self.engine.engine.model_config)
        has_positions = self._position_model is not None
        self.compares_positions = has_positions and self._has_dummy_model()

    def _has_dummy_model(self) -> bool:
        """Give the template a model without weights, which counts positions, and return whether
        there can be one. It is ms-swift's own (template/base.py, `_get_model`), by its type."""
        from swift.model import get_model_processor

        info = self.template.model_info
        try:
            with torch.device("meta"):
                self.template.dummy_model, _ = get_model_processor(
                    info.model_dir, model_type=info.model_type, return_dummy_model=True
                )
        except Exception:  # code of a hub, packages that are not there
            return False
        return True

    @property
    def max_length(self) -> int | None:
        """A rollout's prompt has so many tokens at most, before vLLM puts in those of media."""
        length: int | None = self.engine.template.max_length
        return length

    @property
    def max_model_len(self) -> int:
        """A prompt and its completion have so many tokens at most."""
        return int(self.engine.engine.model_config.max_model_len)

    def refusal(self, row: Row) -> str | None:
        """Say why the template of the training refuses a row, as `--truncation_strategy delete`
        sees it."""
        with self._run.environment("training"):
            return encoding_error(self.template, row, self.max_model_len)

    def encode(self, row: Row) -> EncodedRow:
        """Encode a row on both sides; raises what templates and vLLM raise."""
        from swift.infer_engine.protocol import RequestConfig
        from swift.rlhf_trainers import GRPOTrainer
        from swift.utils import remove_response

        sample = RolloutSample.from_row({**row, "messages": list(map(dict, row["messages"]))})
        # What ms-swift's trainer does before a rollout (`_preprocess_inputs`).
        GRPOTrainer._set_inputs_system(SimpleNamespace(template=self.template), [sample])
        remove_response(sample.messages)
        with self._run.environment(self._rollout_side):
            [inputs], _ = self.engine._batch_encode([sample.to_infer_request()], strict=True)
            config = self.engine._prepare_generation_config(RequestConfig(max_tokens=1))
            self.engine._add_request(inputs, config, next(self._ids))
        request: EngineCoreRequest = self.core.add_request.call_args.args[0]
        rollout = list(request.prompt_token_ids)
        with self._run.environment("training"):
            training, placed = self._prompt_in_training(sample, rollout)
        features = request.mm_features or ()
        # Of the text the last tokens are kept: media in front of it have lost theirs.
        was_cut = 0 < (self.max_length or 0) <= len(rollout)
        text_from = next((n for n, i in enumerate(rollout) if i not in self._placeholders), 0)
        starts = [feature.mm_position.offset for feature in features]
        return EncodedRow(
            row=row,
            rollout=rollout,
            training=training,
            differences=list(differences(rollout, training, self._placeholders)),
            misplaced=first_misplaced(
                positions_in(self._position_model, rollout, features), placed
            ),
            media=describe_media(inputs, request),
            num_behind_cut=sum(start < text_from for start in starts) if was_cut else 0,
        )

    def _prompt_in_training(
        self, sample: RolloutSample, rollout: Sequence[int]
    ) -> tuple[list[int], torch.Tensor | None]:
        """Return the prompt's tokens as training is given them, and their positions (M-RoPE)."""
        tokenizer = self.template.tokenizer
        sample.messages.append({"role": "assistant", "content": ""})
        sample.response_token_ids = tokenizer.encode("a", add_special_tokens=False)[:1]
        sample.add_eos = False
        sample.rollout_prompts = [Prompt(list(rollout))]
        max_length = self.template.max_length
        with torch.inference_mode(), replaced(self.template, "max_length", None):
            sample.encoded = encoded = encode_whole(sample, self.template, max_length)
        labels = encoded["labels"]
        end = next((i for i, label in enumerate(labels) if label != -100), len(labels))
        prompt: list[int] = torch.as_tensor(encoded["input_ids"]).flatten().tolist()[:end]
        if not self.compares_positions:
            return prompt, None
        with torch.inference_mode():
            collated = self.template.data_collator([encoded])
        return prompt, positions_in_training([sample], collated)[0]

    def words(self, ids: Sequence[int]) -> str:
        """Return the text of token ids and the ids, for a message."""
        if not ids:
            return "nothing"
        runs = [(i, len(list(run))) for i, run in groupby(ids)]
        text = self.template.tokenizer.decode([i for i, _ in runs[:SHOWN] if i >= 0])
        numbers = [f"{i} x {length}" if length > 1 else str(i) for i, length in runs[:SHOWN]]
        if len(runs) > SHOWN:
            numbers.append(f"... {len(ids)} tokens in all")
        return f"{text!r} ({', '.join(numbers)})"


# --- the two sides ---


def make_encoder(run: Run) -> RowEncoder | None:
    """Return what encodes rows for a run; None where a side's model or template is not known here,
    which `check_template` says."""
    folders: dict[Side, Path] = {}
    templates: dict[Side, Template] = {}
    for side, _ in run.sides:
        folder = model_folder(run.arguments(side).model)
        if folder is None:
            return None
        folders[side] = folder
        try:
            with run.environment(side):
                templates[side] = make_template(run, side, folder)
        except UNKNOWN_MODEL:
            return None
    return RowEncoder(run, folders, templates)


def make_engine(
    folder: Path, template: Template, args: SimpleNamespace
) -> tuple[RolloutEngine, MagicMock]:
    """Return an engine that encodes requests, and the stand-in for its core, which gets them."""
    import vllm.platforms
    from swift.utils import json_parse_to_dict
    from transformers import PreTrainedTokenizerBase
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core_client import EngineCoreClient

    from swift_grpo_ext.rollout.engine import RolloutEngine

    platform = vllm.platforms.current_platform
    if platform.is_unspecified():  # vLLM for GPUs, where there is none; its modules hold the object
        platform.__class__ = CpuPlatform
    kwargs = json_parse_to_dict(args.vllm_engine_kwargs)
    core = MagicMock()
    core.get_supported_tasks.return_value = ("generate",)
    # vLLM's threads, of which none starts here, have copies of the tokenizer: seconds each.
    uncopied = patch.object(
        PreTrainedTokenizerBase, "__deepcopy__", lambda self, memo: self, create=True
    )
    with patch.object(EngineCoreClient, "make_client", return_value=core), uncopied:
        engine = RolloutEngine(
            str(folder),
            template=template,
            torch_dtype=torch.bfloat16,
            max_model_len=args.vllm_max_model_len,
            limit_mm_per_prompt=json_parse_to_dict(args.vllm_limit_mm_per_prompt) or None,
            enforce_eager=True,
            # Of what the cache has, vLLM hands on no more than the name.
            engine_kwargs={"mm_processor_cache_gb": 0}
            | {name: kwargs[name] for name in PROCESSING if name in kwargs},
        )
    return engine, core


def describe_media(inputs: Mapping[str, Any], request: EngineCoreRequest) -> list[str]:
    """Say what a request shows: `image 1 of 28x28 (4 tokens from token 15 on)`."""
    sizes = {kind: map(size_of, inputs.get(kind) or ()) for kind in COLUMNS}
    numbers: Counter[str] = Counter()
    described = []
    for feature in request.mm_features or ():
        kind, place = feature.modality, feature.mm_position
        numbers[kind] += 1
        size = next(sizes.get(f"{kind}s", iter(())), "")
        tokens = f"{place.length} tokens from token {place.offset} on"
        described.append(f"{kind} {numbers[kind]}{size} ({tokens})")
    return described


def size_of(item: Any) -> str:
    """Return ` of` the size of a medium, as ms-swift hands it to vLLM."""
    if isinstance(item, tuple):  # with metadata, or a sampling rate
        item = item[0]
    size = getattr(item, "size", None)
    if isinstance(size, tuple):
        return " of {}x{}".format(*size)
    shape = getattr(item, "shape", None)
    return f" of {'x'.join(map(str, shape))}" if shape else ""


# --- what differs ---


def differences(
    rollout: Sequence[int], training: Sequence[int], placeholders: Collection[int]
) -> Iterator[Difference]:
    """Yield where two prompts differ. A medium that is written in two ways is no difference."""
    sides = [spans_of(ids, placeholders) for ids in (rollout, training)]
    # Numbers below 0 stand for a medium in training, whatever its length.
    unsized = {n for n, (_, ids) in enumerate(sides[1]) if ids and min(ids) < 0}
    items: list[list[tuple[str, list[int]]]] = [[], []]
    for side, spans in zip(items, sides, strict=True):
        for number, (is_media, ids) in enumerate(spans):
            if not is_media:
                side += [(str(i), [i]) for i in ids]
            elif number in unsized:
                side.append((f"medium {number}", ids))
            else:  # one id or another, as often (`same_item`)
                side.append((f"{len(ids)} times" if len({*ids}) == 1 else str(ids), ids))
    ours, theirs = ([item for item, _ in side] for side in items)
    for kind, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind != "equal":
            yield Difference(
                at=sum(len(ids) for _, ids in items[0][:a]),
                rollout=[i for _, ids in items[0][a:b] for i in ids],
                training=[i for _, ids in items[1][c:d] for i in ids],
            )
