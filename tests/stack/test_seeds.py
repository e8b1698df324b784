"""A sample's tokens depend on its (round, group, index) alone, however a run is deployed, and each
sample has its own noise (S1, S2, S3, S7).

Also: a group is asked for once (G2, G4) and read once (L6), a server refuses bad requests and
clients without its key (F5, F7), and serves clients without the plugin (C1, C2, C3). All runs have
the same weights (learning rate 0) and `--seed`. The data set has few rows, so prompts come back,
and three equal ones, so a batch can hold duplicates.
"""

import base64
import io
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.rlhf_trainers.vllm_client import VLLMInferClient
from torch.nn.utils.rnn import pad_sequence

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.server.routes import REPORTS_PATH
from tests.rig.fixtures import BY_NAME, STEPS
from tests.rig.megatron_client import MegatronClient, Weights
from tests.rig.policy import SAME
from tests.rig.processes import free_port, rollout_server
from tests.rig.record.rows import read_diversity
from tests.rig.rounds import (
    BATCH,
    GROUP_SIZE,
    Samples,
    assert_same,
    client_argv,
    digits,
    logged_steps,
    read_records,
    server_argv,
    train,
)

SEED = 42  # ms-swift's default
KEY = "the-key-of-this-test"


# --- colocated ---


def test_seeds_are_unique_and_noise_is_fresh(reference_folder: Path, reference: Samples) -> None:
    """Prompts come back within a batch and in each epoch; the collision test finds sound noise."""
    assert len(reference) == BATCH * STEPS
    for name, sample in reference.items():
        assert sample["infos"]["seed"] == sample_seed(SEED, SampleId.parse(name))
    seeds = {sample["infos"]["seed"] for sample in reference.values()}
    assert len({seed % 2**32 for seed in seeds}) == len(reference)
    prompts = [(tuple(s["images"]), s["step"]) for s in reference.values()]
    repeated = max(prompts.count(prompt) for prompt in set(prompts))
    assert repeated > GROUP_SIZE, "no prompt met itself in a batch: the test sees nothing"
    completions = {tuple(sample["token_ids"]) for sample in reference.values()}
    assert len(completions) == len(reference), "a completion came twice"

    records = read_diversity(reference_folder / "run")
    assert [r.verdict for r in records] == ["healthy"] * STEPS
    assert all(r.num_earlier_pairs for r in records[2:])  # of the second epoch on
    assert "diversity:" not in (reference_folder / "log").read_text(encoding="utf-8")
    logged = [log["diversity/vendi"] for log in logged_steps(reference_folder / "run")]
    assert logged == pytest.approx([r.metrics["vendi"] for r in records], abs=1e-6)


def test_a_group_is_asked_for_and_read_once(reference_folder: Path, reference: Samples) -> None:
    """A group is one request. The engine decodes its image once, and so does training, which also
    reads its prompt once. vLLM caches processed and encoded images by content."""
    num_groups = STEPS * BATCH // GROUP_SIZE
    work = read_records(reference_folder / "record", "engine")
    asked = [entry for entry in work if "samples" in entry]
    assert asked == [{"samples": GROUP_SIZE, "images": 1}] * num_groups
    assert sum("decoded" in entry for entry in work) == 2 * num_groups
    names = {tuple(sample["images"]) for sample in reference.values()}
    assert sum("processed" in entry for entry in work) == num_groups + len(names)
    images_of_rounds = {(sample["step"], tuple(sample["images"])) for sample in reference.values()}
    assert sum(entry.get("encoded", 0) for entry in work) == len(images_of_rounds)
    log = (reference_folder / "log").read_text(encoding="utf-8")
    assert "--dataset: 2 of 6 rows repeat an earlier row's prompt" in log
    assert "prompts of the generation batch are duplicates" in log
    found = re.search(r"auto: passes of .* read (\d+) positions instead of (\d+)", log)
    assert found is not None
    assert int(found[1]) < 0.7 * int(found[2])


