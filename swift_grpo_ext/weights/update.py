"""What one engine was given in its last weight update, and what became of it.

    weights = EngineWeights(model_runner)
        weights.begin_watch()               before the first update, where it is looked at
        with weights.loading(): ...         whole weights, in any number of parts
        weights.end(is_whole=True)          once all parts have come
        with weights.adapter(): ...         an adapter over them, or alone
        weights.report()                    for the trainer, or for the server

A worker of a server (`receiver.py`) and the trainer with a colocated engine (`sync.py`) have one
each.

An engine has to generate with an adapter too that it was given (`--vllm_enable_lora`). Without this
module rollouts come from the base model, or from the adapter before, and nothing fails. A server
logs that vLLM refused an adapter (`--lora_rank 64` where the server allows 16, DoRA), and answers
200 (ms-swift 4.6, pipelines/infer/rollout.py, `llm_worker`). vLLM leaves out what no layer of its
own takes, such as adapters of a vision tower, without a word (vLLM 0.32, lora/model_manager.py,
`activate_adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers.utils import VLLM_LORA_INT_ID
from swift.utils import get_logger

from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.upstream.patches import replaced

if TYPE_CHECKING:
    from swift.rlhf_trainers.utils import TensorLoRARequest
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from swift_grpo_ext.weights.watch import WeightWatch

logger = get_logger()

Shapes = dict[str, str]
"""By each tensor's name its type and shape, such as `float32 (2, 3)`."""

MOST_NAMED = 5
MERGED = "--vllm_enable_lora on both sides: adapters are then merged into the engine's weights."
"""Ends a remedy that begins with "leave out"."""


class WeightUpdateError(RuntimeError):
    """An engine does not hold the weights of the trainer."""


@dataclass
class Update:
    """The state of one update of an engine."""

    loaded: Shapes = field(default_factory=dict)
    filled: set[str] | None = field(default_factory=set)
    """Names of the model's parameters that it says it filled; None where it does not say."""

    unfilled: list[str] = field(default_factory=list)
    has_ended: bool = False
    has_adapter: bool = False
    adapter_fault: str = ""
    base_faults: list[str] | None = None
    """What the watch has found in the whole weights; None where nothing is watched."""

    adapter_faults: list[str] = field(default_factory=list)

    def note(self, weights: list[tuple[str, torch.Tensor]], filled: set[str] | None) -> None:
        """Note what a model's `load_weights` took. Tensors with which it filled nothing are lost.

        Args:
            filled: what it returned. Some models' loaders return None.
        """
        if filled is None or filled:
            self.loaded |= shapes_of(weights)
        self.filled = None if filled is None or self.filled is None else self.filled | filled


