"""Each sample of a rollout is recorded once, with all that is known of it, and passed to listeners
(V1, D1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.media.pictures import media_name
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.recorder import SampleRecorder, masks_of, other_columns
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.rollout.conversation import Turn, first_prompt
from swift_grpo_ext.rollout.wire import Completion, Prompt
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from tests.rig.ranks import ThreadRanks, run_rank_groups

FIRST = SampleId(phase="train", step=3, number=1, group=2, index=0)
SAMPLE = OnPolicySample(
    [{"role": "user", "content": "几?"}],
    images=[{"path": "a.png", "bytes": None}],
    videos=["b.mp4"],
    audios=["c.wav"],
)


ANSWER = Completion(text="七", token_ids=[5, 6], logprobs=[-1.0, -2.0], finish_reason="stop")


def turns_of(sample: OnPolicySample, completion: Completion, name: SampleId = FIRST) -> list[Turn]:
    messages, media = first_prompt(sample)
    return [Turn(name, Prompt([1]), completion, "print", messages, media, 0.5, 0.25)]


def record(recorder: SampleRecorder, names: list[SampleId], *, num_ranks: int = 1) -> None:
    """Record samples of one to three tokens."""
    turns = []
    for number, name in enumerate(names):
        logprobs = [-0.5, -0.25, -0.25][: 3 - number % 3]
        ids, seed = [number] * len(logprobs), sample_seed(42, name)
        completion = replace(ANSWER, text=str(name), token_ids=ids, logprobs=logprobs, seed=seed)
        turns.append(turns_of(SAMPLE, completion, name))
    recorder.record([SAMPLE] * len(names), turns, num_ranks=num_ranks, weight_version=3)


def group_of(group: int, size: int = 2) -> list[SampleId]:
    return [replace(FIRST, group=group, index=index) for index in range(size)]


def recorder_in(folder: Path, ranks: RankGroup | None = None, **options: Any) -> SampleRecorder:
    recorder = SampleRecorder(str(folder), ranks or RankGroup(), **options)
    recorder.open(start_step=3)
    return recorder


def read(folder: Path) -> list[SampleRow]:
    return to_rows(read_samples(folder))


def heard_by(recorder: SampleRecorder) -> list[SampleRow]:
    """Return the rows that a listener gets, with lists: `==` does not compare their arrays."""
    heard = list[SampleRow]()

    def hear(rows: list[SampleRow]) -> None:
        assert not heard  # the main rank alone, once
        for row in rows:
            logprobs = None if row.logprobs is None else list(row.logprobs)
            heard.append(replace(row, token_ids=list(row.token_ids), logprobs=logprobs))

    recorder.listeners.append(hear)
    return heard


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


IN_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}},
    {"type": "image", "image": "七.png"},
    {"type": "text", "text": "哪个?"},
    {"type": "video", "video": "七.mp4"},
]
PLAIN_PROMPT = '[{"role": "user", "content": "几?"}]'
PLAIN_MEDIA = ["a.png", "b.mp4", "c.wav"]


@pytest.mark.parametrize(
    ("sample", "completion", "expected"),
    [
        (
            SAMPLE,
            replace(ANSWER, replica="server 0 replica 1", stop_reason=5, seed=7),
            {"replica": "server 0 replica 1", "stop_reason": "5", "seed": 7},
        ),
        # Not valid in UTF-8.
        (
            SAMPLE,
            replace(ANSWER, text="7\ud83d", token_ids=[], logprobs=None, stop_reason="\ud83d"),
            {"text": "7\\ud83d", "token_ids": [], "logprobs": None, "stop_reason": "\\ud83d"},
        ),
        # What a teacher sees is a column.
        (
            replace(SAMPLE, teacher_images=["sharp.png"], teacher_prompt="<image>How many?"),
            ANSWER,
            {"columns": {"teacher_images": ["sharp.png"], "teacher_prompt": "<image>How many?"}},
        ),
        # Media in parts of a message are media: as text they took 50 bytes a token.
        (
            OnPolicySample(messages=[{"role": "user", "content": IN_PARTS}]),
            ANSWER,
            {
                "prompt": PLAIN_PROMPT.replace("几?", "<image><image>哪个?<video>"),
                "media": [media_name(IN_PARTS[0]["image_url"]["url"]), "七.png", "七.mp4"],
            },
        ),
    ],
)
def test_all_of_an_answer_is_recorded(
    sample: OnPolicySample, completion: Completion, expected: dict[str, Any], tmp_path: Path
) -> None:
    recorder = recorder_in(tmp_path)
    recorder.record([sample], [turns_of(sample, completion)], num_ranks=1, weight_version=3)
    recorder.write()
    recorder.finish()
    [row] = read(tmp_path)
    known: dict[str, Any] = {"sample_id": FIRST, "rank": 0, "fingerprint": "print", "seed": None}
    known |= {"token_ids": [5, 6], "logprobs": [-1.0, -2.0], "text": "七", "finish_reason": "stop"}
    known |= {"prompt": PLAIN_PROMPT, "media": PLAIN_MEDIA, "stop_reason": None, "replica": ""}
    known |= {"weight_version": 3, "columns": None, "engine_seconds": 0.5, "tool_seconds": 0.25}
    found = {name: getattr(row, name) for name in known}
    found["columns"] = row.columns and json.loads(row.columns)
    assert found == known | expected


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        ([5, 6], [1, 1], None),
        ([9, 5, 6], [0, 1, 1], None),  # after a template's response prefix
        ([5, 6], [1, 0], [True, False]),
        ([9, 5, 6, 8], [0, 1, 0, 0], [True, False]),  # before the environment's tokens
        ([5], [1], [True, False]),  # the scheduler cut the answer
        ([7, 6], [1, 1], [False, True]),  # or changed it
    ],
)
def test_tokens_that_training_leaves_out_are_masked(
    ids: list[int], mask: list[int], expected: list[bool] | None
) -> None:
    """Without one list for each turn, a scheduler has joined turns: nothing is known."""
    sample = replace(SAMPLE, response_token_ids=[ids], response_loss_mask=[mask])
    [turn] = turns_of(sample, ANSWER)
    assert masks_of(sample, [turn]) == [expected]
    assert masks_of(sample, [turn, turn]) == [None, None]


@pytest.mark.parametrize("generating", [[1], [0, 1]])
def test_rank_0_writes_a_round_of_all_ranks_as_one_file(
    generating: Sequence[int], tmp_path: Path
) -> None:
    def work(ranks: ThreadRanks) -> list[SampleRow]:
        recorder = recorder_in(tmp_path, ranks, max_gb=3.0)
        recorder.open(start_step=5)  # again is harmless
        heard = heard_by(recorder)
        assert (recorder.log is not None) == (ranks.rank == 0)
        assert recorder.log is None or recorder.log.max_bytes == 3_000_000_000
        if ranks.rank in generating:
            record(recorder, group_of(ranks.rank))
        recorder.write()
        recorder.finish()
        return heard

    heard, of_other_rank = run_rank_groups(2, work)
    [file] = record_files(tmp_path / "samples")
    assert (file.session, file.start_step) == (0, 3)
    assert file.path.name.endswith("-file-000000-train-000003-01.parquet")
    rows = read(tmp_path)
    assert [row.sample_id for row in rows] == [n for rank in generating for n in group_of(rank)]
    assert [row.rank for row in rows] == [row.sample_id.group for row in rows]
    assert [row.seed for row in rows] == [sample_seed(42, row.sample_id) for row in rows]
    assert [row.text for row in rows] == [str(row.sample_id) for row in rows]
    assert (heard, of_other_rank) == (rows, [])


def test_samples_that_rank_0_has_not_got_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a rollout fails on one rank, all end before the round's samples are gathered."""

    def work(ranks: ThreadRanks) -> None:
        recorder = recorder_in(tmp_path, ranks)
        record(recorder, group_of(ranks.rank))
        recorder.finish()

    run_rank_groups(2, work)
    assert [row.sample_id for row in read(tmp_path)] == group_of(0)
    [message] = caplog.messages
    assert message.startswith("Rank 1 has generated 2 samples from train round 3.1 on")


