"""Every kind of model gives logits of the wanted positions only, with the values and gradients of
slicing all of them (SPEC L1 to L3, L5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swift_grpo_ext.logits.shim import (
    LogitsShim,
    UnsupportedModelError,
    base_model,
)
from tests.logits import models
from tests.logits.compare import assert_close, counted_positions, values_and_gradients
from tests.logits.models import HOPELESS, MODELS, UNKNOWN_TRANSFORM, add_lora, build, inputs_of

KEPT = 6
ROWS = 2
BARE_AND_LORA = pytest.mark.parametrize("lora", [False, True], ids=["bare", "LoRA"])


@pytest.fixture
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    yield texts
    assert len(texts) <= 1, texts


def shim_of(model: Any, warned: list[str], *, strict: bool = False) -> LogitsShim:
    return LogitsShim(model, strict=strict, warn=warned.append)


def chosen_mask(inputs: dict[str, Any]) -> Tensor:
    """Positions as right padding leaves them: those of each row's own completion."""
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        mask[row, length - KEPT + row : length] = True
    return mask


# --- compiled models ---


@pytest.mark.parametrize("name", ["Qwen2", "names the keyword only", "soft-capped (Gemma2)"])
def test_compiled_models(name: str, warned: list[str]) -> None:
    """In turns with calls that nobody chooses positions of: those compile code without hooks."""
    torch._dynamo.reset()
    model, inputs = build(name), inputs_of(name)
    compiled: Any = torch.compile(model, backend="aot_eager")
    mask = chosen_mask(inputs)
    targets = inputs["input_ids"].roll(-1, 1)[mask]

    def plain() -> Tensor:
        return model(**inputs).logits[mask].log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    shim, expected = shim_of(compiled, warned, strict=True), values_and_gradients(model, plain)
    for chunk_size in (4, 0, 4):
        last = values_and_gradients(model, lambda: shim.last(compiled, inputs, KEPT).logits)
        assert_close(last, values_and_gradients(model, lambda: model(**inputs).logits[:, -KEPT:]))
        compiled(**inputs)
        found = values_and_gradients(
            model,
            lambda chunk_size=chunk_size: (
                shim.logps(compiled, inputs, mask, targets, chunk_size=chunk_size).logps_N
            ),
        )
        assert_close(found, expected)
    assert not warned


# --- all models ---


@BARE_AND_LORA
@pytest.mark.parametrize("name", MODELS)
def test_last_positions(name: str, lora: bool, warned: list[str]) -> None:
    model, inputs = build(name, lora=lora), inputs_of(name)
    expected = values_and_gradients(model, lambda: model(**inputs).logits[:, -KEPT:])
    shim = shim_of(model, warned)
    found = values_and_gradients(model, lambda: shim.last(model, inputs, KEPT).logits)
    assert shim.way == MODELS[name][1]
    assert_close(found, expected, 1e-6)

    # From the second forward on, no other position is ever computed: a keyword without an effect
    # is known by then.
    with counted_positions(model) as counts:
        found = values_and_gradients(model, lambda: shim.last(model, inputs, KEPT).logits)
    assert counts == [ROWS * KEPT]
    assert_close(found, expected, 1e-6)
    assert not warned


@BARE_AND_LORA
@pytest.mark.parametrize("name", MODELS)
def test_chosen_positions(name: str, lora: bool, warned: list[str]) -> None:
    model, inputs = build(name, lora=lora), inputs_of(name)
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, lambda: model(**inputs).logits[mask])
    shim = shim_of(model, warned)
    with counted_positions(model) as counts:
        found = values_and_gradients(model, lambda: shim.select(model, inputs, mask)[0])
    assert counts == [int(mask.sum())]
    assert_close(found, expected)
    assert not warned


@BARE_AND_LORA
@pytest.mark.parametrize("chunk_size", [0, 4])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(name: str, chunk_size: int, lora: bool, warned: list[str]) -> None:
    """L4, with what each model does to its logits."""
    model, inputs = build(name, lora=lora), inputs_of(name)
    mask = chosen_mask(inputs)
    targets = inputs["input_ids"].roll(-1, 1)[mask]
    temperature = 1.5

    def plain() -> Tensor:
        log_p = (model(**inputs).logits[mask] / temperature).log_softmax(-1)
        entropies = -(log_p.exp() * log_p).sum(-1)
        return torch.stack([log_p.gather(-1, targets[:, None])[:, 0], entropies])

    shim = shim_of(model, warned)

    def ours() -> Tensor:
        logps = shim.logps(
            model, inputs, mask, targets,
            chunk_size=chunk_size, temperature=temperature, with_entropy=True,
        )  # fmt: skip
        assert logps.entropies_N is not None
        return torch.stack([logps.logps_N, logps.entropies_N])

    expected = values_and_gradients(model, plain)
    assert_close(values_and_gradients(model, ours), expected)
    with counted_positions(model) as counts:
        assert_close(values_and_gradients(model, ours), expected)
    with torch.no_grad():
        torch.testing.assert_close(ours(), expected[0], rtol=1e-5, atol=1e-5)
    if chunk_size and name not in UNKNOWN_TRANSFORM:
        # 11 positions, one more that the model goes on with, and once more for the backward.
        assert counts == [4, 4, 3, 1, *reversed([4, 4, 3])]
    else:
        assert counts == [11]
    assert ["--logps_chunk_size has no effect" in text for text in warned] == (
        [True] if chunk_size and name in UNKNOWN_TRANSFORM else []
    )


