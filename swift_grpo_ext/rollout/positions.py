"""Where the tokens of a prompt stand for vLLM's model: in time, height and width, with media.

Two models that are given the same tokens may place them otherwise, in silence: transformers 5.19
went on behind a long video at a smaller number than vLLM did. So an engine's answer says where a
prompt's tokens stood, and training compares (`training/batch.py`, docs/promises.md, M3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from swift.utils import get_logger
from torch import nn

from swift_grpo_ext.upstream.patches import Moment, patch, repair

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

logger = get_logger()
Positions = NDArray[np.int32]
"""[3, tokens]: in time, height and width."""

MAX_WAITING = 2**12
"""Prompts of which positions are kept until their answers are there; those that were aborted are
never asked for."""


class PositionCounter:
    """Counts positions as a model of vLLM does, with its configuration and without its weights.

    `get_mrope_input_positions` reads nothing else (vLLM 0.32, model_executor/models).
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model: Any = None
        prunes = getattr(config.multimodal_config, "video_pruning_rate", None)
        if config.uses_mrope and not prunes:  # pruning places tokens later
            from vllm.model_executor.model_loader.utils import get_model_cls

            model_class = get_model_cls(config)
            self._model = model_class.__new__(model_class)
            nn.Module.__init__(self._model)  # lets attributes be set
            # Qwen-Omni's model of texts and media is its "thinker".
            self._model.config = getattr(config.hf_config, "thinker_config", config.hf_config)

    @property
    def counts(self) -> bool:
        """Whether the model places tokens in more than one dimension."""
        return self._model is not None

    def positions(
        self, token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]
    ) -> Positions | None:
        """Return the positions of a prompt's tokens.

        It is None for a model that counts tokens one by one, and where the processor of vLLM's
        frontend knows a medium from an earlier request and holds no more of it than its name.
        """
        if not self.counts or any(feature.data is None for feature in features):
            return None
        counted, _ = self._model.get_mrope_input_positions(list(token_ids), list(features))
        return np.asarray(counted, dtype=np.int32)


kept_positions = LRUCache[str, Positions](MAX_WAITING)
"""Positions by the requests' ids."""


@repair(
    Moment.ENGINE,
    symptom="Rollout and training place the same tokens otherwise, in silence.",
    upstream="vLLM 0.32, v1/engine/input_processor.py (`process_inputs`): no answer says "
    "where a prompt's tokens stood.",
    until="a request's output has its positions",
    optional=True,
)
def keep_positions() -> None:
    """Have vLLM's frontend count the positions of each prompt with media, and keep them."""
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    counters = WeakKeyDictionary[InputProcessor, PositionCounter]()

    @wraps(process)
    def process_inputs(
        self: InputProcessor, request_id: str, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        request = process(self, request_id, *args, **kwargs)
        if request.mm_features and request.prompt_token_ids:
            try:
                if self not in counters:
                    counters[self] = PositionCounter(self.model_config)
                found = counters[self].positions(request.prompt_token_ids, request.mm_features)
                if found is not None:
                    kept_positions[request_id] = found
            except Exception as e:  # of a model that reads more than its configuration
                logger.warning_once(
                    "Positions of prompts in rollout and training are not compared: vLLM's model "
                    f"does not count them without its weights ({type(e).__name__}: {e}).",
                    hash_id="positions",
                )
        return request

    patch(InputProcessor, process_inputs=process_inputs)