@pytest.mark.parametrize("kept", ["all", "tokens", "none"])
def test_what_the_sample_log_keeps(kept: str, tmp_path: Path) -> None:
    """Rank 0 may generate the samples of all ranks, in order (`--async_generate`)."""
    recorder = recorder_in(tmp_path, kept=kept)
    heard = heard_by(recorder)
    record(recorder, group_of(0, 6), num_ranks=3)
    recorder.write()
    recorder.finish()
    assert [row.rank for row in heard] == [0, 0, 1, 1, 2, 2]
    assert heard[0].logprobs == [-0.5, -0.25, -0.25]  # the monitor needs them
    if kept == "none":
        assert list(tmp_path.iterdir()) == []
    else:
        assert recorder.log is not None
        assert recorder.log.max_bytes is None  # no bound
        is_all = kept == "all"
        rows = [replace(row, logprobs=row.logprobs if is_all else None) for row in heard]
        assert read(tmp_path) == rows


def test_media_go_by_their_names_never_by_their_content() -> None:
    """Equal pixels have one name. Images with another mode, size or pixel have another one."""
    names = {"图\udcff.png": "图\\udcff.png", "A" * 2048: "A" * 2048}
    names["A" * 2049] = "blake2b:4a317afe33484f5fbf1d1b4cfe3077ee"
    assert {media: media_name(media) for media in names} == names
    assert media_name({"path": "a.png", "bytes": None}) == "a.png"
    assert media_name({"path": None, "bytes": b"png"}) == media_name(b"png") != "png"
    assert media_name(["1.png", "2.png"]) == "1.png 2.png"
    red, again, blue = (Image.new("RGB", (4, 2), color) for color in ("red", "red", "blue"))
    turned = Image.frombytes("RGB", (2, 4), red.tobytes())
    assert media_name(red) == media_name(again)
    zeros, other = np.zeros(10_000, np.uint8), np.zeros(10_000, np.uint8)
    other[5_000] = 1  # which `repr` does not show
    different = [red, blue, turned, zeros, other, zeros.astype(np.int8)]
    assert len({media_name(each) for each in different}) == len(different)
