"""Samples that share their group's encoded prompt equal ms-swift's whole encodes, bit for bit, in
each family of models (G2, R3)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from swift.model import get_processor
from swift.template import get_template
from tiny_vlm.families import Family, make_family

from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.encode import GroupEncoder, encode_whole
from swift_grpo_ext.upstream.placeholders import placeholder_ids
from tests.rig.families import PROMPTS, row_of

RESPONSES = [[20, 21, 22, 23], [24], [25, 26, 27, 28, 29, 30]]
"""Token ids."""


@pytest.fixture(scope="module")
def template(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(family.name)
    make_family(family, folder, seed=0)
    processor = get_processor(str(folder), model_type=family.model_type or family.name)
    made = get_template(processor, template_type=family.template)
    made.set_mode("train")
    made.max_length = None
    return made


def group_of(text: str, assets: Path, folder: Path) -> list[RolloutSample]:
    """Return samples of one prompt, each with its own media objects, as a data loader's rows."""
    samples = []
    for index, ids in enumerate(RESPONSES):
        row = row_of(text, assets, folder)
        row["messages"].append({"role": "assistant", "content": "-"})
        sample = RolloutSample.from_row(row)
        sample.response_token_ids = [ids]
        sample.rollout_logprobs = [[-1.0] * len(ids)]
        sample.sample_id = SampleId(phase="train", step=0, number=0, group=0, index=index)
        sample.prompt_hash = "one"
        samples.append(sample)
    return samples


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two entries of encoded samples are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_equal(a[name], b[name]) for name in a)
    return bool(a == b)


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_group_is_encoded_as_its_samples(
    kind: str, family: Family, template: Any, assets: Path, tmp_path: Path
) -> None:
    has = {"images": family.images, "videos": family.videos, "audio": family.audio, "words": True}
    if not has[kind] or (kind == "videos" and family.videos_fail):
        pytest.skip("not made for it")
    for prompt in PROMPTS[kind]:
        samples = group_of(prompt.replace(*family.without), assets, tmp_path)
        encoder = GroupEncoder(template, SimpleNamespace(rollout_mismatch="stop"))
        for sample in samples:
            sample.encoded = encoder.encode(sample)
            whole = encode_whole(sample, template, None)
            assert sample.encoded.keys() == whole.keys()
            for name, value in whole.items():
                assert are_equal(sample.encoded[name], value), name
        assert len({id(sample.encoded.prompt) for sample in samples}) == 1
        assert samples[0].encoded.prompt is not None
    assert not {*placeholder_ids(template)} & {i for ids in RESPONSES for i in ids}
