"""The tool calls in a completion's text, by the agent template of the installed ms-swift.

Symptom: `_get_toolcall() got an unexpected keyword argument 'template_inputs'` with ms-swift 4.5.
Upstream: ms-swift, infer_engine/infer_engine.py, `InferEngine._get_toolcall`: 4.6 hands a row's
tools on to agent templates that ask for their schema, 4.5 has none that do.
Can go with ms-swift 4.5.
"""

from __future__ import annotations

import inspect
from typing import Any


def tool_calls(engine: Any, text: str, template_inputs: Any) -> Any:
    """As ms-swift's `engine` itself finds them; None where there are none."""
    takes = inspect.signature(engine._get_toolcall).parameters
    extra = {"template_inputs": template_inputs} if "template_inputs" in takes else {}
    return engine._get_toolcall(text, **extra)
