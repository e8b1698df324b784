"""Each request of a client without the plugin has a name and noise of its own (C1). A server names
a faulty weight update at once, and draws nothing until one is sound (C2). It records and watches
its samples, for other clients and for our trainings (C3)."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from starlette.routing import Route
from swift.infer_engine.protocol import ChatCompletionResponseChoice, ChatMessage

from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.conversation import KEY, Turn, write_turns
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata, WeightReport
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import lease, routes
from swift_grpo_ext.server import record as record_module
from tests.rig.record.rows import read_diversity
from tests.rig.server.served import Deployed, Replica, listening, metadata_of, output_of, request


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the server's log."""
    lines: list[str] = []
    for name in ("info", "warning", "warning_once", "error"):
        monkeypatch.setattr(record_module.logger, name, lambda text, **_: lines.append(text))
    return lines


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_no_two_requests_share_a_seed_in_the_life_of_a_server() -> None:
    """Seeds of two servers differ too. Within a call, their low 32 bits differ. In engine mode the
    engine chooses; `tests/stack/test_seeds.py` has clients with seeds of their own."""

    def seeds_of(deployed: Deployed) -> list[Any]:
        outputs = deployed.ask(*map(asked, "aabac"), temperature=1.0).json()
        return [output["rollout_infos"]["seed"] for output in outputs]

    seeds: list[int] = []
    for deployed in (Deployed(Replica(), Replica()), Deployed(Replica())):
        for _ in range(3):
            seeds += (drawn := seeds_of(deployed))
            assert len({seed % 2**32 for seed in drawn}) == 5
    assert len({*seeds}) == len(seeds) == 30
    assert min(seeds) > 0
    assert max(seeds) < 2**63
    assert seeds_of(Deployed(Replica(), rollout_seed_mode="engine")) == [None] * 5


CALLS: dict[str, tuple[str, Any]] = {
    "update": ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [1]}),
    "load": ("/process_weights_after_loading/", None),
    "adapter": ("/update_adapter_flattened_param/", {"peft_config": {"r": 8}, "metadatas": []}),
    "reset": ("/reset_prefix_cache/", None),
    "join": ("/init_communicator/", {"host": "0.0.0.0", "port": 7, "world_size": 5}),
    "draw": ("/infer/", {"infer_requests": [request(0)]}),
}
FAULT = "weights changed implausibly: q_proj moved by 141% of its norm"
FAULTY, SOUND = [WeightReport(faults=[FAULT])], [WeightReport(faults=[])]


class Updated(Deployed):
    """A server with two replicas."""

    def __init__(self) -> None:
        self.one, self.two = Replica(number=0), Replica(number=1)
        super().__init__(self.one, self.two, timeout=2.0)

    def play(self, calls: str, status: int = 200, words: str = "", **headers: str) -> str:
        """Make these calls, and check that each has this status and these words in its answer;
        return the cause of the last one's refusal."""
        for name in calls.split():
            path, body = CALLS[name]
            answer = self.client.post(path, json=body, headers=headers)
            assert (answer.status_code, words in answer.text) == (status, True), (name, answer.text)
        return "" if status == 200 else str(answer.json()["detail"])

    def weights(self) -> str:
        """Return what `/health` says of the weights."""
        return str(self.client.get("/health/").json()["weights"])


def test_a_faulty_update_is_told_and_nothing_is_drawn_until_one_is_sound(said: list[str]) -> None:
    """A training with the plugin decides itself; others go on if the server is set to warn. Health
    says where nothing looked: the watch of a replica has ended, or the replica cannot report."""
    server = Updated()
    server.play("update load")
    assert server.weights() == "sound"
    server.two.reports = [WeightReport()]
    server.play("update load draw")
    assert server.weights() == "not looked at"
    server.one.reports = FAULTY
    server.play("update load", **{wire.INSTANCE_HEADER: routes.INSTANCE})
    server.play("update")
    detail = server.play("load", 409, "--rollout_mismatch warn")
    assert detail.startswith(f"The weight update has failed. replica 0: {FAULT}. Rollouts would be")
    assert said == [detail] * 2
    assert server.weights() == server.play("draw", 409) == detail
    server.args.rollout_mismatch = "warn"
    server.play("load draw")
    server.args.rollout_mismatch, server.one.reports = "stop", SOUND
    server.two.faults["read_weight_report"] = "raises"
    server.play("update load draw")
    assert server.weights() == "not looked at"
    server.one.faults["process_weights_after_loading"] = "raises"
    assert server.play("load", 500, "could not load its weights") == server.weights()


