"""With `--router_replay_mode R3` a training pass uses the given experts, also in recomputed layers
[L7]."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swift_grpo_ext.logits.router_replay import (
    NOT_GIVEN,
    RouterReplay,
    batch_experts,
    replayed_share,
    routers_of,
)
from tests.rig.logits.batch import Batch
from tests.rig.logits.compare import assert_close, values_and_gradients
from tests.rig.logits.models import build

ROWS = ((4, 3), (2, 3))


def some_experts(seed: int, batch: Batch) -> Tensor:
    """Return random experts for each token of a batch except the last of each row."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch.inputs["attention_mask"]
    shape = (*mask.shape, 3, 8)  # layers and experts
    experts = torch.rand(shape, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    followed = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    experts[followed == 0] = NOT_GIVEN
    return experts


def forced(model: Any, batch: Batch, experts: Tensor) -> Tensor:
    """Return the logits of a model with hooks that make its routers choose the experts."""
    handles = []
    for name, (_, router) in routers_of(model).items():
        number = int(name.rpartition(".")[2])

        def prefer(_: Any, args: Any, output: Any, chosen: Tensor = experts[:, :, number]) -> Any:
            logits, _, own = output
            chosen = chosen.reshape(own.shape).long()
            wanted = torch.where(chosen < 0, own, chosen)
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, wanted, value=True)
            probs = logits.masked_fill(~kept, float("-inf")).softmax(-1)
            return logits, probs.gather(1, wanted), wanted

        handles.append(router.register_forward_hook(prefer))
    logits: Tensor = model(**batch.inputs).logits
    for handle in handles:
        handle.remove()
    return logits


def replayed(replay: RouterReplay, model: Any, batch: Batch, experts: Tensor | None) -> Tensor:
    """Return the logits of a pass that replays the experts."""
    with replay.active(model, {**batch.inputs, "routed_experts": experts}) as inputs:
        assert "routed_experts" not in inputs
        logits: Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_given_experts_are_used(is_recomputed: bool) -> None:
    """The backward of two passes follows both forwards."""
    model, batch = build("Qwen3-MoE"), Batch(ROWS)
    experts = [some_experts(seed, batch) for seed in (1, 2)]
    expected = values_and_gradients(
        model, lambda: torch.cat([forced(model, batch, each) for each in experts])
    )
    plain = model(**batch.inputs).logits
    assert (plain - expected[0][:2]).abs().max() > 0.1
    assert list(routers_of(model)) == ["model.layers.0", "model.layers.2"]
    replay = RouterReplay(model)
    if is_recomputed:
        model.gradient_checkpointing_enable()
    found = values_and_gradients(
        model, lambda: torch.cat([replayed(replay, model, batch, each) for each in experts])
    )
    assert_close(found, expected)
    assert torch.equal(model(**batch.inputs).logits, plain)  # a pass of its own


def test_the_share_of_experts_that_the_trainers_router_had_chosen_too() -> None:
    model, batch = build("Qwen3-MoE"), Batch(ROWS)
    experts = some_experts(1, batch)
    plain = model(**batch.inputs).logits
    replay = RouterReplay(model)
    assert torch.equal(replayed(replay, model, batch, None), plain)
    assert replay.take_counts() == (0, 0)  # nothing was replayed
    replayed(replay, model, batch, experts)
    num_equal, num_given = replay.take_counts()
    assert 0 < num_equal < num_given == 2 * 2 * (6 + 4)  # layers, experts, tokens
    other_rank = (0.0, num_given)
    share = replayed_share([(num_equal, num_given), other_rank])["router_replay/equal"]
    assert share == num_equal / num_given / 2
    assert replay.take_counts() == (0, 0)
    assert replayed_share([(0, 0)] * 2) == {}
    given_none = torch.full_like(experts, NOT_GIVEN)
    assert torch.equal(replayed(replay, model, batch, given_none), plain)


def test_other_models_get_no_experts() -> None:
    model, other, batch = build("Qwen3-MoE"), build("Qwen3-MoE"), Batch(ROWS)
    replay, experts = RouterReplay(model), some_experts(1, batch)
    plain = other(**batch.inputs).logits
    assert torch.equal(replayed(replay, other, batch, experts), plain)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM has no router .* Leave the flag out"):
        RouterReplay(model, build("Qwen2"))
    with (
        pytest.raises(RuntimeError, match=r"Qwen3MoeForCausalLM does not pass `routed_experts`"),
        replay.active(model, {"routed_experts": experts}),
    ):
        model.get_input_embeddings()(batch.inputs["input_ids"])  # a pass that asks no layer


# --- batches ---


def sample(length: int, experts: np.ndarray | None) -> SimpleNamespace:
    return SimpleNamespace(sample_id="train-0", encoded={"length": length}, routed_experts=experts)


def rows(*numbers: int) -> np.ndarray:
    """Return experts of one layer, each the number of its token."""
    return np.array(numbers, np.uint8)[:, None, None]


def batch(samples: list[Any], **template: Any) -> list[list[int]]:
    settings = SimpleNamespace(**{"padding_free": False, "padding_side": "right", **template})
    made = batch_experts(samples, template=settings, device=torch.device("cpu"), max_seq_len=1)
    assert made.shape[2:] == (1, 1)
    values: list[list[int]] = made[:, :, 0, 0].tolist()
    return values


def test_experts_stand_where_their_tokens_do() -> None:
    """A rollout chooses no experts for a sample's last token."""
    samples = [sample(3, rows(1, 2)), sample(5, rows(1, 2, 3, 4, 5))]
    assert batch(samples) == [[1, 2, -1, -1, -1], [1, 2, 3, 4, 5]]
    assert batch(samples, padding_side="left") == [[-1, -1, 1, 2, -1], [1, 2, 3, 4, 5]]
    assert batch(samples, padding_free=True) == [[1, 2, -1, 1, 2, 3, 4, 5]]
    with pytest.raises(RuntimeError, match=r"train-0 has the experts of 2 tokens, and 5 to"):
        batch([sample(5, rows(1, 2))])
    with pytest.raises(RuntimeError, match=r"train-0 came without its experts\. .*swift rol"):
        batch([sample(5, None)])
