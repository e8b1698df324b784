"""A frozen vision tower sees each image once; real towers with random weights say what it says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.media import encoder_cache
from swift_grpo_ext.media.encoder_cache import EncoderCache
from swift_grpo_ext.media.lazy_concat import LazyConcat
from swift_grpo_ext.ranks import RankGroup
from tests.ranks import WithOthers

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

        def forward(*args: Any, **kwargs: Any) -> Any:
            pixels = [*args, *kwargs.values()][0]
            assert type(pixels) is Tensor  # joined, if it was to be joined late
            self.seen.append(len(kwargs.get("grid_thw", pixels)))
            return own(*args, **kwargs)

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


def rows_of(output: Any) -> Tensor:
    """What the decoder is given in the place of the images, [rows, width].

    Towers of transformers 5 return it within an output, those of 4 by itself or first in a tuple.
    """
    rows = output[0] if isinstance(output, tuple) else getattr(output, "pooler_output", output)
    assert isinstance(rows, Tensor)
    return rows


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    leaves, structure = pytree.tree_flatten(ours)
    expected, other = pytree.tree_flatten(theirs)
    assert structure == other
    torch.testing.assert_close(leaves, expected, rtol=1e-5, atol=1e-6)


WIDE, TALL, VIDEO = (1, 4, 8), (1, 8, 4), (3, 4, 4)


def test_a_group_and_its_later_passes_encode_each_image_once() -> None:
    """No graph runs through a frozen tower, though with `vit_gradient_checkpointing` ms-swift lets
    gradients flow to patches."""
    model = qwen()
    model.visual.patch_embed.register_forward_hook(lambda *given: given[2].requires_grad_(True))
    a, b, c = images(WIDE, TALL, VIDEO)
    shown, grids = [a, a, b, c, a], [WIDE, WIDE, TALL, VIDEO, WIDE]
    expected, other = see(model, shown, grids), see(model, [c, b], [VIDEO, TALL])
    cache = EncoderCache(1.0, model)
    cache.forget()
    model.calls()
    found = see(model, shown, grids)
    assert_equal(found, expected)
    assert (rows_of(found).requires_grad, rows_of(expected).requires_grad) == (False, True)
    assert model.calls() == [2, 1, 3]  # whether images are apart is asked first
    assert_equal(see(model, [c, b], [VIDEO, TALL]), other)
    assert model.calls() == []
    assert cache.agree(RankGroup()) == 3
    assert cache.agree(RankGroup()) == 0
    cache.forget()
    assert_equal(see(model, shown, grids), expected)
    assert model.calls() == [3]


def test_a_tower_of_whole_images() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    config = SiglipVisionConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    model = Counted(SiglipVisionModel(config))
    a, b = torch.randn(2, 1, 3, 8, 8)
    shown = torch.cat([a, b, a, a])
    expected = model.visual(shown, output_hidden_states=True)
    EncoderCache(1.0, model)
    ours = model.visual(shown, output_hidden_states=True)
    torch.testing.assert_close(ours.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(ours.hidden_states, expected.hidden_states)
    assert model.calls() == [4, 2, 1, 2]


def test_what_an_output_depends_on() -> None:
    """A value, a shape and the precision; not positions of the text, which transformers hands a
    Qwen3-VL's tower too. What a pass is given is its own."""
    model = qwen()
    [a] = images(WIDE)
    b = a.clone()
    b[3, 5] += 1e-3
    EncoderCache(1.0, model)
    first = rows_of(see(model, [a, b, a], [WIDE, WIDE, TALL]))
    assert model.calls() == [2, 1, 3]
    parts = first.clone().split(8)
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])
    first.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert rows_of(see(model, [a], [WIDE])).dtype == torch.bfloat16
    model.calls()
    assert torch.equal(rows_of(see(model, [a], [WIDE])), parts[0])
    assert model.calls() == []
    text = {"text_position_ids": torch.arange(5)}
    model.visual(torch.cat([a, a]), grid_thw=torch.tensor([WIDE, WIDE]), return_dict=True, **text)
    assert model.calls() == [2, 1, 1]


def test_what_is_trained_or_adapted_is_left_alone() -> None:
    """Also where a callback unfreezes it later. The reference pass switches adapters off."""
    [a] = images(WIDE)
    trained, unfrozen, adapted = qwen(frozen=False), qwen(), qwen()
    inject_adapter_in_model(LoraConfig(target_modules=["proj"]), adapted.visual)
    adapted.visual.requires_grad_(False)
    caches = [EncoderCache(1.0, model) for model in (trained, unfrozen, adapted)]
    assert [[tower.name for tower in cache.towers] for cache in caches] == [[], ["visual"], []]
    assert [cache.is_on for cache in caches] == [False, True, False]
    unfrozen.visual.requires_grad_(True)
    for model in (trained, unfrozen):
        rows_of(see(model, [a, a], [WIDE, WIDE])).sum().backward()
        assert model.calls() == [2]
        assert model.visual.patch_embed.proj.weight.grad is not None


@pytest.mark.parametrize(
    ("num_images", "first", "second"),
    [(0, [4], [4]), (0.99, [2, 1, 2], [2]), (1.0, [2, 1, 2], [1]), (2.0, [2, 1, 2], [])],
)
def test_the_bound(num_images: float, first: list[int], second: list[int]) -> None:
    """What does not fit is made once a call."""
    output = see(qwen(), images(WIDE), [WIDE])
    num_bytes = sum(leaf.nbytes for leaf in pytree.tree_leaves(output))
    model = qwen()
    a, b = images(WIDE, WIDE)
    EncoderCache(num_images * num_bytes / BYTES_PER_GB * (1 + 1e-9), model)
    for calls in (first, second):
        see(model, [a, a, b, b], [WIDE] * 4)
        assert model.calls() == calls


