"""Rows as training and vLLM encode them, without a model: their media, tokens and positions.

A rollout's request goes all the way that it goes in a run, through ms-swift's template and engine,
what we add, and vLLM's own processing; only the core of the engine, which would load the model, is
left out. Arguments and template are those of the real start, servers encode in a process of their
own. So what `--rollout_mismatch stop` would end a run for is known without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import MagicMock, patch

import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers import GRPOTrainer
from swift.utils import json_parse_to_dict, remove_response

from swift_grpo_ext.checks.finding import Findings, error, note, ok, warning
from swift_grpo_ext.checks.rows import (
    Row,
    RowError,
    encoding_error,
    encoding_fault,
    name_of,
    narrow_fault,
    row_fault,
)
from swift_grpo_ext.rollout.positions import Positions, position_model, positions_in
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.batch import (
    POSITIONS_REMEDY,
    first_misplaced,
    positions_in_training,
)
from swift_grpo_ext.training.encode import REMEDY, check_rollout_prompts, encode_whole
from swift_grpo_ext.training.group import DisagreementError
from swift_grpo_ext.upstream.patches import replaced
from swift_grpo_ext.upstream.placeholders import placeholder_ids, placeholder_texts

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments, RolloutArguments
    from swift.template import Template
    from vllm.v1.engine import EngineCoreRequest

    from swift_grpo_ext.rollout.engine import RolloutEngine

NUM_FIRST, NUM_DRAWN = 16, 16
"""Rows that are encoded: the first, and some of those behind them, drawn by `--data_seed`."""

SHOWN_ROWS = 3
"""Rows that are named of each kind of fault; the others are counted."""

PROCESSING = ("hf_overrides", "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs")
"""Entries of `--vllm_engine_kwargs` that change what vLLM makes of a request."""


# --- the rollout's side ---


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt as an engine reads it."""

    token_ids: list[int]
    positions: Positions | None
    starts: list[int]
    """The first token of each medium."""


@dataclass(frozen=True)
class EncodedRequests:
    """What an engine makes of requests."""

    prompts: list[RolloutPrompt | str]
    """A text says why one cannot be encoded."""

    max_length: int | None
    """A prompt has so many tokens at most, before vLLM puts in those of media."""

    max_model_len: int
    """A prompt and its completion have so many tokens at most."""


Ask = Callable[[list[RolloutInferRequest]], EncodedRequests | None]
"""Has the engine of a run encode requests; None where its start ended before."""


class EngineEncoder:
    """Encodes requests as the engine of a run does, up to vLLM's core."""

    def __init__(self, args: RLHFArguments | RolloutArguments, template: Template) -> None:
        # An engine sets another mode, also of the training's own template.
        self.engine, self.core = make_engine(args, copy(template))
        self._ids = map(str, count())
        self._position_model = position_model(self.engine.engine.model_config)

    def encode(self, request: RolloutInferRequest) -> RolloutPrompt:
        """Encode a request; raises what templates and vLLM raise."""
        [inputs], _ = self.engine._batch_encode([request], strict=True)
        config = self.engine._prepare_generation_config(RequestConfig(max_tokens=1))
        self.engine._add_request(inputs, config, next(self._ids))
        added: EngineCoreRequest = self.core.add_request.call_args.args[0]
        token_ids, features = list(added.prompt_token_ids or ()), added.mm_features or []
        return RolloutPrompt(
            token_ids=token_ids,
            positions=positions_in(self._position_model, token_ids, features),
            starts=[feature.mm_position.offset for feature in features],
        )

    def __call__(self, requests: list[RolloutInferRequest]) -> EncodedRequests:
        prompts: list[RolloutPrompt | str] = []
        for request in requests:
            try:
                prompts.append(self.encode(request))
            except Exception as e:  # templates, processors and vLLM raise many kinds
                prompts.append(e.fault if isinstance(e, RowError) else encoding_fault(request, e))
        return EncodedRequests(
            prompts,
            self.engine.template.max_length,
            int(self.engine.engine.model_config.max_model_len),
        )


