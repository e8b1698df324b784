"""With `--router_replay_mode R3` a training pass uses the given experts, also in recomputed layers
[L7]."""

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
from tests.rig.logits.batch import Batch, assert_close, values_and_gradients
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
    """The backward of two passes follows both forwards. Tokens without given experts choose their
    own; experts that the router had chosen too are counted."""
    model, batch = build("Qwen3-MoE"), Batch(ROWS)
    experts = [some_experts(seed, batch) for seed in (1, 2)]
    expected = values_and_gradients(
        model, lambda: torch.cat([forced(model, batch, each) for each in experts])
    )
    plain = model(**batch.inputs).logits
    assert (plain - expected[0][:2]).abs().max() > 0.1
    assert list(routers_of(model)) == ["model.layers.0", "model.layers.2"]
    replay = RouterReplay(model)
    assert torch.equal(replayed(replay, model, batch, None), plain)
    assert replay.take_counts() == (0, 0)
    if is_recomputed:
        model.gradient_checkpointing_enable()
    found = values_and_gradients(
        model, lambda: torch.cat([replayed(replay, model, batch, each) for each in experts])
    )
    assert_close(found, expected)
    assert torch.equal(model(**batch.inputs).logits, plain)  # a pass of its own
    replay.take_counts()
    with torch.no_grad():
        replayed(replay, model, batch, experts[0])
    num_equal, num_given = replay.take_counts()
    assert 0 < num_equal < num_given == 2 * 2 * (6 + 4)  # layers, experts, tokens
    assert replay.take_counts() == (0, 0)


def test_the_share_of_equal_experts_is_that_of_all_ranks() -> None:
    assert replayed_share([(3.0, 8.0), (0.0, 8.0)]) == {"router_replay/equal": 3 / 16}
    assert replayed_share([(0, 0)] * 2) == {}


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


def batch(*samples: tuple[int, list[int] | None], **template: Any) -> list[list[int]]:
    """Return the experts of samples with these lengths and experts, in a model of one layer."""
    settings = SimpleNamespace(**{"padding_free": False, "padding_side": "right", **template})
    rows = [
        SimpleNamespace(
            sample_id="train-0",
            encoded={"length": length},
            routed_experts=None if own is None else np.array(own, np.uint8)[:, None, None],
        )
        for length, own in samples
    ]
    made = batch_experts(rows, template=settings, device=torch.device("cpu"), max_seq_len=1)
    return made.squeeze((2, 3)).tolist()


def test_experts_stand_where_their_tokens_do() -> None:
    """A rollout chooses no experts for a sample's last token."""
    samples = (3, [1, 2]), (5, [1, 2, 3, 4, 5])
    assert batch(*samples) == [[1, 2, -1, -1, -1], [1, 2, 3, 4, 5]]
    assert batch(*samples, padding_side="left") == [[-1, -1, 1, 2, -1], [1, 2, 3, 4, 5]]
    assert batch(*samples, padding_free=True) == [[1, 2, -1, 1, 2, 3, 4, 5]]
    with pytest.raises(RuntimeError, match=r"train-0 has the experts of 2 tokens, and 5 to"):
        batch((5, [1, 2]))
    with pytest.raises(RuntimeError, match=r"train-0 came without its experts\. .*swift rol"):
        batch((5, None))
