"""`swift rollout --sample_log all` records each sample that it draws, for any client.

The record is that of a training (docs/internals.md). A call of another client is a round, which the
server measures as `--callbacks diversity` does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

logger = get_logger()

SECONDS_TO_WRITE = 10.0  # that a call waits until the call before is on disk


class ServerRecord:
    """Writes the record of one start of a server, in a thread of its own. Raise `RunInUseError` if
    another process writes to `--result_path`, and `OSError` if it cannot be written."""

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
        self._writing: list[Future[None]] = []  # the last call
        self._recorder.open(start_step=0)
        args.save_args(self.folder)  # `view` finds the tokenizer by args.json
        logger.info(f"Samples are recorded. Look at them meanwhile: {view_command(self.folder)}")

    def add(
        self,
        requests: Sequence[Mapping[str, Any]],
        metadatas: Sequence[RequestMetadata],
        outputs: Sequence[RolloutOutput],
        config: RequestConfig | None,
        num_updates: int,
    ) -> None:
        """Have the thread record a call, after `num_updates` weight updates; leave it out if the
        disk is too slow."""
        if not outputs:
            return
        if wait(self._writing, SECONDS_TO_WRITE).not_done:
            logger.warning(
                f"{self.folder}: {metadatas[0].sample_id.round} is left out of the record, since "
                f"the disk has not taken the round before it within {SECONDS_TO_WRITE:g} s. The "
                "server goes on. Give it a faster --result_path, or leave out --sample_log."
            )
            return
        # Greedy decoding, or a seed that the client gives to one request, may repeat on purpose.
        is_repeatable = config is not None and (
            config.temperature == 0 or (len(requests) == 1 and config.seed is not None)
        )
        # A training with the plugin measures its own rounds.
        is_watched = not is_repeatable and all(each.from_other_client for each in metadatas)
        # The caller takes the turns out of `rollout_infos`, and so does `read_turns`.
        copies = [o.model_copy(update={"rollout_infos": {**o.rollout_infos}}) for o in outputs]
        call = (requests, metadatas, copies, num_updates)
        self._writing = [self._thread.submit(self._write, is_watched, *call)]

    def _write(self, is_watched: bool, *call: Any) -> None:
        try:
            rows = rows_of_call(*call)
            self._recorder.append(rows)
            self._recorder.write()
            if is_watched:
                self._watch(rows)
            self._recorder.flush()
        except Exception as e:  # a record must not end a running server
            logger.warning_once(
                f"{self.folder}: samples of a call are not recorded ({type(e).__name__}: {e}). The "
                "server goes on. Let it write there, give it another --result_path, or leave out "
                "--sample_log.",
                hash_id="server_record",
            )

    def _watch(self, rows: Sequence[SampleRow]) -> None:
        """Measure a round, and log an alarm when it begins."""
        samples = [row for row in rows if len(row.token_ids) and row.logprobs is not None]
        for row in self._analyzer.analyze(samples):
            self._recorder.record_diversity(row)
            if row.alarm and row.verdict != self._last_alarm:
                logger.warning(f"{row.alarm} `{view_command(self.folder)}` shows all alarms.")
            self._last_alarm = row.verdict if row.alarm else ""


def rows_of_call(
    requests: Sequence[Mapping[str, Any]],
    metadatas: Sequence[RequestMetadata],
    outputs: Sequence[RolloutOutput],
    num_updates: int,
) -> list[SampleRow]:
    """Return the rows of a call: of groups, conversations, or answers in ms-swift's form."""
    columns = {}
    for request, metadata in zip(requests, metadatas, strict=True):
        others = {k: v for k, v in request["data_dict"].items() if k != wire.KEY}
        columns[metadata.sample_id.group] = other_columns(others)
    if any(conversation.KEY in output.rollout_infos for output in outputs):
        # A scheduler may make several outputs of one request, and none of another.
        turns = [t for output in outputs for t in read_turns(output, metadatas[0].run_seed)]
    else:
        turns = []
        for request, metadata, output in zip(requests, metadatas, outputs, strict=True):
            if answer := output.rollout_infos.get(wire.KEY):
                completions, prompt = wire.read_answer(answer, metadata, "this server")
                completions = [replace(c, replica=answer["replica"]) for c in completions]
            else:
                completions, prompt = answer_of(output)
            name, shown = metadata.sample_id, (prompt_hash(request), *first_prompt(request))
            for k, completion in enumerate(completions):
                turns.append(Turn(replace(name, index=name.index + k), prompt, completion, *shown))
    return [sample_row(turn, num_updates, columns.get(turn.sample_id.group)) for turn in turns]
