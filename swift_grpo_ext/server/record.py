"""`swift rollout --sample_log all` writes down each sample that it draws, whoever asked for it.

The record is that of a training (docs/internals.md). A call of another client is a round, watched
as `--callbacks diversity` watches a training's. A training with the plugin names its rounds and
watches them itself. An error in writing never ends the server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from swift.arguments import RolloutArguments
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.utils import get_logger

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.record.recorder import SampleRecorder, other_columns, sample_row, view_command
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.rollout import conversation, wire
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.rollout.conversation import Turn, first_prompt, read_turns
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.server import bodies

logger = get_logger()

BYTES_PER_TOKEN = 512
"""Memory of a token, as ms-swift's outputs hold it with its log-probability."""


class ServerRecord:
    """Writes the record of one start of a server, in a thread of its own.

    Raises:
        RunInUseError: another process writes its record to `--result_path`.
    """

    def __init__(self, args: RolloutArguments) -> None:
        start = time.strftime("%Y%m%d-%H%M%S")
        self.folder = args.result_path or f"output/{args.model_suffix}/rollout-{start}"
        self._recorder = SampleRecorder(
            self.folder,
            RankGroup(),
            kept=args.sample_log,
            max_gb=args.sample_log_gb,
            keeps_diversity=True,
        )
        self._analyzer = RoundAnalyzer(is_greedy=False, seed_mode=args.rollout_seed_mode)
        self._last_alarm = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="server-record")
        self._waiting: list[tuple[Future[None], int]] = []
        """Calls that the disk has not taken, with their bytes."""

        self._left_out: list[RoundId] = []
        """Rounds of calls that are missing since the disk fell behind."""

        self._recorder.open(start_step=0)
        try:
            args.save_args(self.folder)  # `view` finds the tokenizer by it
        except OSError as e:
            self._tell(e)
        logger.info(f"Samples are recorded. Look at them meanwhile: {view_command(self.folder)}")

    def note(
        self,
        requests: Sequence[Mapping[str, Any]],
        metadatas: Sequence[RequestMetadata],
        outputs: Sequence[RolloutOutput],
        config: RequestConfig | None,
        *,
        num_updates: int,
        num_bytes: int,
    ) -> None:
        """Have the thread write down a call; the caller may take away what `rollout_infos` hold.

        A call is left out where calls that wait for a slow disk have `bodies.MAX_BYTES`.

        Args:
            num_updates: weight updates before the call.
            num_bytes: of the requests.
        """
        num_tokens = sum(output.response.usage.completion_tokens for output in outputs)
        num_bytes += num_tokens * BYTES_PER_TOKEN
        if not (outputs and self._has_room(metadatas[0].sample_id.round, num_bytes)):
            return
        copies = [o.model_copy(update={"rollout_infos": {**o.rollout_infos}}) for o in outputs]
        # Greedy decoding, or a seed that the client gives to one request, may repeat on purpose.
        is_repeatable = config is not None and (
            config.temperature == 0 or (len(requests) == 1 and config.seed is not None)
        )
        is_watched = not is_repeatable and all(each.is_other_clients for each in metadatas)
        call = (requests, metadatas, copies, num_updates, is_watched)
        self._waiting.append((self._thread.submit(self._write, *call), num_bytes))

    def _has_room(self, round_: RoundId, num_bytes: int) -> bool:
        """Return whether a call may wait for the disk; say which ones may not."""
        self._waiting = [(call, size) for call, size in self._waiting if not call.done()]
        total = num_bytes + sum(size for _, size in self._waiting)
        has_room = not self._waiting or total <= bodies.MAX_BYTES
        if not has_room and not self._left_out:
            logger.warning(
                f"{self.folder}: the disk has {len(self._waiting)} calls to write still. Samples "
                f"from {round_} on are left out of the record until it has room for more. The "
                "server goes on. Give it a faster --result_path, or leave out --sample_log."
            )
        elif has_room and self._left_out:
            first, last, count = self._left_out[0], self._left_out[-1], len(self._left_out)
            missing = f"{count} calls are left out of the record, from {first} to {last}"
            logger.warning(f"{self.folder}: {missing}. Samples are recorded again.")
        self._left_out = [] if has_room else [*self._left_out, round_]
        return has_room

    def _write(
        self,
        requests: Sequence[Mapping[str, Any]],
        metadatas: Sequence[RequestMetadata],
        outputs: Sequence[RolloutOutput],
        num_updates: int,
        is_watched: bool,
    ) -> None:
        try:
            columns = {}
            for request, metadata in zip(requests, metadatas, strict=True):
                others = {k: v for k, v in request["data_dict"].items() if k != wire.KEY}
                columns[metadata.sample_id.group] = other_columns(others)
            rows = [
                sample_row(turn, num_updates, columns.get(turn.sample_id.group))
                for turn in turns_of_call(requests, metadatas, outputs)
            ]
            self._recorder.open(start_step=0)  # the folder may not have been readable before
            self._recorder.append(rows)
            self._recorder.write()
            if is_watched:
                self._watch(rows)
            self._recorder.flush()
        except Exception as e:
            self._tell(e)

    def _watch(self, rows: Sequence[SampleRow]) -> None:
        """Measure a round, and tell of an alarm when it begins."""
        samples = [row for row in rows if len(row.token_ids) and row.logprobs is not None]
        for row in self._analyzer.analyze(samples):
            self._recorder.record_diversity(row)
            if row.alarm and row.verdict != self._last_alarm:
                told = f"(Said once; `{view_command(self.folder)}` shows all of them.)"
                logger.warning(f"{row.alarm} {told}")
            self._last_alarm = row.verdict if row.alarm else ""

    def _tell(self, error: Exception) -> None:
        logger.warning_once(
            f"{self.folder}: samples of a call are not recorded ({type(error).__name__}: {error}). "
            "The server goes on. Let it write there, give it another --result_path, or leave out "
            "--sample_log. (Said once.)",
            hash_id="server_record",
        )


def turns_of_call(
    requests: Sequence[Mapping[str, Any]],
    metadatas: Sequence[RequestMetadata],
    outputs: Sequence[RolloutOutput],
) -> list[Turn]:
    """Return what the outputs of a call hold: samples of groups, turns of conversations that the
    server led, or choices of ms-swift's form."""
    if any(conversation.KEY in output.rollout_infos for output in outputs):
        # A scheduler may make several outputs of one request, and none of another.
        return [t for output in outputs for t in read_turns(output, metadatas[0].run_seed)]
    turns = []
    for request, metadata, output in zip(requests, metadatas, outputs, strict=True):
        infos = output.rollout_infos
        if wire.KEY in infos:
            completions, prompt = wire.read_answer(infos[wire.KEY], metadata, "this server")
            replica = infos[wire.KEY]["replica"]
            completions = [replace(c, replica=replica) for c in completions]
        else:
            completions, prompt = answer_of(output)
        fingerprint, (messages, media) = prompt_hash(request), first_prompt(request)
        for k, completion in enumerate(completions):
            turns.append(
                Turn(
                    sample_id=replace(metadata.sample_id, index=metadata.sample_id.index + k),
                    prompt=prompt,
                    completion=completion,
                    fingerprint=fingerprint,
                    messages=messages,
                    media=media,
                )
            )
    return turns
