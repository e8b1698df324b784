"""An engine over a recording vLLM, and ms-swift's registry of schedulers as it was."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
from swift.model import get_processor
from swift.rollout.multi_turn import multi_turns
from swift.template import Template, get_template
from vllm import SamplingParams

from swift_grpo_ext.rollout.engine import UPSTREAM_EXTENSION, RolloutEngine
from tests.unit.rollout.recording_vllm import ROOM


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(multi_turns)
    yield
    multi_turns.clear()
    multi_turns.update(before)


@pytest.fixture(scope="session")
def template(assets: Path) -> Template:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    made = get_template(processor, template_type="qwen2_5_vl")
    made.set_mode("vllm")
    return made


@pytest.fixture
def make(template: Template, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a rollout engine over a recording vLLM."""

    def init(self: Any, vllm: Any, *, engine_kwargs: dict[str, Any], use_async: bool) -> None:
        self.engine, self.engine_kwargs, self.template = vllm, engine_kwargs, template
        self.processor = template.processor
        self.use_async_engine, self.enable_lora, self.strict = use_async, False, True
        self.default_adapter_request, self.task_type, self._request_count = None, "causal_lm", 0
        self.max_model_len, self.max_tokens_offset, self.model_name = ROOM, 0, "m"
        self.generation_config = SamplingParams()
        self.engine_args = SimpleNamespace(tensor_parallel_size=1)

    monkeypatch.setattr(GRPOVllmEngine, "__init__", init)

    def make_engine(
        vllm: Any, *, serves: bool = False, use_async: bool = False, **kwargs: Any
    ) -> Any:
        if serves:
            kwargs["worker_extension_cls"] = UPSTREAM_EXTENSION
        return RolloutEngine(vllm, engine_kwargs=kwargs, use_async=use_async)

    return make_engine
