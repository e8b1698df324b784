"""Compare rows as training and vLLM encode them: their tokens, media and positions.

A request passes ms-swift's template and engine, the plugin's additions, and vLLM's input processor,
as in a run. So a prompt for which `--rollout_mismatch stop` would end a run is found before the
run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from swift.infer_engine import vllm_engine
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.model import get_model_processor
from swift.rlhf_trainers import GRPOTrainer
from swift.utils import json_parse_to_dict, remove_response
from vllm.platforms import current_platform
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

from swift_grpo_ext.checks.finding import Finding, Findings, error, note, ok, warning
from swift_grpo_ext.checks.rows import (
    Row,
    RowError,
    encoding_error,
    encoding_fault,
    name_of,
    row_fault,
)
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.positions import Positions, kept_positions
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.harness import NotHereError
from swift_grpo_ext.training.batch import check_positions
from swift_grpo_ext.training.encode import check_rollout_prompts, encode_whole
from swift_grpo_ext.training.group import DisagreementError
from swift_grpo_ext.upstream.patches import replaced
from swift_grpo_ext.upstream.placeholders import placeholder_ids, placeholder_texts

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments, RolloutArguments
    from swift.template import Template
    from vllm.config import VllmConfig

# The first rows of each data set are encoded, and some of the others, drawn by `--data_seed`.
NUM_FIRST, NUM_DRAWN = 16, 16
SHOWN_ROWS = 3  # with the same fault

# These entries of `--vllm_engine_kwargs` change how vLLM processes a request.
PROCESSING = ("hf_overrides", "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs")


# --- the rollout's side ---


class RolloutPrompt(NamedTuple):
    """A prompt as an engine reads it."""

    token_ids: list[int]
    positions: Positions | None
    num_media: int
    length: int  # in tokens, a medium counting as one


class EncodedRequests(NamedTuple):
    """The prompts that an engine reads in requests."""

    prompts: list[RolloutPrompt | str]  # a text is the reason why one cannot be encoded
    max_length: int | None  # of a prompt, a medium counting as one token
    max_model_len: int  # tokens of a prompt and its completion


Encoder = Callable[[list[RolloutInferRequest]], EncodedRequests | None]
"""It encodes requests with the engine of a run; it returns None if the engine's start failed."""


class Frontend(LLMEngine):
    """vLLM's engine without its core: it processes requests, and generates nothing."""

    def __init__(self, vllm_config: VllmConfig, *_: Any, **__: Any) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.input_processor = InputProcessor(vllm_config)
        self.renderer = self.input_processor.renderer

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        return self.input_processor.process_inputs(*args, **kwargs, supported_tasks=("generate",))


def engine_of(args: RLHFArguments | RolloutArguments, template: Template) -> RolloutEngine:
    """Return the engine of a run, up to vLLM's core, which would load the weights."""
    if current_platform.is_unspecified():
        raise NotHereError("vLLM is built for accelerators, and this machine has none")
    kwargs = json_parse_to_dict(args.vllm_engine_kwargs)
    with replaced(vllm_engine, "LLMEngine", Frontend):
        return RolloutEngine(
            args.model_dir,
            template=copy(template),  # an engine sets another mode
            torch_dtype=torch.bfloat16,
            max_model_len=args.vllm_max_model_len,
            limit_mm_per_prompt=json_parse_to_dict(args.vllm_limit_mm_per_prompt) or None,
            enforce_eager=True,
            # With a cache, vLLM passes on only the names of cached media.
            engine_kwargs={"mm_processor_cache_gb": 0}
            | {name: kwargs[name] for name in PROCESSING if name in kwargs},
        )


