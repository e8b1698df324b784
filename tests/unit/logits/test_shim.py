"""Each kind of model computes logits of the wanted positions alone, with the values and gradients
of a pass with all logits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.utils import get_logger
from torch import Tensor, nn

from swift_grpo_ext.logits.shim import (
    LogitsShim,
    base_model,
    find_transform,
    unchanged,
)
from tests.rig.logits.compare import assert_close, counted_positions, values_and_gradients
from tests.rig.logits.models import (
    BY_KEYWORD,
    HOPELESS,
    MODELS,
    add_lora,
    build,
    inputs_of,
)

KEPT, TEMPERATURE = 6, 1.5


@pytest.fixture(autouse=True)
def warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings of shims; a test that expects some clears them."""
    texts: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", texts.append)
    monkeypatch.setattr(sys.modules["swift.utils.logger"], "warning_set", set())
    yield texts
    assert not texts


def shim_of(
    model: Any, *, strict: bool = False, chunk_size: int = LogitsShim.chunk_size
) -> LogitsShim:
    shim = LogitsShim(model, strict=strict)
    shim.chunk_size = chunk_size
    return shim


def chosen_mask(inputs: dict[str, Any]) -> Tensor:
    """Choose the positions of each row's completion, with padding on the right."""
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        mask[row, length - KEPT + row : length] = True
    return mask


def plain_logps(model: Any, inputs: Any, mask: Tensor) -> Callable[[], Tensor]:
    """Compute log-probabilities of the input ids at the mask, and entropies, by full logits."""
    targets = inputs["input_ids"][mask]

    def compute() -> Tensor:
        log_p = (model(**inputs).logits[mask] / TEMPERATURE).log_softmax(-1)
        entropies = -(log_p.exp() * log_p).sum(-1)
        return torch.stack([log_p.gather(-1, targets[:, None])[:, 0], entropies])

    return compute


def shim_logps(shim: LogitsShim, model: Any, inputs: Any, mask: Tensor) -> Callable[[], Tensor]:
    """Compute the same by the shim."""
    targets = inputs["input_ids"][mask]

    def compute() -> Tensor:
        logps_N, entropies_N = shim.logps(
            model, inputs, mask, targets, temperature=TEMPERATURE, with_entropy=True
        )
        assert entropies_N is not None
        return torch.stack([logps_N, entropies_N])

    return compute


# --- all models ---


@pytest.mark.parametrize("chunk_size", [1024, 4])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(name: str, chunk_size: int, warned: list[str]) -> None:
    """Models may scale, cap or squash their logits."""
    model, inputs = build(name), inputs_of(name)
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, plain_logps(model, inputs, mask))
    ours = shim_logps(shim_of(model, chunk_size=chunk_size), model, inputs, mask)
    with torch.no_grad():
        torch.testing.assert_close(ours(), expected[0], rtol=1e-5, atol=1e-5)
    with counted_positions(model) as counts:
        assert_close(values_and_gradients(model, ours), expected)
    if name == "remote code, squashed":
        assert "has no log-probabilities in chunks: its transform of logits" in warned.pop()
        assert counts == [11]
        return
    # 11 positions, one more that the model goes on with, and once more for the backward.
    sizes = [11] if chunk_size > 11 else [4, 4, 3]
    assert counts == [*sizes, 1, *reversed(sizes)]


@pytest.mark.parametrize("name", BY_KEYWORD)
def test_a_keyword_serves_where_the_head_cannot(name: str, warned: list[str]) -> None:
    """The model computes the last 11 positions, from the first wanted one on."""
    model, inputs = build(name), inputs_of(name)
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, plain_logps(model, inputs, mask))
    inputs["logits_to_keep"] = 2  # ms-swift leaves it there from the pass before
    num_computed: list[int] = []
    model.register_forward_hook(lambda _, __, out: num_computed.append(out.logits.shape[1]))
    ours = shim_logps(shim_of(model, strict=True), model, inputs, mask)
    for _ in range(2):
        assert_close(values_and_gradients(model, ours), expected)
    assert num_computed == [17, 11, 11]
    assert "calls its output embedding 0 times, not once" in warned.pop()


