"""The canary: which engines are asked, what is compared, and what becomes of a gap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image
from swift.infer_engine.protocol import RequestConfig
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.rollout.generate import to_rollout_output
from swift_grpo_ext.rollout.wire import Completion, Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training import canary as canary_module
from swift_grpo_ext.training.canary import COMPLETIONS, MAX_TOKENS, ROUND, WeightCanary, sample_gaps
from swift_grpo_ext.training.gap import Gap
from swift_grpo_ext.weights.checksums import WeightUpdateError
from tests.ranks import ThreadRanks, run_rank_groups

NAN = float("nan")


def make(ranks: Any, action: Any = "stop", *, is_on: bool = True) -> WeightCanary:
    canary = WeightCanary(action, ranks, 0.01, is_on=is_on)
    canary.weights_changed()
    return canary


def sample(words: str) -> OnPolicySample:
    return OnPolicySample.from_row({"messages": [{"role": "user", "content": words}]})


class Engines:
    """Answer with one token; keep what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[SampleId], RequestConfig]] = []

    def __call__(self, sample: Any, ids: Any, config: Any) -> list[Any]:
        self.asked.append((sample.messages[-1]["content"], list(ids), config))
        values: dict[str, Any] = {"text": "a", "logprobs": [-1.0], "finish_reason": "stop"}
        drawn = (Completion(token_ids=[1], replica=f"engine {i.group}", **values) for i in ids)
        return [to_rollout_output(completion, Prompt([2])) for completion in drawn]


def judged(
    gaps: dict[str, Sequence[Any]], monkeypatch: Any, size: int = 1, failing: int = -1, **args: Any
) -> list[Any]:
    """What `judge` gives on each rank.

    Args:
        gaps: by engine, the mean gap of each completion.
        failing: a rank on which the prompt cannot be encoded.
    """

    def encoded_batch(rank: Any, samples: Any) -> Any:
        if rank == failing:
            raise OSError("no such image")
        return [sample.rollout_prompts[0].token_ids for sample in samples]

    def gaps_of(_: Any, samples: Any, batch: Any) -> list[Any]:
        assert batch == [[2]] * COMPLETIONS
        means = gaps[samples[0].rollout_infos["replica"]]
        return [None if mean is None else Gap(2 * mean, 2, mean) for mean in means]

    monkeypatch.setattr(canary_module, "encoded_batch", encoded_batch)
    monkeypatch.setattr(canary_module, "sample_gaps", gaps_of)

    def work(ranks: ThreadRanks) -> float | str | None:
        canary, trainer = make(ranks, **args), cast(Any, ranks.rank)
        canary.generate([sample("one")], RequestConfig(), 1 - ranks.rank, Engines())
        try:
            return canary.judge(trainer, 3)
        except WeightUpdateError as e:
            return str(e)

    return run_rank_groups(size, work)


def test_the_first_prompt_is_asked_after_each_update_and_only_then() -> None:
    engines = Engines()

    def work(ranks: ThreadRanks) -> None:
        canary = WeightCanary("stop", ranks, 0.01, is_on=True)
        config = RequestConfig(max_tokens=100, top_p=0.5, top_k=3, temperature=0.7)
        for words, changed in (("none", False), ("one", True), ("two", False), ("three", True)):
            if changed:
                canary.weights_changed()
            canary.generate([sample(words), sample("another")], config, 1, engines)
        assert (config.max_tokens, config.top_p) == (100, 0.5)

    run_rank_groups(1, work)
    ids = [
        SampleId(phase="eval", step=0, number=ROUND, group=0, index=k) for k in range(COMPLETIONS)
    ]
    assert [(words, asked) for words, asked, _ in engines.asked] == [("one", ids)] * 2
    for _, _, config in engines.asked:
        assert (config.max_tokens, config.temperature) == (MAX_TOKENS, 0.7)
        assert (config.top_p, config.top_k, config.min_p) == (1.0, -1, 0.0)