def test_a_tower_whose_weights_ranks_share_is_left_alone(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They gather them in each run, so that each rank has to run it equally often."""
    model = qwen()
    cache = EncoderCache(1.0, model)
    monkeypatch.setattr(encoder_cache, "shard_ranks", lambda _: SimpleNamespace(groups=("all",)))
    cache.forget()
    assert not cache.is_on
    [a] = images(WIDE)
    see(model, [a, a], [WIDE] * 2)
    assert model.calls() == [2]
    assert (cache.agree(RankGroup()), warnings) == (0, [])


def test_what_fails_leaves_calls_as_they_are(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that only saves time ends a run. What fails on one rank is off on all."""
    model = qwen()
    a, b = images(WIDE, WIDE)
    grids = [WIDE] * 3
    expected = see(model, [a, a, b], grids)
    shown = [LazyConcat([part]) for part in (a, a, b)]
    cache = EncoderCache(1.0, model)
    cache.forget()
    model.calls()
    monkeypatch.setattr(encoder_cache, "image_keys", None)
    assert_equal(see(model, shown, grids), expected)
    assert model.calls() == [2, 1, 3]
    assert not cache.is_on
    assert cache.agree(RankGroup()) == 0
    assert_equal(see(model, shown, grids), expected)
    assert model.calls() == [3]
    other = EncoderCache(1.0, qwen())
    assert other.agree(WithOthers((3, ["it is another one"]))) == 3
    assert not other.is_on
    reasons = ["TypeError: 'NoneType' object is not callable", "it is another one"]
    assert warnings == [f"--encoder_cache_gb has no effect on visual: {r}" for r in reasons]


class Stub(nn.Module):
    """A tower with a class, and so a signature, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)


class Mixing(Stub):
    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.flatten(1) - pixel_values.mean() * self.scale


class Pooling(Stub):
    def forward(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.mean() * self.scale


@pytest.mark.parametrize("tower", [Mixing, Pooling])
def test_a_tower_that_mixes_images_is_left_alone(tower: type[Stub], warnings: list[str]) -> None:
    """One sees all images of a call at once, the other says one thing of all."""
    model, shown = Counted(tower()), torch.randn(4, 3, 8, 8)
    expected = model.visual(shown)
    cache = EncoderCache(1.0, model)
    for _ in range(2):
        assert torch.equal(model.visual(pixel_values=shown), expected)
        cache.agree(RankGroup())
    [told] = warnings
    assert told == (
        f"--encoder_cache_gb has no effect on visual: the output of {tower.__name__} for "
        "an image depends on the other images of a call, or cannot be split by image."
    )


class MiDasheng(Stub):
    """MiDashengLM calls `audio_encoder(input_values, audio_length)`."""

    def forward(self, x: Tensor, x_length: Tensor | None = None) -> Tensor:
        return x.flatten(1) * self.scale


class Ernie(Stub):
    """Ernie 4.5 VL is called with its grid by position; audio towers take lengths too."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, lengths: Any = None) -> Tensor:
        return hidden_states.flatten(1) * self.scale


ROWS, TWO = torch.arange(128.0).reshape(8, 16), torch.tensor([[1, 2, 2]] * 2)


@pytest.mark.parametrize(
    ("tower", "given", "num_calls"),
    [
        (MiDasheng, (ROWS, TWO), 1),
        (Ernie, (ROWS, TWO.float()), 1),
        (Ernie, (ROWS, TWO[:, 1:]), 1),
        (Ernie, (ROWS, TWO[:1]), 1),  # the grid of fewer rows
        (Ernie, (ROWS, TWO, torch.ones(2)), 1),
        (Ernie, (ROWS, TWO), 3),
    ],
)
def test_only_a_grid_of_images_is_one(
    tower: type[Stub], given: Any, num_calls: int, warnings: list[str]
) -> None:
    """By position a second argument is what the tower's own signature calls it."""
    model = Counted(tower())
    cache = EncoderCache(1.0, model)
    assert torch.equal(model.visual(*given), ROWS)
    assert len(model.calls()) == num_calls
    cache.agree(RankGroup())
    assert not warnings


class Sized(Stub):
    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        return pixel_values * self.scale


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 16, 3)])
def test_a_tower_that_takes_more_than_images_is_left_alone(
    shape: tuple[int, ...], warnings: list[str]
) -> None:
    """As Pixtral's, Idefics3's, and Gemma 4's, whose images are patches."""
    model = Counted(Sized())
    cache = EncoderCache(1, model)
    pixels = torch.randn(shape)
    for _ in range(2):
        model.visual(pixel_values=pixels, image_sizes=torch.full((2, 2), 4))
    assert model.calls() == [2, 2]
    assert cache.agree(RankGroup()) == 0
    assert not cache.is_on
    reason = "Sized takes image_sizes beside images."
    assert warnings == [f"--encoder_cache_gb has no effect on visual: {reason}"]


def test_the_reference_model_has_outputs_of_its_own() -> None:
    policy, reference = qwen(), qwen()
    [a] = images(WIDE)
    expected = see(reference, [a], [WIDE])
    cache = EncoderCache(1.0, policy, [reference])
    see(policy, [a], [WIDE])
    assert_equal(see(reference, [a], [WIDE]), expected)
    assert cache.agree(RankGroup()) == 2