@BARE_AND_LORA
@pytest.mark.parametrize("name", HOPELESS)
def test_slices_with_one_warning(name: str, lora: bool, warned: list[str]) -> None:
    model, inputs = build(name, lora=lora), inputs_of(name)
    mask = chosen_mask(inputs)
    everything = values_and_gradients(model, lambda: model(**inputs).logits[:, -KEPT:])
    chosen = values_and_gradients(model, lambda: model(**inputs).logits[mask])
    shim = shim_of(model, warned)
    for _ in range(2):
        found = values_and_gradients(model, lambda: shim.last(model, inputs, KEPT).logits)
        assert_close(found, everything, 1e-6)
    assert_close(
        values_and_gradients(model, lambda: shim.select(model, inputs, mask)[0]), chosen, 1e-6
    )
    assert shim.way == "slice"
    (text,) = warned
    assert HOPELESS[name][1] in text
    assert type(base_model(model)).__name__ in text


@pytest.mark.parametrize("name", HOPELESS)
def test_strict_refuses(name: str, warned: list[str]) -> None:
    model, inputs = build(name), inputs_of(name)
    with pytest.raises(UnsupportedModelError, match=r"--logits_shim auto"):
        shim_of(model, warned, strict=True).last(model, inputs, KEPT)
    mask = chosen_mask(inputs)
    targets = inputs["input_ids"][mask]
    with pytest.raises(UnsupportedModelError, match=r"--logps_chunk_size 0"):
        shim_of(model, warned, strict=True).logps(model, inputs, mask, targets, chunk_size=4)


@pytest.mark.parametrize("name", MODELS)
def test_strict_runs_where_something_works(name: str, warned: list[str]) -> None:
    model, inputs = build(name), inputs_of(name)
    assert shim_of(model, warned, strict=True).last(model, inputs, KEPT).logits.shape[1] == KEPT


# --- single cases ---


@pytest.mark.parametrize("name", HOPELESS)
def test_without_chunks_all_at_once(name: str) -> None:
    """Where the head cannot be worked at: right all the same, and said."""
    model, inputs = build(name), inputs_of(name)
    mask = chosen_mask(inputs)
    targets = inputs["input_ids"][mask]

    def plain() -> Tensor:
        log_p = model(**inputs).logits[mask].log_softmax(-1)
        return log_p.gather(-1, targets[:, None])[:, 0]

    expected = values_and_gradients(model, plain)
    texts: list[str] = []
    shim = shim_of(model, texts)
    for _ in range(2):
        found = values_and_gradients(
            model, lambda: shim.logps(model, inputs, mask, targets, chunk_size=4).logps_N
        )
        assert_close(found, expected)
    assert len(texts) == 2
    assert sum("--logps_chunk_size has no effect" in text for text in texts) == 1


def test_unequal_prompts_cost_their_completions_only(warned: list[str]) -> None:
    """L5: prompts of 1,500 and 60 tokens with 200 new ones each, padded on the right."""
    model, prompts, new = build("Qwen2"), (1500, 60), 200
    inputs = inputs_of("Qwen2", tuple(p + new for p in prompts))
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        mask[row, prompt - 1 : prompt + new - 1] = True
    shim = shim_of(model, warned)
    targets = inputs["input_ids"].roll(-1, 1)[mask]
    with torch.no_grad(), counted_positions(model) as counts:
        shim.logps(model, inputs, mask, targets)
        shim.logps(model, inputs, mask, targets, chunk_size=128)
    assert counts == [2 * new, 128, 128, 128, 16, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side(side: str, warned: list[str]) -> None:
    model, inputs = build("Qwen2-VL"), inputs_of("Qwen2-VL", (17, 12), side)
    mask = inputs["attention_mask"].bool() & (inputs["input_ids"] > 99) & (torch.arange(17) > 6)
    expected = values_and_gradients(model, lambda: model(**inputs).logits[mask])
    shim = shim_of(model, warned)
    found = values_and_gradients(model, lambda: shim.select(model, inputs, mask)[0])
    assert_close(found, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "VideoLlama3"])
