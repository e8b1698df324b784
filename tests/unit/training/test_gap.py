"""A gap of log-probabilities between rollout and training beyond rounding ends the run, and its
error names the engine and the kind of row; a healthy run gets no alarm (M5, R4)."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
import scipy.stats

from swift_grpo_ext.ranks import RankGroup
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
from tests.rig.ranks import run_rank_groups
from tests.rig.training.samples import arguments, batch, sample

NAN = float("nan")


def test_limits() -> None:
    """A temperature below 1 divides rounding errors of logits too; above 1 the limit keeps its
    margin."""
    assert [gap_limit(bits) for bits in (32, 16, 8)] == [0.01, 0.125, 2.0]
    assert [gap_limit(32, temperature) for temperature in (0.25, 3.0, 0.0)] == [0.04, 0.01, 0.01]


# --- the gap of a round ---


def drawn(engine: str = "rank 0", **media: int) -> Any:
    """Return a sample of an engine; `media` has the number of each medium."""
    shown = {name: ["x"] * number for name, number in media.items()}
    return sample(rollout_infos={"replica": engine}, **shown)


def batch_of(*nats: float, count: int = 64) -> Any:
    """Return a batch with rows whose log-probabilities differ by these nats."""
    training = [[-each] * count for each in nats]
    mask = [[1] * count] * len(nats)
    return batch(rollout=[[0.0] * count] * len(nats), training=training, mask=mask)


def measure(*batches: Any, ranks: Any = None, limit: float = 0.25, **changes: Any) -> Any:
    """Measure the gap of batches; a pair has its samples, other batches have rows of text."""
    args = arguments(**{"rollout_mismatch": "warn", **changes})
    pairs = [
        b if isinstance(b, tuple) else ([drawn()] * len(b.completion_mask), b) for b in batches
    ]
    of_ranks = (ranks or RankGroup()).all_gather(measure_gap(pairs))
    return GapCheck(args, limit).check([*chain(*of_ranks)], step=7)


def test_the_gap_is_that_of_all_ranks(warnings: list[str]) -> None:
    """It has the absolute differences of completion tokens. Ranks without tokens do not count."""
    far = batch(rollout=((-0.5, -1.0),), training=((-0.3, -1.4),))  # 0.2 and 0.4 nats
    batches = [
        [batch(rollout=((-1.0, -1.0),), training=((-1.5, -9.0),), mask=((1, 0),))],
        [far, batch(rollout=((-1.0, 0.0),), training=((-0.9, 0.0),))],
        [batch(rollout=None), batch(training=None)],
        [batch(mask=((0, 0),))],
    ]
    results = run_rank_groups(4, lambda ranks: measure(*batches[ranks.rank], ranks=ranks))
    expected = {"rollout_gap/mean": (0.5 + 0.2 + 0.4 + 0.1) / 5, "rollout_gap/max": 0.5}
    assert results == [pytest.approx(expected)] * 4
    assert measure(*batches[2]) == {}
    assert warnings == []


@pytest.mark.parametrize("count", [8, 2**12])
def test_few_tokens_may_lie_further_apart(count: int, warnings: list[str]) -> None:
    """The sum may exceed the limit of 0.25 nats by 32 limits: a few tokens with other experts."""
    bound = 0.25 * (1 + 32 / count)
    for nats in (bound - 0.01, bound + 0.01, bound + 0.01):
        measure(batch_of(nats, count=count))
    [warning] = warnings
    found = f"{nats:.3g} nats in the mean of {count} tokens, {nats:.3g} at most ({bound:.3g} expl"
    assert "Step 7: log-probabilities of the rollout and of training differ by" in warning
    assert f"rank 0 rows of text: {found}" in warning
    assert "do not see the same weights or prompts" in warning


def test_rows_of_one_kind_are_named_wherever_they_are() -> None:
    """The videos are one row in eight, so the round's mean is small. A gap on one rank stops all
    ranks."""
    rows = [drawn(videos=1), *(drawn(images=1) for _ in range(3)), *(drawn() for _ in range(4))]
    batches = [(rows, batch_of(1.5, *[0.0] * 7)), (rows[1:], batch_of(*[0.01] * 7))]

    def of_rank(ranks: RankGroup) -> str:
        with pytest.raises(DisagreementError) as raised:
            measure(batches[ranks.rank], ranks=ranks, rollout_mismatch="stop")
        return str(raised.value)

    first, second = run_rank_groups(2, of_rank)
    assert first == second
    assert "rank 0 rows of video: 1.5 nats in the mean of 64 tokens" in first
    assert "image" not in first
    assert "Other rows agree: one side reads" in first
    metrics = measure(*batches)
    assert metrics["rollout_gap/mean"] < 0.25
    kinds = {"rollout_gap/video": 1.5, "rollout_gap/text": 0.005, "rollout_gap/image": 0.005}
    assert {name: metrics[name] for name in kinds} == pytest.approx(kinds)


@pytest.mark.parametrize("other", ["text", "image"])
def test_one_engine_of_several_is_named(other: str, warnings: list[str]) -> None:
    """Also if only its rows of images differ: training reads them as the other engine does. A
    warning about one engine does not hide a later one about another."""
    media = {"images": 1} if other == "image" else {}
    rows = [drawn(f"server {n}", **shown) for n in range(3) for shown in ({}, media)]
    for engine in (1, 1, 2):
        nats = [0.0] * 6
        nats[2 * engine + 1] = 0.9
        if other == "text":
            nats[2 * engine] = 0.9
        measure((rows, batch_of(*nats)))
    for engine, warning in zip((1, 2), warnings, strict=True):
        assert f"server {engine} rows of {other}: 0.9 nats" in warning
        assert warning.count("server") == 1
        assert "Other engines agree: this one has other weights" in warning


def test_a_single_sample_is_told_and_stops_nothing(warnings: list[str]) -> None:
    """One of 64 rows hardly changes their mean. A NaN always stops the run."""
    rows = [drawn(images=2) for _ in range(64)]
    for nats in (0.37, 4.0, 4.0):
        measure((rows, batch_of(nats, *[0.01] * 63)), rollout_mismatch="stop")
    [warning] = warnings
    assert "explains: train round 3.0, group 2, sample 1 (images): 4 nats" in warning
    broken = batch_of(0.01, NAN, *[0.01] * 62)
    with pytest.raises(DisagreementError, match=r"nan nats .* nan at most"):
        measure((rows, broken), rollout_mismatch="stop", top_p=0.5)


@pytest.mark.parametrize(
    ("changes", "shift"),
    [
        ({"top_p": 1, "top_k": 0, "structured_outputs_regex": ""}, 0),
        # A part p of the vocabulary adds -log(p) to what is left.
        ({"top_p": 0.9}, 0.10536),
        ({"repetition_penalty": 1.1}, 2),
        ({"top_p": 0.5, "top_k": 20}, 2.69315),
        ({"min_p": 0.3}, 2),
        # One token has a log-probability of 0, and a grammar may leave as little.
        ({"top_k": 1}, math.inf),
        ({"structured_outputs_regex": r"\d"}, math.inf),
        ({"top_p": None}, math.inf),  # the model's own generation settings decide
        ({"async_generate": True}, math.inf),  # weights of a step before (R4)
    ],
)
def test_settings_explain_a_part_of_the_gap(
    changes: dict[str, Any], shift: float, warnings: list[str]
) -> None:
    """A gap beyond both parts is reported with them; NaN always is."""
    assert sampling_shift(arguments(**changes)) == pytest.approx(shift, abs=1e-5)
    near, far = (0.24 + shift, 0.26 + shift) if shift < 9 else (30.0, NAN)
    measure(batch_of(near, count=2**14), **changes)
    assert warnings == []
    measure(batch_of(far, count=2**14), **changes)
    [warning] = warnings
    assert (f" explained, {shift:.3g} of it by sampling settings)" in warning) == (0 < shift < 9)


def test_a_healthy_run_does_not_end_late(warnings: list[str]) -> None:
    """In the first two rounds a gap beyond the bound ends the run, later one beyond four bounds or
    eight medians."""
    gap_check = GapCheck(arguments(rollout_mismatch="stop"), 0.25)

    def round_of(nats: float, **of_round: bool) -> None:
        pairs = [([drawn()], batch_of(nats, count=2**14))]
        gap_check.check(measure_gap(pairs), 7, **of_round)

    round_of(0.1)
    round_of(0.1, is_training=False)
    with pytest.raises(DisagreementError, match=r"0\.3 nats in the mean"):
        round_of(0.3)
    for _ in range(9):
        round_of(0.1)
    assert warnings == []
    for nats in (0.3, 0.3, 0.7):
        round_of(nats)
    [warning] = warnings
    assert "rank 0 rows of text: 0.3 nats" in warning
    assert warning.endswith("Before, it was 0.1 nats in the median.")
    for nats in (0.9, 1.1, NAN):
        with pytest.raises(DisagreementError, match="rollout_mismatch warn"):
            round_of(nats)


# --- early rounds, with the rounding of their tokens ---


def seen(kind: str, group: int, gap: float, rounding: float, engine: str = "rank 0") -> SampleGap:
    """Return the gap of a sample of 256 tokens, in nats a token."""
    name = SampleId(phase="train", step=0, number=0, group=group, index=0)
    bounded = BoundedGap(Gap(256 * gap, 256, gap), Gap(256 * rounding, 256, rounding))
    return SampleGap(name, (engine, kind), bounded)


def test_rounding_bounds_the_gap_of_early_rounds(warnings: list[str]) -> None:
    """Later rounds have the wider limit of all models."""
    gap_check = GapCheck(arguments(rollout_mismatch="stop"), 0.125)
    gap_check.check([seen("image", 0, 0.02, 0.01)], 0)
    with pytest.raises(DisagreementError, match=r"0\.04 nats .* 0\.04 at most \(0\.03 explained\)"):
        gap_check.check([seen("image", 0, 0.04, 0.01)], 1)
    with pytest.raises(DisagreementError, match="nan nats"):
        gap_check.check([seen("image", 0, NAN, 0.01)], 1)
    gap_check.check([seen("image", 0, 0.001, 0.0)], 1)  # the smallest bound
    assert not gap_check.is_early
    gap_check.check(measure_gap([([drawn(images=1)], batch_of(0.04, count=2**14))]), 2)
    assert warnings == []


def test_a_round_has_the_rounding_of_each_sample() -> None:
    one = batch_of(0.01, 0.04, count=256)
    rows = [drawn(), drawn(images=1)]
    text, image = measure_gap([(rows, one)], [one.old_per_token_logps + 0.02])
    assert image.source == ("rank 0", "image")
    assert [s.gap.gap.mean for s in (text, image)] == pytest.approx([0.01, 0.04])
    assert [s.gap.rounding.mean for s in (text, image)] == pytest.approx([0.02, 0.02])
    assert image.gap.bound == pytest.approx(1.5 * 2 * 0.02)
    [plain, _] = measure_gap([(rows, one)])
    assert plain.gap.bound == math.inf


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
                gaps.append(seen(kind, number, 0.016 * ratio, 0.016, engine))
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
    wrong_weights = {("rank 1", "text"): 5.0, ("rank 1", "image"): 5.0}
    found = unlike_their_peers(healthy_round(noise, wrong_weights, engines=2))
    assert set(found) == set(wrong_weights)
    assert all("times that of other engines" in why for why in found.values())


def test_what_proves_too_little_is_not_compared() -> None:
    # Four samples of one prompt are one observation.
    images = [seen("image", 0, 0.2, 0.01)] * 4
    text = [seen("text", number, 0.01, 0.01) for number in range(1, 9)]
    assert unlike_their_peers(images + text) == {}
    # Rows with certain answers: the smallest gap that counts would decide the ratio.
    noise = np.random.default_rng(5)
    for_certain = [
        seen(kind, number, nats * np.exp(noise.normal(0, 0.1)), 10 * nats)
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
