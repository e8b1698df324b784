"""Samples of a rollout are recorded, and passed to listeners."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.media.pictures import media_name
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.recorder import SampleRecorder, other_columns
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.rollout.conversation import Conversation, Turn
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.rig.ranks import ThreadRanks, run_rank_groups

FIRST = SampleId(phase="train", step=3, number=1, group=2, index=0)
SAMPLE = OnPolicySample(
    [{"role": "user", "content": "几?"}],
    images=[{"path": "a.png", "bytes": None}],
    videos=["b.mp4"],
    audios=["c.wav"],
)


def ids(*indices: int, group: int = 2) -> list[SampleId]:
    return [replace(FIRST, group=group, index=index) for index in indices]


def output(
    ids: list[int] | None, text: str = "七", logprobs: Sequence[float] = (), **infos: Any
) -> RolloutOutput:
    """Return an output in ms-swift's own form."""
    choice = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content=text),
        finish_reason="stop",
        logprobs={"content": [{"logprob": p} for p in logprobs]},
        token_ids=ids,
    )
    response = ChatCompletionResponse("", [choice], UsageInfo(1, 1, 2))
    return RolloutOutput(response=response, rollout_infos=infos)


def record(
    recorder: SampleRecorder,
    sample_ids: list[SampleId],
    outputs: list[RolloutOutput] | None = None,
    *,
    num_ranks: int = 1,
) -> None:
    """Record up to three tokens for each sample, or given outputs. Prompts differ in length too."""
    lengths = [2 - number % 3 for number in range(len(sample_ids))]
    if outputs is None:
        outputs = [
            output(
                [number, *[5] * length],
                str(name),
                [-0.5, *[-0.25] * length],
                seed=sample_seed(42, name),
            )
            for number, (name, length) in enumerate(zip(sample_ids, lengths, strict=True))
        ]
    num = len(sample_ids)
    samples = [
        replace(SAMPLE, messages=[{"role": "user", "content": "几?" * (3 - length)}])
        for length in lengths
    ]
    prompts = [f"print {number}" for number in range(num)]
    answered = zip(sample_ids, samples, prompts, outputs, strict=True)
    turns = [noted(sample, out, name, prompt) for name, sample, prompt, out in answered]
    recorder.record(samples, turns, num_ranks=num_ranks, weight_version=3)


def write(recorder: SampleRecorder) -> None:
    recorder.write()
    recorder.flush()


def noted(sample: Any, out: RolloutOutput, sample_id: SampleId, prompt: str) -> list[Turn]:
    [completion], seen = answer_of(out)
    turn = Turn(sample_id=sample_id, prompt=seen, completion=completion, fingerprint=prompt)
    conversation = Conversation()
    conversation.record(sample, turn)
    return conversation.turns


def test_columns_beside_the_messages() -> None:
    """Long values are cut. Null values and ms-swift's own columns are left out."""
    extra = {"solution": "七\ud83d", "boxes": [[1, 2]], "level": 3, "long": [1] * 1000}
    columns = other_columns({**extra, "absent": None, "_id": 1})
    assert columns is not None
    read_again = json.loads(columns)
    assert (len(read_again.pop("long")), read_again.pop("solution")) == (2002, "七\ud83d")
    assert read_again == {"boxes": [[1, 2]], "level": 3}
    assert "\\ud83d" in columns
    assert other_columns({"absent": None}) is None


def test_what_a_teacher_sees_is_a_column(tmp_path: Path) -> None:
    recorder = SampleRecorder(str(tmp_path), RankGroup())
    recorder.open(start_step=0)
    sample = replace(SAMPLE, teacher_images=["sharp.png"], teacher_prompt="<image>How many?")
    [name] = ids(0)
    turns = noted(sample, output([7]), name, "print")
    recorder.record([sample], [turns], num_ranks=1, weight_version=3)
    write(recorder)
    [row] = read(tmp_path)
    assert json.loads(row.columns or "") == {
        "teacher_images": ["sharp.png"],
        "teacher_prompt": "<image>How many?",
    }


