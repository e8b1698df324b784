"""The canary: which engines draw it, what is compared, and what becomes of a gap."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.infer_engine.protocol import RequestConfig
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.rollout.generate import to_rollout_output
from swift_grpo_ext.rollout.wire import Completion
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training import canary
from swift_grpo_ext.training.agreement import Gap
from swift_grpo_ext.training.canary import MAX_TOKENS, NUM_DRAWS, ROUND, WeightCanary
from swift_grpo_ext.weights.checksums import WeightUpdateError
from tests.arguments import training_arguments
from tests.ranks import ThreadRanks, run_rank_groups

TRAINER = SimpleNamespace(model=SimpleNamespace(dtype=torch.float32))


def make(ranks: Any, action: str = "stop", off: str = "", **args: Any) -> WeightCanary:
    return WeightCanary(training_arguments(rollout_mismatch=action, **args), ranks, off)


def sample(words: str) -> OnPolicySample:
    return OnPolicySample.from_row({"messages": [{"role": "user", "content": words}]})


class Engines:
    """Answer with one token; keep what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[SampleId], RequestConfig]] = []

    def __call__(self, sample: Any, ids: Any, config: Any) -> list[Any]:
        self.asked.append((sample.messages[-1]["content"], list(ids), config))
        return [
            to_rollout_output(
                Completion(
                    text="a",
                    token_ids=[1],
                    logprobs=[-1.0],
                    finish_reason="stop",
                    replica=f"engine {i.group}",
                ),
                [2],
            )
            for i in ids
        ]


def fly(
    monkeypatch: pytest.MonkeyPatch, gaps: dict[str, Sequence[Any]], size: int = 1, **args: Any
) -> list[float | str | None]:
    """What `judge` gives on each rank; `gaps`: by engine, the mean gap of each of its draws."""
    monkeypatch.setattr(canary, "encoded_batch", lambda _, probes: ({}, probes))

    def found(_: Any, probes: Any, *__: Any) -> list[Gap | None]:
        of_engine = gaps[probes[0].rollout_infos["replica"]]
        return [None if gap is None else Gap(2 * gap, 2, gap) for gap in of_engine]

    monkeypatch.setattr(canary, "sample_gaps", found)

    def work(ranks: ThreadRanks) -> float | str | None:
        flown = make(ranks, **args)
        flown.weights_changed()
        flown.draw([sample("one")], RequestConfig(), 1 - ranks.rank, Engines())
        try:
            return flown.judge(TRAINER, step=3)
        except WeightUpdateError as e:
            return str(e)

    return run_rank_groups(size, work)


def test_the_first_prompt_is_drawn_after_each_update_and_only_then() -> None:
    engines = Engines()

    def work(ranks: ThreadRanks) -> None:
        flown = make(ranks)
        config = RequestConfig(max_tokens=100, top_p=0.5, top_k=3, temperature=0.7)
        for words, changed in (("none", False), ("one", True), ("two", False), ("three", True)):
            if changed:
                flown.weights_changed()
            flown.draw([sample(words), sample("another")], config, 1, engines)
        assert (config.max_tokens, config.top_p) == (100, 0.5)

    run_rank_groups(1, work)
    draws = [
        SampleId(phase="eval", step=0, number=ROUND, group=0, index=k) for k in range(NUM_DRAWS)
    ]
    assert [(words, ids) for words, ids, _ in engines.asked] == [("one", draws)] * 2
    for _, _, config in engines.asked:
        assert (config.max_tokens, config.temperature) == (MAX_TOKENS, 0.7)
        assert (config.top_p, config.top_k, config.min_p) == (1.0, -1, 0.0)


