"""Defines the wire format between trainer and engine: a request's metadata and answer. Pure.

The metadata is in `RolloutInferRequest.data_dict`, which reaches the engine on every path of
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

# Identifies one start of a server. Requests that need its weights send the id that they expect.
INSTANCE_HEADER = "X-Swift-Grpo-Ext-Instance"

# The trainer's `--rollout_timeout`, in seconds. For the holder of its lease, the server ends a
# replica that takes longer than the smaller of both sides' timeouts.
TIMEOUT_HEADER = "X-Swift-Grpo-Ext-Timeout"
MIN_TIMEOUT = 1.0  # seconds; an idle, healthy replica answers faster

# Requests a streamed answer, since conversations may wait long for their tools: blanks, then the
# status, a line break and the content.
STATUS_HEADER = "X-Swift-Grpo-Ext-Status"

# Names a request; its answer has the same name (docs/promises.md, F1).
MESSAGE_HEADER = "X-Swift-Grpo-Ext-Message"

# Timeouts of server and trainer, in units of `--rollout_timeout`, a replica's own timeout (F2). In
# weight updates a replica waits half a unit for the others. A request may wait half a unit in the
# queue, one for a replica that hangs, and one for the replica that repeats its groups.
GROUP_TIMEOUTS = 0.5
SERVER_TIMEOUTS = 2.5
TRAINER_TIMEOUTS = 3.0

# Token ids or log-probabilities. Rank 0 keeps a server's arrays: lists would take 10 times the
# memory, and most of rank 0's time.
Numbers = list[Any] | NDArray[Any]


class WireError(ValueError):
    """A message is malformed, or has another version of the wire format."""


@dataclass(frozen=True)
class WeightReport:
    """An engine's report on its last weight update, as JSON values."""

    loaded: dict[str, str] = field(default_factory=dict)  # tensor name to `float32 (2, 3)`
    unfilled: list[str] = field(default_factory=list)  # parameters that the update did not load
    adapter_fault: str = ""  # why the engine does not use the adapter
    faults: list[str] | None = None  # findings of the weight watch; None if it is off


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetadata:
    """A request's settings for the engine."""

    sample_id: SampleId  # the first sample; the others have consecutive indices
    count: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]  # number of samples: vLLM's `n`
    run_seed: NonNegativeInt | None  # `--seed`; None: ms-swift chooses the seeds
    as_arrays: bool  # whether to answer with arrays; multi-turn schedulers need ms-swift's form
    # In addition to the stop strings of ms-swift's request configuration. A server sets None for a
    # client that sends no metadata: ms-swift's own stops and texts apply.
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = ()
    include_stop_str_in_output: bool = True  # whether texts include the stop that ended them

    @property
    def from_other_client(self) -> bool:
        """Whether a server made the metadata, for a client that sends none."""
        return self.stop_token_ids is None

    def seed_of(self, k: int) -> int | None:
        """Return the seed of the request's k-th sample, from 0."""
        return None if self.run_seed is None else sample_seed(self.run_seed, self.sample_id) + k

    def next_turn(self) -> RequestMetadata:
        return replace(self, sample_id=replace(self.sample_id, turn=self.sample_id.turn + 1))


_METADATA = TypeAdapter(RequestMetadata)


def read_metadata(data_dict: Mapping[str, Any] | None) -> RequestMetadata | None:
    """Return a request's metadata, or None. Raise `WireError` if its version or form is wrong."""
    wire = (data_dict or {}).get(KEY)
    if wire is None:
        return None
    check_version(wire, "a request")
    try:
        # As JSON: in strict mode, pydantic would reject a Python list for a tuple.
        metadata = _METADATA.validate_json(json.dumps(wire), strict=True)
        sample_seed(0, metadata.sample_id)  # raises if numbers are out of range
    except (TypeError, ValueError) as e:
        raise WireError(f"A request's {KEY} is malformed ({e}): {wire!r}") from e
    return metadata


def write_metadata(data_dict: MutableMapping[str, Any], metadata: RequestMetadata) -> None:
    data_dict[KEY] = {"version": VERSION, **asdict(metadata)}


def check_version(message: object, peer: str) -> None:
    """Raise a `WireError` unless a message has this version of the wire format."""
    version = message.get("version") if isinstance(message, Mapping) else None
    if version != VERSION:
        raise WireError(
            f"{peer} speaks version {version!r} of swift-grpo-ext's wire format, this side speaks "
            f"{VERSION}: load the same version of the plugin in `swift rlhf` and `swift rollout`."
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One generated sample."""

    text: str
    token_ids: Numbers
    logprobs: Numbers | None  # of the sampled tokens, in nats, under the sampled distribution
    finish_reason: str | None
    stop_reason: StopReason = None  # the stop string or token id that ended it; None for others
    seed: int | None = None
    replica: str = ""  # the engine that generated it: `rank 0`, `server 1 replica 0`
    # Each token's experts (`--router_replay_mode R3`): an array, on the wire serialized by
    # ms-swift's `serialize_ndarray`.
    routed_experts: Any = None


class Prompt(NamedTuple):
    """A prompt as the engine saw it."""

    token_ids: list[int]
    # [3, tokens] in time, height and width; None if the engine has none (positions.py).
    positions: NDArray[np.int32] | None = None


class Answer(NamedTuple):
    """All samples of one request, and their prompt."""

    completions: list[Completion]
    prompt: Prompt


def write_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values. Either all its samples have log-probabilities, or none has
    (`engine.flat_logprobs`)."""
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
    """Return an answer with its numbers as arrays. Raise a `WireError` if it has another version,
    is malformed, or its counts disagree (M6)."""
    check_version(answer, server)
    try:
        lengths, texts, reasons = answer["lengths"], answer["texts"], answer["finish_reasons"]
        stop_reasons, experts = answer["stop_reasons"], answer["routed_experts"]
        names = ("token_ids", "prompt_token_ids", "prompt_positions")
        ids, prompt_ids, positions = (from_base64(answer[name], "<i4") for name in names)
        logprobs = None if answer["logprobs"] is None else from_base64(answer["logprobs"], "<f4")
        counts = {len(values) for values in (lengths, texts, reasons, stop_reasons, experts)}
        num_logprobs = len(ids) if logprobs is None else len(logprobs)
        # Slicing an array that is too short would not raise.
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
    """Return numbers as base64 of their little-endian bytes; 4 bytes take 5.4 characters."""
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode("ascii")


def from_base64(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
