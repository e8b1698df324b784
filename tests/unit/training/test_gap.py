"""A gap of log-probabilities between rollout and training beyond rounding ends the run, and its
error names the engine and the kind of row; a healthy run gets no alarm (M5, R4)."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from swift.utils.logger import warning_set

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.gap import (
    CHANCE,
    BoundedGap,
    Gap,
    GapCheck,
    SampleGap,
    gap_limit,
    least_ratio,
    measure_gap,
    sampling_shift,
    unlike_their_peers,
)
from swift_grpo_ext.training.group import DisagreementError
from tests.unit.training.samples import arguments, batch, sample

NAN = float("nan")


def test_limits() -> None:
    """A temperature below 1 divides rounding errors of logits too; above 1 the limit keeps its
    margin."""
    assert [gap_limit(bits) for bits in (32, 16, 8)] == [0.01, 0.125, 2.0]
    assert [gap_limit(32, temperature) for temperature in (0.25, 3.0, 0.0)] == [0.04, 0.01, 0.01]


def seen(
    nats: float,
    kind: str = "text",
    engine: str = "rank 0",
    *,
    count: int = 64,
    group: int = 2,
    rounding: float | None = None,
) -> SampleGap:
    """Return the gap of a sample, in nats a token; rounding may not have been measured."""
    name = SampleId(phase="train", step=3, number=0, group=group, index=1)
    known = Gap() if rounding is None else Gap(count * rounding, count, rounding)
    return SampleGap(name, (engine, kind), BoundedGap(Gap(count * nats, count, nats), known))


def check(*gaps: SampleGap, **changes: Any) -> dict[str, float]:
    args = arguments(**{"rollout_mismatch": "warn", **changes})
    return GapCheck(args, 0.25).check(gaps, step=7)


def test_a_gap_is_that_of_completion_tokens(warnings: list[str]) -> None:
    """It has their absolute differences. Samples and batches without tokens do not count."""
    text = sample(rollout_infos={"replica": "rank 0"})
    seeing = sample(rollout_infos={}, images=["a", "b"], audios="c", videos=None)
    masked = batch(rollout=((-1.0, -1.0),), training=((-1.5, -9.0),), mask=((1, 0),))
    two = ((-0.5, -1.0), (0.0, 0.0)), ((-0.3, -1.4), (0.0, -0.1)), ((1, 1), (0, 1))
    far = batch(*two)  # 0.2 and 0.4 nats, and 0.1
    batches = [masked, batch(rollout=None), batch(training=None), batch(mask=((0, 0),))]
    gaps = measure_gap([([text], one) for one in batches] + [([text, seeing], far)])
    assert [gap.source for gap in gaps[-2:]] == [("rank 0", "text"), ("", "images+audio")]
    metrics = check(*gaps)
    assert metrics["rollout_gap/mean"] == pytest.approx((0.5 + 0.2 + 0.4 + 0.1) / 4)
    assert metrics["rollout_gap/max"] == pytest.approx(0.5)
    assert check() == {}
    assert warnings == []
    # With other rounding, each sample has a bound.
    rounded = measure_gap([([text, seeing], far)], [far.old_per_token_logps + 0.02])
    assert [gap.gap.rounding.mean for gap in rounded] == pytest.approx([0.02, 0.02])
    assert rounded[0].gap.bound == pytest.approx(1.5 * (1 + 256 / 2) * 0.02)
    assert gaps[-1].gap.bound == math.inf


def test_rows_of_one_kind_are_named() -> None:
    """The videos are one row in fifteen, so the round's mean is small. A few tokens may lie further
    apart, as with other experts: the bound of 0.25 nats is 0.375 for 64 tokens."""
    gaps = [seen(1.5, "video"), *[seen(0.01, "image")] * 6, *[seen(0.01)] * 8]
    message = (
        r"Step 7: log-probabilities of the rollout and of training differ by .* rank 0 rows of "
        r"video: 1\.5 nats in the mean of 64 tokens, 1\.5 at most \(0\.375 explained\)\. Other rows"
    )
    with pytest.raises(DisagreementError, match=message) as raised:
        check(*gaps, rollout_mismatch="stop")
    assert "image" not in str(raised.value)
    metrics = check(*gaps)
    assert metrics["rollout_gap/mean"] < 0.25
    kinds = {"rollout_gap/video": 1.5, "rollout_gap/text": 0.01, "rollout_gap/image": 0.01}
    assert {name: metrics[name] for name in kinds} == pytest.approx(kinds)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_one_engine_of_several_is_named(kind: str, warnings: list[str]) -> None:
    """Also if only its rows of images differ: training reads them as the other engine does. A
    warning about one engine does not hide a later one about another."""
    for wrong in (1, 1, 2):
        of_engines = [(f"server {n}", 0.9 * (n == wrong)) for n in range(3)]
        of_text = [seen(nats * (kind == "text"), engine=name) for name, nats in of_engines]
        check(*of_text, *(seen(nats, kind, name) for name, nats in of_engines))
    for wrong, warning in zip((1, 2), warnings, strict=True):
        assert f"server {wrong} rows of {kind}: 0.9 nats" in warning
        assert warning.count("server") == 1
        assert "Other engines agree: this one has other weights" in warning


def test_a_single_sample_is_told_and_stops_nothing(warnings: list[str]) -> None:
    """One of 64 rows hardly changes their mean. A NaN always stops the run."""
    others = [seen(0.01, "images")] * 63
    for nats in (0.37, 4.0, 4.0):
        check(seen(nats, "images"), *others, rollout_mismatch="stop")
    [warning] = warnings
    assert "explains: train round 3.0, group 2, sample 1 (images): 4 nats" in warning
    for broken in ((seen(NAN, "images"), *others), (*others, seen(NAN, "images"))):
        with pytest.raises(DisagreementError, match=r"nan nats .* nan at most"):
            check(*broken, rollout_mismatch="stop", top_p=0.5)


def test_settings_explain_a_part_of_the_gap(warnings: list[str]) -> None:
    """A gap beyond both parts is reported with them; NaN always is."""
    cases: list[tuple[dict[str, Any], float]] = [
        ({"top_p": 1, "top_k": 0, "structured_outputs_regex": ""}, 0),
        ({"repetition_penalty": 1.1}, 2),
        # A part p of the vocabulary adds -log(p) to what is left.
        ({"top_p": 0.5, "top_k": 20}, 2.69315),
        ({"min_p": 0.3}, 2),
        # One token has a log-probability of 0, and a grammar may leave as little.
        ({"top_k": 1}, math.inf),
        ({"structured_outputs_regex": r"\d"}, math.inf),
        ({"top_p": None}, math.inf),  # the model's own generation settings decide
        ({"async_generate": True}, math.inf),  # weights of a step before (R4)
    ]
    for changes, shift in cases:
        assert sampling_shift(arguments(**changes)) == pytest.approx(shift, abs=1e-5)
        near, far = (0.37 + shift, 0.38 + shift) if shift < 9 else (30.0, NAN)
        for nats, num_warnings in ((near, 0), (far, 1), (far, 1)):
            check(seen(nats), **changes)
            assert len(warnings) == num_warnings
        by_settings = f" explained, {shift:.3g} of it by sampling settings)" in warnings.pop()
        assert by_settings == (0 < shift < 9)
        warning_set.clear()


def test_a_healthy_run_does_not_end_late(warnings: list[str]) -> None:
    """In the first two rounds a gap beyond the bound ends the run, later one beyond four bounds or
    eight medians."""
    gap_check = GapCheck(arguments(rollout_mismatch="stop"), 0.25)

    def round_of(nats: float, **of_round: bool) -> None:
        gap_check.check([seen(nats, count=2**14)], 7, **of_round)

    round_of(0.1)
    round_of(0.1, is_training=False)
    with pytest.raises(DisagreementError, match=r"0\.3 nats in the mean"):
        round_of(0.3)
    for _ in range(9):
        round_of(0.1)
    assert warnings == []
    for nats in (0.3, 0.3, 0.8):
        round_of(nats)
    [warning] = warnings
    assert "rank 0 rows of text: 0.3 nats" in warning
    assert warning.endswith("Before, it was 0.1 nats in the median.")
    for nats in (0.9, 1.1, NAN):
        with pytest.raises(DisagreementError, match="rollout_mismatch warn"):
            round_of(nats)


def test_rounding_bounds_the_gap_of_early_rounds(warnings: list[str]) -> None:
    """Later rounds have the wider limit of all models."""
    gap_check = GapCheck(arguments(rollout_mismatch="stop"), 0.125)
    gap_check.check([seen(0.02, count=256, rounding=0.01)], 0)
    with pytest.raises(DisagreementError, match=r"0\.04 nats .* 0\.04 at most \(0\.03 explained\)"):
        gap_check.check([seen(0.04, count=256, rounding=0.01)], 1)
    with pytest.raises(DisagreementError, match="nan nats"):
        gap_check.check([seen(NAN, count=256, rounding=0.01)], 1)
    gap_check.check([seen(0.001, count=256, rounding=0.0)], 1)  # the smallest bound
    assert not gap_check.is_early
    gap_check.check([seen(0.04, count=2**14)], 2)
    assert warnings == []


def healthy_round(
    noise: np.random.Generator, faults: dict[tuple[str, str], float], engines: int = 1
) -> list[SampleGap]:
    """Return a round of 24 groups of text and of images on each engine. Groups scatter as those of
    the tiny models in bfloat16. Images have 1.2 times the gap of text."""
    gaps = []
    for number in range(24):
        for engine in map("rank {}".format, range(engines)):
            for kind, times in (("text", 1.0), ("image", 1.2)):
                ratio = 0.6 * times * faults.get((engine, kind), 1.0) * np.exp(noise.normal(0, 0.4))
                gaps.append(seen(0.016 * ratio, kind, engine, group=number, rounding=0.016))
    return gaps


def test_media_and_engines_are_compared_with_their_peers() -> None:
    noise = np.random.default_rng(5)
    for _ in range(200):
        assert unlike_their_peers(healthy_round(noise, {}, engines=2)) == {}
    found = unlike_their_peers(healthy_round(noise, {("rank 0", "image"): 5.0}))
    assert list(found) == [("rank 0", "image")]
    assert found["rank 0", "image"].startswith("at least ")
    assert " times that of rows of text, each in units of its " in found["rank 0", "image"]
    # A kind of media that agrees is not named beside one that does not.
    videos = [s._replace(source=("rank 0", "video")) for s in healthy_round(noise, {})[::2]]
    found = unlike_their_peers([*healthy_round(noise, {("rank 0", "image"): 9.0}), *videos])
    assert list(found) == [("rank 0", "image")]
    rows = (("text", 1.0, 600), ("video", 1.4, 240), ("image", 5.0, 60))
    found = unlike_their_peers(
        [
            seen(0.01 * times, kind, group=number, rounding=0.016)
            for kind, times, count in rows
            for number in range(count)
        ]
    )
    assert list(found) == [("rank 0", "image")]
    wrong_weights = {("rank 1", "text"): 5.0, ("rank 1", "image"): 5.0}
    found = unlike_their_peers(healthy_round(noise, wrong_weights, engines=2))
    assert set(found) == set(wrong_weights)
    assert all("times that of other engines" in why for why in found.values())


def test_what_proves_too_little_is_not_compared() -> None:
    # Four samples of one prompt are one observation.
    images = [seen(0.2, "image", group=0, rounding=0.01)] * 4
    text = [seen(0.01, group=number, rounding=0.01) for number in range(1, 9)]
    assert unlike_their_peers(images + text) == {}
    # Rows with certain answers: the smallest gap that counts would decide the ratio.
    noise = np.random.default_rng(5)
    for_certain = [
        seen(nats * np.exp(noise.normal(0, 0.1)), kind, group=number, rounding=10 * nats)
        for number in range(24)
        for kind, nats in (("text", 0.0019), ("image", 0.0003))
    ]
    assert unlike_their_peers(for_certain) == {}


def test_the_least_ratio_is_students() -> None:
    noise = np.random.default_rng(7)
    own = noise.normal(1.0, 0.4, 20)

    def students(peers: np.ndarray) -> float:
        low = scipy.stats.ttest_ind(own, peers).confidence_interval(1 - 2 * CHANCE).low
        return math.exp(low)

    peers = own - 0.8  # of the same variance
    assert least_ratio(own.tolist(), peers.tolist()) == pytest.approx(students(peers))
    few = noise.normal(0.0, 1.5, 4)  # scatter more than the pooled variance
    assert least_ratio(own.tolist(), few.tolist()) < students(few)
    assert least_ratio([1.0], peers.tolist()) == 0
