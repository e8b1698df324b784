"""A training pass uses the given experts, with gradient checkpointing and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from swift_grpo_ext.logits.router_replay import (
    NOT_GIVEN,
    RouterReplay,
    batch_experts,
    replayed_share,
    routers_of,
)

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
}
E, K = 8, 2


def make_model() -> Qwen3MoeForCausalLM:
    """Return a mixture of experts whose second layer is dense."""
    torch.manual_seed(0)
    experts = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True, mlp_only_layers=[1])
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def some_ids(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of 7 and 5 tokens, and its attention mask."""
    ids = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[1, 5:] = mask[1, 5:] = 0
    return ids, mask


def some_experts(seed: int, mask: torch.Tensor) -> torch.Tensor:
    """Return random experts for each token of a batch except the last of each row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*mask.shape, SIZES["num_hidden_layers"], E)
    experts = torch.rand(shape, generator=generator).argsort(-1)[..., :K].to(torch.int16)
    followed = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    experts[followed == 0] = NOT_GIVEN
    return experts


def forced(
    model: Qwen3MoeForCausalLM, batch: tuple[torch.Tensor, torch.Tensor], experts: torch.Tensor
) -> torch.Tensor:
    """Return the logits of a model with hooks that make its routers choose the experts."""
    handles = []
    for name, (_, router) in routers_of(model).items():
        number = int(name.rpartition(".")[2])

        def prefer(
            _: Any, args: Any, output: Any, chosen: torch.Tensor = experts[:, :, number]
        ) -> Any:
            logits, _, own = output
            chosen = chosen.reshape(-1, K).long()
            wanted = torch.where(chosen < 0, own, chosen)
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, wanted, value=True)
            probs = logits.masked_fill(~kept, float("-inf")).softmax(-1)
            return logits, probs.gather(1, wanted), wanted

        handles.append(router.register_forward_hook(prefer))
    logits: torch.Tensor = model(*batch).logits
    for handle in handles:
        handle.remove()
    return logits


def test_the_given_experts_are_used() -> None:
    model, ids = make_model(), some_ids()
    experts = some_experts(1, ids[1])
    plain, expected = model(*ids).logits, forced(model, ids, experts)
    assert (plain - expected).abs().max() > 0.1
    assert list(routers_of(model)) == ["model.layers.0", "model.layers.2"]
    replay = RouterReplay(model)
    assert torch.equal(logits_of(replay, model, ids, None), plain)
    assert replay.take_counts() == (0, 0)  # nothing was replayed
    assert torch.allclose(logits_of(replay, model, ids, experts), expected, atol=1e-5)
    num_equal, num_given = replay.take_counts()
    assert 0 < num_equal < num_given
    other_rank = (0.0, num_given)
    share = replayed_share([(num_equal, num_given), other_rank])["router_replay/equal"]
    assert share == num_equal / num_given / 2
    assert replay.take_counts() == (0, 0)
    assert replayed_share([(0, 0)] * 2) == {}
    given_all = torch.full_like(experts, NOT_GIVEN)
    assert torch.equal(logits_of(replay, model, ids, given_all), plain)
    assert torch.equal(model(*ids).logits, plain)  # a pass of its own


def logits_of(
    replay: RouterReplay,
    model: Qwen3MoeForCausalLM,
    ids: tuple[torch.Tensor, torch.Tensor],
    experts: torch.Tensor | None,
) -> torch.Tensor:
    batch = {"input_ids": ids[0], "attention_mask": ids[1], "routed_experts": experts}
    with replay.active(model, batch) as inputs:
        assert "routed_experts" not in inputs
        logits: torch.Tensor = model(**inputs).logits
    return logits


def test_gradients_are_those_of_the_given_experts() -> None:
    """The backward passes of two batches follow both forwards, and recompute layers."""
    gradients = []
    for checkpoints in (False, True):
        model = make_model().train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        replay, losses = RouterReplay(model), []
        for seed in (1, 2):
            ids, mask = some_ids(seed)
            logits = logits_of(replay, model, (ids, mask), some_experts(seed, mask))
            losses.append(logits[mask.bool()].square().mean())
        sum(losses).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert torch.allclose(gradient, recomputed[name], atol=1e-6), name
    assert plain["model.layers.0.mlp.gate.weight"].abs().max() > 0


def test_other_models_get_no_experts() -> None:
    model, other, ids = make_model(), make_model(), some_ids()
    replay = RouterReplay(model)
    plain = other(*ids).logits
    assert torch.equal(logits_of(replay, other, ids, some_experts(1, ids[1])), plain)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no router .* Leave the flag out"):
        RouterReplay(model, Qwen3ForCausalLM(Qwen3Config(**SIZES)))
    with (
        pytest.raises(RuntimeError, match=r"Qwen3MoeForCausalLM does not pass `routed_experts`"),
        replay.active(model, {"routed_experts": some_experts(1, ids[1])}),
    ):
        model.get_input_embeddings()(ids[0])  # a pass that asks no layer


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
