"""Conversations: what the engine saw and gave in each turn, and what a scheduler added in between.

ms-swift leads a conversation in the training (rollout/agent_loop.py, `run_multi_turn`) or in
`swift rollout` (rollout/multi_turn.py, `MultiTurnScheduler.run`), and keeps the messages of the
last turn and the tokens of all. `Conversation.note` is called with each answer on either side:
training compares what the engine saw with what it sees itself, and the record has a row for each
turn.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
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


KEY = f"{wire.KEY}.turns"
"""In `rollout_infos` of what a server's scheduler made: its turns."""

EMPTY = ("", None)
"""The content of the answer that ms-swift leaves in the messages for a template to go on from."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn, as the engine saw it."""

    sample_id: SampleId
    prompt: Prompt
    completion: Completion
    fingerprint: str
    """The hash of the prompt."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Holds what was added to the prompt since the answer before; of the first turn, the prompt."""

    media: list[Picture] = field(default_factory=list)
    """The media that were added with it."""

    engine_seconds: float = 0.0
    """From the request to the answer. A colocated engine answers all samples of a turn at once."""

    tool_seconds: float = 0.0
    """In the scheduler, between the answer before and the request."""

    @property
    def is_answered(self) -> bool:
        """True if the answer has tokens, which its prompt may have left no room for."""
        return len(self.completion.token_ids) > 0


@dataclass
class Conversation:
    """The turns of one sample, and how much of its prompt they have shown."""

    turns: list[Turn] = field(default_factory=list)
    _num_messages: int = 0
    _num_media: dict[str, int] = field(default_factory=dict)

    def note(
        self,
        request: RolloutSample | RolloutInferRequest,
        answer: Answer,
        sample_id: SampleId,
        fingerprint: str,
        *,
        engine_seconds: float = 0.0,
        tool_seconds: float = 0.0,
    ) -> None:
        """Note the answer to a request, and what was added to the request since the answer before.

        Args:
            request: as the engine was asked with it, without the answer.
            answer: of one sample.
            fingerprint: the hash of the prompt.
        """
        held = list(request.messages)
        if held and held[-1]["role"] == "assistant" and held[-1].get("content") in EMPTY:
            held.pop()
        # Where there are fewer than before, a scheduler rewrote the conversation: all are added.
        start = self._num_messages if self._num_messages <= len(held) else 0
        self._num_messages = len(held) + 1  # with the answer
        added = []
        for column in COLUMNS:
            values = list(column_of(request, column) or ())
            known = self._num_media.get(column, 0)
            added += values[known if known <= len(values) else 0 :]
            self._num_media[column] = len(values)
        if not self.turns:
            messages, media = first_prompt(request)
        else:
            messages = [dict(message) for message in held[start:]]
            with suppress(RowFormError):  # recorded as it is
                read = read_row({"messages": messages})
                messages = read.messages
                added = [*(medium.value for medium in read.media), *added]
            media = [picture_of(medium) for medium in added]
        [completion], prompt = answer
        turn = Turn(
            sample_id=sample_id,
            prompt=prompt,
            completion=completion,
            fingerprint=fingerprint,
            messages=messages,
            media=media,
            engine_seconds=engine_seconds,
            tool_seconds=tool_seconds,
        )
        self.turns.append(turn)


