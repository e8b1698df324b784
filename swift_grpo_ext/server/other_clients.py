"""Names and seeds for the requests of clients that send no metadata: plain ms-swift, Megatron.

Symptom: without seeds, vLLM draws all requests from its engine's one generator, which starts over
with the engine. With a seed, all requests of all steps have the same one, on each replica.
Upstream: ms-swift 4.6, rlhf_trainers/vllm_client.py and infer_engine/vllm_engine.py (`infer`).
Can go when ms-swift's clients give each request a seed of its own.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import MutableMapping, Sequence
from itertools import count
from typing import Any

from swift.infer_engine.protocol import RequestConfig
from swift.utils import get_logger

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import SampleId

logger = get_logger()


class OtherClients:
    """Names their samples, so that no seed comes twice, over all replicas, servers and restarts. A
    call of `/infer` is a round. Its equal prompts are a group. With `gives_seeds` false, client and
    engine choose the seeds (`--rollout_seed_mode engine`)."""

    def __init__(self, *, gives_seeds: bool) -> None:
        self._run_seed = secrets.randbits(62) if gives_seeds else None
        self._calls = count()

    def name(
        self, requests: Sequence[MutableMapping[str, Any]], config: RequestConfig | None
    ) -> list[RequestMetadata]:
        """Write metadata into each request, and return them."""
        call, n, seed = next(self._calls), (config and config.n) or 1, self._run_seed
        if config is not None and config.seed is not None and seed is not None:
            if len(requests) == 1:
                seed = None  # the client's own
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
