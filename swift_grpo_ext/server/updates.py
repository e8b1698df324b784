"""Whether a server's last weight update was sound, whoever sent it (docs/promises.md, C2).

Each worker has looked at its weights (`weights/watch.py`). Each replica reads two sentences before
the first update and after every one, and goes on from them.

A training with the plugin compares weights by itself: faults of its updates stand in the log and in
`/health`. Any other client gets the fault as the answer to its update, or to the next request where
the update was answered before it was made (adapters). It draws nothing until an update is sound
(`--rollout_mismatch stop`). `/health` stays 200: a restart would throw the evidence away, and the
next update may be sound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.utils import get_logger

from swift_grpo_ext.server import replicas

logger = get_logger()

TEXTS = (
    "Water freezes at zero degrees and boils at one hundred. The sun rises in the east.",
    "水在零度结冰，在一百度沸腾。太阳从东方升起，在西方落下。",
)
NOT_LOOKED_AT = "not looked at"
NUM_TOKENS = 16
MOST_FALL = 8.0
"""Nats a token by which an update may lower the log-probability of plain sentences. Models give
them some 4; 12 are what a vocabulary of 160,000 tokens gives by chance."""

FALL_OF_REPETITION = 2.0
"""The same, where the model now says one token over and over, and has not before: "!!!"."""

REMEDY = (
    "Rollouts would be garbage. Send the weights again; start `swift rollout` with the --model "
    "that the client trains, and both with the same versions of ms-swift and transformers; or go "
    "on with `swift rollout ... --rollout_mismatch warn`."
)


@dataclass(frozen=True)
class Reading:
    """What a replica makes of one of the texts."""

    mean: float  # log-probability of its tokens, in nats a token
    repeats: bool  # the replica goes on with one token, over and over


class Updates:
    """What a server knows of its updates."""

    def __init__(self, server: SwiftRolloutDeploy) -> None:
        self._server = server
        self.watches: bool = server.args.watches_weights
        self._readings: dict[str, list[Reading]] = {}
        """Of the last sound weights, by replica."""

        self.is_due = False
        """Weights have come that were not looked at yet."""

        self.is_arriving = False
        """Others follow them: nothing is judged or generated until an update has ended."""

        self.state = "sound" if self.watches else NOT_LOOKED_AT
        self.fault = ""
        """`/health` says this, or `state` where the last update has no fault."""

    def begin(self, timeout: float) -> None:
        """Have replicas that were not given weights yet read the texts."""
        if not self.watches or all(c.name in self._readings for c in self._server.connections):
            return
        self._readings = {**self._read(timeout), **self._readings}

    def look(self, timeout: float, *, reads: bool) -> None:
        """Look at all replicas after an update, and set `state` and `fault`.

        Args:
            reads: have them read the texts.
        """
        self.is_due = self.is_arriving = False
        if not self.watches:
            return
        ask = {"method": "collective_rpc", "kwargs": {"method": "read_weight_report"}}
        replies = replicas.call_all(self._server, {"type": "call", **ask}, timeout)
        connections = list(self._server.connections)
        readings = self._read(timeout) if reads else {}
        told = []
        for connection, workers in zip(connections, replies, strict=True):
            found = list[str]()
            for report in workers or ():
                found += filter(None, [*(report["faults"] or ()), report["adapter_fault"]])
            reading = readings.get(connection.name, [])
            found += worsening(self._readings.get(connection.name, []), reading)
            if found:
                told.append(f"replica {connection.number}: {'; '.join(dict.fromkeys(found))}")
            elif reading:
                self._readings[connection.name] = reading
        # Nothing has looked where a worker's watch has ended, or a replica could not answer.
        is_seen = all(
            workers and all(report["faults"] is not None for report in workers)
            for workers in replies
        )
        self.state = "sound" if is_seen else NOT_LOOKED_AT
        self.fault = f"The weight update has failed. {'. '.join(told)}. {REMEDY}" if told else ""
        if self.fault:
            logger.error(self.fault)

    def _read(self, timeout: float) -> dict[str, list[Reading]]:
        """Return what each replica makes of the texts; nothing of one that cannot read them (a
        template that asks for an image, a short context)."""
        size = self._server.args.vllm_data_parallel_size if self._server.use_async_engine else 1
        # An async engine gives them to its replicas in turn.
        messages = [[{"role": "user", "content": t}] for t in TEXTS for _ in range(size)]
        kwargs = {
            "infer_requests": [{"messages": m} for m in messages],
            "request_config": RequestConfig(
                max_tokens=NUM_TOKENS, temperature=0, prompt_logprobs=0, return_details=True
            ),
            "use_tqdm": False,
        }
        replies = replicas.call_all(
            self._server, {"type": "call", "method": "read_texts", "kwargs": kwargs}, timeout
        )
        readings = {}
        for connection, reply in zip(self._server.connections, replies, strict=True):
            if isinstance(reply, list):
                readings[connection.name] = [reading_of(output) for output in reply]
            else:
                logger.warning_once(
                    f"Replica {connection.number} does not read the plain sentences that tell "
                    f"garbage after a weight update ({reply}): weights alone are looked at."
                )
        return readings


def reading_of(output: RolloutOutput) -> Reading:
    response: Any = output.response
    logprobs = [next(iter(p.values()))["logprob"] for p in response.prompt_logprobs if p]
    tokens = response.choices[0].token_ids
    mean = math.fsum(logprobs) / len(logprobs)
    return Reading(mean, len(set(tokens)) == 1 and len(tokens) == NUM_TOKENS)


def worsening(before: list[Reading], after: list[Reading]) -> list[str]:
    """Return in words how replicas read worse than before an update, where none makes it so."""
    if any(not math.isfinite(reading.mean) for reading in after):
        return ["its log-probabilities are NaN"]
    falls = [(b.mean - a.mean, b, a) for b, a in zip(before, after, strict=False)]
    return [
        f"perplexity check failed: {-a.mean:.1f} nats/token (was {-b.mean:.1f})"
        + (", and it repeats one token" if a.repeats else "")
        for fall, b, a in sorted(falls, key=lambda each: -each[0])[:1]
        if fall > MOST_FALL or (fall > FALL_OF_REPETITION and a.repeats and not b.repeats)
    ]