@pytest.mark.parametrize(("num_engines", "groups"), [(1, [[0], [1]]), (3, [[0, 1], [2, 3]])])
def test_there_is_a_request_for_each_engine(num_engines: int, groups: list[list[int]]) -> None:
    """Rank 0 calls all engines; both ranks share the requests, under ids of their own."""

    def work(ranks: ThreadRanks) -> list[int]:
        engines, canary = Engines(), make(ranks)
        canary.generate([sample("one")], RequestConfig(), num_engines * (1 - ranks.rank), engines)
        [(_, ids, _)] = engines.asked
        assert [i.index for i in ids] == [*range(COMPLETIONS)] * (len(ids) // COMPLETIONS)
        return [i.group for i in ids[::COMPLETIONS]]

    assert run_rank_groups(2, work) == groups


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        (["ab", "cd", "e<", ">h"], "<"),  # the first image of the first rank that has one
        (["ab", "cd"], "a"),
    ],
)
def test_all_ranks_ask_the_same_with_media_where_there_are_any(rows: list[str], asked: str) -> None:
    def work(ranks: ThreadRanks) -> list[Any]:
        engines, canary = Engines(), make(ranks)
        samples = [sample(word) for word in rows[ranks.rank]]
        for one in samples:
            one.images = ["f.png"] if one.messages[-1]["content"] in "<>" else []
        for _ in range(2):
            canary.weights_changed()
            canary.generate(samples, RequestConfig(), 1, engines)
        return [words for words, _, _ in engines.asked]

    assert run_rank_groups(len(rows), work) == [[asked] * 2] * len(rows)


def test_large_images_of_the_prompt_are_scaled_down(tmp_path: Path) -> None:
    """The round's own sample keeps its images."""
    large, small = tmp_path / "large.png", Image.new("RGB", (448, 448))
    Image.new("L", (2000, 500), 255).save(large)
    thin = Image.new("RGB", (1, 300_000))  # no whole pixel wide when scaled down
    images = [{"bytes": None, "path": str(large)}, small, "absent.png", thin]

    def asked(objects: dict[str, Any]) -> list[Any]:
        offered = sample("one")
        offered.images, offered.objects = list(images), objects
        canary = make(SimpleNamespace(rank=0, size=1, all_gather=lambda value: [value]))
        prompts: list[OnPolicySample] = []

        def engines(prompt: OnPolicySample, *_: Any) -> list[Any]:
            prompts.append(prompt)
            return []

        canary.generate([offered], RequestConfig(), 1, engines)
        assert offered.images == images
        return prompts[0].images

    scaled, *others = asked({})
    with Image.open(BytesIO(scaled["bytes"])) as image:
        assert (image.size, image.mode, image.getpixel((9, 9))) == ((896, 224), "RGB", (255,) * 3)
    assert others == images[1:]
    assert asked({"bbox": [[1500, 0, 2000, 500]]}) == images


def test_videos_are_left_out() -> None:
    """An update would pay for thousands of tokens; rows with images come first."""
    clip, image = sample("<video>What?"), sample("<image>Which?")
    clip.videos, image.images = ["a.mp4", "b.mp4"], ["a.png"]
    for rows, words in (([clip, image], "<image>Which?"), ([clip], "What?")):
        engines, canary = (
            Engines(),
            make(SimpleNamespace(rank=0, size=1, all_gather=lambda value: [value])),
        )
        canary.generate(rows, RequestConfig(), 1, engines)
        assert [asked for asked, _, _ in engines.asked] == [words]
    assert clip.videos == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize("form", ["null", "part", "url"])
def test_the_prompt_has_media_in_any_form(form: str, tmp_path: Path) -> None:
    """A column that is null, as rows of text have where others have images; images in parts."""
    large = tmp_path / "large.png"
    Image.new("L", (2000, 500), 255).save(large)
    text, shown = sample("text"), sample("shown")
    text.images = text.videos = text.audios = cast(Any, None)
    content = {
        "null": "text",
        "part": [{"type": "image", "image": str(large)}, {"type": "text", "text": "Which?"}],
        "url": [{"type": "image_url", "image_url": {"url": str(large)}}],
    }[form]
    shown.messages = [{"role": "user", "content": content}]
    shown.images = cast(Any, None)
    canary = make(SimpleNamespace(rank=0, size=1, all_gather=lambda value: [value]))
    prompts: list[OnPolicySample] = []

    def engines(prompt: OnPolicySample, *_: Any) -> list[Any]:
        prompts.append(prompt)
        return []

    canary.generate([text, shown], RequestConfig(), 1, engines)
    [prompt] = prompts
    words = {"null": "text", "part": "<image>Which?", "url": "<image>"}[form]
    assert prompt.messages[-1]["content"] == words
    sizes = []
    for image in prompt.images:
        with Image.open(BytesIO(image["bytes"])) as opened:
            sizes.append(opened.size)
    assert sizes == ([] if form == "null" else [(896, 224)])
    assert shown.messages[0]["content"] == content  # the round's own sample stays


