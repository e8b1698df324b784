"""A plugin for `weight_updates.py`: writes down how long weight updates take, with and without
verification, in turns.

Loaded after `plugins/grpo_ext.py`, by trainer and server; the file comes from the environment
variable `UPDATE_TIMES`. One JSON line for each update. As a script, it stands for the trainer of a
server: `timed_updates.py MODEL PORT UPDATES` sends the model's weights so often.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file
from swift.rlhf_trainers.utils import (
    _create_parameter_buckets,
    _process_bucket_with_flattened_tensor,
)
from swift.rlhf_trainers.vllm_client import VLLMClient
from swift.trainers import TrainerFactory

from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.training import RolloutGRPOTrainer
from swift_grpo_ext.upstream.weight_sync import connect_client
from swift_grpo_ext.weights import receiver
from swift_grpo_ext.weights import updates as trainer_weights
from swift_grpo_ext.weights.receiver import CPUWeightSyncWorkerExtension


def nothing(*_: Any) -> dict[str, str]:
    return {}


def switch(module: Any, names: tuple[str, ...], *, on: bool) -> None:
    """Let a module's functions verify, or do nothing."""
    for name in names:
        value = ORIGINAL[module.__name__, name]
        skipped = (lambda *_: nothing) if name == "weight_checksums_in_background" else nothing
        setattr(module, name, value if on else skipped)


OF_TRAINER = ("compare", "compare_tensors", "weight_checksums_in_background")
OF_WORKER = ("weight_checksums_in_background",)
ORIGINAL = {
    (module.__name__, name): getattr(module, name)
    for module, names in ((trainer_weights, OF_TRAINER), (receiver, OF_WORKER))
    for name in names
}


class TimedTrainer(RolloutGRPOTrainer):
    updates = 0

    def _move_model_to_vllm(self, *args: Any, **kwargs: Any) -> None:
        time_update(
            self.updates, lambda: super(TimedTrainer, self)._move_model_to_vllm(*args, **kwargs)
        )
        self.updates += 1


def time_update(number: int, update: Callable[[], None]) -> None:
    """Make an update, every other one without verification."""
    is_verified = number % 2 == 1
    switch(trainer_weights, OF_TRAINER, on=is_verified)
    start = time.perf_counter()
    update()
    seconds = time.perf_counter() - start
    with Path(os.environ["UPDATE_TIMES"]).open("a", encoding="utf-8") as f:
        f.write(json.dumps({"verified": is_verified, "seconds": seconds}) + "\n")


class TimedExtension(CPUWeightSyncWorkerExtension):
    updates = 0

    def _take(self, tensors: list[tuple[str, Any]]) -> None:
        switch(receiver, OF_WORKER, on=self.updates % 2 == 1)
        super()._take(tensors)

    def process_weights_after_loading(self) -> None:
        self.updates += 1
        super().process_weights_after_loading()


def send(model: Path, port: int, count: int) -> None:
    """Send a model's weights to a server as often, with the requests of ms-swift's trainer."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        group_port = s.getsockname()[1]
    client = VLLMClient(hosts=["127.0.0.1"], server_ports=[port], group_ports=group_port)
    weights: dict[str, Any] = {}
    for path in sorted(model.glob("*.safetensors")):
        weights |= load_file(path)
    with tempfile.TemporaryDirectory() as run:
        names = {"rollout_timeout": 600.0, "output_dir": run, "new_special_tokens": []}
        client.init_communicator(device=0)
        connect_client(client, 600.0)
        servers = trainer_weights.connect_servers(client, SimpleNamespace(**names))
        updates = trainer_weights.WeightUpdates(SingleRank(), servers)

        def load(state_dict: dict[str, Any]) -> None:
            for bucket in _create_parameter_buckets(list(state_dict.items())):
                _process_bucket_with_flattened_tensor(SimpleNamespace(vllm_client=client), bucket)

        def move(_: bool) -> None:
            updates.send(weights, load)
            client.process_weights_after_loading()
            client.reset_prefix_cache()
            client.reset_encoder_cache()

        for number in range(count):
            time_update(number, lambda: updates.update(move))


receiver.CPUWeightSyncWorkerExtension = TimedExtension  # type: ignore[misc]
TrainerFactory.TRAINER_MAPPING["grpo"] = "timed_updates.TimedTrainer"

if __name__ == "__main__":
    send(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
