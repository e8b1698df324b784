"""What SQL finds of random histories: sessions that crash and resume, bounds, damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from swift_grpo_ext.record import query, reader
from swift_grpo_ext.record.log import record_files
from swift_grpo_ext.record.tables import REWARDS, SAMPLES, RewardRow
from swift_grpo_ext.sampling.seeding import SampleId
from tests.record.rows import open_log, row_of, sample_id


def score_of(name: SampleId, session: int) -> RewardRow:
    return RewardRow(
        sample_id=name, reward=float(session), rewards=[("Accuracy", None), ("数字", 1.0)],
        truncated=False, replaced=False, fate="trained",
    )  # fmt: skip


@dataclass
class Session:
    start_step: int
    rounds: list[tuple[str, int, int, bool]] = field(default_factory=list)
    """Phase, step, number, and whether it was scored."""

    ends_whole: bool = True
    """Else it is killed, and its small files stay."""


sessions = st.lists(
    st.builds(
        Session,
        start_step=st.integers(0, 4),
        rounds=st.lists(
            st.tuples(
                st.sampled_from(["train", "eval"]),
                st.integers(0, 5),
                st.integers(0, 1),
                st.booleans(),
            ),
            max_size=6,
        ),
        ends_whole=st.booleans(),
    ),
    max_size=4,
)


@contextmanager
def history(ran: list[Session]) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        for number, session in enumerate(ran):
            log = open_log(Path(folder), session=number, start_step=session.start_step)
            for phase, step, in_step, is_scored in session.rounds:
                names = [
                    sample_id(step, phase, number=in_step, group=group, index=index, turn=turn)
                    for group, index, turn in ((1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1))
                ]
                log.append([row_of(name, seed=number) for name in names])
                if is_scored:
                    scored = [name for name in names if not name.turn]
                    log.append([score_of(name, number) for name in scored], REWARDS)
                log.flush()
            if session.ends_whole:
                log.finish()
        yield Path(folder)


def files_of(folder: Path) -> list[Path]:
    return [f.path for t in (SAMPLES, REWARDS) for f in record_files(t.folder(folder))]


def in_order(rows: pa.Table) -> list[dict]:
    return sorted(rows.to_pylist(), key=str)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate],
)
@given(
    sessions, st.lists(st.integers(0, 100), max_size=3), st.lists(st.integers(0, 100), max_size=3)
)
def test_equal(ran: list[Session], removed: list[int], damaged: list[int]) -> None:
    with history(ran) as folder, TemporaryDirectory() as other:
        (folder / "samples").mkdir(exist_ok=True)
        for number in removed:
            if paths := files_of(folder):
                paths[number % len(paths)].unlink()
        beside = Path(other) / "run"
        shutil.copytree(folder, beside)
        for number in damaged:
            if paths := files_of(folder):
                path = paths[number % len(paths)]
                content = path.read_bytes()
                path.write_bytes(content[: len(content) // 2])
                (beside / path.relative_to(folder)).unlink(missing_ok=True)
        reads = ["read_samples"] if removed or damaged else ["read_samples", "read_rewards"]
        for read in reads:
            found, expected = getattr(query, read)(folder), getattr(reader, read)(beside)
            assert found.schema == expected.schema
            assert in_order(found) == in_order(expected)
            columns = ["phase", "step", "number"]
            assert found.select(columns).equals(expected.select(columns))
