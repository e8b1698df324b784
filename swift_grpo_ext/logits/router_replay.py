"""Train a mixture of experts on the experts that its rollout chose (`--router_replay_mode R3`).

Rounding lets an engine and a training pass choose other experts for some tokens, and
log-probabilities at equal weights part by far more than rounding (docs/support.md). Replayed, each
token goes through the experts of the rollout; how much each counts is computed from the trainer's
own router, with its gradient (Rollout Routing Replay: arXiv 2510.11370).

vLLM returns the experts of a sample, and ms-swift carries them into the model's inputs as
`routed_experts`, where its templates drop them, or models hand them from layer to layer and nobody
reads them. Here the text model of a pass is given them among its arguments, and each layer takes
its own: recomputation for gradient checkpointing calls it with the same ones again.

Letters in names are shapes: B rows of a batch, T positions of a row, L layers, K experts of a
token, S = B x T tokens, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from swift.utils import get_logger
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.upstream.patches import Moment, patch, repair

if TYPE_CHECKING:
    from swift.rl_core.data import OnPolicySample
    from swift.template import Template

logger = get_logger()

INPUT = "routed_experts"
"""ms-swift's name of the experts among a model's inputs."""

NOT_GIVEN = -1
"""Stands in the place of a token's experts where the rollout gives none."""

CAPTURES = {"enable_return_routed_experts": True}
"""The setting of vLLM with which it returns experts (`--vllm_engine_kwargs`)."""


class RouterReplayError(RuntimeError):
    """A sample's experts are not there, or do not belong to its tokens."""


