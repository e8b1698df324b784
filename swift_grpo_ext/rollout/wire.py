"""Messages between trainer and engine: a request's metadata, and its answer. Pure.

The metadata travels in `RolloutInferRequest.data_dict`, which reaches the engine on every path of
ms-swift (colocated and served, sync and async, through multi-turn schedulers).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, TypeAdapter

from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE, SampleId, sample_seed
from swift_grpo_ext.stops.rule import StopReason

KEY = "swift_grpo_ext"
VERSION = 9

# HTTP requests that rest on weights name the start of the server that got these weights.
INSTANCE_HEADER = "X-Swift-Grpo-Ext-Instance"

# The trainer's `--rollout_timeout`, in seconds. For the holder of its lease, the server ends a
# replica that takes longer than the smaller of both sides' timeouts.
TIMEOUT_HEADER = "X-Swift-Grpo-Ext-Timeout"
MIN_TIMEOUT = 1.0  # seconds; a healthy replica that is idle answers in less

# Asks for an answer that begins at once, since conversations last as long as their tools: blanks,
# and once it is ready its status, a line break and its content.
STATUS_HEADER = "X-Swift-Grpo-Ext-Status"

# Names a request; its answer has the same name (docs/promises.md, F1).
MESSAGE_HEADER = "X-Swift-Grpo-Ext-Message"

# How long a server and the trainer wait, in units of `--rollout_timeout`, which bounds a replica
# (F2). In a weight update a replica waits half a unit for the others. A request has half a unit for
# its turn, and two for a replica that hangs and the one that serves its groups instead.
GROUP_TIMEOUTS = 0.5
SERVER_TIMEOUTS = 2.5
TRAINER_TIMEOUTS = 3.0

# Token ids or log-probabilities. Rank 0 keeps a server's arrays: lists of a round's numbers take
# 10 times the memory, and most of its seconds.
Numbers = list[Any] | NDArray[Any]


class WireError(ValueError):
    """A message of another version, or none of ours at all."""


@dataclass(frozen=True)
class WeightReport:
    """An engine's report of its last update; plain values, which travel as JSON."""

    loaded: dict[str, str] = field(default_factory=dict)  # tensors' names to `float32 (2, 3)`
    unfilled: list[str] = field(default_factory=list)  # parameters that the update did not fill
    adapter_fault: str = ""  # why the engine does not generate with the adapter that it got
    faults: list[str] | None = None  # the watch's findings; None where nothing is watched


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetadata:
    """What a request asks of the engine beside its prompt."""

    sample_id: SampleId  # the first sample's; the others have the indices that follow
    count: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]  # number of samples: vLLM's `n`
    run_seed: NonNegativeInt | None  # `--seed`; None leaves the seeds to ms-swift
    as_arrays: bool  # asks for an answer in arrays; multi-turn schedulers read ms-swift's form
    # Beside the stop strings of ms-swift's request configuration. A server writes None for a client
    # that sends no metadata: stops and texts are ms-swift's.
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = ()
    include_stop_str_in_output: bool = True  # whether texts end with what stopped them, or before

    @property
    def is_other_clients(self) -> bool:
        """True if a server made the metadata, for a client that sends none."""
        return self.stop_token_ids is None

    def seed_of(self, k: int) -> int | None:
        """Return the seed of the request's sample k, from 0."""
        return None if self.run_seed is None else sample_seed(self.run_seed, self.sample_id) + k

    def next_turn(self) -> RequestMetadata:
        return replace(self, sample_id=replace(self.sample_id, turn=self.sample_id.turn + 1))


_METADATA = TypeAdapter(RequestMetadata)


def read_metadata(data_dict: Mapping[str, Any] | None) -> RequestMetadata | None:
    """Return the metadata of a request; None where it has none.

    Raises:
        WireError: it has another version, or is malformed; names the field and its value.
    """
    wire = (data_dict or {}).get(KEY)
    if wire is None:
        return None
    check_version(wire, "a request")
    try:
        # As JSON: strict about numbers, pydantic takes no Python list for a tuple.
        metadata = _METADATA.validate_json(json.dumps(wire), strict=True)
        sample_seed(0, metadata.sample_id)  # numbers from which a seed can be made
    except (TypeError, ValueError) as e:
        raise WireError(f"A request's {KEY} is malformed ({e}): {wire!r}") from e
    return metadata


def write_metadata(data_dict: MutableMapping[str, Any], metadata: RequestMetadata) -> None:
    data_dict[KEY] = {"version": VERSION, **asdict(metadata)}


