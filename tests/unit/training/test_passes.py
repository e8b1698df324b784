"""Training leaves out the pass of the old policy where the loss's own pass has its weights; its
first rounds have a pass that measures rounding, which is off on GPUs (M7, R8)."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers import GRPOTrainer

from swift_grpo_ext.training import RolloutGRPOTrainer, trainer
from tests.rig.training.samples import arguments

LOGPS = torch.tensor([[-1.0, -2.0]], requires_grad=True)


class Host(RolloutGRPOTrainer):
    """The attributes of ms-swift's trainer that the passes read."""

    def __init__(self, *, steps: int = 2, sp: int = 1, training: bool = True, **own: Any) -> None:
        self.args = arguments(gradient_accumulation_steps=steps, steps_per_generation=2)
        self.template = SimpleNamespace(sequence_parallel_size=sp)
        self.model = SimpleNamespace(training=training)
        self._has_teacher_explicit = lambda: own.get("teacher", False)
        self.kl_in_reward, self.beta = own.get("kl_in_reward", False), own.get("beta", 0.0)
        self.use_liger_loss, self.ref_model = own.get("liger", False), None
        self.dynamic_num_samples = own.get("dynamic", False)


@pytest.mark.parametrize(
    ("settings", "views", "needs"),
    [
        ({}, False, False),
        ({"steps": 4}, False, False),  # two rounds for an update
        ({"beta": 0.04}, False, False),  # a reference does not need it
        ({"steps": 1}, False, True),  # two updates from a round
        ({"steps": 3}, False, True),
        ({"steps": 1, "training": False}, False, False),  # an evaluation updates nothing
        ({"steps": 4, "sp": 2}, False, False),
        ({"steps": 2, "sp": 2}, False, True),
        ({}, True, True),
        ({"teacher": True}, False, True),
        ({"kl_in_reward": True, "beta": 0.04}, False, True),
        ({"kl_in_reward": True}, False, False),
        ({"liger": True}, False, True),
        ({"dynamic": True}, False, True),
    ],
)
def test_which_rounds_need_the_old_policys_pass(
    settings: dict[str, Any], views: bool, needs: bool
) -> None:
    assert Host(**settings).needs_old_logps(has_views=views) is needs


def test_zero_3_makes_the_pass_for_a_reference_of_lora_without_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`disable_adapter` fails on weights that only the generation's inference mode has gathered."""
    monkeypatch.setattr(trainer, "is_deepspeed_zero3_enabled", lambda: True)
    host = Host(beta=0.04)
    assert not host.needs_old_logps()
    host.args.use_vllm = False
    assert host.needs_old_logps()
    host.ref_model = object()  # `disable_adapter` is not called
    assert not host.needs_old_logps()


def test_the_first_pass_of_a_batch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's pass is made. The loss's first pass gives the old policy's values, to which a
    second iteration compares."""
    made: list[Any] = []

    def compute(self: Any, model: Any, inputs: Any, batch: Any, *_: Any, **__: Any) -> Any:
        made.append(model)
        return LOGPS, None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", compute)
    host = Host()

    def pass_of(model: str, batch: Any) -> Any:
        return host._get_per_token_logps_and_entropies(model, {}, batch)[0]

    batches = [SimpleNamespace(old_per_token_logps=None) for _ in range(2)]
    host._skips_old_pass = True
    for batch in batches:
        assert pass_of("policy", batch) is None
        assert pass_of("reference", batch) is LOGPS
        assert batch.old_per_token_logps is None
    assert made == ["reference"] * 2
    host._skips_old_pass = False
    assert pass_of("policy", batches[0]) is LOGPS
    assert torch.equal(batches[0].old_per_token_logps, LOGPS)
    assert not batches[0].old_per_token_logps.requires_grad
    kept = SimpleNamespace(old_per_token_logps=-LOGPS)
    pass_of("policy", kept)
    assert torch.equal(kept.old_per_token_logps, -LOGPS)


@pytest.mark.parametrize(
    ("changes", "is_compared"),
    [
        ({}, True),
        ({"is_early": False}, False),
        ({"training": False}, False),  # an evaluation
        ({"bits": 8}, False),  # the noise has no steps of quantized numbers
        ({"top_p": 0.9}, False),  # sampling settings move log-probabilities
        ({"use_vllm": False}, False),
        ({"torch_compile": True}, False),  # compiled layers ignore the noise
        ({"layers": []}, False),  # the noise would reach the embeddings alone
        ({"gpu": True}, False),  # no GPU has run it
    ],
)
def test_early_rounds_have_a_pass_with_other_rounding(
    changes: dict[str, Any], is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(training=changes.get("training", True))
    host.least_bits = changes.get("bits", 16)
    host._gap_check = SimpleNamespace(is_early=changes.get("is_early", True))
    host.args = arguments(**{n: v for n, v in changes.items() if hasattr(host.args, n)})
    monkeypatch.setattr(trainer, "has_accelerator", lambda: changes.get("gpu", False))
    monkeypatch.setattr(trainer, "base_model", lambda model: model)
    monkeypatch.setattr(trainer, "named_layers", lambda _: changes.get("layers", [1]))
    for name in ("rounding_noise", "disable_gradient_checkpointing"):
        monkeypatch.setattr(trainer, name, lambda *_: nullcontext())
    single = "_get_per_token_logps_and_entropies_single"
    monkeypatch.setattr(Host, single, lambda _, model, inputs, batch: ((inputs, batch), None))
    batches = [{"model_inputs": number, "grpo_batch": -number} for number in range(3)]
    expected = [(0, 0), (1, -1), (2, -2)] if is_compared else []
    assert host._rounded_logps(batches) == expected