class RouterReplay:
    """Lets the routers of models choose what their inputs say.

    Args:
        models: of transformers, wrapped or not; all of one architecture.

    Raises:
        ValueError: a model has no router that can be told what to choose.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = [base_model(model) for model in models]
        self._given: Tensor | None = None
        """The pass that is running has these experts."""

        self._num_calls = 0
        """How often a router has been told, to see that layers are handed the experts at all."""

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
            parents = {model.get_submodule(name.rpartition(".layers.")[0]) for name in routers}
            for parent in parents:
                parent.register_forward_pre_hook(self._give, with_kwargs=True)
            # The experts come to a layer by the arguments of each call, and not by this object:
            # recomputation in the backward calls it again, long after the pass.
            for name, (layer, router) in routers.items():
                number, experts = int(name.rpartition(".")[2]), list[Tensor]()
                layer.register_forward_pre_hook(partial(_take, number, experts), with_kwargs=True)
                router.register_forward_hook(partial(self._choose, experts))

    @contextmanager
    def given(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Let a model's pass within the block replay the experts among its inputs, unless it is
        another model; give the other inputs.

        Raises:
            RouterReplayError: the model's layers were not handed the experts.
        """
        others = {name: value for name, value in inputs.items() if name != INPUT}
        base, num_calls = base_model(model), self._num_calls
        # A local teacher gets its inputs without them, and routes by itself.
        self._given = inputs.get(INPUT) if base in self._models else None
        is_given = self._given is not None
        try:
            yield others
        finally:
            self._given = None
        if is_given and self._num_calls == num_calls:
            raise RouterReplayError(
                f"--router_replay_mode R3: {type(base).__name__} does not hand its layers what its "
                "text model is given. Leave the flag out."
            )

    def _give(
        self, parent: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs if self._given is None else {**kwargs, INPUT: self._given}

    def _choose(
        self,
        experts: list[Tensor],
        router: nn.Module,
        args: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return a router's output with the experts that its layer was given."""
        if not experts:
            return None
        self._num_calls += 1
        logits_SE, weights_SK, own_SK = output
        given_SK = experts.pop().reshape(own_SK.shape).to(own_SK)
        is_given_S1 = given_SK[:, :1] != NOT_GIVEN  # all of a token's, or none
        chosen_SK = torch.where(is_given_S1, given_SK, own_SK)
        # As the router computes its own weights, with its gradient (`routers_of`).
        probs_SK = torch.softmax(logits_SE, dtype=torch.float32, dim=-1).gather(-1, chosen_SK)
        probs_SK = probs_SK / probs_SK.sum(dim=-1, keepdim=True)
        with torch.no_grad():
            # Sets are compared: the order of a token's experts means nothing. Counts stay on the
            # device, as to read them here would wait for it in each layer.
            equal_SK = (chosen_SK[:, :, None] == own_SK[:, None, :]).any(dim=-1)
            self._num_equal += (equal_SK & is_given_S1).sum()
            self._num_given += is_given_S1.sum() * chosen_SK.shape[-1]
        return logits_SE, probs_SK.to(weights_SK), chosen_SK

    def take_counts(self) -> tuple[float, float]:
        """Return how many of the replayed choices training would have made too, and how many there
        were, in this rank's passes since the last call."""
        counts = float(self._num_equal), float(self._num_given)
        self._num_equal = self._num_given = 0.0
        return counts


def replayed_share(counts: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the metric of all ranks' `take_counts`; none where nothing was replayed."""
    num_equal, num_given = map(sum, zip(*counts, strict=True))
    return {"router_replay/equal": num_equal / num_given} if num_given else {}


def routers_of(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return the layers that have a router, with it, by the name of the layer.

    Routers of transformers 5.19's `*TopKRouter` classes take the softmax of their logits, and make
    the chosen ones' probabilities sum to 1.
    """
    found = {}
    for name, layer in model.named_modules():
        router = getattr(getattr(layer, "mlp", None), "gate", None)
        if type(router).__name__.endswith("TopKRouter") and re.search(r"\.layers\.\d+$", name):
            found[name] = (layer, router)
    return found


def _take(
    number: int,
    experts: list[Tensor],
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the experts of a layer aside for its router."""
    experts.clear()
    if kwargs.get(INPUT) is not None:
        experts.append(kwargs[INPUT][:, :, number])
    return args, kwargs


def batch_experts(
    samples: Sequence[OnPolicySample], *, template: Template, device: torch.device, **_: Any
) -> Tensor:
    """Return the experts of a batch's tokens [B, T, L, K], each where its token stands; with
    padding-free, those of its one row.

    T is the longest sample's, not the length that ms-swift hands over: that is of completions here.

    Raises:
        RouterReplayError: a sample lacks experts, or has them for other tokens than it is trained
            on.
    """
    rows_experts = []
    for sample in samples:
        name, length = getattr(sample, "sample_id", "A sample"), int(sample.encoded["length"])
        if sample.routed_experts is None:
            raise RouterReplayError(
                f"--router_replay_mode R3: {name} came without its experts. With --vllm_mode "
                "server, start `swift rollout` with --vllm_engine_kwargs "
                "'{\"enable_return_routed_experts\": true}'."
            )
        # No model has more than 32,767 experts, and there are L x K of these for each token.
        experts = torch.as_tensor(sample.routed_experts).to(torch.int16)
        # vLLM computes nothing for the last token that it samples, and so has no experts for it.
        if len(experts) not in (length - 1, length):
            raise RouterReplayError(
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


def no_experts(samples: Sequence[OnPolicySample], **_: Any) -> None:
    """Leave experts out of a batch, and say once that they are not replayed."""
    if any(getattr(sample, INPUT, None) is not None for sample in samples):
        logger.warning_once(
            "vLLM returns the experts that it chose, and nothing in training reads them. "
            "--router_replay_mode R3 trains on them. (Said once.)",
            hash_id=INPUT,
        )


@repair(
    Moment.CALLED,
    symptom="Experts that vLLM returned are among the model's inputs, and change nothing, in "
    "silence; those of one sample missing, a batch's are dropped. With padding on the left, "
    "the experts of each token are those of the token before it.",
    upstream="ms-swift 4.6, rlhf_trainers/utils.py (`build_routed_experts_batch`): made for "
    "Megatron.",
    until="ms-swift's own trainer replays experts",
)
def batch_routed_experts(mode: str) -> None:
    """Have ms-swift make batches with experts where they are replayed, and without elsewhere."""
    from swift.rlhf_trainers import utils

    patch(utils, build_routed_experts_batch=batch_experts if mode == "R3" else no_experts)
