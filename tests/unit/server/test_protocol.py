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


def test_it_has_all_headers_routes_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert {*told, *reported, routes.REPORTS_PATH, wire.KEY, conversation.KEY} <= NAMES
    [text] = re.findall(r"```json\n(.*?)```", PROTOCOL, re.S)
    request = json.loads(text)
    monkeypatch.setattr(routes, "check_media", lambda _: None)  # its picture does not exist
    assert server.ask(request).status_code == 200
    written = request["data_dict"][wire.KEY]
    assert {*written} == {"version", *(field.name for field in fields(RequestMetadata))}
    assert {*written["sample_id"]} == {field.name for field in fields(SampleId)}
    assert f"(version {wire.VERSION})" in PROTOCOL