@pytest.mark.parametrize("call", ["reset", "draw"])
def test_what_comes_behind_an_answered_update_tells_of_it(call: str) -> None:
    """An adapter is broadcast after the server's answer; then clients reset caches, and generate.
    ms-swift's next client resets a cache after it has joined, before it sends weights."""
    server = Updated()
    server.one.reports = [WeightReport(adapter_fault="vLLM refuses the adapter", faults=[])]
    server.play("adapter")
    server.play(call, 409, "vLLM refuses the adapter")
    server.play("join reset")
    server.play("adapter join reset")  # the training has ended before anybody looked


def test_an_update_is_judged_when_it_has_ended(said: list[str]) -> None:
    """Workers on GPUs load each part at once. Another client's request between two parts waits, at
    last with an error. Requests for health, or after the update, do not wait."""
    server = Updated()
    server.one.reports = FAULTY
    server.play("update")
    server.play("draw", 503, "a weight update is under way")
    assert server.weights() == "sound"
    with listening(server) as url, ThreadPoolExecutor() as pool:
        draw = partial(requests.post, f"{url}/infer/", json=CALLS["draw"][1], timeout=20)
        waiting = [pool.submit(draw) for _ in range(2)]
        time.sleep(0.3)
        server.one.reports = SOUND
        loaded = requests.post(f"{url}/process_weights_after_loading/", timeout=20)
        assert loaded.status_code == 200
        assert [drawn.result().status_code for drawn in waiting] == [200, 200]
    # Clients that do not report the end of an update reset caches; a new one joins.
    for ending in ("reset", "join"):
        server.play("update")
        server.play(f"{ending} draw")
    assert said == []


TOKENS = list(range(40))  # two independent samples would not share them


def choice(text: str, token_ids: list[int]) -> ChatCompletionResponseChoice:
    """Return a choice in ms-swift's form."""
    content = [{"token": "", "logprob": -1.5} for _ in token_ids]
    message = ChatMessage(role="assistant", content=text)
    return ChatCompletionResponseChoice(0, message, "stop", {"content": content}, token_ids)


class Recording(Deployed):
    """A server with `--sample_log all` and one replica."""

    def __init__(self, folder: Path | None, *says: ChatCompletionResponseChoice) -> None:
        replica = Replica()
        replica.says_to_others += says
        settings = {"sample_log": "all", "sample_log_gb": 0.0, "model_suffix": "tiny"}
        settings |= {"result_path": folder and str(folder), "save_args": lambda _: None}
        super().__init__(replica, **settings)

    def rows(self) -> list[SampleRow]:
        assert self.record is not None
        self.record._thread.submit(lambda: None).result()
        return to_rows(read_samples(self.record.folder))

    def places(self) -> list[tuple[int, int, int]]:
        """Return the call, group and index of each row."""
        ids = [row.sample_id for row in self.rows()]
        return [(name.step, name.group, name.index) for name in ids]


def test_a_call_of_another_client_is_a_round(tmp_path: Path) -> None:
    server = Recording(tmp_path, choice("one", TOKENS), choice("two", [1, 2]))
    image = asked("a", images=["/none/7.png"], data_dict={"solution": "7"})
    server.ask(asked("a"), asked("a"), n=2)
    server.num_updates = 3
    server.ask(image, asked("b"), n=2)
    assert server.ask().json() == []  # a call for nothing is none
    second = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert server.places() == [*((0, 0, index) for index in range(4)), *second]
    assert {file.start_step for file in record_files(tmp_path / "samples")} == {0}
    rows = server.rows()
    assert [row.text for row in rows] == ["one", "two"] * 4
    assert [row.weight_version for row in rows] == [0] * 4 + [3] * 4
    seen = rows[4]
    assert (seen.fingerprint, list(seen.media)) == (prompt_hash(image), ["/none/7.png"])
    assert json.loads(seen.prompt) == image["messages"]
    assert json.loads(seen.columns or "") == {"solution": "7"}
    assert (list(rows[1].token_ids), list(rows[1].logprobs or ())) == ([1, 2], [-1.5, -1.5])


