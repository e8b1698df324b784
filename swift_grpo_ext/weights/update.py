"""Records an engine's last weight update: the arrived tensors, and the loaded ones.

    weights = EngineWeights(model_runner)
        weights.begin_watch()               optional, before the first update
        with weights.loading(): ...         whole weights, in any number of parts
        weights.end(is_whole=True)          after the last part
        with weights.adapter(): ...         an adapter, with or without new base weights
        weights.report()                    for the trainer or the server

Each worker of a server (`receiver.py`) and a trainer with a colocated engine (`sync.py`) has one.

Symptom: with `--vllm_enable_lora`, rollouts come from the base model or from an older adapter, and
nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers.utils import VLLM_LORA_INT_ID
from swift.utils import get_logger

from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.upstream.patches import wrapped

if TYPE_CHECKING:
    from swift.rlhf_trainers.utils import TensorLoRARequest
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from swift_grpo_ext.weights.watch import WeightWatch

logger = get_logger()

Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = dict[str, str]
"""Maps a tensor's name to its type and shape, such as `float32 (2, 3)`."""

MOST_NAMED = 5
MERGED = "or leave out --vllm_enable_lora on both sides: adapters are then merged into the weights."


class WeightUpdateError(RuntimeError):
    """An engine does not have the trainer's weights."""


@dataclass
class Update:
    """The state of one update of an engine."""

    loaded: Shapes = field(default_factory=dict)
    filled: set[str] | None = field(default_factory=set)  # parameters; None if unknown
    unfilled: list[str] = field(default_factory=list)  # parameters that were not loaded
    has_ended: bool = False
    has_adapter: bool = False
    adapter_fault: str = ""  # why vLLM does not use the adapter
    watched_faults: tuple[str, ...] = ()  # the watch's findings about the adapter


