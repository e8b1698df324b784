"""Each sample of a rollout is recorded once, with its score and all that is known of it, and passed
to listeners (V1, D1). Sessions of a folder are resumed after a kill. Two trainings never share a
folder."""

import errno
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swift.rl_core.data import GRPOBatch, OnPolicySample

from swift_grpo_ext.checks.finding import enforce
from swift_grpo_ext.media.pictures import media_name
from swift_grpo_ext.ranks import RankGroup, RolloutError
from swift_grpo_ext.record import log, rewards
from swift_grpo_ext.record.log import check_output_dir, record_files
from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.record.recorder import SampleRecorder, masks_of
from swift_grpo_ext.record.rewards import RewardRecorder, scores_of_ranks, training_scores
from swift_grpo_ext.record.tables import REWARDS, SAMPLES, RewardRow, SampleRow
from swift_grpo_ext.rollout.conversation import Turn, first_prompt
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Completion, Prompt
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from tests.rig.arguments import ROOT, command_line_arguments
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.rig.record.rows import open_log, read_rows, row_of, sample_id

ALONE = RankGroup()
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


def group_of(group: int, size: int = 2) -> list[SampleId]:
    return [replace(FIRST, group=group, index=index) for index in range(size)]


def recorder_in(
    folder: Path, ranks: RankGroup = ALONE, start_step: int = 0, **options: Any
) -> SampleRecorder:
    recorder = SampleRecorder(str(folder), ranks, **options)
    recorder.open(start_step=start_step)
    return recorder


def write_steps(recorder: SampleRecorder, *steps: int) -> None:
    for step in steps:
        recorder.append([row_of(sample_id(step))])
        recorder.write()
    recorder.flush()


# --- what is known of a sample ---


IN_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}},
    {"type": "image", "image": "七.png"},
    {"type": "text", "text": "哪个?"},
    {"type": "video", "video": "七.mp4"},
]
PLAIN_PROMPT = '[{"role": "user", "content": "几?"}]'


def test_all_of_an_answer_is_recorded(tmp_path: Path) -> None:
    """Text may be invalid in UTF-8. Media in parts of a message are media: as text they took 50
    bytes a token. Of other columns, long values are cut, values that are no JSON are shown, and
    null values and ms-swift's own are left out. What a teacher sees is a column."""
    extra = {"solution": "七\ud83d", "long": [1] * 1000, "absent": None, "_id": 1, "day": {7}}
    in_parts = OnPolicySample([{"role": "user", "content": IN_PARTS}], extra=extra)
    cut = {"response_token_ids": [[5]], "response_loss_mask": [[1]]}  # by a scheduler
    in_parts = replace(in_parts, teacher_images=["sharp.png"], **cut)
    columns = f'{{"solution": "七\\ud83d", "long": "[{"1, " * 666}1 …", "day": "{{7}}", '
    answers = [
        replace(ANSWER, replica="server 0 replica 1", stop_reason=5, seed=7),
        replace(ANSWER, text="7\ud83d", token_ids=[], logprobs=None, stop_reason="\ud83d"),
        ANSWER,
    ]
    changes: list[dict[str, Any]] = [
        {"replica": "server 0 replica 1", "stop_reason": "5", "seed": 7},
        {"text": "7\\ud83d", "token_ids": [], "logprobs": None, "stop_reason": "\\ud83d"},
        {
            "prompt": PLAIN_PROMPT.replace("几?", "<image><image>哪个?<video>"),
            "media": [media_name(IN_PARTS[0]["image_url"]["url"]), "七.png", "七.mp4"],
            "columns": columns + '"teacher_images": ["sharp.png"]}',
            "mask": [True, False],
        },
    ]
    recorder, names, samples = recorder_in(tmp_path), group_of(2, 3), [SAMPLE, SAMPLE, in_parts]
    turns = [turns_of(*each) for each in zip(samples, answers, names, strict=True)]
    # Rank 0 may generate the samples of all ranks, in order (`--async_generate`).
    recorder.record(samples, turns, num_ranks=3, weight_version=3)
    recorder.write()
    recorder.finish()
    assert recorder.log is not None
    assert recorder.log.max_bytes is None
    known: dict[str, Any] = {"replica": "", "fingerprint": "print", "seed": None, "mask": None}
    known |= {"token_ids": [5, 6], "logprobs": [-1.0, -2.0], "text": "七", "finish_reason": "stop"}
    known |= {"prompt": PLAIN_PROMPT, "media": ["a.png", "b.mp4", "c.wav"], "stop_reason": None}
    known |= {"weight_version": 3, "columns": None, "engine_seconds": 0.5, "tool_seconds": 0.25}
    for row, name, changed in zip(read_rows(tmp_path), names, changes, strict=True):
        expected = known | {"sample_id": name, "rank": name.index} | changed
        assert {field: getattr(row, field) for field in expected} == expected


