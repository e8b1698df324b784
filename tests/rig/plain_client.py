"""A client of `swift rollout` without the plugin: ms-swift's own, over gloo in place of NCCL.

    python -m tests.rig.plain_client PORT GROUP_PORT MODEL OUTPUT

It sends four updates as ms-swift's trainers do: a sound one, one with a random layer, a sound one,
and one with a layer of another size, which vLLM cannot load. It generates after each update, and
writes the server's answers to OUTPUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.rlhf_trainers.vllm_client import VLLMClient

from swift_grpo_ext import cpu
from swift_grpo_ext.upstream.patches import PatchPhase, apply

SPOILED = "model.layers.1.self_attn.o_proj.weight"


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as e:  # as a trainer would end
        return str(e)
    return ""


def main(port: int, group_port: int, model: str, output: str) -> None:
    url = f"http://127.0.0.1:{port}"
    cpu.register()
    client = VLLMClient([url], group_ports=group_port)
    apply(PatchPhase.TRAINER)
    client.init_communicator(device="cpu")
    weights = load_file(Path(model, "model.safetensors"))
    question = RolloutInferRequest(messages=[{"role": "user", "content": "Which digit?"}])

    def update(seed: int, kind: str) -> dict[str, Any]:
        torch.manual_seed(seed)
        sent = {name: t + 1e-4 * torch.randn_like(t) for name, t in weights.items()}
        if kind == "random":
            sent[SPOILED] = torch.randn_like(sent[SPOILED]) * sent[SPOILED].std()
        elif kind == "of another size":
            sent[SPOILED] = sent[SPOILED][:-8]
        named = list(sent.items())
        for part in (named[:30], named[30:]):
            bucket = FlattenedTensorBucket(named_tensors=part)
            client.update_flattened_params(bucket.get_metadata(), bucket.get_flattened_tensor())
        return {
            "update": error_of(client.process_weights_after_loading),
            "reset": error_of(client.reset_prefix_cache),
            "infer": error_of(lambda: client.infer([question], RequestConfig(max_tokens=4))),
            "health": requests.get(f"{url}/health/", timeout=60).json()["weights"],
            "status": requests.get(f"{url}/health/", timeout=60).status_code,
        }

    kinds = ("sound", "random", "sound again", "of another size")
    found = [update(seed, kind) for seed, kind in enumerate(kinds)]
    Path(output).write_text(json.dumps(found, indent=1), encoding="utf-8")
    client.close_communicator()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
