"""Dynamic sampling draws as many groups at once as are expected to fill a batch."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from swift_grpo_ext.sampling.waves import Waves

COUNTS = st.lists(st.tuples(st.integers(0, 12), st.integers(12, 24)), max_size=10)


@given(COUNTS, st.integers(1, 12), st.sampled_from([1, 3]))
@example([(12, 12)], 1, 3)
def test_waves_are_bounded_and_fit_the_ranks(
    counts: list[tuple[int, int]], missing: int, unit: int
) -> None:
    """The batch and its first wave are at most twice the batch; a further wave is not empty."""
    waves = Waves(12, unit, draws_ahead=True)
    for kept, drawn in counts:
        waves.record(kept, drawn, 1.0, 0.5)
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


def test_engine_mode_draws_as_ms_swift_does() -> None:
    waves = Waves(12, 1, draws_ahead=False)
    waves.record(3, 12, 1.0, 1.0)
    assert (waves.first(), waves.further(1)) == (0, 12)