def test_gradient_checkpointing(name: str, use_reentrant: bool, warned: list[str]) -> None:
    model, inputs = build(name, lora=True), inputs_of(name)
    mask = chosen_mask(inputs)
    targets = inputs["input_ids"][mask]
    shim = shim_of(model, warned)
    expected = values_and_gradients(model, lambda: shim.select(model, inputs, mask)[0])
    plain = values_and_gradients(model, lambda: shim.logps(model, inputs, mask, targets).logps_N)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_close(
        values_and_gradients(model, lambda: shim.select(model, inputs, mask)[0]), expected, 1e-6
    )

    def chunked() -> Tensor:
        return shim.logps(model, inputs, mask, targets, chunk_size=4).logps_N

    assert_close(values_and_gradients(model, chunked), plain)


@pytest.mark.parametrize("where", ["lm_head", "modules_to_save"])
def test_an_adapter_on_the_head(where: str, warned: list[str]) -> None:
    targets = (
        {"target_modules": ["q_proj", "lm_head"]}
        if where == "lm_head"
        else {"modules_to_save": ["lm_head"]}
    )
    model, inputs = add_lora(build("remote code"), **targets), inputs_of("remote code")
    mask = chosen_mask(inputs)
    targets_N = inputs["input_ids"][mask]

    def plain() -> Tensor:
        log_p = model(**inputs).logits[mask].log_softmax(-1)
        return log_p.gather(-1, targets_N[:, None])[:, 0]

    expected = values_and_gradients(model, plain)
    assert any("lm_head" in name for name in expected[1])
    shim = shim_of(model, warned)
    for chunk_size in (0, 4):

        def ours(chunk_size: int = chunk_size) -> Tensor:
            return shim.logps(model, inputs, mask, targets_N, chunk_size=chunk_size).logps_N

        assert_close(values_and_gradients(model, ours), expected)
    assert not warned


@pytest.mark.parametrize("chunk_size", [0, 4])
@pytest.mark.parametrize("name", ["Qwen2", "remote code", "scaled (Cohere)"])
def test_hooks_of_others_on_the_head(name: str, chunk_size: int, warned: list[str]) -> None:
    """Before it and after it, each applied once: as those by which tokens are ruled out."""
    model, inputs = build(name), inputs_of(name)
    mask = chosen_mask(inputs)
    targets = inputs["input_ids"][mask]
    ruled_out = torch.tensor([150, 155])
    lowest = torch.finfo(torch.float32).min / 16
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: (1.5 * args[0],))
    head.register_forward_hook(lambda _, __, logits: logits.index_fill_(-1, ruled_out, lowest))

    def plain() -> Tensor:
        log_p = model(**inputs).logits[mask].log_softmax(-1)
        return log_p.gather(-1, targets[:, None])[:, 0]

    expected = values_and_gradients(model, plain)
    shim = shim_of(model, warned)
    for _ in range(2):
        found = values_and_gradients(
            model, lambda: shim.logps(model, inputs, mask, targets, chunk_size=chunk_size).logps_N
        )
        assert_close(found, expected)
    assert not warned


def test_prompt_tuning_puts_positions_before_the_rows(warned: list[str]) -> None:
    from peft import PromptTuningConfig, get_peft_model

    virtual = 3
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
    model, inputs = get_peft_model(build("Qwen2"), config), inputs_of("Qwen2")
    mask = chosen_mask(inputs)
    expected = values_and_gradients(model, lambda: model(**inputs).logits[:, virtual:][mask])
    shim = shim_of(model, warned)
    found = values_and_gradients(model, lambda: shim.select(model, inputs, mask)[0])
    assert_close(found, expected)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["Qwen2", "Qwen2, tied", "soft-capped (Gemma2)"])
def test_chunks_of_16_bit_models(name: str, lora: bool, warned: list[str]) -> None:
    """Through the model's own head, with a LoRA on it too: as all positions at once."""
    more = {"target_modules": ["q_proj", "lm_head"]} if lora else {}
    model, inputs = build(name), inputs_of(name)
    model = (add_lora(model, **more) if lora else model).bfloat16()
    mask = chosen_mask(inputs)
    targets, shim = inputs["input_ids"][mask], shim_of(model, warned, strict=True)

    def logps_of(chunk_size: int) -> Any:
        return values_and_gradients(
            model, lambda: shim.logps(model, inputs, mask, targets, chunk_size=chunk_size).logps_N
        )

    assert_close(logps_of(4), logps_of(0), 1e-2)


