"""Repairs of the forwards that ms-swift gives to models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swift_grpo_ext.upstream import models, pins
from swift_grpo_ext.upstream.contract import mismatch

TOKENS = {"image": 60, "video": 61}


@pytest.fixture(params=[None, "vision"])
def gemma4(request: pytest.FixtureRequest) -> Any:
    """A model that ms-swift has patched, with our repair."""
    transformers = pytest.importorskip("transformers", minversion="5.19")
    from swift.model.models import gemma

    models.repair_gemma4()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Gemma4Config(
        text_config={
            **{"vocab_size": 64, "hidden_size_per_layer_input": 0, **sizes},
            "layer_types": ["sliding_attention", "full_attention"],
            "use_bidirectional_attention": request.param,
        },
        vision_config={"patch_size": 2, "position_embedding_size": 8, **sizes},
        image_token_id=TOKENS["image"],
        video_token_id=TOKENS["video"],
        audio_token_id=62,
    )
    torch.manual_seed(0)
    model = transformers.Gemma4Model(config).eval()
    gemma._patch_gemma4_forward(model, None)
    return model


@pytest.mark.skipif(any(map(mismatch, pins.GEMMA4_FORWARD)), reason="knows no Gemma 4")
@pytest.mark.parametrize("kind", TOKENS)
def test_gemma4_sees_two_media(gemma4: Any, kind: str) -> None:
    """Of three by three patches and of three by six, padded, each a token or two of the text. They
    look both ways where transformers lets them."""
    places = torch.full((2, 18, 2), -1)
    places[0, :9] = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    places[1] = torch.cartesian_prod(torch.arange(3), torch.arange(6))
    patches = torch.rand(2, 18, 12)
    values = "pixel_values" if kind == "image" else "pixel_values_videos"
    inputs = {values: patches, f"{kind}_position_ids": places}
    more = {} if kind == "image" else {"num_frames_per_video": torch.tensor([1, 1])}
    get_features = getattr(type(gemma4), f"get_{kind}_features")
    token = TOKENS[kind]
    ids = torch.tensor([[1, token, 2, token, token, 3]])
    text = {"input_ids": ids, "mm_token_type_ids": (ids == token).long()}
    with torch.no_grad():
        ours = gemma4(**text, **inputs).last_hidden_state
        features = get_features(gemma4, patches, places, **more, return_dict=True)
        expected = gemma4.origin_forward(**text, mm_encoder_outputs={kind: features})
    assert len(features.pooler_output) == 2
    torch.testing.assert_close(ours, expected.last_hidden_state)
