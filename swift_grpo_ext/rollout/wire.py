"""What travels between trainer and engine: a request's metadata, and its answer. Pure.

The metadata travels in `RolloutInferRequest.data_dict` under one versioned key, so that it reaches
the engine on every path of ms-swift (colocated and served, sync and async, through multi-turn
schedulers). An answer holds all samples of a request: token ids and log-probabilities as
arrays of numbers, not one JSON dictionary per token.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, TypeAdapter

from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE, SampleId, sample_seed
from swift_grpo_ext.stops.rule import StopReason

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest

KEY = "swift_grpo_ext"
VERSION = 9
INSTANCE_HEADER = "X-Swift-Grpo-Ext-Instance"
"""HTTP requests that rest on weights name the start of the server that was given them."""

TIMEOUT_HEADER = "X-Swift-Grpo-Ext-Timeout"
"""The trainer's `--rollout_timeout`, in seconds. For the client that holds the server's lease, a
replica that takes longer than the smaller of both sides' timeouts is ended."""

MIN_TIMEOUT = 1.0
"""Seconds. A healthy replica that is idle answers in less."""

STATUS_HEADER = "X-Swift-Grpo-Ext-Status"
"""Asks for an answer that begins at once, since conversations take as long as their tools: blanks
while it is made, then its status, a line break and its content."""

MESSAGE_HEADER = "X-Swift-Grpo-Ext-Message"
"""Names a request; its answer has the same name (docs/promises.md, F1)."""

GROUP_TIMEOUTS = 0.5
SERVER_TIMEOUTS = 2.5
TRAINER_TIMEOUTS = 3.0
"""How long a server and the trainer wait, in units of `--rollout_timeout`, which bounds a replica
(F2). In a weight update a replica waits half a unit for the others: it does not hang where another
does. A request has half a unit for its turn, and two for a replica that hangs and the one that
serves its groups instead."""

Numbers = list[Any] | NDArray[Any]
"""Token ids or log-probabilities. Rank 0 keeps a server's arrays: lists of a round's numbers take
10 times the memory, and most of its seconds."""


class WireError(ValueError):
    """A message of another version, or none of ours at all."""


@dataclass(frozen=True)
class WeightReport:
    """An engine's report of its last update; plain values, which travel as JSON."""

    loaded: dict[str, str] = field(default_factory=dict)
    """By each tensor's name its type and shape, such as `float32 (2, 3)`."""

    unfilled: list[str] = field(default_factory=list)
    """Parameters that the update has left as they were."""

    adapter_fault: str = ""
    """Why the engine does not generate with the adapter that it was given."""

    faults: list[str] | None = None
    """What the watch has found; None where nothing is watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetadata:
    """What a request asks of the engine beside its prompt."""

    sample_id: SampleId
    """The first sample."""

    count: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]
    """Number of samples: vLLM's `n`."""

    run_seed: NonNegativeInt | None
    """`--seed`; None leaves the seeds to ms-swift (`--rollout_seed_mode engine`)."""

    as_arrays: bool
    """Answer with arrays of all samples' numbers. Multi-turn schedulers read ms-swift's form."""

    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = ()
    """End a completion, beside the stop strings of ms-swift's request configuration. None, which a
    server writes for a client that sends no metadata, leaves stops and texts to ms-swift."""

    include_stop_str_in_output: bool = True
    """Whether the text ends with what stopped it, or right before it."""

    @property
    def is_other_clients(self) -> bool:
        """True if a server made it for a client that sends none: it names a sample and seeds it,
        and changes nothing else."""
        return self.stop_token_ids is None

    @property
    def seed(self) -> int | None:
        """The first sample's seed; the others' follow it."""
        return None if self.run_seed is None else sample_seed(self.run_seed, self.sample_id)

    def seed_of(self, k: int) -> int | None:
        """Return the seed of the request's sample k, from 0."""
        seed = self.seed
        return None if seed is None else seed + k

    def next_turn(self) -> RequestMetadata:
        return replace(self, sample_id=replace(self.sample_id, turn=self.sample_id.turn + 1))


_METADATA = TypeAdapter(RequestMetadata)


