"""Training sees the prompt of the rollout in each turn, in tokens and positions, whatever the order
of words and media (M3)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from swift.infer_engine.protocol import RolloutInferRequest

from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.batch import check_positions
from swift_grpo_ext.training.encode import GroupEncoder
from tests.rig.encoders import BothSides
from tests.rig.rounds import write_video

SIZES = [(56, 84), (140, 56), (28, 28)]
END_OF_TURN = 151645
Turn = tuple[list[str], list[int]]

parts = st.sampled_from([" which", "七?", "\n", "<image>", "<video>"])
contents = st.lists(parts, min_size=1, max_size=3)
answers = st.lists(st.sampled_from([1477, 432, 198, 1339]), min_size=1, max_size=3)
ends = st.sampled_from([[], [END_OF_TURN]])  # a stop string ends a turn without its end
turns = st.lists(
    st.tuples(contents, st.builds(lambda answer, end: answer + end, answers, ends)),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def both(assets: Path) -> BothSides:
    names = {"model_type": "qwen2_5_vl", "template": "qwen2_5_vl", "vllm_max_model_len": 2048}
    return BothSides(model=str(assets / "tiny_vlm"), **names)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Images of several sizes, and a video of two of them."""
    folder = tmp_path_factory.mktemp("media")
    images = [str(folder / f"{number}.png") for number in range(len(SIZES))]
    for path, size in zip(images, SIZES, strict=True):
        Image.effect_noise(size, 60).convert("RGB").save(path)
    return {"images": images, "videos": [str(write_video([images[0]] * 4, folder / "a.mp4"))]}


@settings(max_examples=20)
@given(turns=turns)
@example(turns=[(["<video>", "<image>"], [1477]), (["<image>", "<image>"], [432, END_OF_TURN])])
def test_training_sees_the_prompts_of_the_rollout(
    turns: list[Turn], both: BothSides, media: dict[str, list[str]]
) -> None:
    asked: list[dict[str, Any]] = []  # the conversation as the engine gets it
    shown: dict[str, list[str]] = {"images": [], "videos": []}
    prompts = []
    for content, answer in turns:
        for kind, of_kind in shown.items():
            for _ in range(content.count(f"<{kind[:-1]}>")):
                of_kind.append(media[kind][len(of_kind) % len(media[kind])])
        asked.append({"role": "user", "content": "".join(content)})
        request = RolloutInferRequest(messages=[*map(dict, asked)])
        request.images, request.videos = list(shown["images"]), list(shown["videos"])
        [prompt] = both.ask([request]).prompts
        assert not isinstance(prompt, str)
        assert prompt.num_media == sum(map(len, shown.values()))
        prompts.append(Prompt(prompt.token_ids, prompt.positions))
        asked.append({"role": "assistant", "content": answer})

    said = [m | {"content": "-"} if m["role"] == "assistant" else m for m in asked]
    sample = RolloutSample.from_row({"messages": said, **shown})
    sample.response_token_ids = [answer for _, answer in turns]
    sample.rollout_prompts, sample.prompt_hash = prompts, "one"
    sample.sample_id = SampleId(phase="train", step=0, number=0, group=0, index=0)
    stops: Any = SimpleNamespace(rollout_mismatch="stop")
    encoder = GroupEncoder(both.template, stops, is_conversation=len(turns) > 1)
    sample.encoded = encoder.encode(sample)
    assert encoder.fault == ""
    check_positions([sample], both.template.data_collator([sample.encoded]), stops)