@pytest.mark.parametrize(("num_engines", "groups"), [(1, [[0], [1]]), (3, [[0, 1], [2, 3]])])
def test_there_is_a_request_for_each_engine(num_engines: int, groups: list[list[int]]) -> None:
    """Rank 0 has three replicas; both ranks share the requests, under ids of their own."""

    def work(ranks: ThreadRanks) -> list[int]:
        engines, flown = Engines(), make(ranks)
        flown.weights_changed()
        flown.draw([sample("one")], RequestConfig(), num_engines if ranks.rank == 0 else 0, engines)
        [(_, ids, _)] = engines.asked
        assert [i.index for i in ids] == [*range(NUM_DRAWS)] * (len(ids) // NUM_DRAWS)
        return [i.group for i in ids[::NUM_DRAWS]]

    assert run_rank_groups(2, work) == groups


def test_all_engines_are_asked_the_same_with_media_where_there_are_any() -> None:
    """A rank whose rows are text asks about the first image of the others."""

    def work(ranks: ThreadRanks) -> list[tuple[str, list[Any]]]:
        asked = []
        rows = [[["a"], ["b"]], [["c"], ["d"]], [["e"], ["<f>"]], [["<g>"], ["h"]]][ranks.rank]
        flown = make(ranks)

        def draw(sample: Any, ids: Any, config: Any) -> list[Any]:
            asked.append((sample.messages[-1]["content"], sample.images))
            return Engines()(sample, ids, config)

        samples = [sample(words) for [words] in rows]
        for one in samples:
            one.images = ["f.png"] if "<" in one.messages[-1]["content"] else []
        for _ in range(2):
            flown.weights_changed()
            flown.draw(samples, RequestConfig(), 1, draw)
        return asked

    assert run_rank_groups(4, work) == [[("<f>", ["f.png"])] * 2] * 4
    text = run_rank_groups(2, lambda ranks: _text_asked(ranks))
    assert text == ["row of rank 0"] * 2


def _text_asked(ranks: ThreadRanks) -> str:
    engines, flown = Engines(), make(ranks)
    flown.weights_changed()
    flown.draw([sample(f"row of rank {ranks.rank}")], RequestConfig(), 1, engines)
    return engines.asked[0][0]


def test_every_rank_makes_the_same_forwards_whatever_its_probes_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are gathered in a forward: prompts that differ, and rows that cannot be encoded on
    one rank, keep no other rank waiting."""
    calls: list[int] = []

    def forward(_: Any, *__: Any) -> list[None]:
        calls.append(1)
        return [None] * NUM_DRAWS

    monkeypatch.setattr(canary, "sample_gaps", forward)
    warnings: list[str] = []
    monkeypatch.setattr(canary.logger, "warning", warnings.append)

    def fly_on(failing: int | None) -> list[float | None]:
        calls.clear()

        def work(ranks: ThreadRanks) -> float | None:
            flown = make(ranks)
            flown.weights_changed()
            flown.draw([sample("one")], RequestConfig(), 1, Engines())
            trainer: Any = SimpleNamespace(rank=ranks.rank, model=TRAINER.model)
            return flown.judge(trainer, step=3)

        def encode(trainer: Any, probes: Any) -> tuple[Any, Any]:
            if trainer.rank == failing:
                raise OSError("no such image")
            return {}, None

        monkeypatch.setattr(canary, "encoded_batch", encode)
        return run_rank_groups(2, work)

    assert (fly_on(None), len(calls)) == ([None, None], 2)
    assert (fly_on(1), len(calls)) == ([None, None], 0)
    [warning] = warnings
    assert "on rank 1 OSError: no such image" in warning


def test_a_gap_stops_every_rank_and_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = {"engine 0": [0.001, 0.002], "engine 1": [0.05, 0.06]}
    found = fly(monkeypatch, gaps, size=2)
    assert found[0] == found[1]
    assert str(found[0]).startswith(
        "engine 1 does not sample with the trainer's weights: at step 3 the canary's "
        "log-probabilities lie 0.05 nats from the trainer's in the mean of 2 tokens, in each of 2 "
        "draws above the 0.04"
    )
    assert "--rollout_mismatch warn" in str(found[0])


@pytest.mark.parametrize(
    ("gap", "args", "stops"),
    [
        (0.04, {}, False),
        (0.041, {}, True),
        (float("nan"), {}, True),
        (0.5, {"bf16": True}, False),
        (0.51, {"fp16": True}, True),
        (9.0, {"action": "warn"}, False),
        (0.041, {"temperature": 0.5}, False),  # as rounding errors of logits
        (0.081, {"temperature": 0.5}, True),
        (0.041, {"temperature": 2.0}, True),
    ],
)
def test_the_limit_follows_the_precision(
    gap: float, args: dict[str, Any], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(canary.logger, "warning", warnings.append)
    [found] = fly(monkeypatch, {"engine 0": [gap, gap]}, **{"temperature": 1.0} | args)
    assert isinstance(found, str) == stops
    if not stops:
        assert found == pytest.approx(gap)
    assert len(warnings) == ("action" in args)


NAN = float("nan")


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ({"engine 0": [0.0, 0.0], "engine 1": [0.001, NAN]}, "engine 1"),
        ({"engine 0": [NAN, 9.0], "engine 1": [0.0, 0.0]}, "engine 0"),
        ({"engine 0": [9.0, 0.01], "engine 1": [0.0, 9.0]}, 0.01),  # an expert chosen otherwise
        ({"engine 0": [9.0, 9.0], "engine 1": [0.0, 9.0]}, "engine 0"),
        ({"engine 0": [None, 9.0], "engine 1": [None, None]}, "engine 0"),
        ({"engine 0": [None, None], "engine 1": [None, None]}, None),
    ],
)
def test_an_engine_is_at_fault_in_all_its_draws_or_where_one_is_nan(
    gaps: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN counts wherever it stands, and what cannot be compared does not."""
    found, other = fly(monkeypatch, gaps, size=2, temperature=1.0)
    assert found == other
    if isinstance(expected, str):
        assert str(found).startswith(f"{expected} does not sample")
    else:
        assert found == expected


def test_where_it_cannot_fly_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(canary.logger, "info", told.append)
    assert fly(monkeypatch, {}, off="this is async") == [None]
    assert told == ["No canary tests what engines sample with: this is async."]


def test_two_prompts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in the forward; the round names the one that differs."""
    template = SimpleNamespace(placeholder_tokens=[90], tokenizer=SimpleNamespace(decode=str))
    logps = torch.tensor([[-0.5], [-2.0]])
    trainer = SimpleNamespace(
        template=template,
        model=torch.nn.Linear(1, 1),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _get_per_token_logps_and_entropies=lambda *_: (logps, None),
    )
    probes = [sample("one"), sample("one")]
    for probe, prompt in zip(probes, ([1, 2], [1, 3]), strict=True):
        probe.sample_id, probe.response_token_ids = "the canary", [[5]]  # type: ignore[attr-defined]
        probe.encoded = {"input_ids": [1, 2, 5]}
        probe.rollout_prompt_ids = prompt  # type: ignore[attr-defined]
    batch = SimpleNamespace(
        rollout_per_token_logps=torch.tensor([[-1.0], [-1.0]]), completion_mask=torch.ones(2, 1)
    )
    assert canary.sample_gaps(trainer, probes, {}, batch) == [Gap(0.5, 1, 0.5), None]
