"""Computes the position ids that vLLM gives to prompts with media: in time, height and width.

vLLM and transformers may silently differ: after a long video, transformers 5.19 continued at a
smaller position than vLLM. Training compares the engine's positions with its own
(`training/batch.py`, docs/promises.md, M3).
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from swift.utils import get_logger
from torch import nn

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

logger = get_logger()
Positions = NDArray[np.int32]  # [3, tokens]: in time, height and width


def position_model(config: ModelConfig) -> Any:
    """Return one of vLLM's models without weights, to compute positions; None if the model's
    positions have one dimension."""
    prunes = getattr(config.multimodal_config, "video_pruning_rate", None)
    if not config.uses_mrope or prunes:  # pruning changes positions later
        return None
    from vllm.model_executor.model_loader.utils import get_model_cls

    model_class = get_model_cls(config)
    model: Any = model_class.__new__(model_class)
    nn.Module.__init__(model)  # needed to set attributes
    # `get_mrope_input_positions` only reads the configuration (vLLM 0.32, model_executor/models).
    # Qwen-Omni's model for text and media is its "thinker".
    model.config = getattr(config.hf_config, "thinker_config", config.hf_config)
    return model


# By request id. The answer removes them; positions of aborted requests stay until evicted.
kept_positions = LRUCache[str, Positions](maxsize=2**12)


@repair(PatchPhase.ENGINE, optional=True)
def keep_positions() -> None:
    """Have vLLM's frontend compute and keep the positions of each prompt with media.

    Symptom: rollout and training silently use different positions for the same tokens.
    Upstream: vLLM 0.32, v1/engine/input_processor.py (`process_inputs`): no answer has the
    positions of its prompt. Can go when a request's output has its positions.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    models = WeakKeyDictionary[InputProcessor, Any]()

    @wraps(process)
    def process_inputs(
        self: InputProcessor, request_id: str, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        request = process(self, request_id, *args, **kwargs)
        token_ids, features = request.prompt_token_ids, request.mm_features
        if token_ids and features:
            try:
                if self not in models:
                    models[self] = position_model(self.model_config)
                model = models[self]
                # vLLM's frontend has only the hash of a medium that it cached.
                if model is not None and all(feature.data is not None for feature in features):
                    counted, _ = model.get_mrope_input_positions(list(token_ids), list(features))
                    kept_positions[request_id] = np.asarray(counted, dtype=np.int32)
            except Exception as e:  # the model reads more than its configuration
                logger.warning_once(
                    "Positions of prompts in rollout and training are not compared: vLLM's model "
                    f"does not count them without its weights ({type(e).__name__}: {e}).",
                    hash_id="positions",
                )
        return request

    patch(InputProcessor, process_inputs=process_inputs)
