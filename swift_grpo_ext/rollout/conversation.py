"""Records the turns of conversations, with the messages and media that a scheduler added.

ms-swift runs a conversation in the trainer (rollout/agent_loop.py, `run_multi_turn`) or in
`swift rollout` (rollout/multi_turn.py, `MultiTurnScheduler.run`). Both sides record each turn:
training compares its own prompt with the engine's, and the record has a row for each turn.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from swift.infer_engine.protocol import RolloutInferRequest

from swift_grpo_ext.media.pictures import Picture, media_name, picture_of
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import answer_of, fill_scheduler_fields, infos_of
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.stops.templates import STOP_REASON
from swift_grpo_ext.upstream.rows import COLUMNS, RowFormError, column_of, read_row

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutOutput
    from swift.template import Template

    from swift_grpo_ext.rollout.sample import RolloutSample


KEY = f"{wire.KEY}.turns"  # key of the turns in `rollout_infos` of a server's conversation


@dataclass(frozen=True)
class Turn:
    """One turn, as the engine saw it."""

    sample_id: SampleId
    prompt: Prompt
    completion: Completion
    fingerprint: str  # the hash of the prompt
    # Added to the prompt since the previous answer. The first turn has the whole prompt.
    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[Picture] = field(default_factory=list)
    # From request to answer. A colocated engine answers all samples of a turn at once.
    engine_seconds: float = 0.0
    tool_seconds: float = 0.0  # in the scheduler, between the previous answer and the request

    @property
    def is_answered(self) -> bool:
        """False for a conversation's last turn if its prompt left no room for an answer."""
        return len(self.completion.token_ids) > 0


@dataclass
class Conversation:
    """The turns of one sample."""

    turns: list[Turn] = field(default_factory=list)
    _num_known: dict[str, int] = field(default_factory=dict)  # recorded values of each column

    def record(self, request: RolloutSample | RolloutInferRequest, turn: Turn) -> None:
        """Append a turn, with the messages and media that the request has gained."""
        held = {name: list(column_of(request, name) or ()) for name in ("messages", *COLUMNS)}
        last = held["messages"][-1]
        # ms-swift appends an empty answer for a template to continue.
        if last["role"] == "assistant" and last.get("content") in ("", None):
            held["messages"].pop()
        added = {}
        for name, values in held.items():
            known = self._num_known.get(name, 0)
            # Fewer values than before: the scheduler rewrote the conversation, and all are new.
            added[name] = values[known:] if known <= len(values) else values
            self._num_known[name] = len(values)
        self._num_known["messages"] += 1  # the answer
        if self.turns:
            messages, contents = _prompt_of(added)
            media = [picture_of(medium) for medium in contents]
        else:
            messages, media = first_prompt(request)
        self.turns.append(replace(turn, messages=messages, media=media))


