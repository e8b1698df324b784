"""Each kind of decoder has the logits of the wanted positions alone [L1, L2]; the first forward
shows by which way [L3]. Chunks of any size have the log-probabilities, entropies and gradients of
ms-swift's own way, and call the head as often as other ranks do [L4]."""

import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swift.utils import get_logger
from torch import Tensor, nn
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from swift_grpo_ext.logits.chunked import Logps, in_chunks, token_logps
from swift_grpo_ext.logits.shim import LogitsShim, base_model, find_transform, unchanged
from tests.rig.logits.batch import Batch, Run, assert_close, by_shim, plain, values_and_gradients
from tests.rig.logits.models import build

ROWS = ((11, 6), (6, 5))


@pytest.fixture(autouse=True)
def warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings of shims; a test that expects some clears them."""
    texts: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", texts.append)
    monkeypatch.setattr(sys.modules["swift.utils.logger"], "warning_set", set())
    yield texts
    assert not texts


def assert_passes_are_right(model: Any, shim: LogitsShim, expected: Run, batch: Batch) -> None:
    for _ in range(2):
        found = values_and_gradients(model, lambda: by_shim(shim, model, batch))
        assert_close(found, expected)


# --- other ways than the head ---


@pytest.mark.parametrize(
    ("name", "reason", "num_computed"),
    [
        # All wanted positions go through the head and the model's own code at once.
        ("remote code, squashed", "its transform of logits", [1, 11, 11]),
        # The keyword selects the last positions, from the first wanted one on.
        ("keeps by keyword", "calls its output embedding 0 times", [17, 12, 12]),
        # Logits of all positions are sliced; `strict` refuses.
        ("names the keyword only", "0 times", []),
        ("insists on all positions", "RuntimeError", []),
    ],
)
def test_models_that_compute_no_chunks_are_right_with_one_warning(
    name: str, reason: str, num_computed: list[int], warned: list[str]
) -> None:
    model, batch = build(name, lora=True), Batch(ROWS)
    expected = values_and_gradients(model, lambda: plain(model, batch))
    batch.inputs["logits_to_keep"] = 2  # ms-swift leaves it there from the pass before
    lengths: list[int] = []
    model.register_forward_hook(lambda _, __, out: lengths.append(out.logits.shape[1]))
    shim = LogitsShim(model, strict=bool(num_computed))
    assert_passes_are_right(model, shim, expected, batch)
    [text] = warned
    warned.clear()
    assert reason in text
    assert type(base_model(model)).__name__ in text
    if num_computed:
        assert lengths == num_computed
        return
    with pytest.raises(RuntimeError, match="--logits_shim auto"):
        by_shim(LogitsShim(model, strict=True), model, batch)


# --- single cases ---


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
    is_in_head: bool, num_passes: int, kind: type[Exception], text: str
) -> None:
    """Otherwise other ranks would wait in their first forward, this one in a second."""
    model, batch = build("remote code"), Batch(ROWS)
    shim = LogitsShim(model)
    for _ in range(num_passes):
        by_shim(shim, model, batch)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def fail(*_: Any) -> None:
        raise kind(text)  # anew: while an error lives, so do the hooks of torch 2.8's checkpoint

    (model.lm_head if is_in_head else model).register_forward_hook(fail)
    with pytest.raises(kind, match=text):
        by_shim(shim, model, batch)
    assert len(forwards) == 1
    assert not model.lm_head._forward_pre_hooks


# --- what a model does to logits after its head ---


RAW = torch.linspace(-8, 8, 50)


def config_of(**settings: float) -> Any:
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings))


CAP = config_of(final_logit_softcapping=30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "final", "is_known"),
    [
        (None, RAW, True),
        (config_of(), RAW, True),
        (CAP, 30 * (RAW / 30).tanh(), True),
        (CAP, RAW, True),  # the model ignores its setting
        (config_of(logit_scale=0.0625), RAW * 0.0625, True),
        (config_of(logits_scaling=8.0), RAW / 8, True),
        (CAP, RAW + 1, False),
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


# --- chunks ---

VOCABULARY = 50


def head_of(num: int) -> Any:
    """Return a head with hidden states for it."""
    torch.manual_seed(num)
    head = nn.Linear(8, VOCABULARY)
    head.hidden = nn.Parameter(3 * torch.randn(num, 8))
    return head


def upstream(logits: Tensor, targets: Tensor, temperature: float) -> Logps:
    """Compute as in ms-swift's `_get_logps_via_local_forward`, with TRL's functions."""
    logits = logits / temperature
    return Logps(selective_log_softmax(logits, targets), entropy_from_logits(logits))


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 75), st.integers(0, 9), st.sampled_from([0.3, 1.0, 1.7]))
def test_any_chunk_size_is_as_upstream(
    num: int, chunk_size: int, num_chunks: int, temperature: float
) -> None:
    """Values, and gradients by hidden states and weights, of log-probabilities and entropies."""
    head, targets = head_of(num), torch.randint(VOCABULARY, (num,))
    function = partial(token_logps, temperature=temperature, with_entropy=True)
    numbers = {"chunk_size": chunk_size, "num_chunks": num_chunks}
    expected, at_once, parted = (
        values_and_gradients(head, lambda way=way: torch.stack([*way()]))
        for way in (
            lambda: upstream(head(head.hidden), targets, temperature),
            lambda: function(head(head.hidden), targets),
            lambda: in_chunks(head, head.hidden, [targets], function, **numbers),
        )
    )
    assert_close(at_once, expected)
    assert_close(parted, expected)


SURE = torch.tensor([[30.0, 30.0 - 16.12, 30.0 - 16.12]])
"""Logits of a nearly certain policy: p = 1 - 2e-7, entropy 3.3e-6."""

LARGE = 2 * torch.randn(8, 151_936, generator=torch.Generator().manual_seed(0))
"""Logits of Qwen's vocabulary: on some machines torch's own log-softmax is off there."""
LARGE[:, 5] = 22.0

CERTAIN = torch.full((1, VOCABULARY), -1e4).index_fill(1, torch.tensor([3]), 0.0)


@pytest.mark.parametrize(
    ("logits", "target", "tolerance"),
    [
        *[(SURE, 0, 3e-7), (LARGE, 5, 3e-6), (CERTAIN, 3, 0.0), (CERTAIN, 4, 0.0)],
        (LARGE.bfloat16(), 5, 3e-6),
    ],
)
def test_values_against_double_precision(logits: Tensor, target: int, tolerance: float) -> None:
    targets = torch.full((len(logits),), target)
    exact = upstream(logits.double(), targets, 1.0)
    logps = token_logps(logits, targets, with_entropy=True)
    for found, expected in zip(logps, exact, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= tolerance
    assert token_logps(logits, targets).entropies_N is None


def test_chunks_without_tokens_come_to_the_head_as_others_do() -> None:
    """The head's forward is repeated before its backward, so ranks that share its weight gather it
    in one order, also if a loss drops empty chunks (ms-swift's `jsd_loss`)."""
    events: list[str] = []
    head = head_of(4)
    head.register_forward_hook(lambda *_: events.append("forward"))
    head.register_full_backward_pre_hook(lambda *_: events.append("backward"))

    def loss(logits: Tensor, *, overwrite: bool) -> tuple[Tensor]:
        return ((logits.exp() if len(logits) else logits).sum()[None],)

    [totals] = in_chunks(head, head.hidden, [], loss, chunk_size=3, num_chunks=4)
    assert events == ["forward"] * 4
    events.clear()
    totals.sum().backward()
    assert events == ["forward", "backward"] * 4
