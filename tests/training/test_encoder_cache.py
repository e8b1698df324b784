"""A frozen vision tower sees each image once; real towers with random weights say what it says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from swift_grpo_ext.training import encoder_cache
from swift_grpo_ext.training.encoder_cache import EncoderCache

SMALL = {"hidden_size": 16, "num_heads": 2, "depth": 2, "patch_size": 2, "temporal_patch_size": 1}


class Counted(nn.Module):
    """A model of ms-swift's with a vision tower, whose calls are counted in images."""

    def __init__(self, tower: Any, *, frozen: bool = True) -> None:
        super().__init__()
        self.visual = tower.requires_grad_(not frozen)
        architecture = SimpleNamespace(vision_tower=["visual", "audio"])
        self.model_meta = SimpleNamespace(model_arch=architecture)
        self.seen: list[int] = []
        own = tower.forward

        def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
            grid = kwargs.get("grid_thw")
            self.seen.append(len(hidden_states if grid is None else grid))
            return own(hidden_states, **kwargs)

        tower.forward = forward

    def calls(self) -> list[int]:
        taken, self.seen[:] = self.seen[:], []
        return taken


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(encoder_cache.logger, "warning", told.append)
    return told


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def qwen(**kwargs: Any) -> Counted:
    config = Qwen2_5_VLVisionConfig(
        **SMALL, intermediate_size=32, out_hidden_size=8, window_size=8, fullatt_block_indexes=[1]
    )
    return Counted(Qwen2_5_VisionTransformerPretrainedModel(config), **kwargs)


def images(*grids: tuple[int, int, int]) -> list[Tensor]:
    return [torch.randn(t * h * w, 12) for t, h, w in grids]


def see(model: Counted, shown: list[Tensor], grids: list[Any]) -> Any:
    return model.visual(torch.cat(shown), grid_thw=torch.tensor(grids))


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


WIDE, TALL, VIDEO = (1, 4, 8), (1, 8, 4), (3, 4, 4)


def test_a_group_and_its_later_passes_encode_each_image_once() -> None:
    model = qwen()
    a, b, c = images(WIDE, TALL, VIDEO)
    shown, grids = [a, a, b, c, a], [WIDE, WIDE, TALL, VIDEO, WIDE]
    expected, other = see(model, shown, grids), see(model, [c, b], [VIDEO, TALL])
    cache = EncoderCache(1.0, model)
    cache.begin_round()
    model.calls()
    assert_equal(see(model, shown, grids), expected)
    assert model.calls() == [2, 1, 3]  # whether images are apart is asked first
    assert_equal(see(model, [c, b], [VIDEO, TALL]), other)
    assert model.calls() == []
    assert cache.take_encoded() == 3
    assert cache.take_encoded() == 0
    cache.begin_round()
    assert_equal(see(model, shown, grids), expected)
    assert model.calls() == [3]


def test_layers_between_are_told_apart_too() -> None:
    config = Qwen3VLVisionConfig(
        **SMALL,
        intermediate_size=32,
        out_hidden_size=8,
        deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    )
    model = Counted(Qwen3VLVisionModel(config))
    a, b = images(WIDE, TALL)
    expected = see(model, [a, b, b], [WIDE, TALL, TALL])
    EncoderCache(1.0, model)
    for _ in range(2):
        output = see(model, [a, b, b], [WIDE, TALL, TALL])
        torch.testing.assert_close(output.pooler_output, expected.pooler_output)
        torch.testing.assert_close(output.deepstack_features, expected.deepstack_features)
    assert model.calls() == [3, 2, 1, 2]


@pytest.mark.parametrize("asked", [{}, {"output_hidden_states": True}])
def test_a_tower_of_whole_images(asked: dict[str, Any]) -> None:
    config = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    model = Counted(SiglipVisionModel(config))
    a, b = torch.randn(2, 1, 3, 8, 8)
    shown = torch.cat([a, b, a, a])
    expected = model.visual(shown, **asked)
    EncoderCache(1.0, model)
    ours = model.visual(shown, **asked)
    torch.testing.assert_close(ours.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(ours.hidden_states, expected.hidden_states)
    assert model.calls() == [4, 2, 1, 2]


def test_a_value_or_a_shape_makes_another_image() -> None:
    model = qwen()
    [a] = images(WIDE)
    b = a.clone()
    b[3, 5] += 1e-3
    EncoderCache(1.0, model)
    ours = see(model, [a, b, a], [WIDE, WIDE, TALL])
    assert model.calls() == [2, 1, 3]
    parts = ours.pooler_output.split(8)
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])


def test_what_a_pass_is_given_is_its_own() -> None:
    model = qwen()
    [a] = images(WIDE)
    EncoderCache(1.0, model)
    first = see(model, [a], [WIDE]).pooler_output
    kept = first.clone()
    first.zero_()
    assert torch.equal(see(model, [a], [WIDE]).pooler_output, kept)


def test_precision_is_part_of_how_an_image_is_seen() -> None:
    model = qwen()
    [a] = images(WIDE)
    EncoderCache(1.0, model)
    full = see(model, [a], [WIDE]).pooler_output
    with torch.autocast("cpu", torch.bfloat16):
        assert see(model, [a], [WIDE]).pooler_output.dtype == torch.bfloat16
    assert torch.equal(see(model, [a], [WIDE]).pooler_output, full)