def read(folder: Path) -> list[SampleRow]:
    return sorted(to_rows(read_samples(folder)), key=lambda row: row.sample_id)


def with_lists(row: SampleRow) -> SampleRow:
    """Return a row with lists: listeners get arrays, which `==` does not compare."""
    logprobs = None if row.logprobs is None else list(row.logprobs)
    return replace(row, token_ids=list(row.token_ids), logprobs=logprobs)


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (output([5, 6], "七", [-0.5, -1.5]), ("七", [5, 6], [-0.5, -1.5], "", None)),
        (
            output([5, 6], "七", [-1.0, -2.0], replica="server 0 replica 1", stop_reason=5),
            ("七", [5, 6], [-1.0, -2.0], "server 0 replica 1", "5"),
        ),
        # Not valid in UTF-8.
        (
            output(None, "7\ud83d", stop_reason="\ud83d"),
            ("7\\ud83d", [], None, "", "\\ud83d"),
        ),
    ],
)
def test_what_is_recorded_of_an_answer(out: RolloutOutput, expected: tuple[Any, ...]) -> None:
    recorder, rows = SampleRecorder("", RankGroup(), kept="none"), list[SampleRow]()
    recorder.listeners.append(rows.extend)
    record(recorder, ids(0), [out])
    recorder.write()
    [row] = map(with_lists, rows)
    assert (row.text, row.token_ids, row.logprobs, row.replica, row.stop_reason) == expected
    assert (row.seed, row.rank, row.weight_version, row.finish_reason) == (None, 0, 3, "stop")
    assert row.media == ["a.png", "b.mp4", "c.wav"]
    assert row.prompt == '[{"role": "user", "content": "几?"}]'
    assert row.fingerprint == "print 0"


@pytest.mark.parametrize("generating", [[1], [0, 1]])
def test_rank_0_writes_a_round_of_all_ranks_as_one_file(
    generating: Sequence[int], tmp_path: Path
) -> None:
    heard: list[SampleRow] = []

    def hear(rows: list[SampleRow]) -> None:
        assert not heard  # the main rank alone, once
        heard.extend(map(with_lists, rows))

    def work(ranks: ThreadRanks) -> None:
        recorder = SampleRecorder(str(tmp_path), ranks, max_gb=3.0)
        recorder.listeners.append(hear)
        for _ in range(2):  # again is harmless
            recorder.open(start_step=3)
        assert (recorder.log is not None) == (ranks.rank == 0)
        assert recorder.log is None or recorder.log.max_bytes == 3_000_000_000
        if ranks.rank in generating:
            record(recorder, ids(0, 1, group=ranks.rank))
        write(recorder)
        recorder.finish()

    run_rank_groups(2, work)
    [file] = record_files(tmp_path / "samples")
    assert (file.session, file.start_step) == (0, 3)
    assert file.path.name.endswith("-file-000000-train-000003-01.parquet")
    rows = read(tmp_path)
    assert [row.sample_id for row in rows] == [
        i for rank in generating for i in ids(0, 1, group=rank)
    ]
    assert [row.rank for row in rows] == [rank for rank in generating for _ in range(2)]
    assert [row.seed for row in rows] == [sample_seed(42, row.sample_id) for row in rows]
    assert [row.text for row in rows] == [str(row.sample_id) for row in rows]
    assert sorted(heard, key=lambda row: row.sample_id) == rows


def test_samples_that_rank_0_has_not_got_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a rollout fails on one rank, all end before the round's samples are gathered."""

    def work(ranks: ThreadRanks) -> None:
        recorder = SampleRecorder(str(tmp_path), ranks)
        recorder.open(start_step=3)
        record(recorder, ids(0, 1, group=ranks.rank))
        recorder.finish()

    run_rank_groups(2, work)
    assert [row.sample_id for row in read(tmp_path)] == ids(0, 1, group=0)
    assert caplog.messages == [
        "Rank 1 has generated 2 samples from train round 3.1 on that are not in the run's record: "
        "the rollout failed before rank 0 had them."
    ]