def encode_requests(
    engine: RolloutEngine, requests: Iterable[RolloutInferRequest]
) -> EncodedRequests:
    """Encode requests by an engine of `engine_of`."""
    prompts: list[RolloutPrompt | str] = []
    for request in requests:
        try:
            [inputs], _ = engine._batch_encode([request], strict=True)
            length = len(inputs["input_ids"])
            config = engine._prepare_generation_config(RequestConfig(max_tokens=1))
            made = engine._add_request(inputs, config, "0")
        except Exception as e:  # templates, processors and vLLM raise many kinds
            prompts.append(e.fault if isinstance(e, RowError) else encoding_fault(request, e))
            continue
        positions = kept_positions.pop("0", None)
        ids, media = list(made.prompt_token_ids or ()), made.mm_features or ()
        prompts.append(RolloutPrompt(ids, positions, len(media), length))
    max_model_len = int(engine.engine.model_config.max_model_len)
    return EncodedRequests(prompts, engine.template.max_length, max_model_len)


# --- the training's side ---


def add_dummy_model(template: Template) -> None:
    """Give a template a model without weights, which counts positions, if one can be made."""
    # ms-swift makes the same one without the model's type (4.6, template/base.py, `_get_model`).
    info = template.model_info
    with suppress(Exception), torch.device("meta"):  # code of a hub, missing packages
        template.dummy_model, _ = get_model_processor(
            info.model_dir, model_type=info.model_type, return_dummy_model=True
        )


def sample_of(template: Template, row: Row) -> RolloutSample:
    """Return a row as ms-swift's trainer has it before a rollout (`_preprocess_inputs`)."""
    sample = RolloutSample.from_row({**row, "messages": list(map(dict, row["messages"]))})
    GRPOTrainer._set_inputs_system(SimpleNamespace(template=template), [sample])
    remove_response(sample.messages)
    return sample


def difference(template: Template, sample: RolloutSample, prompt: RolloutPrompt) -> str:
    """Return how the prompt of a training differs from the engine's; "" if both are equal. The
    sample is encoded in place."""
    # A training encodes a prompt with a completion: one token is enough.
    sample.messages.append({"role": "assistant", "content": ""})
    sample.response_token_ids = template.tokenizer.encode("a", add_special_tokens=False)[:1]
    sample.add_eos = False
    sample.rollout_prompts = [Prompt(prompt.token_ids, prompt.positions)]
    sample.sample_id = SampleId(phase="train", step=0, number=0, group=0, index=0)
    placeholders, max_length = placeholder_ids(template), template.max_length
    with torch.inference_mode(), replaced(template, "max_length", None):
        sample.encoded = encode_whole(sample, template, max_length)
        try:
            check_rollout_prompts(sample, sample.encoded, template, placeholders)
            if prompt.positions is not None and template.dummy_model is not None:
                batch = template.data_collator([sample.encoded])
                raises: Any = SimpleNamespace(rollout_mismatch="stop")
                check_positions([sample], batch, raises)
        except DisagreementError as e:
            return str(e).partition(": ")[2]  # without the name of the sample
    return ""


# --- findings ---


def check_encoding(
    args: RLHFArguments, template: Template, datasets: Iterable[Sequence[Row]], encode: Encoder
) -> Findings:
    """Encode some rows of the data sets on both sides. Name those that differ, cannot be encoded,
    or do not fit."""
    placeholders = placeholder_texts(template)
    # `check_rows` has named the others.
    rows = [row for row in drawn_rows(datasets, args.data_seed) if not row_fault(row, placeholders)]
    encoded = encode([sample_of(template, row).to_infer_request() for row in rows])
    if encoded is None:
        return
    add_dummy_model(template)
    compared: list[tuple[Row, RolloutPrompt]] = []
    refused, unusable, differing, num_bytes = list[str](), list[str](), list[str](), list[int]()
    for row, prompt in zip(rows, encoded.prompts, strict=True):
        if fault := encoding_error(template, row, encoded.max_model_len):
            unusable.append(f"{name_of(row)} cannot be encoded for training ({fault}).")
        elif isinstance(prompt, str):
            refused.append(f"{name_of(row)} cannot be encoded for a rollout ({prompt}).")
        else:
            compared.append((row, prompt))
            sample = sample_of(template, row)
            if found := difference(template, sample, prompt):
                differing.append(f"{name_of(row)}: {found}")
            num_bytes.append(media_bytes(sample.encoded))
    yield from first_of(error, refused, "Correct them, or leave them out.")
    if args.truncation_strategy == "delete":
        yield from first_of(warning, unusable, "Others take their place.")
    else:
        remedy = "Correct them, or use --truncation_strategy delete."
        yield from first_of(error, unusable, remedy)
    yield from first_of(error if args.rollout_mismatch == "stop" else warning, differing)
    if compared and not differing:
        num_media = sum(prompt.num_media for _, prompt in compared)
        has_positions = any(prompt.positions is not None for _, prompt in compared)
        parts = "tokens and positions" if has_positions and template.dummy_model else "tokens"
        text = f"{len(compared)} rows with {num_media} media are equal in rollout and training"
        yield ok("dataset", f"{text}, in {parts}.")
    if compared:
        yield from lengths_of(compared, encoded, int(args.max_completion_length))
        yield from memory_of(args, num_bytes)