def make_engine(
    args: RLHFArguments | RolloutArguments, template: Template
) -> tuple[RolloutEngine, MagicMock]:
    """Return an engine that encodes requests, and the stand-in for its core, which gets them."""
    import vllm.platforms
    from transformers import PreTrainedTokenizerBase
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core_client import EngineCoreClient

    from swift_grpo_ext.rollout.engine import RolloutEngine

    platform = vllm.platforms.current_platform
    if platform.is_unspecified():  # vLLM for GPUs, where there is none; its modules hold the object
        platform.__class__ = CpuPlatform
    kwargs, core = json_parse_to_dict(args.vllm_engine_kwargs), MagicMock()
    core.get_supported_tasks.return_value = ("generate",)
    # vLLM's threads, of which none starts here, have copies of the tokenizer: seconds each.
    uncopied = patch.object(
        PreTrainedTokenizerBase, "__deepcopy__", lambda self, memo: self, create=True
    )
    apart = patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="1")  # the core, as on GPUs
    with patch.object(EngineCoreClient, "make_client", return_value=core), uncopied, apart:
        engine = RolloutEngine(
            args.model_dir,
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


# --- the training's side ---


@dataclass(frozen=True)
class EncodedRow:
    """A row's prompt on both sides."""

    row: Row
    rollout: RolloutPrompt
    fault: str
    """How training would see another prompt; "" where it sees the rollout's."""

    num_behind_cut: int | None
    """So many media stand in the text that `--max_length` cuts, and stay in the prompt; None where
    it cuts nothing."""


class TrainingEncoder:
    """Encodes rows as the training does, and holds them against an engine's prompts."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._placeholders = placeholder_ids(template)
        self.placeholder_texts = placeholder_texts(template)
        self.counts_positions = self._has_dummy_model()

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

    def sample(self, row: Row) -> RolloutSample:
        """Return a row as ms-swift's trainer has it before a rollout (`_preprocess_inputs`)."""
        sample = RolloutSample.from_row({**row, "messages": list(map(dict, row["messages"]))})
        GRPOTrainer._set_inputs_system(SimpleNamespace(template=self.template), [sample])
        remove_response(sample.messages)
        return sample

    def compare(self, row: Row, rollout: RolloutPrompt, encoded: EncodedRequests) -> EncodedRow:
        """Encode a row for training, with the engine's prompt; raises what templates raise."""
        ids = rollout.token_ids
        # Of the text the last tokens are kept: media in front of it have lost theirs.
        text_from = next((n for n, i in enumerate(ids) if i not in self._placeholders), 0)
        behind_cut = sum(start < text_from for start in rollout.starts)
        return EncodedRow(
            row=row,
            rollout=rollout,
            fault=self._fault(self.sample(row), rollout),
            num_behind_cut=behind_cut if 0 < (encoded.max_length or 0) <= len(ids) else None,
        )

    def _fault(self, sample: RolloutSample, rollout: RolloutPrompt) -> str:
        """Say what a round would of this prompt, and a completion of a token."""
        tokenizer = self.template.tokenizer
        sample.messages.append({"role": "assistant", "content": ""})
        sample.response_token_ids = tokenizer.encode("a", add_special_tokens=False)[:1]
        sample.add_eos = False
        sample.rollout_prompts = [Prompt(rollout.token_ids, rollout.positions)]
        sample.sample_id = SampleId(phase="train", step=0, number=0, group=0, index=0)
        max_length = self.template.max_length
        with torch.inference_mode(), replaced(self.template, "max_length", None):
            sample.encoded = encode_whole(sample, self.template, max_length)
            try:
                check_rollout_prompts(
                    sample, sample.encoded, self.template, self._placeholders, REMEDY
                )
            except DisagreementError as e:
                return str(e).partition(": ")[2]  # without the name of the sample
            if not self.counts_positions or rollout.positions is None:
                return ""
            [placed] = positions_in_training(
                [sample], self.template.data_collator([sample.encoded])
            )
        misplaced = first_misplaced(rollout.positions, placed)
        text = f"the same tokens stand at other positions, {misplaced}. {POSITIONS_REMEDY}"
        return text if misplaced else ""


# --- what is said ---


def check_encoding(
    args: RLHFArguments, template: Template, datasets: Mapping[str, Sequence[Row]], ask: Ask
) -> Findings:
    """Encode some rows of each data set on both sides and say what differs, and what does not
    fit."""
    encoder = TrainingEncoder(template)
    drawn = {}
    for setting, rows in datasets.items():
        rest = range(min(NUM_FIRST, len(rows)), len(rows))
        numbers = Random(args.data_seed).sample(rest, min(NUM_DRAWN, len(rest)))
        some = [rows[i] for i in (*range(rest.start), *numbers)]
        # `check_rows` has said what is wrong with the others.
        drawn[setting] = [
            row
            for row in some
            if not (row_fault(row, encoder.placeholder_texts) or narrow_fault(template, row))
        ]
    every = [row for rows in drawn.values() for row in rows]
    encoded = ask([encoder.sample(row).to_infer_request() for row in every])
    if encoded is None:
        return
    prompts = iter(encoded.prompts)
    for setting, rows in drawn.items():
        pairs = [(row, next(prompts)) for row in rows]
        yield from compare_rows(encoder, pairs, encoded, setting=setting, args=args)


def compare_rows(
    encoder: TrainingEncoder,
    pairs: Sequence[tuple[Row, RolloutPrompt | str]],
    encoded: EncodedRequests,
    *,
    setting: str,
    args: RLHFArguments,
) -> Findings:
    """Say what differs, and what does not fit, of rows of a data set."""
    compared: list[EncodedRow] = []
    faults: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    """By side and type of the error, the rows that cannot be encoded, with the reason."""
    for row, prompt in pairs:
        side, reason = "training", encoding_error(encoder.template, row, encoded.max_model_len)
        if not reason and isinstance(prompt, str):
            side, reason = "a rollout", prompt
        elif not reason and isinstance(prompt, RolloutPrompt):
            try:
                compared.append(encoder.compare(row, prompt, encoded))
            except Exception as e:  # templates and processors raise many kinds
                reason = encoding_fault(row, e)
        if reason:
            faults.setdefault((side, reason.partition(":")[0]), []).append((row, reason))
    deletes = args.truncation_strategy == "delete"
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
    if compared:
        yield from differences_of(encoder, compared, setting, args)
        yield from lengths_of(compared, encoded, setting, args)


def differences_of(
    encoder: TrainingEncoder, rows: Sequence[EncodedRow], setting: str, args: RLHFArguments
) -> Findings:
    """Name the rows whose prompts differ; or say that none does."""
    differing = [row for row in rows if row.fault]
    say = error if args.rollout_mismatch == "stop" else warning
    for row in differing[:SHOWN_ROWS]:
        yield say(setting, f"{name_of(row.row)}: {row.fault}")
    if len(differing) > SHOWN_ROWS:
        yield say(setting, f"{len(differing) - SHOWN_ROWS} more of {len(rows)} rows differ.")
    if not differing:
        num_media = sum(len(row.rollout.starts) for row in rows)
        with_positions = encoder.counts_positions and rows[0].rollout.positions is not None
        yield ok(
            setting,
            f"{len(rows)} rows with {num_media} media are equal in rollout and training, in "
            f"tokens{' and positions' * with_positions}.",
        )


def lengths_of(
    rows: Sequence[EncodedRow], encoded: EncodedRequests, setting: str, args: RLHFArguments
) -> Findings:
    """Name prompts that are cut, media of which a cut takes the text, and prompts that leave a
    completion no room."""
    limit, room = encoded.max_length, encoded.max_model_len
    cut = [row for row in rows if row.num_behind_cut is not None]
    for row in [row for row in cut if row.num_behind_cut][:SHOWN_ROWS]:
        yield warning(
            setting,
            f"{name_of(row.row)} is truncated to --max_length {limit}: {row.num_behind_cut} of its "
            f"{len(row.rollout.starts)} media lost the text around them.",
            "Raise --max_length, or have such prompts replaced with --truncation_strategy delete.",
        )
    if cut and not any(row.num_behind_cut for row in cut):
        yield warning(
            setting,
            f"{len(cut)} of {len(rows)} rows are cut to --max_length {limit} at their beginning, "
            f"where the system prompt and the question stand, the first: {name_of(cut[0].row)}.",
            "Raise it, or have such prompts replaced with --truncation_strategy delete.",
        )
    lengths = [len(row.rollout.token_ids) for row in rows]
    num_prompt, num_completion = max(lengths), int(args.max_completion_length)
    text = (
        f"prompts have {min(lengths)} to {num_prompt} tokens (--max_length {limit} counts a medium "
        f"as one); with --max_completion_length {num_completion} a sample takes up to "
        f"{num_prompt + num_completion} of {room} (--vllm_max_model_len)."
    )
    if room - num_prompt < num_completion:
        longest = rows[lengths.index(num_prompt)]
        more = f"Completions of {name_of(longest.row)} end after {room - num_prompt} tokens."
        remedy = "Raise --vllm_max_model_len, or lower --max_length."
        yield warning(setting, f"{text} {more}", remedy)
    else:
        yield note(setting, text)
