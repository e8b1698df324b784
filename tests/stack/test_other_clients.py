"""Clients without the plugin and a real `swift rollout` with it: ms-swift's client, and one that
sends the requests of Megatron's trainers."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from swift_grpo_ext.server.routes import REPORTS_PATH
from tests.rig.megatron_client import MegatronClient, Weights
from tests.rig.policy import SAME
from tests.rig.processes import COMMAND, free_port, rollout_server, started
from tests.rig.rounds import digits, server_argv

ONE_SEED = "A client gives one seed (7) for 4 requests"


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("other-clients")


@pytest.fixture(scope="module")
def port(assets: Path, server_folder: Path) -> Iterator[int]:
    """The port of a server with two replicas, `--vllm_enable_lora` and a record."""
    argv = server_argv(
        assets,
        *("--vllm_data_parallel_size", "2", "--vllm_enable_lora", "true"),
        *("--sample_log", "all", "--result_path", str(server_folder / "record")),
    )
    with rollout_server(*argv, log=server_folder / "log") as port:
        yield port


@pytest.fixture
def group(assets: Path) -> list[dict[str, Any]]:
    """Two digits, twice each."""
    return digits(assets, [0, 0, 1, 1])


def ask(port: int, rows: list[dict[str, Any]], **config: Any) -> list[RolloutOutput]:
    """Send the request of ms-swift's trainer. At temperature 2 the tiny model says anything."""
    client = VLLMInferClient(hosts=["127.0.0.1"], server_ports=[port], connection_timeout=60)
    infer_requests = [RolloutInferRequest(messages=r["messages"], images=r["images"]) for r in rows]
    own = {"max_tokens": 16, "temperature": 2.0, "logprobs": True, "return_details": True}
    return list(client.infer(infer_requests, RequestConfig(**(own | config))))


def tokens(outputs: list[RolloutOutput]) -> list[list[int]]:
    return [output.response.choices[0].token_ids for output in outputs]


def logprobs(outputs: list[RolloutOutput]) -> torch.Tensor:
    contents = [output.response.choices[0].logprobs["content"] for output in outputs]
    return torch.tensor([[token["logprob"] for token in content] for content in contents])


def test_no_two_requests_share_their_noise(
    port: int, group: list[dict[str, Any]], server_folder: Path
) -> None:
    """Within a call, over its replicas, and in the next call. The record has all samples."""
    outputs = [output for _ in range(2) for output in ask(port, group)]
    seeds = [output.rollout_infos["seed"] for output in outputs]
    assert len({*seeds}) == len(outputs) == 8
    assert {output.rollout_infos["replica"] for output in outputs} == {"replica 0", "replica 1"}
    assert len({*map(tuple, tokens(outputs))}) == 8
    rows: dict[int | None, Any] = {}
    deadline = time.monotonic() + 60  # a thread writes, beside the answer
    while not rows.keys() >= {*seeds}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        with suppress(FileNotFoundError):
            rows = {row.seed: row for row in to_rows(read_samples(server_folder / "record"))}
    for seed, output in zip(seeds, outputs, strict=True):
        row, [choice] = rows[seed], output.response.choices
        assert (list(row.token_ids), row.text) == (choice.token_ids, choice.message.content)
        assert row.logprobs is not None
        found = torch.tensor([row.logprobs])
        assert torch.allclose(found, logprobs([output]), rtol=5e-4, atol=5e-4)
        assert row.replica == output.rollout_infos["replica"]
    assert [(rows[s].sample_id.group, rows[s].sample_id.index) for s in seeds[:4]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    page = server_folder / "page.html"
    argv = ["view", str(server_folder / "record"), "--output", str(page)]
    with started([*COMMAND, *argv], server_folder / "view.log") as running:
        assert running.wait(120).returncode == 0, running.output
    assert "Which digit" in page.read_text(encoding="utf-8")


def test_a_clients_own_seed_wins_where_it_means_something(
    port: int, group: list[dict[str, Any]], server_folder: Path
) -> None:
    one, again, other = (ask(port, group[:1], seed=seed) for seed in (7, 7, None))
    assert tokens(one) == tokens(again) != tokens(other)
    assert one[0].rollout_infos["seed"] == 7
    many = ask(port, group, seed=7)
    assert len({*map(tuple, tokens(many))}) == 4
    log = (server_folder / "log").read_text(encoding="utf-8")
    assert log.count(ONE_SEED) == 1


def reports(port: int) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = requests.get(f"http://127.0.0.1:{port}{REPORTS_PATH}").json()
    return answer


def moved(weights: Weights, share: float) -> Weights:
    """Return the weights after an update that moves each by this share of its size."""
    torch.manual_seed(0)
    return {name: w + share * w.abs() * torch.randn_like(w) for name, w in weights.items()}


def test_megatrons_updates_and_rollouts(
    port: int, assets: Path, group: list[dict[str, Any]]
) -> None:
    """It sends whole weights in buckets with an adapter, moved ones, the first ones again, and then
    an adapter alone."""
    client = MegatronClient(port, free_port())
    try:
        weights = load_file(assets / "tiny_vlm/model.safetensors")
        config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        adapter: Weights = {}
        for name, weight in weights.items():
            if name.startswith("model.") and name.endswith(("q_proj.weight", "v_proj.weight")):
                module = name.removesuffix(".weight")
                adapter[f"{module}.lora_A.weight"] = torch.randn(8, weight.shape[1])
                adapter[f"{module}.lora_B.weight"] = torch.zeros(weight.shape[0], 8)

        def generate() -> torch.Tensor:
            """Return the log-probabilities of all tokens, padded with 0."""
            outputs = client.draw([*group, *group], temperature=0.0)
            rows = [logprobs([output])[0] for output in outputs]
            return torch.stack([torch.nn.functional.pad(row, (0, 16 - len(row))) for row in rows])

        client.send(weights, adapter, config)
        before = generate()
        first, second = reports(port)
        assert first == second
        named = {f"base_model.model.{name}" for name in adapter}  # as PEFT names them
        assert first["loaded"].keys() == {*weights, *named}
        assert (first["adapter_fault"], first["faults"]) == ("", [])
        assert (before[:4] - before[4:]).abs().max() < SAME  # replica 0's and replica 1's
        client.send(moved(weights, 0.1), adapter, config)
        assert (generate() - before).abs().max() > SAME
        client.send(weights, adapter, config)
        assert (generate() - before).abs().max() < SAME
        for name in adapter:
            if "lora_B" in name:
                adapter[name] = torch.full_like(adapter[name], 0.02)
        client.send_adapter(adapter, config)
        assert (generate() - before).abs().max() > SAME

        outputs = [output for _ in range(2) for output in client.draw(group, temperature=2.0)]
        assert len({output.rollout_infos["seed"] for output in outputs}) == 8
        assert len({*map(tuple, tokens(outputs))}) == 8
        # `samples2requests` sends the bytes of an image as base64, and a path as it is.
        row = group[0]
        content = Path(row["images"][0]).read_bytes()
        by_path, by_bytes, by_text = client.draw(
            [
                {**row, "images": [{"path": row["images"][0], "bytes": None}]},
                {**row, "images": [{"path": None, "bytes": content}]},
                {**row, "images": [base64.b64encode(content).decode()]},
            ],
            temperature=0.0,
        )
        assert tokens([by_path]) == tokens([by_bytes]) == tokens([by_text])
        assert by_path.response.prompt_token_ids == by_bytes.response.prompt_token_ids
    finally:
        client.close()