def test_tokens_that_training_leaves_out_are_masked() -> None:
    """Without one list for each turn, a scheduler has joined turns: nothing is known."""
    [turn] = turns_of(SAMPLE, ANSWER)
    for ids, mask, expected in (
        ([9, 5, 6], [0, 1, 1], None),  # after a template's response prefix
        ([9, 5, 6, 8], [0, 1, 0, 0], [True, False]),  # before the environment's tokens
        ([5], [1], [True, False]),  # the scheduler cut the answer
        ([7, 6], [1, 1], [False, True]),  # or changed it
    ):
        sample = replace(SAMPLE, response_token_ids=[ids], response_loss_mask=[mask])
        assert masks_of(sample, [turn]) == [expected]
        assert masks_of(sample, [turn, turn]) == [None, None]


def test_rank_0_writes_a_round_of_all_ranks_as_one_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a later rollout fails on one rank, all end before its samples are gathered: rank 1 names
    those that are lost."""
    heard = list[SampleRow]()

    def rows_of(group: int, rank: int) -> list[SampleRow]:
        return [row_of(name, rank=rank) for name in group_of(group)]

    def work(ranks: ThreadRanks) -> None:
        recorder = recorder_in(tmp_path, ranks, kept="tokens", max_gb=3.0, start_step=3)
        recorder.open(start_step=5)  # again is harmless
        recorder.listeners.append(heard.extend)
        assert (recorder.log is not None) == (ranks.rank == 0)
        assert recorder.log is None or recorder.log.max_bytes == 3_000_000_000
        recorder.append(rows_of(ranks.rank, ranks.rank))
        recorder.write()
        recorder.flush()
        if ranks.rank == 0:
            [file] = record_files(tmp_path / "samples")
            assert (file.session, file.start_step) == (0, 3)
            assert file.path.name.endswith("-file-000000-train-000003-01.parquet")
            assert read_rows(tmp_path) == [replace(row, logprobs=None) for row in heard]
        recorder.append(rows_of(2 + ranks.rank, ranks.rank))
        recorder.finish()

    run_rank_groups(2, work)
    assert heard == rows_of(0, rank=0) + rows_of(1, rank=1)  # the monitor needs log-probabilities
    assert [row.sample_id.group for row in read_rows(tmp_path)] == [0, 0, 1, 1, 2, 2]
    [message] = caplog.messages
    assert message.startswith("Rank 1 has generated 2 samples from train round 3.1 on")


# --- sessions ---

TRAINING = """
import sys
from pathlib import Path
from swift_grpo_ext.record.log import claim_session
from tests.rig.record.rows import row_of, sample_id, write_session
folder = Path(sys.argv[1])
rows = [row_of(sample_id(step)) for step in range(12)]
write_session(folder, rows, session=claim_session(folder))
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run another process that has recorded twelve steps."""
    argv, pipe = [sys.executable, "-c", TRAINING, str(folder)], subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        yield process
        process.kill()


def fail(*_: Any) -> Any:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def refused(folder: Path) -> list[str]:
    """Return what ends each of two ranks that begin a session."""

    def work(ranks: ThreadRanks) -> str:
        with pytest.raises(RolloutError if ranks.rank else log.RunInUseError) as caught:
            recorder_in(folder, ranks)
        return str(caught.value)

    return run_rank_groups(2, work)


def test_two_trainings_in_one_folder_and_a_resume_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused on all ranks, and before its model is loaded, if it would write. After
    the first was killed, it can be resumed. On a disk without locks each has its own files."""

    def check(**changes: Any) -> None:
        enforce(check_output_dir(command_line_arguments("rlhf", output_dir=folder, **changes)))

    folder = str(tmp_path)
    check()
    with training(tmp_path) as first:
        files = record_files(SAMPLES.folder(tmp_path))
        said = refused(tmp_path)
        assert said[1] == f"The rollout failed on rank 0: RunInUseError: {said[0]}"
        process = rf"--output_dir {tmp_path}: process {first.pid} on \S+ \(since [-0-9: ]+\) trains"
        assert re.match(process, said[0])
        assert "give this training another --output_dir" in said[0]
        for changes in ({}, {"sample_log": "none", "callbacks": ["diversity"]}):
            with pytest.raises(ValueError, match=rf"^{process}"):
                check(**changes)
        check(sample_log="none")  # it would write nothing
        recorder_in(tmp_path, kept="none")
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert record_files(SAMPLES.folder(tmp_path)) == files
    check()
    write_steps(recorder_in(tmp_path, start_step=8), *range(8, 14))
    assert [row.sample_id.step for row in read_rows(tmp_path)] == list(range(14))
    with training(tmp_path / "other"):
        monkeypatch.setattr("fcntl.lockf", fail)
        write_steps(recorder_in(tmp_path / "other"), *range(12))
        sessions = {file.session for file in record_files(tmp_path / "other/samples")}
        assert sessions == {0, 1}


