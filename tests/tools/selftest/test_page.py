"""Tables, JSON, and the page: all that is found, and no secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from swift_grpo_ext.tools.selftest.page import MASK, masked, table, write
from swift_grpo_ext.tools.selftest.result import Result, exit_status, judged, untried

ENV = {"MY_API_KEY": "abcdef-123456", "HOME": "/u/me", "TOKEN_OF_FEW": "abc"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"api_key": "x", "num": 3}, {"api_key": MASK, "num": 3}),
        ({"hub_token": "x", "max_completion_length": 5}, {"hub_token": MASK,
                                                          "max_completion_length": 5}),
        ({"stop_token_ids": [7], "tokens": 9}, {"stop_token_ids": [7], "tokens": 9}),
        ({"api_key": ""}, {"api_key": ""}),
        (["Authorization: Bearer a.b-c"], [f"Authorization: Bearer {MASK}"]),
        ("failed with abcdef-123456.", f"failed with {MASK}."),
        ("http://me:pass@host:80/x", f"http://{MASK}@host:80/x"),
        ("hf_abcdefghijklmnop", f"hf_{MASK}"),
        ("/u/me/data/a.png", "~/data/a.png"),
        ("/u/meat.png", "/u/meat.png"),
        ("/home/someone/a.png", "~/a.png"),
        ("abc", "abc"),
        (None, None),
    ],
)  # fmt: skip
def test_secrets_are_masked(value: object, expected: object) -> None:
    assert masked(value, ENV) == expected


def test_this_folder_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert masked(f"{tmp_path}/a.png and {tmp_path}s", {}) == f"./a.png and {tmp_path}s"


RESULTS = [
    Result(name="seeds", topology="server", status="holds", values={"flips": 0, "first": [1]}),
    Result(
        name="stops",
        topology="server",
        status="does not hold",
        reason="the text is '<script>alert(1)</script> [red]'",
        remedy="Report <it>.",
    ),
    untried("1 device", name="seeds", topology="colocate, 2 ranks"),
]


def test_the_table_and_the_files(tmp_path: Path) -> None:
    console = Console(width=200, record=True, quiet=False, file=(tmp_path / "t").open("w"))
    console.print(table(RESULTS))
    text = console.export_text()
    for words in ("flips: 0", "does not hold", "<script>alert(1)</script> [red]", "1 device"):
        assert words in text
    as_json, as_html = write(tmp_path, RESULTS, {"api_key": "k"}, {"device": "cpu"})
    body = json.loads(as_json.read_text(encoding="utf-8"))
    assert body["settings"] == {"api_key": MASK}
    assert [r["status"] for r in body["results"]] == [r.status for r in RESULTS]
    page = as_html.read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("numbers", "status"), [([0], 0), ([0, 1], 1), ([0, 2], 0), ([2], 2), ([], 2)]
)
def test_the_exit_status_says_whether_a_promise_broke(numbers: list[int], status: int) -> None:
    assert exit_status([RESULTS[number] for number in numbers]) == status


def test_faults_are_the_reason() -> None:
    assert judged({"a": 1}, []) == Result(status="holds", values={"a": 1})
    assert judged({}, ["x", "y"], "z") == Result(status="does not hold", reason="x; y", remedy="z")
