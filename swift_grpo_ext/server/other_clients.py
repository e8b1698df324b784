"""Names, seeds and weight checks for clients without the plugin: plain ms-swift, Megatron
(docs/promises.md, C1 and C2).

Symptom: without seeds, vLLM draws all requests from its engine's one generator, which starts over
with the engine. With a seed, all requests of all steps have the same one, on each replica.
Upstream: ms-swift 4.6, rlhf_trainers/vllm_client.py and infer_engine/vllm_engine.py (`infer`).
Can go when ms-swift's clients give each request a seed of its own.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from itertools import count
from typing import Any

from swift.infer_engine.protocol import RequestConfig
from swift.utils import get_logger

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server.replicas import ReplicaConnection

logger = get_logger()

NOT_LOOKED_AT = "not looked at"
REMEDY = (
    "Rollouts would be garbage. Send the weights again; start `swift rollout` with the --model "
    "that the client trains, and both with the same versions of ms-swift and transformers; or go "
    "on with `swift rollout ... --rollout_mismatch warn`."
)


class OtherClients:
    """Names the samples of these clients. A call of `/infer` is a round, and its equal prompts are
    a group. `gives_seeds` is false with `--rollout_seed_mode engine`."""

    def __init__(self, *, gives_seeds: bool) -> None:
        # Random: no seed may come twice, over all servers and restarts.
        self._run_seed = secrets.randbits(62) if gives_seeds else None
        self._calls = count()

    def name(
        self, requests: Sequence[MutableMapping[str, Any]], config: RequestConfig | None
    ) -> list[RequestMetadata]:
        """Write metadata into each request, and return the metadata."""
        call, n, seed = next(self._calls), (config and config.n) or 1, self._run_seed
        if config is not None and config.seed is not None and seed is not None:
            if len(requests) == 1:
                seed = None  # the client's own seed applies
            else:
                logger.warning_once(
                    f"A client gives one seed ({config.seed}) for {len(requests)} requests: the "
                    "same noise on each replica, and in each call that gives it. Each request gets "
                    "a seed of its own instead (`seed` in `rollout_infos`). To keep the client's, "
                    "start `swift rollout` with --rollout_seed_mode engine.",
                    hash_id="one_seed_for_many",
                )
        groups: dict[str, int] = {}
        drawn: Counter[int] = Counter()  # samples of each group
        metadatas = []
        for request in requests:
            group = groups.setdefault(prompt_hash(request), len(groups))
            name = SampleId(phase="train", step=call, number=0, group=group, index=drawn[group])
            drawn[group] += n
            metadata = RequestMetadata(
                sample_id=name, count=n, run_seed=seed, as_arrays=False, stop_token_ids=None
            )
            request["data_dict"] = {**(request.get("data_dict") or {})}
            wire.write_metadata(request["data_dict"], metadata)
            metadatas.append(metadata)
        return metadatas


class Updates:
    """Records whether a server's last weight update was sound. If it `watches`, workers check the
    weights that they receive, from any client."""

    def __init__(self, watches: bool) -> None:
        self.watches = watches
        self.is_due = False  # weights have arrived that were not checked yet
        self.is_arriving = False  # more weights follow: until then, nothing is checked or generated
        self.state = "sound" if watches else NOT_LOOKED_AT
        # `/health` shows the fault, or `state` if there is none. It stays 200: a restart would
        # destroy the evidence. Clients without the plugin get the fault as the answer to their
        # update, or (adapters, which arrive after the answer) to their next request, and draw
        # nothing until an update is sound (`--rollout_mismatch stop`).
        self.fault = ""

    def check_reports(self, replicas: Iterable[ReplicaConnection], replies: Iterable[Any]) -> None:
        """Set `state` and `fault` by the reports of each replica's workers (`WeightReport`); the
        reply of a replica that could not answer is None."""
        named, is_seen = [], True
        for replica, reports in zip(replicas, replies, strict=True):
            found = dict[str, None]()  # in order, each once
            for report in reports or ():
                found |= dict.fromkeys([*(report["faults"] or ()), report["adapter_fault"]])
            if texts := "; ".join(filter(None, found)):
                named.append(f"replica {replica.number}: {texts}")
            # If a worker's watch has ended, its faults are None.
            is_seen &= bool(reports) and all(r["faults"] is not None for r in reports)
        self.state = "sound" if is_seen else NOT_LOOKED_AT
        self.fault = f"The weight update has failed. {'. '.join(named)}. {REMEDY}" if named else ""
        if self.fault:
            logger.error(self.fault)