def drawn_rows(datasets: Iterable[Sequence[Row]], seed: int) -> Iterator[Row]:
    """Yield the first rows of each data set, and some of its others."""
    for rows in datasets:
        rest = range(min(NUM_FIRST, len(rows)), len(rows))
        numbers = Random(seed).sample(rest, min(NUM_DRAWN, len(rest)))
        yield from (rows[i] for i in (*range(rest.start), *numbers))


def first_of(level: Callable[..., Finding], texts: Sequence[str], remedy: str = "") -> Findings:
    """Name the first rows with a fault, and count the others."""
    for text in texts[:SHOWN_ROWS]:
        yield level("dataset", text, remedy)
    if len(texts) > SHOWN_ROWS:
        yield level("dataset", f"{len(texts) - SHOWN_ROWS} more rows have such a fault.")


def lengths_of(
    rows: Sequence[tuple[Row, RolloutPrompt]], encoded: EncodedRequests, num_completion: int
) -> Findings:
    """Name prompts that are cut, and prompts that leave a completion no room."""
    limit, room = encoded.max_length, encoded.max_model_len
    cut = [row for row, prompt in rows if 0 < (limit or 0) <= prompt.length]
    if cut:
        yield warning(
            "dataset",
            f"{len(cut)} of {len(rows)} rows are cut to --max_length {limit} at their beginning, "
            f"where the system prompt and the question stand, the first: {name_of(cut[0])}.",
            "Raise it, or have such prompts replaced with --truncation_strategy delete.",
        )
    lengths = [len(prompt.token_ids) for _, prompt in rows]
    num_prompt = max(lengths)
    text = (
        f"prompts have {min(lengths)} to {num_prompt} tokens (--max_length {limit} counts a medium "
        f"as one); with --max_completion_length {num_completion} a sample takes up to "
        f"{num_prompt + num_completion} of {room} (--vllm_max_model_len)."
    )
    if num_prompt + num_completion <= room:
        yield note("dataset", text)
        return
    longest, _ = rows[lengths.index(num_prompt)]
    text = f"{text} Completions of {name_of(longest)} end after {room - num_prompt} tokens."
    yield warning("dataset", text, "Raise --vllm_max_model_len, or lower --max_length.")


def media_bytes(encoded: Mapping[str, Any]) -> int:
    """Return the bytes of an encoded row's tensors; its tokens are lists."""
    return sum(value.nbytes for value in encoded.values() if isinstance(value, torch.Tensor))


def memory_of(args: RLHFArguments, num_bytes: Sequence[int]) -> Findings:
    """Warn if the media of a round do not fit into this machine's free memory; `num_bytes` has the
    bytes of some rows' media."""
    sizes: Any = args.training_args
    num_prompts = sizes.generation_batch_size // getattr(sizes, "num_generations", 1)
    needed = fmean(num_bytes) * num_prompts / int(os.environ.get("NNODES") or 1)
    free = psutil.virtual_memory().available
    if needed > free:
        yield warning(
            "per_device_train_batch_size",
            f"the media of a round take about {needed / 1e9:.0f} GB on each machine once they are "
            f"decoded ({fmean(num_bytes) / 1e6:.1f} MB for each of {num_prompts} prompts), and "
            f"{free / 1e9:.0f} GB are free.",
            "Lower MAX_PIXELS, or the prompts of a round (also --steps_per_generation).",
        )