class EngineWeights:
    """The weight updates of one worker's engine.

    Args:
        runner: vLLM's model runner.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner: Any = runner
        self._update: Update | None = None
        """The last one, until another begins."""

        self._watch: WeightWatch | None = None

    def begin_watch(self) -> None:
        """Look at what each update makes of the weights, from the first one on."""
        from swift_grpo_ext.weights.watch import WeightWatch  # needs vLLM, unlike a trainer

        if self._watch is None and self._update is None:
            runner = self._runner
            with self._looking():
                is_random = runner.load_config.load_format == "dummy"
                self._watch = WeightWatch(runner.model, runner.model_config, is_random=is_random)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Record what the model's `load_weights` takes in the block."""
        # An update arrives in many calls; the first one after the end of the last begins another.
        if self._update is None or self._update.has_ended:
            self._update = Update()
        update, model = self._update, self._runner.model
        load = model.load_weights

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
            held = list(weights)  # an iterator is read once
            if self._watch is not None:
                with self._looking():
                    self._watch.note_arrived(held)
            filled = load(held, *args, **kw)
            update.note(held, filled)
            return filled

        with replaced(model, "load_weights", load_weights):
            yield

    def end(self, *, is_whole: bool) -> None:
        """Judge the update, once all of it has come.

        Args:
            is_whole: whether the client has said so. Some clients never do.
        """
        update = self._update
        if update is None or (update.has_ended and not is_whole):
            return
        update.has_ended = True
        if is_whole:
            update.unfilled = self._unfilled(update)
        if self._watch is not None:
            with self._looking():
                faults = self._watch.check_weights(self._runner.model, update.unfilled)
                update.base_faults = list(faults)

    def _unfilled(self, update: Update) -> list[str]:
        """Return the model's parameters that an update of all weights has left as they were, as
        vLLM itself looks for them when it loads from disk."""
        # A quantized model has parameters of its own.
        if update.filled is None or self._runner.model_config.quantization is not None:
            return []
        filled = {plain_name(name) for name in update.filled}
        return sorted({plain_name(n) for n, _ in self._runner.model.named_parameters()} - filled)

    @contextmanager
    def adapter(self) -> Iterator[None]:
        """Record an adapter, with the whole weights that it follows, or alone.

        Raises:
            WeightUpdateError: the engine does not use it, or not all of it.
        """
        # The first adapter follows the base weights within one update, and the trainer compares
        # both; each later one is an update of its own.
        self.end(is_whole=False)
        update = self._update
        if update is None or update.has_adapter:
            known = ([] if self._watch else None) if update is None else update.base_faults
            update = Update(filled=None, has_ended=True, base_faults=known)
        self._update, update.has_adapter = update, True
        manager = getattr(self._runner, "lora_manager", None)  # none where adapters are off

        def add_adapter(request: TensorLoRARequest) -> bool:
            return add_whole_adapter(manager, request, update)

        try:
            with replaced(manager, "add_adapter", add_adapter) if manager else nullcontext():
                yield
        except Exception as e:
            update.adapter_fault = str(e)
            raise
        if self._watch is not None and manager is not None:
            with self._looking():
                held = manager._adapter_manager.get_adapter(VLLM_LORA_INT_ID)
                update.adapter_faults = list(self._watch.check_adapter(held.loras))

    def report(self) -> WeightReport:
        """Return what is known of the last update, whoever its client is."""
        self.end(is_whole=False)
        update = self._update or Update()
        is_watched = self._watch is not None and update.base_faults is not None
        faults = [*(update.base_faults or ()), *update.adapter_faults] if is_watched else None
        return WeightReport(update.loaded, update.unfilled, update.adapter_fault, faults)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Log a failure of the watch, which ends then: to look at weights must not end a run."""
        try:
            yield
        except Exception:
            self._watch = None
            logger.exception("The watch over weights has failed: further updates go unwatched.")


def add_whole_adapter(manager: Any, request: TensorLoRARequest, update: Update) -> bool:
    """Give a LoRA manager of vLLM an adapter, and note it.

    Raises:
        WeightUpdateError: the engine does not use it, or not all of it.
    """
    # A copy, since vLLM scales matrices on CPU where they lie, which in a colocated engine is the
    # trainer's own memory.
    request.lora_tensors = {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor
        for name, tensor in request.lora_tensors.items()
    }
    update.loaded |= shapes_of(request.lora_tensors.items())
    # The class's own: `EngineWeights.adapter` has replaced the object's.
    try:
        added = bool(type(manager).add_adapter(manager, request))
    except Exception as e:
        raise WeightUpdateError(
            f"vLLM refuses the adapter: {e} Give `swift rollout` a --vllm_max_lora_rank that "
            f"is at least the adapter's rank, train with plain LoRA, or leave out {MERGED}"
        ) from e
    layers = manager._adapter_manager
    held = layers.get_adapter(request.lora_int_id)
    if held is None or request.lora_int_id not in layers.lora_index_to_id:
        raise WeightUpdateError(f"vLLM holds no adapter after it was given one. Leave out {MERGED}")
    # `base_layer`: the first of two matrices of experts that lie in one tensor.
    ignored = sorted(
        name for name in held.loras if name.removesuffix(".base_layer") not in layers.modules
    )
    if ignored:
        raise WeightUpdateError(
            "vLLM has no place for parts of the adapter: it ignores those of "
            f"{len(ignored)} modules ({first_names(ignored)}). Train none there (--freeze_vit "
            "true and --freeze_aligner true for the tower of a model that sees, "
            f"--target_modules for others), or leave out {MERGED}"
        )
    return added


def shapes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Shapes:
    """Return type and shape of each tensor by its plain name."""
    return {
        plain_name(name): f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors
    }


def plain_name(name: str) -> str:
    """Return a weight's name without `base_layer`, which says that adapters lie over it: ms-swift
    adds or drops that on the way to an engine which holds adapters apart (`--vllm_enable_lora`). An
    adapter's own name stays, in which it tells two matrices of experts apart."""
    return name if ".lora_" in name else name.replace(".base_layer.", ".")


def compare(sent: Mapping[str, str], report: WeightReport, engine_name: str) -> None:
    """Raise `WeightUpdateError`, naming tensors, where an engine was given something else.

    Args:
        sent: the trainer's tensors.
    """
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
    wrong = [
        f"{len(names)} {what} ({first_names(names)})" for what, names in faults.items() if names
    ]
    if wrong:
        raise WeightUpdateError(
            f"{engine_name} does not hold the trainer's weights: of {len(sent)} tensors "
            f"{'; '.join(wrong)}. Rollouts would come from another policy. The engine's log "
            "tells why; restart it and resume from the last checkpoint."
        )


def first_names(names: Sequence[str]) -> str:
    """Spell the first names of a list that may be long."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
