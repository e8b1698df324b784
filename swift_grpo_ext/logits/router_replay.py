"""Makes training use the experts that the rollout chose (`--router_replay_mode R3`).

Rounding makes engine and training choose different experts for some tokens, so that
log-probabilities at equal weights differ by more than rounding (docs/support.md). With replay, each
token uses the experts of the rollout. Their weights still come from the trainer's router, with its
gradient (Rollout Routing Replay: arXiv 2510.11370).

vLLM returns the experts of a sample, and ms-swift adds them to the model's inputs as
`routed_experts`, which no layer reads. Here the text model gets them as an argument, and each layer
takes its own. They are arguments so that gradient checkpointing recomputes a layer with them.

Letters in names are shapes: B rows of a batch, T positions of a row, L layers, K experts of a
token, S = B x T tokens, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.upstream.patches import patch

if TYPE_CHECKING:
    from swift.rl_core.data import OnPolicySample
    from swift.template import Template

INPUT = "routed_experts"  # ms-swift's name for this model input
NOT_GIVEN = -1  # marks a token without experts from the rollout
CAPTURES = {"enable_return_routed_experts": True}  # vLLM's setting (`--vllm_engine_kwargs`)


class RouterReplay:
    """Makes the routers of models of one architecture choose the experts in the inputs.

    Raises:
        ValueError: a model has no router that can be replayed.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = [base_model(model) for model in models]
        self._experts: Tensor | None = None  # the experts of the running pass
        self._num_calls = 0  # replayed router calls; a pass without any did not get the experts
        self._num_equal = self._num_given = 0.0
        for model in self._models:
            routers = routers_of(model)
            if not routers:
                raise ValueError(
                    f"--router_replay_mode R3: {type(model).__name__} has no router of the form "
                    "that can be replayed: a module `mlp.gate` of its layers, which returns the "
                    "logits, the weights and the numbers of each token's experts. Expected: a "
                    "mixture of experts such as Qwen3-VL-MoE. Leave the flag out."
                )
            for parent in {model.get_submodule(name.rpartition(".layers.")[0]) for name in routers}:
                parent.register_forward_pre_hook(self._pass_experts, with_kwargs=True)
            for name, (layer, router) in routers.items():
                self._replay(int(name.rpartition(".")[2]), layer, router)

    def _replay(self, number: int, layer: nn.Module, router: nn.Module) -> None:
        """Make a layer's router choose the experts in the layer's arguments."""
        experts = list[Tensor]()

        def take(_: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
            given = kwargs.get(INPUT)
            experts[:] = [] if given is None else [given[:, :, number]]

        def choose(_: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            return self._chosen(experts.pop(), *output) if experts else None

        layer.register_forward_pre_hook(take, with_kwargs=True)
        router.register_forward_hook(choose)

    @contextmanager
    def active(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Replay the experts in `inputs` in a pass within the block, and yield the other inputs.
        Raise `RuntimeError` if the model's layers did not get the experts."""
        others = {name: value for name, value in inputs.items() if name != INPUT}
        base, num_calls = base_model(model), self._num_calls
        # A teacher chooses its own experts.
        self._experts = inputs.get(INPUT) if base in self._models else None
        is_given = self._experts is not None
        try:
            yield others
        finally:
            self._experts = None
        if is_given and self._num_calls == num_calls:
            raise RuntimeError(
                f"--router_replay_mode R3: {type(base).__name__} does not pass `{INPUT}` on to its "
                "layers. Leave the flag out."
            )

    def _pass_experts(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self._experts is None else (args, {**kwargs, INPUT: self._experts})

    def _chosen(
        self, given: Tensor, logits_SE: Tensor, weights_SK: Tensor, own_SK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a router's output with the given experts [B, T, K]."""
        self._num_calls += 1
        given_SK = given.reshape(own_SK.shape).to(own_SK)
        is_given_S1 = given_SK[:, :1] != NOT_GIVEN  # a token has all its experts, or none
        chosen_SK = torch.where(is_given_S1, given_SK, own_SK)
        # The same computation as in the router, with its gradient (`routers_of`).
        probs_SK = torch.softmax(logits_SE, dtype=torch.float32, dim=-1).gather(-1, chosen_SK)
        probs_SK = probs_SK / probs_SK.sum(dim=-1, keepdim=True)
        with torch.no_grad():
            # A token's experts have no order. Counts stay on the device: reading them here would
            # synchronize in each layer.
            equal_SK = (chosen_SK[:, :, None] == own_SK[:, None, :]).any(dim=-1)
            self._num_equal += (equal_SK & is_given_S1).sum()
            self._num_given += is_given_S1.sum() * chosen_SK.shape[-1]
        return logits_SE, probs_SK.to(weights_SK), chosen_SK

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the passes within the block out of `take_counts`."""
        kept = self._num_equal, self._num_given
        try:
            yield
        finally:
            self._num_equal, self._num_given = kept

    def take_counts(self) -> tuple[float, float]:
        """Return how many replayed experts the trainer's router had chosen too, and how many were
        replayed, in this rank's passes since the last call."""
        counts = float(self._num_equal), float(self._num_given)
        self._num_equal = self._num_given = 0.0
        return counts


def replayed_share(counts: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the metric for the counts of all ranks; {} if nothing was replayed."""
    num_equal, num_given = map(sum, zip(*counts, strict=True))
    return {"router_replay/equal": num_equal / num_given} if num_given else {}


def routers_of(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return each layer with a router, and the router, by the layer's name. The `*TopKRouter`
    classes of transformers 5.19 take the softmax of their logits, and scale the probabilities of
    the chosen experts to a sum of 1."""
    found = {}
    for name, layer in model.named_modules():
        router = getattr(getattr(layer, "mlp", None), "gate", None)
        if type(router).__name__.endswith("TopKRouter") and re.search(r"\.layers\.\d+$", name):
            found[name] = (layer, router)
    return found


def batch_experts(
    samples: Sequence[OnPolicySample], *, template: Template, device: torch.device, **_: Any
) -> Tensor:
    """Return the experts of a batch's tokens: [B, T, L, K], padded to the longest sample; with
    padding-free [1, tokens, L, K].

    Raises:
        RuntimeError: a sample lacks experts, or has them for other tokens.
    """
    rows_experts = []
    for sample in samples:
        name, length = getattr(sample, "sample_id", "A sample"), int(sample.encoded["length"])
        if sample.routed_experts is None:
            raise RuntimeError(
                f"--router_replay_mode R3: {name} came without its experts. With --vllm_mode "
                "server, start `swift rollout` with --vllm_engine_kwargs "
                "'{\"enable_return_routed_experts\": true}'."
            )
        # int16 is enough for 32,767 experts, and saves memory: each token has L x K of them.
        experts = torch.as_tensor(sample.routed_experts).to(torch.int16)
        # vLLM has no experts for the last sampled token, which it does not compute.
        if len(experts) not in (length - 1, length):
            raise RuntimeError(
                f"--router_replay_mode R3: {name} has the experts of {len(experts)} tokens, and "
                f"{length} tokens in training."
            )
        padding = (0, 0, 0, 0, 0, length - len(experts))
        rows_experts.append(nn.functional.pad(experts, padding, value=NOT_GIVEN))
    if template.padding_free:
        return torch.cat(rows_experts)[None].to(device)
    side = template.padding_side
    rows = pad_sequence(rows_experts, batch_first=True, padding_value=NOT_GIVEN, padding_side=side)
    return rows.to(device)


def batch_routed_experts() -> None:
    """Have ms-swift build batches of experts by `batch_experts`.

    Symptom: if one sample lacks its experts, those of the whole batch are dropped silently. With
    padding on the left, each token gets the experts of the token before it (--router_replay_mode
    R3).
    Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`build_routed_experts_batch`): made for
    Megatron. Can go when ms-swift's own trainer replays experts.
    """
    from swift.rlhf_trainers import utils

    patch(utils, build_routed_experts_batch=batch_experts)