def test_two_ranks_and_ms_swifts_passes(
    assets: Path, rows: Path, folder: Path, reference_folder: Path, reference: Samples
) -> None:
    """Losses of ms-swift's passes equal those of passes that read a prompt once."""
    argv = (*BY_NAME, "--logps_shared_prompt", "false")
    assert_same(train(assets, rows, folder / "two-ranks", *argv, ranks=2), reference)
    logs = logged_steps(folder / "two-ranks/run")
    for ours, theirs in zip(logs, logged_steps(reference_folder / "run")[:3], strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
        assert ours["rollout_gap/mean"] == pytest.approx(theirs["rollout_gap/mean"], abs=SAME)


# --- servers ---


@pytest.fixture(scope="module")
def servers(assets: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Ports of a server with one replica and an API key, and of one with two replicas, adapters and
    a record. All clients have the key in their netrc."""
    netrc = folder / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login swift password {KEY}\n")
    two = (
        *("--vllm_data_parallel_size", "2", "--vllm_enable_lora", "true"),
        *("--sample_log", "all", "--result_path", str(folder / "servers/two")),
    )
    (folder / "servers").mkdir()
    has_key = {"VLLM_API_KEY": KEY, "NETRC": "/dev/null"}
    with (
        rollout_server(*server_argv(assets), log=folder / "servers/one.log", env=has_key) as first,
        rollout_server(*server_argv(assets, *two), log=folder / "servers/two.log") as second,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("NETRC", str(netrc))
        yield first, second


def test_two_servers(
    assets: Path, rows: Path, folder: Path, servers: tuple[int, int], reference: Samples
) -> None:
    """All three replicas generate for three ranks. No file holds the key, neither in plain text nor
    in base64. A server listens at the address that it was given, and nowhere else."""
    samples = train(assets, rows, folder / "two-servers", *client_argv(*servers), ranks=3)
    assert_same(samples, reference)
    assert len({sample["infos"]["replica"] for sample in samples.values()}) == 3
    written = [path for name in ("two-servers", "servers") for path in (folder / name).rglob("*")]
    files = [path for path in written if path.is_file()]
    assert {folder / "two-servers/run/args.json", folder / "servers/one.log"} <= set(files)
    for path in files:
        content = path.read_bytes()
        for secret in (KEY.encode(), base64.b64encode(f"swift:{KEY}".encode())):
            assert secret not in content, path
    assert "api_key='***'" in (folder / "servers/one.log").read_text(encoding="utf-8")
    with requests.Session() as anonymous:
        anonymous.trust_env = False  # without the netrc
        assert anonymous.get(f"http://127.0.0.1:{servers[0]}{REPORTS_PATH}").status_code == 401
    with pytest.raises(ConnectionRefusedError), socket.socket() as elsewhere:
        elsewhere.connect(("127.0.0.2", servers[0]))  # this machine too


def test_a_bad_request_is_refused(servers: tuple[int, int]) -> None:
    """A picture of 20 kB that would take half a gigabyte, and bytes that are
    no image, which only a replica notices."""
    file = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(file, "PNG")
    faults = {
        base64.b64encode(file.getvalue()).decode(): "decompression bomb",
        f"data:image/png;base64,{'A' * 80}": "cannot identify image file",
    }
    for image, reason in faults.items():
        request = {"messages": [{"role": "user", "content": "<image>?"}], "images": [image]}
        for port in servers:
            url = f"http://127.0.0.1:{port}/infer/"
            refused = requests.post(url, json={"infer_requests": [request]}, timeout=60)
            assert reason in refused.json()["detail"]
            assert refused.status_code == 400


def test_async_generation(
    assets: Path, rows: Path, folder: Path, servers: tuple[int, int], reference: Samples
) -> None:
    """A round has the name of the step that uses it, and the prompts of the step before. An
    evaluation has its own names, seeds and group size, also in batches generated ahead."""
    argv = [*client_argv(servers[0]), "--async_generate", "true"]
    argv += ["--val_dataset", str(rows), "--eval_strategy", "steps", "--eval_steps", "2"]
    argv += ["--per_device_eval_batch_size", "2", "--num_generations_eval", "2"]
    samples = train(assets, rows, folder / "ahead", *argv, ranks=2, steps=3)
    training = {n: s for n, s in samples.items() if SampleId.parse(n).phase == "train"}
    evaluation = [SampleId.parse(name) for name in samples.keys() - training.keys()]
    assert {0, 1, 2} <= {SampleId.parse(name).step for name in training}
    assert {(i.step, i.number) for i in evaluation} == {(2, 0), (3, 0)}
    assert {i.index for i in evaluation} == {0, 1}
    assert {i.group for i in evaluation} >= {0, 1}
    for name, sample in samples.items():
        assert sample["infos"]["seed"] == sample_seed(SEED, SampleId.parse(name))
    for name, sample in training.items():
        sample_id = SampleId.parse(name)
        if sample_id.step > 0:
            before = f"train-{sample_id.step - 1}.0-{sample_id.group}-{sample_id.index}"
            assert sample["images"] == reference[before]["images"]


# --- clients without the plugin: ms-swift's, and one with the requests of Megatron's trainers ---


@pytest.fixture
def group(assets: Path) -> list[dict[str, Any]]:
    """Two digits, twice each."""
    return digits(assets, [0, 0, 1, 1])


def ask(port: int, rows: list[dict[str, Any]], seed: int | None = None) -> list[RolloutOutput]:
    """Send the request of ms-swift's trainer. At temperature 2 the tiny model says anything."""
    client = VLLMInferClient(hosts=["127.0.0.1"], server_ports=[port], connection_timeout=60)
    infer_requests = [RolloutInferRequest(messages=r["messages"], images=r["images"]) for r in rows]
    own = {"max_tokens": 16, "temperature": 2.0, "logprobs": True, "return_details": True}
    return list(client.infer(infer_requests, RequestConfig(**own, seed=seed)))


def tokens(outputs: list[RolloutOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.response.choices[0].token_ids) for output in outputs]


def test_requests_of_another_client(
    folder: Path, servers: tuple[int, int], group: list[dict[str, Any]]
) -> None:
    """No two share their noise: within a call, over its replicas, and in the next call. The record
    has all samples. A client's own seed wins if a call has one request."""
    outputs = [output for _ in range(2) for output in ask(servers[1], group)]
    seeds = [output.rollout_infos["seed"] for output in outputs]
    assert len({*seeds}) == len(outputs) == 8
    assert {output.rollout_infos["replica"] for output in outputs} == {"replica 0", "replica 1"}
    assert len({*tokens(outputs)}) == 8
    rows: dict[int | None, Any] = {}
    deadline = time.monotonic() + 60  # a thread writes, beside the answer
    while not rows.keys() >= {*seeds}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        with suppress(FileNotFoundError):
            rows = {row.seed: row for row in to_rows(read_samples(folder / "servers/two"))}
    for seed, output in zip(seeds, outputs, strict=True):
        row, [choice] = rows[seed], output.response.choices
        assert (list(row.token_ids), row.text) == (choice.token_ids, choice.message.content)
        assert row.replica == output.rollout_infos["replica"]

    one, again, other = (ask(servers[1], group[:1], seed=seed) for seed in (7, 7, None))
    assert tokens(one) == tokens(again) != tokens(other)
    assert one[0].rollout_infos["seed"] == 7
    assert len({*tokens(ask(servers[1], group, seed=7))}) == 4
    log = (folder / "servers/two.log").read_text(encoding="utf-8")
    assert log.count("A client gives one seed (7) for 4 requests") == 1


def test_megatrons_updates_and_rollouts(
    assets: Path, servers: tuple[int, int], group: list[dict[str, Any]]
) -> None:
    """It sends whole weights in buckets with an adapter, and then an adapter alone."""
    client = MegatronClient(servers[1], free_port())
    try:
        weights = load_file(assets / "tiny_vlm/model.safetensors")
        config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        adapter: Weights = {}
        for name, weight in weights.items():
            if name.startswith("model.") and name.endswith(("q_proj.weight", "v_proj.weight")):
                module = name.removesuffix(".weight")
                adapter[f"{module}.lora_A.weight"] = torch.randn(8, weight.shape[1])
                adapter[f"{module}.lora_B.weight"] = torch.zeros(weight.shape[0], 8)

        client.send(weights, adapter, config)

        def logprobs() -> torch.Tensor:
            """Return those of all tokens, padded with 0, from both replicas."""
            outputs = client.draw([*group, *group], temperature=0.0)
            contents = [output.response.choices[0].logprobs["content"] for output in outputs]
            rows = [torch.tensor([token["logprob"] for token in each]) for each in contents]
            return pad_sequence(rows, batch_first=True)

        before = logprobs()
        assert (before[:4] - before[4:]).abs().max() < SAME  # replica 0's and replica 1's
        first, second = requests.get(f"http://127.0.0.1:{servers[1]}{REPORTS_PATH}").json()
        assert first == second
        named = {f"base_model.model.{name}" for name in adapter}  # as PEFT names them
        assert first["loaded"].keys() == {*weights, *named}
        assert (first["adapter_fault"], first["faults"]) == ("", [])
        for name in adapter:
            if "lora_B" in name:
                adapter[name] = torch.full_like(adapter[name], 0.02)
        client.send_adapter(adapter, config)
        after = logprobs()
        assert after.shape != before.shape or (after - before).abs().max() > SAME
    finally:
        client.close()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as e:  # as a trainer would end
        return str(e)
    return ""


def test_a_client_without_the_plugin_is_told(
    assets: Path, folder: Path, servers: tuple[int, int], group: list[dict[str, Any]]
) -> None:
    """It sends a sound update, one with a random layer, a sound one, and one with a layer of
    another size, as from a trainer of another model (ms-swift issue 9401)."""
    spoiled, told = "layers.1.self_attn.o_proj", []
    weights = load_file(assets / "tiny_vlm/model.safetensors")
    client = MegatronClient(servers[0], free_port())
    for seed, kind in enumerate(("sound", "random", "sound", "misshapen")):
        torch.manual_seed(seed)
        sent = {name: t + 1e-4 * torch.randn_like(t) for name, t in weights.items()}
        layer = sent[f"model.{spoiled}.weight"]
        others = {"random": torch.randn_like(layer) * layer.std(), "misshapen": layer[:-8]}
        sent[f"model.{spoiled}.weight"] = others.get(kind, layer)
        update = error_of(partial(client.send, sent, None, LoraConfig()))
        health = requests.get(f"http://127.0.0.1:{servers[0]}/health/", timeout=60)
        assert health.status_code == 200
        told.append((update, error_of(partial(client.draw, group)), health.json()["weights"]))
    client.close()
    assert told[0] == told[2] == ("", "", "sound")
    for text in told[1]:
        assert f"{spoiled} moved by 1" in text
    for text in told[3]:
        assert "could not load its weights" in text
    log = (folder / "servers/one.log").read_text(encoding="utf-8")
    assert f"{spoiled} moved by 1" in log