@pytest.mark.parametrize("name", HOPELESS)
def test_slices_with_one_warning(name: str, warned: list[str]) -> None:
    """If the head cannot be hooked, results are right with one warning; `strict` refuses."""
    model, inputs = build(name, lora=True), inputs_of(name)
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, plain_logps(model, inputs, mask))
    ours = shim_logps(shim_of(model), model, inputs, mask)
    for _ in range(2):
        assert_close(values_and_gradients(model, ours), expected)
    (of_slices,) = warned
    warned.clear()
    assert HOPELESS[name][1] in of_slices
    assert type(base_model(model)).__name__ in of_slices
    with pytest.raises(RuntimeError, match="--logits_shim auto"):
        shim_logps(shim_of(model, strict=True), model, inputs, mask)()


# --- how a model is wrapped and run ---


@pytest.mark.parametrize(("is_in_place", "is_called_before"), [(False, True), (True, False)])
def test_compiled_models(is_in_place: bool, is_called_before: bool) -> None:
    """Passes alternate with plain calls, which compile code without hooks."""
    torch._dynamo.reset()
    model = compiled = build("soft-capped (Gemma2)")
    inputs = inputs_of("Qwen2")
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, plain_logps(model, inputs, mask))
    if is_in_place:
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    shim = shim_of(compiled, strict=True, chunk_size=4)
    if is_called_before:
        compiled(**inputs)
    ours = shim_logps(shim, compiled, inputs, mask)
    for _ in range(2):
        assert_close(values_and_gradients(model, ours), expected)
        compiled(**inputs)


def with_checkpointing(use_reentrant: bool) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        model = add_lora(model)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    return prepare


def with_hooks(model: Any) -> Any:
    """Hook the head before and after, as masks of tokens do; each hook must run once."""
    ruled_out, lowest = torch.tensor([150, 155]), torch.finfo(torch.float32).min / 16
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: (1.5 * args[0],))
    head.register_forward_hook(lambda _, __, logits: logits.index_fill_(-1, ruled_out, lowest))
    return model


@pytest.mark.parametrize("chunk_size", [1024, 4])
@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        ("Qwen2.5-VL", with_checkpointing(False)),
        ("VideoLlama3", with_checkpointing(True)),
        ("remote code", lambda model: add_lora(model, target_modules=["q_proj", "lm_head"])),
        ("remote code", lambda model: add_lora(model, modules_to_save=["lm_head"])),
        ("scaled (Cohere)", with_hooks),
    ],
)
def test_wrappings(name: str, prepare: Callable[[Any], Any], chunk_size: int) -> None:
    model, inputs = prepare(build(name)), inputs_of(name)
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, plain_logps(model, inputs, mask))
    ours = shim_logps(shim_of(model, strict=True, chunk_size=chunk_size), model, inputs, mask)
    for _ in range(2):
        assert_close(values_and_gradients(model, ours), expected)


def test_prompt_tuning_puts_positions_before_the_rows() -> None:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, inputs = get_peft_model(build("Qwen2"), config), inputs_of("Qwen2")
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, lambda: model(**inputs).logits[:, 3:][mask])
    shim = shim_of(model)
    found = values_and_gradients(model, lambda: shim.select(model, inputs, mask))
    assert_close(found, expected)


def test_base_model() -> None:
    model = build("Qwen2")
    assert base_model(nn.DataParallel(torch.compile(add_lora(model)))) is model


