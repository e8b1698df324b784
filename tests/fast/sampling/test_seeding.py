"""Seeds have exact values, and no two samples of a run share noise (S1, S2, S3, S5, S6, S7).
Dynamic sampling draws as many groups at once as are expected to fill a batch."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE, PHASES, SampleId, sample_seed
from swift_grpo_ext.sampling.waves import Waves

NAMES = ("phase", "step", "number", "turn", "group", "index")
PLACE = SampleId(phase="train", step=3, number=0, group=5, index=2)

sample_ids = st.builds(
    SampleId,
    phase=st.sampled_from(PHASES),
    step=st.integers(0, 10**6),
    number=st.integers(0, 100),
    group=st.integers(0, 2**18 - 1),
    index=st.integers(0, MAX_GROUP_SIZE - 1),
    turn=st.integers(0, 50),
)


def test_seeds_never_change() -> None:
    """Recorded seeds and resumed runs depend on them."""
    last = SampleId(phase="train", step=10**6, number=7, group=2**18 - 1, index=2**14 - 1)
    assert sample_seed(42, PLACE) == 67667112449389149
    assert sample_seed(2**31 - 1, last) == 2197497676260700548


@given(st.integers(0, 2**32 - 1), sample_ids)
def test_the_rule_is_the_documented_one(run_seed: int, sample_id: SampleId) -> None:
    """numpy alone recomputes a seed by the documented rule."""
    phase = {"train": 0, "eval": 1}[sample_id.phase]
    key = (phase, sample_id.step, sample_id.number, sample_id.turn)
    (low,) = np.random.SeedSequence(run_seed, spawn_key=key).generate_state(1)
    (high,) = np.random.SeedSequence(run_seed, spawn_key=(*key, sample_id.group)).generate_state(1)
    base = ((int(high) >> 2) << 32) | ((int(low) + sample_id.group * 2**14) % 2**32)
    seed = sample_seed(run_seed, sample_id)
    assert seed == base + sample_id.index  # S6: vLLM gives child k of a request its seed + k
    assert 0 <= seed < 2**62 + 2**14 < 2**63  # JSON readers and torch take signed 64-bit integers


def test_no_two_samples_of_a_run_share_a_seed() -> None:
    """Steps, evaluations, resampled rounds, turns and groups differ, and so do the runs with the
    seeds next to it, which people use for repetitions."""
    places = [range(41, 44), PHASES, range(20), range(2), range(2), range(8), range(8)]
    seeds = {
        sample_seed(run_seed, SampleId(**dict(zip(NAMES, place, strict=True))))
        for run_seed, *place in product(*places)
    }
    assert len(seeds) == 3 * 2 * 20 * 2 * 2 * 8 * 8


def test_low_32_bits_differ_within_a_round() -> None:
    """2**14 samples a group and 2**18 groups fill the 32 bits, and do not overlap. torch's
    generator on CPU drops the upper half of a seed. Other indices are refused."""
    places = [(group, index) for group in range(256) for index in range(64)]
    places += product((2**17, 2**18 - 2, 2**18 - 1), (0, 1, MAX_GROUP_SIZE - 2, MAX_GROUP_SIZE - 1))
    seeds = [sample_seed(42, replace(PLACE, group=group, index=i)) for group, i in places]
    assert len({seed % 2**32 for seed in seeds}) == len(places)
    for index in (-1, MAX_GROUP_SIZE):
        with pytest.raises(ValueError, match=rf"index {index} in a group: expected 0 to 16383;"):
            sample_seed(42, replace(PLACE, index=index))


def test_the_rules_import_without_torch_and_vllm() -> None:
    """So that anyone can recompute a seed, read an answer or analyze diversity anywhere."""
    names = ("sampling.seeding", "sampling.prompt_hash", "sampling.rounds", "stops.rule")
    names += ("rollout.dispatch", "rollout.wire", "diversity.analyzer")
    code = "import sys\n" + "\n".join(f"import swift_grpo_ext.{name}" for name in names)
    code += "\nprint(sorted({'torch', 'vllm', 'swift', 'trl', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@given(sample_ids)
@example(SampleId(phase="eval", step=12, number=1, group=5, index=3, turn=2))
def test_a_name_tells_its_sample(name: SampleId) -> None:
    """ms-swift's name has all but the turn: a conversation has one name."""
    assert name.prompt_id == f"{name.phase}-{name.step}.{name.number}-{name.group}"
    assert name.request_id == f"{name.prompt_id}-{name.index}"
    assert SampleId.parse(name.request_id) == replace(name, turn=0)
    assert name.group_id == replace(name, index=0)
    turn = f", turn {name.turn}" if name.turn else ""
    place = f"{name.phase} round {name.step}.{name.number}, group {name.group}"
    assert str(name) == f"{place}, sample {name.index}{turn}"


def test_what_is_no_name_is_refused() -> None:
    name = "train-12.0-5-3"
    for wrong in (name[:-2], f"{name}-1", f"x{name}", f"{name}\n", "eval-1x0-5-3"):
        with pytest.raises(ValueError, match=r"is no name of a sample, such as train-12\.0-5-3"):
            SampleId.parse(wrong)


COUNTS = st.lists(st.tuples(st.integers(0, 12), st.integers(12, 24)), max_size=10)


@given(COUNTS, st.integers(1, 12), st.sampled_from([1, 3]))
@example([(12, 12)], 1, 3)
def test_waves_are_bounded_and_fit_the_ranks(
    counts: list[tuple[int, int]], missing: int, unit: int
) -> None:
    """The batch and its first wave are at most twice the batch; a further wave is not empty. Engine
    mode has ms-swift's waves."""
    waves, of_engines = (Waves(12, unit, draws_ahead=ahead) for ahead in (True, False))
    for kept, drawn in counts:
        for each in (waves, of_engines):
            each.record(kept, drawn, 1.0, 0.5)
    assert (of_engines.first(), of_engines.further(missing)) == (0, 12)
    for size, least in ((waves.first(), 0), (waves.further(missing) if counts else 12, 1)):
        assert least <= size <= 12
        assert size % unit == 0


def test_a_wave_is_expected_to_leave_a_full_batch() -> None:
    """If half of the groups are kept, twice as many are generated; more if a wave costs more than
    scores."""
    waves = Waves(64, 1, draws_ahead=True)
    assert waves.first() == 0, "nothing is known yet"
    waves.record(32, 64, generating=0.0, scoring=1.0)
    assert waves.first() == 64
    assert waves.further(8) == 16
    for generating, scoring, spread in ((1.0, 0.0, 4), (1.0, 1.0, 2)):
        waves.record(32, 64, generating, scoring)
        assert waves.further(8) == 16 + spread
    for _ in range(8):
        waves.record(64, 64, generating=1.0, scoring=0.0)
    assert waves.first() == 0, "all are kept"