# --- scores ---

FUNCTIONS, WEIGHTS = ["accuracy", "format"], [1.0, 0.5]


def scored(name: SampleId, **fields: Any) -> RolloutSample:
    made = RolloutSample(messages=[], **fields)
    made.sample_id = name
    return made


def record(
    recorder: RewardRecorder,
    names: Sequence[SampleId],
    values: Sequence[Sequence[float]],
    ranks: RankGroup = ALONE,
) -> list[RewardRow]:
    samples = [scored(name) for name in names]
    rows = recorder.record(samples, values, fate="trained", extras={})
    return scores_of_ranks(ranks.all_gather(rows))


def test_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    """A function may give nothing. Two functions may share a name."""
    recorder = RewardRecorder(["judge", "form", "judge"], [1.0, 0.5, 0.25])
    name, other = sample_id(3, number=1, group=2, index=5), sample_id(4)
    known = {"advantage": -0.5, "gap_mean": 0.125, "gap_max": 2.0, "gaps": [(3, 0.5)]}
    samples = [scored(name, finish_reason="length"), scored(other)]
    values = [[math.nan, 1.0, 1.0], [math.nan] * 3]
    rows = recorder.record(samples, values, fate="trained", extras={name: known})
    rewards_of_name = [("judge", None), ("form", 1.0), ("judge_2", 1.0)]
    expected = {
        **{"reward": 0.75, "rewards": rewards_of_name, **known},
        **{"truncated": True, "replaced": False, "fate": "trained"},
    }
    assert rows[0] == RewardRow(sample_id=name, **expected)
    assert (rows[1].reward, rows[1].advantage, rows[1].truncated) == (None, None, False)
    log = open_log(tmp_path)
    log.append([row_of(name)])
    log.append(rows, REWARDS)
    log.flush()
    table = read_rewards(tmp_path)
    assert table.select([*expected]).to_pylist() == [expected]
    assert table.schema == REWARDS.schema