def test_a_wrapper_without_a_head_of_its_own() -> None:
    """As in remote code that wraps a language model, and in Qwen2.5-Omni's thinker."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = build("remote code")

        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

        def forward(self, **inputs: Any) -> Any:
            return self.language_model(**inputs)

    model, inputs = Outer(), inputs_of("remote code")
    mask = chosen_mask(inputs)
    logps_N = shim_logps(shim_of(model, strict=True), model, inputs, mask)()
    torch.testing.assert_close(logps_N, plain_logps(model, inputs, mask)())


# --- single cases ---


@pytest.mark.parametrize("chunk_size", [1024, 4])
def test_no_position_at_all(chunk_size: int) -> None:
    """A micro-batch without completion tokens still has a graph: other ranks wait for its
    backward."""
    model, inputs = build("Qwen2"), inputs_of("Qwen2")
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    logps_N = shim_logps(shim_of(model, chunk_size=chunk_size), model, inputs, mask)()
    logps_N.sum().backward()
    assert logps_N.shape == (2, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("is_in_head", "num_passes", "kind", "text"),
    [
        (True, 0, RuntimeError, "Connection closed by peer"),  # as gloo says it
        (False, 0, torch.distributed.DistBackendError, "NCCL timeout"),
        (False, 0, torch.OutOfMemoryError, "no memory"),
        (False, 1, RuntimeError, "positions were chosen in a pass before"),
    ],
)
def test_no_other_forward_after_what_is_no_fault_of_the_way(
    is_in_head: bool,
    num_passes: int,
    kind: type[Exception],
    text: str,
) -> None:
    """Otherwise other ranks would wait in their first forward, this one in a second."""
    model, inputs = build("remote code"), inputs_of("remote code")
    ours = shim_logps(shim_of(model), model, inputs, chosen_mask(inputs))
    for _ in range(num_passes):
        ours()
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def fail(*_: Any) -> None:
        raise kind(text)  # anew: while an error lives, so do the hooks of torch 2.8's checkpoint

    (model.lm_head if is_in_head else model).register_forward_hook(fail)
    with pytest.raises(kind, match=text):
        ours()
    assert len(forwards) == 1


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = build("remote code"), inputs_of("remote code")
    head, shim, mask = model.lm_head, shim_of(model), chosen_mask(inputs)
    before = model(**inputs).logits
    shim.logps(model, inputs, mask, inputs["input_ids"][mask])
    with pytest.raises(TypeError):
        shim.select(model, {"no": "input"}, mask)
    assert "forward" not in vars(head)
    assert not head._forward_pre_hooks
    torch.testing.assert_close(model(**inputs).logits, before, rtol=0, atol=0)


# --- what a model does to logits after its head ---


RAW = torch.linspace(-8, 8, 50)


def config_of(**settings: float) -> Any:
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings))


CAP = config_of(final_logit_softcapping=30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "final", "is_known"),
    [
        (config_of(), RAW, True),
        (CAP, 30 * (RAW / 30).tanh(), True),
        (CAP, RAW, True),  # the model ignores its setting
        (config_of(logit_scale=0.0625), RAW * 0.0625, True),
        (config_of(logits_scaling=8.0), RAW / 8, True),
        (CAP, RAW + 1, False),
        (CAP, 2 * RAW, False),
        (CAP, RAW.tanh(), False),
        (CAP, RAW[:-1], False),
    ],
)
def test_a_transform_is_found_and_not_guessed(
    config: Any, final: Tensor, is_known: bool, dtype: torch.dtype
) -> None:
    transform = find_transform(config, RAW.to(dtype), final.to(dtype))
    assert (transform is not None) == is_known
    if transform:
        torch.testing.assert_close(transform(RAW), final)
    if final is RAW:
        assert transform is unchanged


def test_ranks_find_one_transform() -> None:
    """Here both transforms fit; on another rank only capping does."""
    small = RAW / 1e5
    elsewhere = torch.tensor([0.0, 1.0])
    transform = find_transform(CAP, small, small, lambda errors: torch.maximum(errors, elsewhere))
    assert transform is not None
    torch.testing.assert_close(transform(RAW), 30 * (RAW / 30).tanh())
    assert find_transform(CAP, small, small, lambda errors: errors + 1) is None