def test_no_graph_runs_through_a_frozen_tower() -> None:
    """With `vit_gradient_checkpointing`, ms-swift lets gradients flow to patches for nothing."""
    model = qwen()
    model.visual.patch_embed.register_forward_hook(lambda *given: given[2].requires_grad_(True))
    [a] = images(WIDE)
    assert see(model, [a], [WIDE]).pooler_output.requires_grad
    EncoderCache(1.0, model)
    assert not see(model, [a], [WIDE]).pooler_output.requires_grad


def test_what_is_trained_is_left_alone() -> None:
    model = qwen(frozen=False)
    cache = EncoderCache(1.0, model)
    assert cache.towers == []
    [a] = images(WIDE)
    see(model, [a, a], [WIDE, WIDE]).pooler_output.sum().backward()
    assert model.calls() == [2]
    assert model.visual.patch_embed.proj.weight.grad is not None


def test_what_a_callback_unfreezes_is_trained() -> None:
    model = qwen()
    cache = EncoderCache(1.0, model)
    assert cache.towers == ["visual"]
    model.visual.requires_grad_(True)
    [a] = images(WIDE)
    assert see(model, [a, a], [WIDE, WIDE]).pooler_output.requires_grad
    assert model.calls() == [2]


def test_adapters_change_what_a_frozen_tower_says() -> None:
    """The reference pass switches them off."""
    model = qwen()
    inject_adapter_in_model(LoraConfig(target_modules=["proj"]), model.visual)
    model.visual.requires_grad_(False)
    assert EncoderCache(1.0, model).towers == []


@pytest.mark.parametrize(("max_gb", "calls"), [(0, [4]), (1e-9, [2, 1, 2]), (1.6e-6, [2, 1, 2])])
def test_the_bound(max_gb: float, calls: list[int]) -> None:
    """An image's output takes 32 x 16 and 8 x 8 values; what does not fit is made once a call."""
    model = qwen()
    a, b = images(WIDE, WIDE)
    EncoderCache(max_gb, model)
    see(model, [a, a, b, b], [WIDE] * 4)
    assert model.calls() == calls
    see(model, [a, a, b, b], [WIDE] * 4)
    assert model.calls() == [4 if max_gb == 0 else 2]


def test_a_bound_that_takes_one_image() -> None:
    model = qwen()
    a, b = images(WIDE, WIDE)
    EncoderCache(2.4e-6, model)
    for _ in range(2):
        see(model, [a, b], [WIDE] * 2)
    assert model.calls() == [2, 1, 2, 1]


def test_sharded_weights_are_gathered_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """So each rank makes the call, if only with the images that it sees there."""
    model = qwen()
    cache = EncoderCache(1.0, model)
    monkeypatch.setattr(encoder_cache, "shard_ranks", lambda _: SimpleNamespace(groups=("all",)))
    cache.begin_round()
    a, b = images(WIDE, WIDE)
    for _ in range(2):
        see(model, [a, a, b], [WIDE] * 3)
    assert model.calls() == [2, 1, 2, 2]


class Mixing(nn.Module):
    """Sees all images of a call at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.flatten(1) - pixel_values.mean() * self.scale


class Pooling(Mixing):
    """Says one thing of all images."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.mean() * self.scale


@pytest.mark.parametrize("tower", [Mixing, Pooling])
def test_a_tower_that_mixes_images_is_left_alone(tower: Any, warnings: list[str]) -> None:
    model = nn.Module()
    model.visual = tower()
    model.model_meta = Counted(Mixing()).model_meta
    shown = torch.randn(4, 3, 8, 8)
    expected = model.visual(shown)
    EncoderCache(1.0, model)
    for _ in range(2):
        assert torch.equal(model.visual(pixel_values=shown), expected)
    [told] = warnings
    assert f"--encoder_cache_gb has no effect on {tower.__name__}" in told


def test_calls_of_another_kind_pass(warnings: list[str]) -> None:
    """Audio towers take lengths beside their values."""
    model = qwen()
    EncoderCache(1.0, model)
    [a] = images(WIDE)
    lengths = torch.tensor([32, 32])
    model.visual(torch.cat([a, a]), grid_thw=torch.tensor([WIDE, WIDE]), lengths=lengths)
    assert model.calls() == [2]
    assert warnings == []


def test_positions_of_the_text_pass_by() -> None:
    """transformers hands a Qwen3-VL's tower whatever the model was given."""
    model = qwen()
    EncoderCache(1.0, model)
    [a] = images(WIDE)
    grid, text = torch.tensor([WIDE, WIDE]), {"text_position_ids": torch.arange(5)}
    model.visual(torch.cat([a, a]), grid_thw=grid, return_dict=True, **text)
    assert model.calls() == [2, 1, 1]


def test_the_reference_model_has_outputs_of_its_own() -> None:
    policy, reference = qwen(), qwen()
    [a] = images(WIDE)
    expected = see(reference, [a], [WIDE]).pooler_output
    cache = EncoderCache(1.0, policy, [reference])
    assert cache.towers == ["visual", "visual"]
    see(policy, [a], [WIDE])
    torch.testing.assert_close(see(reference, [a], [WIDE]).pooler_output, expected)
    assert cache.take_encoded() == 2
