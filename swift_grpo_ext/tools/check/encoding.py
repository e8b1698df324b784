"""Rows as training and vLLM encode them, without weights: their media, tokens and positions.

A request passes ms-swift's template and engine, the plugin's additions, and vLLM's own processing,
as in a run; only the core of the engine, which would load the model, is left out. Arguments and
template come from the real start; servers encode in a process of their own. So a prompt for which
`--rollout_mismatch stop` would end a run is found without a GPU.
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

NUM_FIRST, NUM_DRAWN = 16, 16
"""Rows that are encoded: the first, and some of the others, drawn by `--data_seed`."""

SHOWN_ROWS = 3  # of those that differ

PROCESSING = ("hf_overrides", "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs")
"""Entries of `--vllm_engine_kwargs` that change how vLLM processes a request."""


# --- the rollout's side ---


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt as an engine reads it."""

    token_ids: list[int]
    positions: Positions | None
    starts: list[int]  # the first token of each medium
    length: int  # in tokens, a medium counting as one


@dataclass(frozen=True)
class EncodedRequests:
    """The prompts that an engine makes of requests."""

    prompts: list[RolloutPrompt | str]  # a text says why one cannot be encoded
    max_length: int | None  # of a prompt, a medium counting as one token
    max_model_len: int  # tokens of a prompt and its completion


Ask = Callable[[list[RolloutInferRequest]], EncodedRequests | None]
"""Has the engine of a run encode requests; None where its start ended before."""


