"""The canary: which engines draw it, what is compared, and what becomes of a gap."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.infer_engine.protocol import RequestConfig
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.rollout.draw import to_rollout_output
from swift_grpo_ext.rollout.wire import Completion
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training import canary
from swift_grpo_ext.training.agreement import Gap
from swift_grpo_ext.training.canary import MAX_TOKENS, ROUND, WeightCanary
from swift_grpo_ext.weights.checksums import WeightUpdateError
from tests.ranks import ThreadRanks, run_rank_groups

TRAINER = SimpleNamespace(model=SimpleNamespace(dtype=torch.float32))


def make(ranks: Any, action: str = "stop", off: str = "", **args: Any) -> WeightCanary:
    values = {"rollout_canary": action, "bf16": False, "fp16": False} | args
    return WeightCanary(SimpleNamespace(**values), ranks, off)


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
    monkeypatch: pytest.MonkeyPatch, gaps: dict[str, float], size: int = 1, **args: Any
) -> list[float | str | None]:
    """What `judge` gives on each rank; `gaps` by the words and the engine of a probe."""

    def gap(_: Any, probe: Any) -> Gap:
        largest = gaps[probe.rollout_infos["replica"]]
        return Gap(2 * largest, 2, largest)

    monkeypatch.setattr(canary, "sample_gap", gap)

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
    canary_id = SampleId(phase="eval", step=0, number=ROUND, group=0, index=0)
    assert [(words, ids) for words, ids, _ in engines.asked] == [("one", [canary_id])] * 2
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
        return [i.group for i in ids]

    assert run_rank_groups(2, work) == groups


def test_a_gap_stops_every_rank_and_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = {"engine 0": 0.001, "engine 1": 0.05}
    found = fly(monkeypatch, gaps, size=2)
    assert found[0] == found[1]
    assert str(found[0]).startswith(
        "engine 1 does not sample with the trainer's weights: at step 3 the canary's "
        "log-probabilities lie 0.05 nats from the trainer's in the mean of 2 tokens, above the 0.04"
    )
    assert "--rollout_canary warn or off" in str(found[0])


@pytest.mark.parametrize(
    ("gap", "args", "stops"),
    [
        (0.04, {}, False),
        (0.041, {}, True),
        (float("nan"), {}, True),
        (0.5, {"bf16": True}, False),
        (0.51, {"fp16": True}, True),
        (9.0, {"action": "warn"}, False),
    ],
)
def test_the_limit_follows_the_precision(
    gap: float, args: dict[str, Any], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(canary.logger, "warning", warnings.append)
    [found] = fly(monkeypatch, {"engine 0": gap}, **args)
    assert isinstance(found, str) == stops
    if not stops:
        assert found == pytest.approx(gap)
    assert len(warnings) == ("action" in args)


@pytest.mark.parametrize("args", [{"action": "off"}, {"off": "this is async"}])
def test_where_it_cannot_fly_nothing_is_drawn(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(canary.logger, "info", told.append)
    assert fly(monkeypatch, {}, **args) == [None]
    expected = ["--rollout_canary stop has no effect: this is async."]
    assert told == (expected if "off" in args else [])


def test_two_prompts_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round names the difference itself; the model (there is none) is not asked."""
    encoded = {"input_ids": [1, 2, 5], "labels": [-100, -100, 5]}
    monkeypatch.setattr(canary, "encode_sample", lambda *_: dict(encoded))
    monkeypatch.setattr(canary, "collate_to_grpo_micro_batch", lambda *_, **__: ({}, None))

    class Template(SimpleNamespace):
        data_collator = list

    template = Template(placeholder_tokens=[90], tokenizer=SimpleNamespace(decode=str))
    trainer = SimpleNamespace(
        template=template,
        _template_context=lambda _: nullcontext(),
        accelerator=SimpleNamespace(device="cpu"),
    )
    probe = sample("one")
    probe.request_id, probe.response_token_ids = "eval-0.0-0-0", [5]
    probe.rollout_prompt_ids = [1, 3]  # type: ignore[attr-defined]
    assert canary.sample_gap(trainer, probe) == Gap()
    probe.rollout_prompt_ids = [1, 2]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="model"):
        canary.sample_gap(trainer, probe)