def first_prompt(
    row: RolloutSample | RolloutInferRequest | Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Return a row's messages, with marks for media in `content`, and the names of all media."""
    messages, media = _prompt_of(row)
    return messages, [Picture(media_name(medium)) for medium in media]


def _prompt_of(row: object) -> tuple[list[dict[str, Any]], list[Any]]:
    try:
        read = read_row(row)
        return read.messages, [medium.value for medium in read.media]
    except RowFormError:  # a scheduler's own request: record its messages as they are
        messages = [dict(message) for message in column_of(row, "messages")]
        return messages, [m for column in COLUMNS for m in column_of(row, column) or ()]


# --- from a server's scheduler to the trainer ---


def write_turns(output: RolloutOutput, turns: Sequence[Turn]) -> None:
    """Add turns to an output's `rollout_infos`, as JSON values."""
    output.rollout_infos[KEY] = {
        "version": wire.VERSION,
        "server": "",  # `name_server` in the trainer sets it: a server does not know its number
        "turns": [
            {
                "sample_id": asdict(turn.sample_id),
                "fingerprint": turn.fingerprint,
                "answer": wire.write_answer(Answer([turn.completion], turn.prompt)),
                # Schedulers may put any object into messages, but JSON cannot hold it.
                "messages": json.loads(json.dumps(turn.messages, default=repr)),
                "media": [
                    (m.name, m.webp and base64.b64encode(m.webp).decode()) for m in turn.media
                ],
                "seconds": (turn.engine_seconds, turn.tool_seconds),
            }
            for turn in turns
        ],
    }


def name_server(output: RolloutOutput, name: str) -> None:
    output.rollout_infos.get(KEY, {})["server"] = name


def read_turns(output: RolloutOutput, run_seed: int | None) -> list[Turn]:
    """Remove and return the turns of a server's output; [] if the server lacks this plugin. Raise a
    `WireError` if they have another version, or are malformed."""
    written = output.rollout_infos.pop(KEY, None)
    if written is None:
        return []
    wire.check_version(written, written.get("server") or "a server")
    turns = []
    for each in written["turns"]:
        sample_id = SampleId(**each["sample_id"])
        metadata = RequestMetadata(sample_id=sample_id, count=1, run_seed=run_seed, as_arrays=True)
        [completion], prompt = wire.read_answer(each["answer"], metadata, written["server"])
        media = [Picture(name, webp and base64.b64decode(webp)) for name, webp in each["media"]]
        engine_seconds, tool_seconds = each["seconds"]
        turn = Turn(sample_id, prompt, completion, each["fingerprint"], each["messages"], media)
        turns.append(replace(turn, engine_seconds=engine_seconds, tool_seconds=tool_seconds))
    return turns


# --- in the trainer ---

BETWEEN = f"{wire.KEY}_between_turns"  # an attribute of requests, which ms-swift passes to hooks


@dataclass
class BetweenTurns:
    """The state of a request after its last answer."""

    num_messages: int = 0  # includes the last answer
    media: dict[str, list[Any]] = field(default_factory=dict)  # by column, as the engine saw it
    tool_seconds: float = 0.0  # time in hooks
    reported: frozenset[str] = frozenset()  # media columns in the `rollout_infos` of `step`


def between_turns(request: RolloutInferRequest) -> BetweenTurns:
    between: BetweenTurns = vars(request).setdefault(BETWEEN, BetweenTurns())
    return between


class Conversations:
    """Keeps the turns of the trainer's own conversations, until `take` returns them."""

    def __init__(self, template: Template, *, has_scheduler: bool) -> None:
        self._template, self._has_scheduler = template, has_scheduler
        self._by_sample = defaultdict[SampleId, Conversation](Conversation)

    def record(
        self,
        samples: Sequence[RolloutSample | RolloutInferRequest],
        outputs: Sequence[RolloutOutput],
        sample_ids: Sequence[SampleId],
        fingerprints: Sequence[str],
        seconds: float,
    ) -> None:
        """Record a turn of each sample (later turns are requests), before a scheduler reads the
        outputs. `seconds` is the engine's time."""
        named = zip(samples, outputs, sample_ids, fingerprints, strict=True)
        for sample, output, sample_id, fingerprint in named:
            [completion], prompt = answer_of(output)
            turn = Turn(sample_id, prompt, completion, fingerprint, engine_seconds=seconds)
            if isinstance(sample, RolloutInferRequest):
                turn = replace(turn, tool_seconds=between_turns(sample).tool_seconds)
            self._by_sample[replace(sample_id, turn=0)].record(sample, turn)
            if self._has_scheduler:
                fill_scheduler_fields(output.response, self._template, sample.tools)

    def take(
        self, samples: Sequence[RolloutSample], outputs: Sequence[RolloutOutput]
    ) -> list[list[Turn]]:
        """Remove and return the turns of each output."""
        pairs = zip(samples, outputs, strict=False)  # --async_generate gives other ranks no outputs
        return [self._by_sample.pop(sample.sample_id).turns for sample, _ in pairs]


def servers_turns(
    samples: Sequence[RolloutSample], outputs: Sequence[RolloutOutput], run_seed: int | None
) -> list[list[Turn]]:
    """Return the known turns of each output of a server's conversations. A server without this
    plugin sends the last turn only. A scheduler may return several outputs for one sample."""
    turns_of_outputs = [read_turns(output, run_seed) for output in outputs]
    if len(samples) != len(outputs):
        return turns_of_outputs
    for turns, sample, output in zip(turns_of_outputs, samples, outputs, strict=True):
        # The server's images have no file names; take those of the trainer's row.
        messages, media = first_prompt(sample)
        if turns:
            is_own_prompt = messages == turns[0].messages  # else an environment replaced it
            fingerprint = sample.prompt_hash if is_own_prompt else turns[0].fingerprint
            turns[0] = replace(turns[0], media=media, fingerprint=fingerprint)
        else:
            [completion], prompt = answer_of(output)
            turn = Turn(sample.sample_id, prompt, completion, sample.prompt_hash, messages, media)
            turns.append(turn)
    return turns_of_outputs


def attach_turns(sample: RolloutSample, turns: Sequence[Turn], *, is_conversation: bool) -> None:
    """Set the prompts of a sample's answered turns. In a conversation, also set the seed and
    replica of the last answer, and the stop reason of the last turn."""
    answered = [turn for turn in turns if turn.is_answered]
    sample.rollout_prompts = [turn.prompt for turn in answered]
    if is_conversation and answered:
        own = infos_of(answered[-1].completion)
        own[STOP_REASON] = turns[-1].completion.stop_reason
        sample.rollout_infos = {**(sample.rollout_infos or {}), **own}