class EngineWeights:
    """Records the weight updates of one worker's model runner."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner: Any = runner
        self._update: Update | None = None  # the current or last update
        self._watch: WeightWatch | None = None
        self._base_faults: tuple[str, ...] = ()  # the watch's findings about the last whole weights

    def begin_watch(self) -> None:
        """Start the watch over weights; has no effect after the first update."""
        from swift_grpo_ext.weights.watch import WeightWatch  # needs vLLM, unlike a trainer

        if self._watch is None and self._update is None:
            runner = self._runner
            with self._watching():
                is_random = runner.load_config.load_format == "dummy"
                self._watch = WeightWatch(runner.model, runner.model_config, is_random=is_random)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Record the tensors that the model's `load_weights` loads in the block."""
        # An update takes many calls; the first call after `end` begins another update.
        if self._update is None or self._update.has_ended:
            self._update = Update()
        update = self._update

        def load_weights(
            load: Callable[[Weights], set[str] | None], weights: Weights
        ) -> set[str] | None:
            held = list(weights)  # an iterator can be read only once
            if self._watch is not None:
                with self._watching():
                    self._watch.record_arrived(held)
            filled = load(held)
            if filled is None or update.filled is None:
                update.filled = None
            else:
                update.filled |= filled
            if filled is None or filled:  # else the model has ignored the tensors
                update.loaded |= shapes_of(held)
            return filled

        with wrapped(self._runner.model, "load_weights", load_weights):
            yield

    def end(self, *, is_whole: bool) -> None:
        """Check the update after its last part. `is_whole`: the client has announced the end."""
        # Some clients never announce it: `report` and `adapter` end their updates.
        update, runner = self._update, self._runner
        if update is None or (update.has_ended and not is_whole):
            return
        update.has_ended = True
        # The same check as in vLLM's loader; a quantized model has additional parameters.
        if is_whole and update.filled is not None and runner.model_config.quantization is None:
            names = {plain_name(name) for name, _ in runner.model.named_parameters()}
            update.unfilled = sorted(names - {plain_name(name) for name in update.filled})
        if self._watch is not None:
            with self._watching():
                self._base_faults = self._watch.check_weights(runner.model, update.unfilled)

    @contextmanager
    def adapter(self) -> Iterator[None]:
        """Record an adapter; raise `WeightUpdateError` if the engine does not use all of it."""
        # The first adapter belongs to the update of its base; each later one is another update.
        self.end(is_whole=False)
        if self._update is None or self._update.has_adapter:
            self._update = Update(filled=None, has_ended=True)
        update = self._update
        update.has_adapter = True
        manager = getattr(self._runner, "lora_manager", None)  # None if adapters are off
        add = partial(add_whole_adapter, manager, update)
        try:
            with wrapped(manager, "add_adapter", add) if manager else nullcontext():
                yield
        except Exception as e:
            # For the report: a server only logs that vLLM rejected an adapter, and answers 200
            # (ms-swift 4.6, pipelines/infer/rollout.py, `llm_worker`).
            update.adapter_fault = str(e)
            raise
        if self._watch is not None and manager is not None:
            with self._watching():
                held = manager._adapter_manager.get_adapter(VLLM_LORA_INT_ID)
                update.watched_faults = self._watch.check_adapter(held.loras)

    def report(self) -> WeightReport:
        """Return the report of the last update."""
        self.end(is_whole=False)
        update = self._update
        if update is None:
            return WeightReport()
        faults = None if self._watch is None else [*self._base_faults, *update.watched_faults]
        return WeightReport(update.loaded, update.unfilled, update.adapter_fault, faults)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Switch the watch off if it raises: its own bugs must not end the run."""
        try:
            yield
        except Exception:
            self._watch = None
            logger.exception("The watch over weights has failed: further updates go unwatched.")


def add_whole_adapter(
    manager: Any, update: Update, add: Callable[..., bool], request: TensorLoRARequest
) -> bool:
    """Add an adapter with `add` of vLLM's LoRA manager, and record it in `update`."""
    # A copy: on CPU, vLLM scales matrices in place, possibly in the trainer's own memory.
    request.lora_tensors = {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor
        for name, tensor in request.lora_tensors.items()
    }
    update.loaded |= shapes_of(request.lora_tensors.items())
    try:
        added = add(request)
    except Exception as e:
        raise WeightUpdateError(
            f"vLLM refuses the adapter: {e} Give `swift rollout` a --vllm_max_lora_rank that "
            f"is at least the adapter's rank, train with plain LoRA, {MERGED}"
        ) from e
    layers = manager._adapter_manager
    loras = layers.get_adapter(request.lora_int_id).loras
    # vLLM ignores parts for which it has no layer, such as a vision tower's (0.32,
    # lora/model_manager.py, `activate_adapter`). `base_layer` names the first of two expert
    # matrices in one tensor.
    ignored = sorted(n for n in loras if n.removesuffix(".base_layer") not in layers.modules)
    if ignored:
        raise WeightUpdateError(
            f"vLLM ignores the adapter's parts for {len(ignored)} modules ({shorten(ignored)}). "
            "Train no adapters there (--freeze_vit true and --freeze_aligner true for a vision "
            f"tower, --target_modules for others), {MERGED}"
        )
    return added


def shapes_of(tensors: Weights) -> Shapes:
    """Return the type and shape of each tensor, by its plain name."""
    return {
        plain_name(name): f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors
    }


def plain_name(name: str) -> str:
    """Return a weight's name without `base_layer`; adapters keep it."""
    # ms-swift adds or drops it with `--vllm_enable_lora`. In an adapter, it distinguishes two
    # matrices of experts.
    return name if ".lora_" in name else name.replace(".base_layer.", ".")


def compare(sent: Mapping[str, str], report: WeightReport, engine_name: str) -> None:
    """Raise `WeightUpdateError` if an engine's tensors differ from the `sent` ones."""
    if report.adapter_fault:
        raise WeightUpdateError(
            f"{engine_name} does not generate with the trainer's adapter. {report.adapter_fault}"
        )
    loaded = report.loaded
    faults = {
        "of its parameters were left as they were": report.unfilled,
        "did not arrive": [name for name in sent if name not in loaded],
        "have another type or shape": [n for n in sent if loaded.get(n, sent[n]) != sent[n]],
    }
    wrong = [f"{len(names)} {fault} ({shorten(names)})" for fault, names in faults.items() if names]
    if wrong:
        raise WeightUpdateError(
            f"{engine_name} does not hold the trainer's weights after an update of {len(sent)} "
            f"tensors: {'; '.join(wrong)}. Rollouts would come from another policy. The engine's "
            "log has the cause; restart it and resume from the last checkpoint."
        )


def shorten(names: Sequence[str]) -> str:
    """Join names, and leave out all but the first few."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
