"""Positions of a prompt's tokens in vLLM's model: in time, height and width, with media.

Two models may place the same tokens otherwise, in silence: behind a long video transformers 5.19
went on at a smaller number than vLLM did. Training compares the engine's positions with its own
(`training/batch.py`, docs/promises.md, M3).
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
Positions = NDArray[np.int32]  # [3, tokens]: in time, height and width


def position_model(config: ModelConfig) -> Any:
    """Return a model of vLLM without weights, which counts positions by its configuration; None for
    one that places tokens in one dimension."""
    prunes = getattr(config.multimodal_config, "video_pruning_rate", None)
    if not config.uses_mrope or prunes:  # pruning places tokens later
        return None
    from vllm.model_executor.model_loader.utils import get_model_cls

    model_class = get_model_cls(config)
    model: Any = model_class.__new__(model_class)
    nn.Module.__init__(model)  # lets attributes be set
    # `get_mrope_input_positions` reads the configuration alone (vLLM 0.32, model_executor/models).
    # Qwen-Omni's model of texts and media is its "thinker".
    model.config = getattr(config.hf_config, "thinker_config", config.hf_config)
    return model


def positions_in(
    model: Any, token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]
) -> Positions | None:
    """Return the positions of a prompt's tokens; None without a model, and where vLLM's frontend
    holds only a medium's name, from an earlier request."""
    if model is None or any(feature.data is None for feature in features):
        return None
    counted, _ = model.get_mrope_input_positions(list(token_ids), list(features))
    return np.asarray(counted, dtype=np.int32)


# By the requests' ids, until their answers are there; those of aborted requests stay.
kept_positions = LRUCache[str, Positions](maxsize=2**12)


@repair(
    Moment.ENGINE,
    symptom="Rollout and training place the same tokens otherwise, in silence.",
    upstream="vLLM 0.32, v1/engine/input_processor.py (`process_inputs`): no answer has the "
    "positions of its prompt.",
    until="a request's output has its positions",
    optional=True,
)
def keep_positions() -> None:
    """Have vLLM's frontend count the positions of each prompt with media, and keep them."""
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    models = WeakKeyDictionary[InputProcessor, Any]()

    @wraps(process)
    def process_inputs(
        self: InputProcessor, request_id: str, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        request = process(self, request_id, *args, **kwargs)
        if request.mm_features and request.prompt_token_ids:
            try:
                if self not in models:
                    models[self] = position_model(self.model_config)
                found = positions_in(models[self], request.prompt_token_ids, request.mm_features)
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
