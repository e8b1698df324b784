"""Media have vLLM's positions in training [M3]. `tests/extra/test_families.py` has other repairs of
models."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl

from swift_grpo_ext.upstream import models
from swift_grpo_ext.upstream.patches import make

SIDES = st.integers(1, 4).map(lambda half: 2 * half)
TEXT = st.tuples(st.just("text"), st.integers(1, 5))
IMAGE = st.tuples(st.just("image"), st.tuples(st.just(1), SIDES, SIDES))
VIDEO = st.tuples(st.just("video"), st.tuples(st.integers(1, 9), SIDES, SIDES))
ROW = st.lists(st.tuples(TEXT, st.one_of(IMAGE, VIDEO)), max_size=4)


def vllm_positions(model_class: Any, config: Any, row: Any, seconds: float) -> Any:
    """Return the positions that vLLM's model counts for a row; it has no weights."""
    features, offset = [], 0
    for kind, size in row:
        if kind == "text":
            offset += size
            continue
        t, h, w = size
        data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(size))}
        data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(seconds))
        place = SimpleNamespace(offset=offset)
        features.append(SimpleNamespace(modality=kind, mm_position=place, data=data))
        offset += t * h * w // 4
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    return model.get_mrope_input_positions([0] * offset, features)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_positions_are_those_of_vllm(name: str, data: st.DataObject) -> None:
    """For any two rows in a batch, with videos of any length and rate."""
    make(models.place_what_follows_videos)
    config = getattr(transformers, f"{name}Config")()
    modeling = getattr(transformers, f"{name}Model")
    module = qwen2_vl if name == "Qwen2VL" else qwen2_5_vl
    theirs = getattr(module, f"{name}ForConditionalGeneration")
    seconds = data.draw(st.sampled_from([1.0, 0.5, 2 / 3, 4.0])) if name == "Qwen2_5_VL" else 1.0
    rows = []
    for pairs in (data.draw(ROW), data.draw(ROW)):
        rows.append([block for pair in pairs for block in pair] + [("text", data.draw(TEXT)[1])])
    kinds = {"text": 0, "image": 1, "video": 2}
    types, grids = [], {"image": list[Any](), "video": list[Any]()}
    for row in rows:
        types.append(list[int]())
        for kind, size in row:
            count = size if kind == "text" else int(np.prod(size)) // 4
            types[-1] += [kinds[kind]] * count
            if kind != "text":
                grids[kind].append(size)
    length = max(map(len, types))
    padded = torch.tensor([row + [0] * (length - len(row)) for row in types])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in types])
    given_grids = {f"{kind}_grid_thw": torch.tensor(g) if g else None for kind, g in grids.items()}
    times = {"second_per_grid_ts": [seconds] * len(grids["video"])} if seconds != 1 else {}
    self = SimpleNamespace(config=config)
    found, deltas = modeling.get_rope_index(
        self, torch.zeros_like(padded), padded, attention_mask=mask, **given_grids, **times
    )
    for number, (row, of_row) in enumerate(zip(rows, types, strict=True)):
        expected, delta = vllm_positions(theirs, config, row, seconds)
        assert found[:, number, : len(of_row)].tolist() == expected.tolist()
        assert deltas[number].item() == delta
        assert not found[:, number, len(of_row) :].any()