def test_every_rank_makes_the_same_forwards(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Weights are gathered in a forward: a row that cannot be encoded on one rank keeps no other
    waiting. (Gaps are of no engine here.)"""
    assert judged({}, monkeypatch, size=2, failing=1) == [None, None]
    [warning] = warnings
    assert "no engine was compared after this update (on rank 1 OSError: no such image)" in warning


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ({"engine 0": [0.01, 0.04], "engine 1": [0.0, 0.0]}, 0.01),
        ({"engine 0": [0.04, 0.04], "engine 1": [0.0, 0.0]}, 0.04),  # the limit, four times 0.01
        ({"engine 0": [0.001, 0.002], "engine 1": [0.05, 0.06]}, "engine 1"),
        ({"engine 0": [0.0, 0.0], "engine 1": [0.001, NAN]}, "engine 1"),  # wherever it stands
        ({"engine 0": [NAN, 9.0], "engine 1": [0.0, 0.0]}, "engine 0"),
        ({"engine 0": [9.0, 0.01], "engine 1": [0.0, 9.0]}, 0.01),  # an expert chosen otherwise
        ({"engine 0": [9.0, 9.0], "engine 1": [0.0, 9.0]}, "engine 0"),
        ({"engine 0": [None, 9.0], "engine 1": [None, None]}, "engine 0"),  # cannot be compared
        ({"engine 0": [None, None], "engine 1": [None, None]}, None),
    ],
)
def test_an_engine_is_at_fault_where_all_its_completions_say_so(
    gaps: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, other = judged(gaps, monkeypatch, size=2)
    assert found == other
    if isinstance(expected, str):
        assert str(found).startswith(f"{expected} does not sample with the trainer's weights")
        assert "at step 3 the canary's log-probabilities lie " in str(found)
        assert "the mean of 2 tokens, in each of 2 completions above the 0.04" in str(found)
    else:
        assert found == expected


def test_a_gap_may_be_a_warning_and_a_canary_that_is_off_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    assert judged({"engine 0": [9.0, 9.0]}, monkeypatch, action="warn") == [9.0]
    assert [text.startswith("engine 0 does not sample") for text in warnings] == [True]
    assert judged({}, monkeypatch, is_on=False) == [None]


def test_two_prompts_are_not_compared() -> None:
    """Both are in the forward; the round names the one that differs."""
    template = SimpleNamespace(placeholder_tokens=[90], tokenizer=SimpleNamespace(decode=str))
    logps = torch.tensor([[-0.5, -9.0], [-2.0, -9.0]])
    trainer: Any = SimpleNamespace(
        template=template,
        model=torch.nn.Linear(1, 1),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _get_per_token_logps_and_entropies=lambda *_: (logps, None),
        _logps=SimpleNamespace(sharing_nothing=nullcontext),
    )
    samples = [sample("one"), sample("one")]
    for one, prompt in zip(samples, ([1, 2], [1, 3]), strict=True):
        one.sample_id, one.response_token_ids = "the canary", [[5]]  # type: ignore[attr-defined]
        one.encoded = {"input_ids": [1, 2, 5]}
        one.rollout_prompts = [Prompt(prompt)]  # type: ignore[attr-defined]
    batch: Any = SimpleNamespace(
        rollout_per_token_logps=torch.full((2, 2), -1.0),
        completion_mask=torch.tensor([[1, 0], [1, 0]]),
    )
    assert sample_gaps(trainer, samples, ({}, batch)) == [Gap(0.5, 1, 0.5), None]
    batch.rollout_per_token_logps = None
    assert sample_gaps(trainer, samples, ({}, batch)) == [None, None]