def read_metadata(data_dict: Mapping[str, Any] | None) -> RequestMetadata | None:
    """Return the metadata of a request; None where it has none.

    Raises:
        WireError: it is of another version, or malformed; names the field and its value.
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


def data_dict_of(request: RolloutInferRequest | dict[str, Any]) -> dict[str, Any] | None:
    """Return the data of a request; ms-swift's come as objects and as dictionaries."""
    found = request.get("data_dict") if isinstance(request, dict) else request.data_dict
    return found if isinstance(found, dict) else None


def write_metadata(data_dict: MutableMapping[str, Any], metadata: RequestMetadata) -> None:
    """Put metadata into a request's data, as JSON takes it."""
    data_dict[KEY] = {"version": VERSION, **asdict(metadata)}


def check_version(message: object, what: str) -> None:
    """Refuse a message of another version of swift-grpo-ext.

    Raises:
        WireError: names both versions, and the remedy.
    """
    version = message.get("version") if isinstance(message, Mapping) else None
    if version != VERSION:
        raise WireError(
            f"{what} speaks version {version!r} of swift-grpo-ext's wire format, this side speaks "
            f"{VERSION}: load the same version of the plugin in `swift rlhf` and `swift rollout`."
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample as it was generated: what is trained on, and what rewards and logs see."""

    text: str
    token_ids: Numbers
    logprobs: Numbers | None
    """The sampled tokens' log-probabilities, in nats, under the distribution that was sampled."""

    finish_reason: str | None
    stop_reason: StopReason = None
    """The stop string or token id that ended it; None where none did."""

    seed: int | None = None
    replica: str = ""
    """The engine that generated it: `rank 0`, `server 1 replica 0`."""

    routed_experts: Any = None
    """The experts that each token went to (`--router_replay_mode R3`): an array, or what
    `serialize_ndarray` of ms-swift makes of one for the wire."""


class Prompt(NamedTuple):
    """A prompt as its engine saw it."""

    token_ids: list[int]
    positions: NDArray[np.int32] | None = None
    """[3, tokens] in time, height and width; None where the engine counted none (positions.py)."""


class Answer(NamedTuple):
    """All samples of one request, and their prompt."""

    completions: list[Completion]
    prompt: Prompt


def write_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain JSON values.

    Raises:
        WireError: some samples have log-probabilities and others none, or not one for each token.
    """
    completions, prompt = answer
    replica = completions[0].replica
    counts = [None if c.logprobs is None else len(c.logprobs) for c in completions]
    lengths = [len(c.token_ids) for c in completions]
    if counts not in (lengths, [None] * len(completions)):
        raise WireError(f"{replica} generated {lengths} tokens with {counts} log-probabilities.")
    return {
        "version": VERSION,
        "replica": replica,
        "texts": [c.text for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "stop_reasons": [c.stop_reason for c in completions],
        "lengths": lengths,
        "token_ids": to_base64([i for c in completions for i in c.token_ids], "<i4"),
        "logprobs": None
        if None in counts
        else to_base64([p for c in completions for p in c.logprobs or ()], "<f4"),
        "prompt_token_ids": to_base64(prompt.token_ids, "<i4"),
        "prompt_positions": to_base64([] if prompt.positions is None else prompt.positions, "<i4"),
        "routed_experts": [c.routed_experts for c in completions],
    }


def read_answer(answer: Mapping[str, Any], metadata: RequestMetadata, server: str) -> Answer:
    """Return an answer, its numbers as arrays.

    Args:
        server: names the server that answered, for errors and logs.

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
            raise WireError(
                f"{server} answered {metadata} with {sorted(counts)} samples of {lengths} tokens, "
                f"{len(ids)} token ids and {num_logprobs} log-probabilities in all."
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
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise WireError(f"{server} answered {metadata} with nonsense: {e!r}") from e
    return Answer(completions, Prompt(prompt_ids.tolist(), placed))


def to_base64(values: Sequence[float] | Sequence[int] | NDArray[Any], dtype: str) -> str:
    """Return numbers as base64 of their little-endian bytes: 4 bytes, 5.4 characters each."""
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode("ascii")


def from_base64(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