def check_version(message: object, what: str) -> None:
    """Raise a `WireError` unless a message has our version."""
    version = message.get("version") if isinstance(message, Mapping) else None
    if version != VERSION:
        raise WireError(
            f"{what} speaks version {version!r} of swift-grpo-ext's wire format, this side speaks "
            f"{VERSION}: load the same version of the plugin in `swift rlhf` and `swift rollout`."
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample as it was generated."""

    text: str
    token_ids: Numbers
    logprobs: Numbers | None  # of the sampled tokens, in nats, under the sampled distribution
    finish_reason: str | None
    stop_reason: StopReason = None  # the stop string or token id that ended it, if one did
    seed: int | None = None
    replica: str = ""  # the engine that generated it: `rank 0`, `server 1 replica 0`
    # Each token's experts (`--router_replay_mode R3`): an array, or what ms-swift's
    # `serialize_ndarray` makes of it for the wire.
    routed_experts: Any = None


class Prompt(NamedTuple):
    """A prompt as its engine saw it."""

    token_ids: list[int]
    # [3, tokens] in time, height and width; None where the engine counted none (positions.py).
    positions: NDArray[np.int32] | None = None


class Answer(NamedTuple):
    """All samples of one request, and their prompt."""

    completions: list[Completion]
    prompt: Prompt


def write_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain JSON values. Its samples have log-probabilities of all tokens, or
    all have none (`engine.flat_logprobs`)."""
    completions, prompt = answer
    logprobs = [p for c in completions for p in (() if c.logprobs is None else c.logprobs)]
    has_logprobs = completions[0].logprobs is not None
    return {
        "version": VERSION,
        "replica": completions[0].replica,
        "texts": [c.text for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "stop_reasons": [c.stop_reason for c in completions],
        "lengths": [len(c.token_ids) for c in completions],
        "token_ids": to_base64([i for c in completions for i in c.token_ids], "<i4"),
        "logprobs": to_base64(logprobs, "<f4") if has_logprobs else None,
        "prompt_token_ids": to_base64(prompt.token_ids, "<i4"),
        "prompt_positions": to_base64([] if prompt.positions is None else prompt.positions, "<i4"),
        "routed_experts": [c.routed_experts for c in completions],
    }


def read_answer(answer: Mapping[str, Any], metadata: RequestMetadata, server: str) -> Answer:
    """Return an answer, its numbers as arrays.

    Raises:
        WireError: the answer has another version, is malformed, or its counts disagree (M6);
            names the server.
    """
    check_version(answer, server)
    try:
        lengths, texts, reasons = answer["lengths"], answer["texts"], answer["finish_reasons"]
        stop_reasons, experts = answer["stop_reasons"], answer["routed_experts"]
        names = ("token_ids", "prompt_token_ids", "prompt_positions")
        ids, prompt_ids, positions = (from_base64(answer[name], "<i4") for name in names)
        logprobs = None if answer["logprobs"] is None else from_base64(answer["logprobs"], "<f4")
        counts = {len(values) for values in (lengths, texts, reasons, stop_reasons, experts)}
        num_logprobs = len(ids) if logprobs is None else len(logprobs)
        # Slices of arrays that are too short would be short without an error.
        is_complete = sum(lengths) == len(ids) == num_logprobs
        if counts != {metadata.count} or min(lengths) < 0 or not is_complete:
            raise ValueError(
                f"{sorted(counts)} samples of {lengths} tokens, {len(ids)} token ids and "
                f"{num_logprobs} log-probabilities in all"
            )
        placed = positions.reshape(3, len(prompt_ids)) if len(positions) else None
        ends = np.cumsum(lengths).tolist()
        completions = [
            Completion(
                text=texts[k],
                token_ids=ids[end - length : end],
                logprobs=None if logprobs is None else logprobs[end - length : end],
                finish_reason=reasons[k],
                stop_reason=stop_reasons[k],
                seed=metadata.seed_of(k),
                replica=f"{server} {answer['replica']}",
                routed_experts=experts[k],
            )
            for k, (length, end) in enumerate(zip(lengths, ends, strict=True))
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise WireError(f"{server} answered {metadata} with nonsense: {e!r}") from e
    return Answer(completions, Prompt(prompt_ids.tolist(), placed))


def to_base64(values: Sequence[float] | Sequence[int] | NDArray[Any], dtype: str) -> str:
    """Return base64 of numbers' little-endian bytes: 4 bytes, 5.4 characters each."""
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode("ascii")


def from_base64(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
