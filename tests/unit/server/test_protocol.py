"""The page of the protocol (docs/internals.md), for writers of clients, has the names of the
code."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from starlette.routing import Route

from swift_grpo_ext.rollout import conversation, wire
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata, WeightReport
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import lease, routes
from tests.rig.server.served import Deployed, Replica

PAGE = Path(__file__).resolve().parents[3] / "docs/internals.md"
PROTOCOL = PAGE.read_text(encoding="utf-8").split("\n## The protocol\n")[1].split("\n## ")[0]
NAMES = {*re.findall(r"`([^`\n]+)`", PROTOCOL)}


def test_its_headers_are_all_that_there_are() -> None:
    ours = {value for name, value in vars(wire).items() if name.endswith("_HEADER")}
    told = {name for name in NAMES if name.startswith("X-Swift-Grpo-Ext-")}
    assert told == {*ours, lease.OWNER_HEADER}
    assert f"every {lease.HEARTBEAT_SECONDS:g} seconds" in PROTOCOL
    assert f"for {lease.LEASE_SECONDS:g} seconds" in PROTOCOL


def test_its_routes_are_those_of_a_server() -> None:
    deployed = Deployed(Replica())
    found = {each.path for each in deployed.app.routes if isinstance(each, Route)}
    # `/health` is the same without a slash, and all trainers send adapters in buckets.
    left_out = {"/health", "/update_adapter_param/"}
    told = {name for name in NAMES if re.fullmatch(r"/[a-z_/]+/", name)}
    assert found - left_out == told
    reported = {field.name for field in fields(WeightReport)}
    assert {routes.REPORTS_PATH, *reported, wire.KEY, conversation.KEY} <= NAMES


def test_its_request_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = re.findall(r"```json\n(.*?)```", PROTOCOL, re.S)
    request = json.loads(text)
    monkeypatch.setattr(routes, "check_media", lambda _: None)  # its picture does not exist
    answer = Deployed(Replica()).client.post("/infer/", json={"infer_requests": [request]})
    assert answer.status_code == 200
    written = request["data_dict"][wire.KEY]
    assert {*written} == {"version", *(field.name for field in fields(RequestMetadata))}
    assert {*written["sample_id"]} == {field.name for field in fields(SampleId)}
    assert f"(version {wire.VERSION})" in PROTOCOL


def test_its_answers_have_these_fields() -> None:
    drawn = Completion(text="", token_ids=[1], logprobs=[0.0], finish_reason=None)
    assert {*wire.write_answer(Answer([drawn], Prompt([1])))} <= NAMES
    client = Deployed(Replica()).client
    assert {*client.post("/get_engine_type/").json()[wire.KEY]} <= NAMES
    assert {*client.get("/health/").json()} <= NAMES
