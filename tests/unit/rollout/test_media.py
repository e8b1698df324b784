"""Media that cannot be encoded are named with their row, and media that vLLM's cache lost with the
setting that helps (M1, F5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from PIL import Image
from swift.infer_engine.protocol import RolloutInferRequest
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalKwargsItem

from swift_grpo_ext.checks.rows import RowError
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT
from tests.rig.recording_vllm import RecordingVllm, ask, infer, metadata_of, request


@pytest.fixture(params=[(False, False), (False, True), (True, False), (True, True)], ids=str)
def refused(request: pytest.FixtureRequest, make: Any) -> Callable[..., str]:
    """Returns the error of requests, colocated or served, of a sync or async engine."""
    serves, use_async = request.param

    def refused(*asked: RolloutInferRequest, is_fault: bool = True, add: Any = None) -> str:
        vllm: Any = RecordingVllm("aa")
        if add is not None:
            vllm.add_request = add
        engine = make(vllm, serves=serves, use_async=use_async)
        if serves:
            reply = infer(engine, [*asked])
            assert reply[REQUEST_FAULT] is is_fault
            return str(reply[FAILURE])
        with pytest.raises((RowError, RuntimeError)) as raised:
            infer(engine, [*asked])
        return f"{raised.typename}: {raised.value}"

    return refused


@pytest.mark.parametrize("metadata", [metadata_of(), None])
def test_what_cannot_be_encoded_is_named(
    refused: Callable[..., str], metadata: Any, assets: Path, tmp_path: Path
) -> None:
    """A truncated file has a whole header, and neither ms-swift nor vLLM names its row. A file that
    is absent here may exist on another machine, so it is no fault of the request."""
    digit = sorted((assets / "digits").rglob("*.png"))[0]
    Image.open(digit).convert("RGB").save(whole := tmp_path / "whole.jpg")
    (cut := tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:-200])
    good, bad = request(metadata, str(whole)), request(metadata, str(whole), str(cut))
    text = refused(good, bad)
    assert text.startswith("RowError: ")
    assert f"'Hi' cannot be encoded (images[1]: {str(cut)!r} is not an image that can" in text
    assert "image file is truncated" in text
    assert text.endswith("or have such prompts replaced with --truncation_strategy delete.")
    absent = request(metadata, "absent.png")  # ms-swift takes some longer names for base64
    assert "(images[0]: 'absent.png' does not exist)" in refused(absent, is_fault=False)
    bad.messages = [{"role": "user", "content": [{"type": "image", "image": str(cut)}]}]
    bad.images = []
    assert f"(messages[0].content[0]: {str(cut)!r} is not an image" in refused(bad)

    def refuse(*_: Any) -> None:
        raise ValueError("The decoder prompt (length 600) is longer than the maximum")

    text = refused(request(metadata_of(), str(whole)), add=refuse)
    assert "(ValueError: The decoder prompt (length 600)" in text
    assert f"it shows images[0] {str(whole)!r})" in text


def caches() -> list[Any]:
    """Return vLLM's caches of media in the process that prepares prompts, and in the engine's."""
    lru = pytest.importorskip("vllm.multimodal.cache.lru")
    model = SimpleNamespace(get_multimodal_config=MultiModalConfig)
    return [lru.LruKeyReplicatedSenderCache(model), lru.LruKeyReplicatedReceiverCache(model)]


@pytest.mark.parametrize("side", [0, 1])
def test_media_that_vllms_cache_lost_name_the_setting(
    refused: Callable[..., str], side: int
) -> None:
    """Another replica may draw such a request."""
    cache = caches()[side]

    def lose(*_: Any) -> None:
        cache.get_and_update_item(None, "4f2a")

    error = refused(request(metadata_of()), is_fault=False, add=lose)
    assert "4f2a" in error
    assert "Set --vllm_mm_processor_cache_gb in this engine's command to 0" in error


def test_a_request_that_vllm_ends_with_an_error_is_no_sample(make: Any) -> None:
    """vLLM 0.32 ends a request so if its cache lost an image; the text is empty."""
    engine = make(RecordingVllm([""], finish_reason="error"))
    with pytest.raises(RuntimeError, match="--vllm_mm_processor_cache_gb"):
        ask(engine, metadata_of())


@pytest.mark.parametrize("use_async", [False, True])
def test_media_of_a_refused_turn_are_sent_again(make: Any, use_async: bool) -> None:
    """vLLM finds out that a prompt is too long once its image is in the sender's cache."""
    sender, receiver = caches()
    refusals = iter([True])

    class CachingVllm(RecordingVllm):
        renderer = SimpleNamespace(
            clear_mm_cache=sender.clear_cache,
            clear_mm_cache_async=AsyncMock(wraps=sender.clear_cache),
        )

        def add_request(self, request_id: str, inputs: Any, params: SamplingParams) -> None:
            if len(inputs["prompt_token_ids"]) > 1:  # not what stands for a refused turn
                item, _ = sender.get_and_update_item((MultiModalKwargsItem.dummy(), []), "4f2a")
                if next(refusals, False):
                    raise ValueError("longer than the maximum model length")
                receiver.get_and_update_item(item, "4f2a")
            super().add_request(request_id, inputs, params)

    engine = make(CachingVllm(["a.", "a."]), use_async=use_async)
    for reason in ("length", "stop"):
        [completion] = ask(engine, metadata_of().next_turn()).response.answer.completions
        assert completion.finish_reason == reason
