"""A server records and watches its samples, for other clients and for our trainings (C3)."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swift.infer_engine.protocol import ChatCompletionResponseChoice, ChatMessage, RolloutOutput

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.rollout.conversation import KEY, Turn, write_turns
from swift_grpo_ext.rollout.wire import Completion, Prompt
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import record as record_module
from tests.rig.record.rows import read_diversity
from tests.rig.server.served import Deployed, Replica, output_of, request

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


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the record's log."""
    lines: list[str] = []
    for name in ("info", "warning", "warning_once"):
        monkeypatch.setattr(record_module.logger, name, lambda text, **_: lines.append(text))
    return lines


def test_a_call_of_another_client_is_a_round(tmp_path: Path) -> None:
    server = Recording(tmp_path, choice("one", TOKENS), choice("two", [1, 2]))
    image = asked("a", images=["/none/7.png"], data_dict={"solution": "7"})
    server.ask(asked("a"), asked("a"), n=2)
    server.num_updates = 3
    server.ask(image, asked("b"), n=2)
    assert server.ask() == []  # a call for nothing is none
    second = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert server.places() == [*((0, 0, index) for index in range(4)), *second]
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


def turns(name: SampleId) -> RolloutOutput:
    """Return the output of a server's scheduler for a conversation of two turns."""
    output = output_of({}, [choice("b", TOKENS)])
    drawn = Completion(text="b", token_ids=[1], logprobs=[-1.0], finish_reason="stop", replica="r")
    parts: dict[str, Any] = {"prompt": Prompt([1]), "completion": drawn, "fingerprint": "f"}
    write_turns(output, [Turn(sample_id=replace(name, turn=turn), **parts) for turn in range(2)])
    return output


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_conversation_has_a_row_for_each_turn(
    is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only our trainer gets the turns with the answer; another client could not read them."""
    name = SampleId(phase="train", step=0, number=0, group=0, index=0)
    monkeypatch.setattr(Replica, "_output", lambda *_: turns(name))
    server = Recording(tmp_path)
    own = request(0, count=1, as_arrays=False)
    [answer] = server.ask(own if is_ours else asked("a", data_dict={"solution": "7"}))
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