def test_one_rank_generates_for_all(tmp_path: Path) -> None:
    """With `--async_generate`, rank 0 generates the samples of all ranks in order."""
    recorder = SampleRecorder(str(tmp_path), RankGroup())
    recorder.open(start_step=0)
    assert recorder.log is not None
    assert recorder.log.max_bytes is None  # no bound
    record(recorder, ids(*range(6)), num_ranks=3)
    write(recorder)
    assert [row.rank for row in read(tmp_path)] == [0, 0, 1, 1, 2, 2]


def test_media_in_parts_are_media_and_no_text(tmp_path: Path) -> None:
    """Content in the prompt's text took 50 bytes a token, and the viewer showed no picture."""
    inline = "data:image/png;base64," + "A" * 4000
    parts = [
        {"type": "image_url", "image_url": {"url": inline}},
        {"type": "image", "image": "七.png"},
        {"type": "text", "text": "哪个?"},
        {"type": "video", "video": "七.mp4"},
    ]
    sample = OnPolicySample(messages=[{"role": "user", "content": parts}])
    recorder = SampleRecorder(str(tmp_path), RankGroup())
    recorder.open(start_step=0)
    turns = noted(sample, output([5]), FIRST, "print")
    recorder.record([sample], [turns], num_ranks=1, weight_version=3)
    write(recorder)
    [row] = read(tmp_path)
    assert json.loads(row.prompt) == [{"role": "user", "content": "<image><image>哪个?<video>"}]
    digest, *names = row.media
    assert digest == media_name(inline) != inline
    assert names == ["七.png", "七.mp4"]


@pytest.mark.parametrize("kept", ["tokens", "none"])
def test_what_the_sample_log_keeps(kept: str, tmp_path: Path) -> None:
    heard: list[SampleRow] = []
    recorder = SampleRecorder(str(tmp_path), RankGroup(), kept=kept)
    recorder.listeners.append(heard.extend)
    recorder.open(start_step=0)
    record(recorder, ids(0))
    write(recorder)
    [row] = map(with_lists, heard)
    assert row.logprobs == [-0.5, -0.25, -0.25]  # the monitor needs them
    recorder.finish()
    if kept == "tokens":
        assert read(tmp_path) == [replace(row, logprobs=None)]
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("media", "name"),
    [
        ("图\udcff.png", "图\\udcff.png"),
        ({"path": "a.png", "bytes": None}, "a.png"),
        (["1.png", "2.png"], "1.png 2.png"),
        ("A" * 2048, "A" * 2048),
        ("A" * 2049, "blake2b:4a317afe33484f5fbf1d1b4cfe3077ee"),
        ({"path": None, "bytes": b"png"}, "blake2b:3449a8e147e9b8b4dede218577f3fe88"),
        (7, "blake2b:9e287f590d2dcbbf387bfb70928e621d"),
    ],
)
def test_media_go_by_their_names_never_by_their_content(media: Any, name: str) -> None:
    assert media_name(media) == name


def test_equal_pixels_have_one_name() -> None:
    """Images with another mode, size or pixel have another name."""
    red, again, blue = (Image.new("RGB", (4, 2), color) for color in ("red", "red", "blue"))
    turned = Image.frombytes("RGB", (2, 4), red.tobytes())
    assert media_name(red) == media_name(again)
    large, other = np.zeros(10_000, np.uint8), np.zeros(10_000, np.uint8)
    assert media_name(large) == media_name(other)
    other[5_000] = 1  # which `repr` does not show
    different = [red, blue, turned, large, other, large.astype(np.int8)]
    assert len({media_name(each) for each in different}) == len(different)