class EngineEncoder:
    """Encodes requests as the engine of a run does, up to vLLM's core."""

    def __init__(self, args: RLHFArguments | RolloutArguments, template: Template) -> None:
        import vllm.platforms
        from transformers import PreTrainedTokenizerBase
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.engine.core_client import EngineCoreClient

        from swift_grpo_ext.rollout.engine import RolloutEngine

        platform = vllm.platforms.current_platform
        if platform.is_unspecified():  # vLLM for GPUs, without one; its modules hold the object
            platform.__class__ = CpuPlatform
        self.core = MagicMock()  # a stand-in for vLLM's core, which receives the requests
        self.core.get_supported_tasks.return_value = ("generate",)
        # vLLM copies the tokenizer for threads that do not start here: seconds each.
        uncopied = patch.object(
            PreTrainedTokenizerBase, "__deepcopy__", lambda self, memo: self, create=True
        )
        apart = patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="1")  # the core, as on GPUs
        kwargs = json_parse_to_dict(args.vllm_engine_kwargs)
        with patch.object(EngineCoreClient, "make_client", return_value=self.core), uncopied, apart:
            self.engine = RolloutEngine(
                args.model_dir,
                template=copy(template),  # an engine sets another mode
                torch_dtype=torch.bfloat16,
                max_model_len=args.vllm_max_model_len,
                limit_mm_per_prompt=json_parse_to_dict(args.vllm_limit_mm_per_prompt) or None,
                enforce_eager=True,
                # vLLM passes on only the names of media that its cache has.
                engine_kwargs={"mm_processor_cache_gb": 0}
                | {name: kwargs[name] for name in PROCESSING if name in kwargs},
            )
        self._ids = map(str, count())
        self._position_model = position_model(self.engine.engine.model_config)

    def encode(self, request: RolloutInferRequest) -> RolloutPrompt:
        """Encode a request; raises what templates and vLLM raise."""
        [inputs], _ = self.engine._batch_encode([request], strict=True)
        length = len(inputs["input_ids"])
        config = self.engine._prepare_generation_config(RequestConfig(max_tokens=1))
        self.engine._add_request(inputs, config, next(self._ids))
        added: EngineCoreRequest = self.core.add_request.call_args.args[0]
        token_ids, features = list(added.prompt_token_ids or ()), added.mm_features or []
        return RolloutPrompt(
            token_ids=token_ids,
            positions=positions_in(self._position_model, token_ids, features),
            starts=[feature.mm_position.offset for feature in features],
            length=length,
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


# --- the training's side ---


@dataclass(frozen=True)
class EncodedRow:
    """A row's prompt on both sides."""

    row: Row
    rollout: RolloutPrompt
    fault: str  # how training would see another prompt; "" where it sees the rollout's


class TrainingEncoder:
    """Encodes rows as the training does, and compares them with an engine's prompts."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._placeholders = placeholder_ids(template)
        self.placeholder_texts = placeholder_texts(template)
        self.counts_positions = self._has_dummy_model()

    def _has_dummy_model(self) -> bool:
        """Give the template a model without weights, which counts positions, and return whether
        there is one for its type. It is ms-swift's own (template/base.py, `_get_model`)."""
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

    def compare(self, row: Row, rollout: RolloutPrompt) -> EncodedRow:
        """Compare an engine's prompt with that of a round, with a completion of one token; raises
        the exceptions of templates."""
        sample = self.sample(row)
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
                # Without the name of the sample.
                return EncodedRow(row, rollout, str(e).partition(": ")[2])
            if not self.counts_positions or rollout.positions is None:
                return EncodedRow(row, rollout, "")
            [placed] = positions_in_training(
                [sample], self.template.data_collator([sample.encoded])
            )
        misplaced = first_misplaced(rollout.positions, placed)
        text = f"the same tokens stand at other positions, {misplaced}. {POSITIONS_REMEDY}"
        return EncodedRow(row, rollout, text if misplaced else "")


# --- findings ---


def check_encoding(
    args: RLHFArguments, template: Template, datasets: Mapping[str, Sequence[Row]], ask: Ask
) -> Findings:
    """Encode some rows of each data set on both sides, and name those that differ, and those that
    do not fit."""
    encoder = TrainingEncoder(template)
    drawn = {}
    for setting, rows in datasets.items():
        rest = range(min(NUM_FIRST, len(rows)), len(rows))
        numbers = Random(args.data_seed).sample(rest, min(NUM_DRAWN, len(rest)))
        some = [rows[i] for i in (*range(rest.start), *numbers)]
        # `check_rows` has named the others.
        drawn[setting] = [row for row in some if not row_fault(row, encoder.placeholder_texts)]
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
    compared: list[EncodedRow] = []
    refused: dict[str, list[str]] = {}  # rows that cannot be encoded, by the side that refuses them
    for row, prompt in pairs:
        side, reason = "training", encoding_error(encoder.template, row, encoded.max_model_len)
        if not reason and isinstance(prompt, str):
            side, reason = "a rollout", prompt
        elif not reason and isinstance(prompt, RolloutPrompt):
            try:
                compared.append(encoder.compare(row, prompt))
            except Exception as e:  # templates and processors raise many kinds
                reason = encoding_fault(row, e)
        if reason:
            text = f"{name_of(row)} cannot be encoded for {side} ({reason})."
            refused.setdefault(side, []).append(text)
    deletes = args.truncation_strategy == "delete"
    for side, texts in refused.items():
        text = texts[0] + (f" {len(texts) - 1} more rows fail, too." if len(texts) > 1 else "")
        if side == "a rollout":
            yield error(setting, text, "Correct them, or leave them out.")
        elif deletes:
            yield warning(
                setting, f"{text} Others take their place (--truncation_strategy delete)."
            )
        else:
            yield error(setting, text, "Correct them, or use --truncation_strategy delete.")
    if compared:
        yield from differences_of(encoder, compared, setting, args)
        yield from lengths_of(compared, encoded, setting, args)


def differences_of(
    encoder: TrainingEncoder, rows: Sequence[EncodedRow], setting: str, args: RLHFArguments
) -> Findings:
    """Name the rows with prompts that differ; or say that none does."""
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
    """Name prompts that are cut, and prompts that leave a completion no room."""
    limit, room = encoded.max_length, encoded.max_model_len
    cut = [row for row in rows if 0 < (limit or 0) <= row.rollout.length]
    if cut:
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
