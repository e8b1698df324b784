"""One request for each replica of running servers, by its number."""

from __future__ import annotations

from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server.client import RolloutServers


def connect(*ports: int) -> RolloutServers:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    return RolloutServers(VLLMInferClient(base_urls=urls), timeout=600.0)


def drawn_by(servers: RolloutServers) -> list[str]:
    """Return which replica says that it drew each request. The prompts are of unequal lengths."""
    metadatas = [
        RequestMetadata(
            sample_id=SampleId(phase="eval", step=0, number=0, group=k, index=0),
            count=1,
            run_seed=42,
            packed=True,
            replica=k,
        )
        for k in range(sum(servers.replicas))
    ]
    messages = [{"role": "user", "content": "word " * (1 + 100 * k)} for k in range(len(metadatas))]
    asked = [RolloutInferRequest(messages=[message]) for message in messages]
    config = RequestConfig(max_tokens=4, logprobs=True)
    answers = servers.infer(asked, metadatas, config)
    return [" ".join(completion.replica.split()[-2:]) for [completion], _ in answers]