def test_no_position_at_all(warned: list[str]) -> None:
    """A micro-batch without a completion token has a graph all the same, for other ranks' sake."""
    model, inputs = build("Qwen2"), inputs_of("Qwen2")
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    shim = shim_of(model, warned)
    for chunk_size in (0, 4):
        logps = shim.logps(
            model, inputs, mask, inputs["input_ids"][mask],
            chunk_size=chunk_size, with_entropy=True,
        )  # fmt: skip
        model.zero_grad()
        logps.logps_N.sum().backward()
        assert logps.logps_N.shape == (0,)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_keywords_among_the_inputs_are_ours_to_set(warned: list[str]) -> None:
    """ms-swift leaves `logits_to_keep` in the inputs of one pass, and so of the next."""
    model = build("Qwen2")
    inputs = {**inputs_of("Qwen2"), "logits_to_keep": 2}
    assert shim_of(model, warned).last(model, inputs, KEPT).logits.shape[1] == KEPT


def test_too_few_positions(warned: list[str]) -> None:
    model = build("VideoLlama3")
    with pytest.raises(ValueError, match=r"17 positions, expected 40"):
        shim_of(model, warned).last(model, inputs_of("VideoLlama3"), 40)


def test_a_failing_forward_is_not_taken_for_a_failing_way(warned: list[str]) -> None:
    model = build("Qwen2")
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|DATA bounds)"):
        shim_of(model, warned).select(
            model, {"input_ids": torch.tensor([[999]])}, torch.tensor([[True]])
        )


@pytest.mark.parametrize("chunk_size", [0, 4])
@pytest.mark.parametrize(
    ("is_in_head", "kind", "text"),
    [
        (True, RuntimeError, "Connection closed by peer"),  # as gloo says it
        (True, torch.distributed.DistBackendError, "NCCL timeout"),
        (False, torch.distributed.DistBackendError, "NCCL timeout"),
        (False, torch.OutOfMemoryError, "no memory"),
    ],
)
def test_no_other_forward_after_what_is_no_fault_of_the_way(
    is_in_head: bool, kind: type[Exception], text: str, chunk_size: int, warned: list[str]
) -> None:
    """The other ranks would wait in their first forward, this one in its second."""
    model, inputs = build("remote code"), inputs_of("remote code")
    mask = chosen_mask(inputs)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def fail(*_: Any) -> None:
        raise kind(text)  # anew: while an error lives, so do the hooks of torch 2.8's checkpoint

    (model.lm_head if is_in_head else model).register_forward_hook(fail)
    with pytest.raises(kind, match=text):
        shim_of(model, warned).logps(
            model, inputs, mask, inputs["input_ids"][mask], chunk_size=chunk_size
        )
    assert len(forwards) == 1
    assert not warned


def test_the_model_is_left_as_it_was(warned: list[str]) -> None:
    model, inputs = build("wrapped forward"), inputs_of("wrapped forward")
    head, shim, mask = model.lm_head, shim_of(model, warned), chosen_mask(inputs)
    own_forward = model.forward
    before = model(**inputs).logits
    shim.logps(model, inputs, mask, inputs["input_ids"][mask], chunk_size=4)
    shim.last(model, inputs, KEPT)
    with pytest.raises(TypeError):
        shim.last(model, {"no": "input"}, KEPT)
    assert "forward" not in vars(head)
    assert not head._forward_pre_hooks
    assert model.forward is own_forward
    torch.testing.assert_close(model(**inputs).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen2-VL", "VideoLlama3"])
def test_at_the_head_and_by_keyword_are_one_bit_for_bit(name: str, warned: list[str]) -> None:
    model, inputs = build(name), inputs_of(name)
    full = model(**inputs).logits
    shim = shim_of(model, warned)
    by_keyword = shim.last(model, inputs, KEPT).logits
    shim._keyword = None
    assert torch.equal(shim.last(model, inputs, KEPT).logits, by_keyword)
    torch.testing.assert_close(by_keyword, full[:, -KEPT:])


def test_base_model() -> None:
    model = build("Qwen2")
    for wrapped in (nn.DataParallel(model), torch.compile(model), add_lora(model)):
        assert base_model(wrapped) is model
    assert base_model(nn.DataParallel(add_lora(build("Qwen2")))).__class__ is type(model)


def test_a_wrapper_without_a_head_of_its_own(warned: list[str]) -> None:
    """As in remote-code VLMs that hold a language model, and in Qwen2.5-Omni's thinker."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = build("remote code")

        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

        def forward(self, **inputs: Any) -> Any:
            return self.language_model(**inputs)

    model, inputs = Outer(), inputs_of("remote code")
    shim = shim_of(model, warned, strict=True)
    assert shim.way == "head"
    logits = shim.last(model, inputs, KEPT).logits
    torch.testing.assert_close(logits, model(**inputs).logits[:, -KEPT:])


def test_every_model_is_named_once() -> None:
    assert not models.MODELS.keys() & models.HOPELESS.keys()