def first_prompt(
    row: RolloutSample | RolloutInferRequest | Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Return a row's messages, with marks where parts of `content` were media, and all media by
    name."""
    try:
        read = read_row(row)
        messages, media = read.messages, [medium.value for medium in read.media]
    except RowFormError:  # of a scheduler that has requests of its own
        messages = [dict(message) for message in column_of(row, "messages")]
        media = [m for column in COLUMNS for m in column_of(row, column) or ()]
    return messages, [Picture(media_name(medium)) for medium in media]


# --- what a server's scheduler made, on its way to the trainer ---


def write_turns(output: RolloutOutput, turns: Sequence[Turn]) -> None:
    """Have an output bring its turns along, as plain JSON values."""
    output.rollout_infos[KEY] = {
        "version": wire.VERSION,
        "server": "",  # a server does not know its number; the trainer writes it (`name_server`)
        "turns": [
            {
                "sample_id": asdict(turn.sample_id),
                "fingerprint": turn.fingerprint,
                "answer": wire.write_answer(Answer([turn.completion], turn.prompt)),
                # Schedulers may put any object into messages; an answer is JSON.
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
    """Say of an output's turns which server led them."""
    output.rollout_infos.get(KEY, {})["server"] = name


def read_turns(output: RolloutOutput, run_seed: int | None) -> list[Turn]:
    """Take the turns from an output that a server made; none where it led it without us.

    Raises:
        WireError: they are of another version, or malformed.
    """
    written = output.rollout_infos.pop(KEY, None)
    if written is None:
        return []
    wire.check_version(written, written.get("server") or "a server")
    turns = []
    for each in written["turns"]:
        sample_id = SampleId(**each["sample_id"])
        metadata = RequestMetadata(sample_id=sample_id, count=1, run_seed=run_seed, as_arrays=True)
        [completion], prompt = wire.read_answer(each["answer"], metadata, written["server"])
        engine_seconds, tool_seconds = each["seconds"]
        turn = Turn(
            sample_id=sample_id,
            prompt=prompt,
            completion=completion,
            fingerprint=each["fingerprint"],
            messages=each["messages"],
            media=[Picture(name, webp and base64.b64decode(webp)) for name, webp in each["media"]],
            engine_seconds=engine_seconds,
            tool_seconds=tool_seconds,
        )
        turns.append(turn)
    return turns


# --- in the training ---

BETWEEN = f"{wire.KEY}_between_turns"
"""An attribute of requests, which ms-swift hands to each hook."""


@dataclass
class BetweenTurns:
    """Records what a scheduler's hooks did with a request since its last answer."""

    num_messages: int = 0
    """Number of messages, the last answer included."""

    media: dict[str, list[Any]] = field(default_factory=dict)
    """The media that the engine saw, by column."""

    tool_seconds: float = 0.0
    """Seconds in hooks."""

    told: frozenset[str] = frozenset()
    """The columns of media that `step` put into `rollout_infos`."""


def between_turns(request: RolloutInferRequest) -> BetweenTurns:
    if not hasattr(request, BETWEEN):
        setattr(request, BETWEEN, BetweenTurns())
    between: BetweenTurns = getattr(request, BETWEEN)
    return between


class Conversations:
    """Holds the conversations of the round that the training generates, by their samples, from each
    rollout to the last output.

    Args:
        template: the training's.
        has_scheduler: a scheduler in the training reads the outputs.
    """

    def __init__(self, template: Template, *, has_scheduler: bool) -> None:
        self._template, self._has_scheduler = template, has_scheduler
        self._by_sample = defaultdict[SampleId, Conversation](Conversation)

    def note(
        self,
        samples: Sequence[RolloutSample | RolloutInferRequest],
        outputs: Sequence[RolloutOutput],
        sample_ids: Sequence[SampleId],
        prompts: Sequence[str],
        seconds: float,
    ) -> None:
        """Note a turn of each sample, which the scheduler is about to read.

        Args:
            samples: ms-swift's, or the requests of a later turn.
            prompts: hashes of the prompts.
            seconds: the engine's.
        """
        named = zip(samples, outputs, sample_ids, prompts, strict=True)
        for sample, output, sample_id, prompt in named:
            is_later = isinstance(sample, RolloutInferRequest)
            self._by_sample[replace(sample_id, turn=0)].note(
                sample,
                answer_of(output),
                sample_id,
                prompt,
                engine_seconds=seconds,
                tool_seconds=between_turns(sample).tool_seconds if is_later else 0.0,
            )
            if self._has_scheduler:
                fill_scheduler_fields(output.response, self._template, sample.tools)

    def take(
        self, samples: Sequence[RolloutSample], outputs: Sequence[RolloutOutput]
    ) -> list[list[Turn]]:
        """Return the turns behind each output, and forget them."""
        pairs = zip(samples, outputs, strict=False)  # none come with --async_generate
        return [self._by_sample.pop(sample.sample_id).turns for sample, _ in pairs]


def servers_turns(
    samples: Sequence[RolloutSample], outputs: Sequence[RolloutOutput], run_seed: int | None
) -> list[list[Turn]]:
    """Return the turns behind each output of a server that leads conversations, as far as they are
    known: it may have led them without us, and made several outputs of one."""
    turns = [read_turns(output, run_seed) for output in outputs]
    if len(samples) == len(outputs):
        for own, sample, output in zip(turns, samples, outputs, strict=True):
            # The server has images by their content, the training by name.
            messages, media = first_prompt(sample)
            if own:
                is_asked = messages == own[0].messages  # an environment asks its own
                fingerprint = sample.prompt_hash if is_asked else own[0].fingerprint
                own[0] = replace(own[0], media=media, fingerprint=fingerprint)
            else:  # a server without us
                conversation = Conversation()
                conversation.note(sample, answer_of(output), sample.sample_id, sample.prompt_hash)
                own += conversation.turns
    return turns


def attach_turns(sample: RolloutSample, turns: Sequence[Turn], *, is_conversation: bool) -> None:
    """Give a sample the prompts of its turns that were answered and, of a conversation, the last
    answer's seed and replica, and what stopped the last turn."""
    answered = [turn for turn in turns if turn.is_answered]
    sample.rollout_prompts = [turn.prompt for turn in answered]
    if is_conversation and answered:
        own = infos_of(answered[-1].completion)
        own[STOP_REASON] = turns[-1].completion.stop_reason
        sample.rollout_infos = {**(sample.rollout_infos or {}), **own}