def test_shared_noise_is_named_for_any_client(tmp_path: Path, said: list[str]) -> None:
    """All calls have the same tokens. A greedy call, and one with a client's seed, may repeat
    them."""
    server = Recording(tmp_path, choice("same", TOKENS))
    for config in ({"temperature": 0.0}, {"seed": 7}, {}, {}, {}):
        server.ask(asked("a"), **{"temperature": 1.0, **config})
    assert len(server.rows()) == 5
    verdicts = [(r.round.step, r.verdict) for r in read_diversity(tmp_path)]
    assert verdicts == [(2, "healthy"), (3, "broken"), (4, "broken")]
    _, told = said
    assert " in train round 3.0: " in told
    assert f"swift-grpo-ext view {tmp_path}" in told


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_conversation_has_a_row_for_each_turn(
    is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only our trainer gets the turns with the answer; another client could not read them."""
    output = output_of({}, [choice("b", TOKENS)])  # of a server's scheduler
    drawn = Completion(text="b", token_ids=[1], logprobs=[-1.0], finish_reason="stop", replica="r")
    name = metadata_of(0).sample_id
    turns = [Turn(replace(name, turn=turn), Prompt([1]), drawn, "print") for turn in range(2)]
    write_turns(output, turns)
    monkeypatch.setattr(Replica, "_output", lambda *_: output)
    server = Recording(tmp_path)
    own = request(0, count=1, as_arrays=False)
    other = asked("a", data_dict={"solution": "7"})
    [answer] = server.ask(own if is_ours else other).json()
    assert (KEY in answer["rollout_infos"]) is is_ours
    rows = server.rows()
    assert [(r.sample_id.turn, r.seed is None) for r in rows] == [(0, False), (1, False)]
    assert [row.columns for row in rows] == [None if is_ours else '{"solution": "7"}'] * 2


def test_a_record_that_fails_is_named_and_ends_nothing(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is left out if it cannot be written, or comes behind one that a slow disk has yet to
    take. Later calls are recorded, a training's under its own names. A server without
    `--result_path` makes a folder."""
    monkeypatch.setattr(record_module, "SECONDS_TO_WRITE", 0.05)
    monkeypatch.chdir(tmp_path)
    server, may_write = Recording(None), threading.Event()
    server.processes[0].faults["infer"] = "answers half"
    server.ask(asked("a"), asked("b"))
    assert server.rows() == []
    server.processes[0].faults.clear()
    assert server.record is not None
    own = server.record._recorder.flush
    monkeypatch.setattr(server.record._recorder, "flush", lambda: may_write.wait(60) and own())
    for group in (1, 2):
        server.ask(request(group, count=2))
    may_write.set()
    assert server.places() == [(0, 1, 0), (0, 1, 1)]
    server.ask(request(3, count=2))
    rows = server.rows()
    assert [row.text for row in rows] == ["1.0", "1.1", "3.0", "3.1"]
    assert len({row.seed for row in rows}) == 4
    assert {row.replica for row in rows} == {"replica 7"}
    begun, failed, late = said
    assert "swift-grpo-ext view output/tiny/rollout-2" in begun
    assert "samples of a call are not recorded (ValueError" in failed
    assert ": train round 0.0 is left out of the record, since the disk" in late


# --- the page of the protocol, for writers of clients ---

PAGE = Path(__file__).resolve().parents[3] / "docs/internals.md"
PROTOCOL = PAGE.read_text(encoding="utf-8").split("\n## The protocol\n")[1].split("\n## ")[0]
NAMES = {*re.findall(r"`([^`\n]+)`", PROTOCOL)}


def test_the_page_has_all_headers_routes_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {value for name, value in vars(wire).items() if name.endswith("_HEADER")}
    assert {n for n in NAMES if n.startswith("X-")} == {*ours, lease.OWNER_HEADER}
    assert f"every {lease.HEARTBEAT_SECONDS:g} seconds" in PROTOCOL
    assert f"for {lease.LEASE_SECONDS:g} seconds" in PROTOCOL
    server = Deployed(Replica())
    found = {each.path for each in server.app.routes if isinstance(each, Route)}
    # `/health` is the same without a slash, and all trainers send adapters in buckets.
    found -= {"/health", "/update_adapter_param/"}
    assert found == {name for name in NAMES if re.fullmatch(r"/[a-z_/]+/", name)}
    drawn = Completion(text="", token_ids=[1], logprobs=[0.0], finish_reason=None)
    told = wire.write_answer(Answer([drawn], Prompt([1]))) | server.client.get("/health/").json()
    told |= server.client.post("/get_engine_type/").json()[wire.KEY]
    reported = {field.name for field in fields(WeightReport)}
    assert {*told, *reported, routes.REPORTS_PATH, wire.KEY, KEY} <= NAMES
    [text] = re.findall(r"```json\n(.*?)```", PROTOCOL, re.S)
    request = json.loads(text)
    monkeypatch.setattr(routes, "check_media", lambda _: None)  # its picture does not exist
    assert server.ask(request).status_code == 200
    written = request["data_dict"][wire.KEY]
    assert {*written} == {"version", *(field.name for field in fields(RequestMetadata))}
    assert {*written["sample_id"]} == {field.name for field in fields(SampleId)}
    assert f"(version {wire.VERSION})" in PROTOCOL