def test_what_dynamic_sampling_drops_has_a_score() -> None:
    """Each of two ranks generates a group twice. ms-swift trains on groups 1 and 2, and rank 0 gets
    samples that rank 1 generated."""

    def work(ranks: ThreadRanks) -> list[tuple[int, int, float | None, str]]:
        recorder, rank = RewardRecorder(FUNCTIONS, WEIGHTS), ranks.rank
        for number in (0, 1):
            names = [sample_id(group=2 * number + rank, index=i) for i in (0, 1)]
            recorder.generated([scored(name) for name in names], [[number + rank / 10, 0.0]] * 2)
        trained = [sample_id(group=rank + 1, index=i) for i in (1, 0)]
        rows = record(recorder, trained, [[9.0, 0.0]] * 2, ranks)
        # Nothing is left for the next round.
        later = [sample_id(1, index=rank)]
        assert len(record(recorder, later, [[5.0, 0.0]], ranks)) == 2
        return [(r.sample_id.group, r.sample_id.index, r.reward, r.fate) for r in rows]

    fates = [(0, 0.0, "dropped"), (1, 9.0, "trained"), (2, 9.0, "trained"), (3, 1.1, "dropped")]
    expected = [(group, i, reward, fate) for group, reward, fate in fates for i in (0, 1)]
    assert run_rank_groups(2, work) == [expected, expected]


def test_groups_that_got_another_prompt() -> None:
    recorder = RewardRecorder(FUNCTIONS, WEIGHTS)
    recorder.replaced(RoundId("train", 0, 0), [1])
    recorder.replaced(RoundId("eval", 0, 0), [4])
    recorder.replaced(RoundId("train", 1, 0), [0])  # drawn ahead
    for step, phase, groups, expected in (
        (0, "train", (0, 1), [False, True]),
        (0, "eval", (3, 4), [False, True]),
        (1, "train", (0, 1), [True, False]),
        (0, "train", (1,), [False]),  # forgotten once its round was recorded
    ):
        names = [sample_id(step, phase, group=group) for group in groups]
        rows = record(recorder, names, [[0.0, 0.0]] * len(names))
        assert [row.replaced for row in rows] == expected


def test_what_training_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    first = scored(sample_id(), response_token_ids=[5, 6, 7, 8], advantages=torch.tensor(0.5))
    # It has more tokens than the training saw, so positions are not known.
    turns = [[5, 6], [7]]
    second = scored(sample_id(index=1), response_token_ids=turns, advantages=torch.tensor(-1.5))
    third = scored(sample_id(index=2))

    def batch(rollout: Any, training: list[list[float]], mask: list[list[int]]) -> GRPOBatch:
        return GRPOBatch(
            completion_mask=torch.tensor(mask),
            truncated_mask=torch.zeros(len(mask)),
            seq_lengths=torch.zeros(len(mask)),
            rollout_per_token_logps=rollout and torch.tensor(rollout),
            old_per_token_logps=torch.tensor(training),
        )

    known = batch(
        [[9.0, -1.0, -2.0, -3.0, -4.0], [9.0, 9.0, 9.0, 9.0, -1.0]],
        [[0.0, -1.5, -1.0, -3.0625, -4.03125], [0.0, 0.0, 0.0, 0.0, -1.25]],
        [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    )
    of_batches = [([first, second], known), ([third], batch(None, [[0.0]], [[1]]))]
    # Positions in the completion. A gap below `SHOWN_GAP` is left out.
    gaps = [(0, 0.5), (1, 1.0), (2, 0.0625)]
    for most in (64, 2):
        monkeypatch.setattr(rewards, "MOST_GAPS", most)
        of_first = {"gap_mean": 0.3984375, "gap_max": 1.0, "gaps": gaps[:most]}
        assert training_scores([first, second, third], of_batches) == {
            first.sample_id: {"advantage": 0.5, **of_first},
            second.sample_id: {"advantage": -1.5, "gap_mean": 0.25, "gap_max": 0.25},
            third.sample_id: {},
        }
