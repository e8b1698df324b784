"""Micro-batches have the tokens and positions of the rollout, or the run stops on each rank (M3,
M6). A group's media are collated once (L6)."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch

from swift_grpo_ext.logits.packed import SharedPromptInputs
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.training.batch import (
    check_batches,
    check_positions,
    check_tokens,
    collate_groups,
    pad_texts,
    switch_off_dropout,
)
from swift_grpo_ext.training.group import DisagreementError, EncodedSample, GroupPrompt
from tests.rig.logits.models import build
from tests.rig.ranks import run_rank_groups
from tests.unit.training.samples import arguments, batch, prompts, sample

PAD = 90


def test_each_sampled_token_has_a_log_probability() -> None:
    """Tokens of an environment have none. A sample without log-probabilities is not counted."""
    tool = sample(turns=[(5, 6, 9), (7,)], logprobs=[(-1, -1), (-1,)], mask=[(1, 1, 0), (1,)])
    single = sample(response_token_ids=[5, 6], rollout_logprobs=[-1, -1])
    rollout = batch(rollout=((-1.0,) * 2,) * 4, mask=((1, 1),) * 4)
    check_tokens([sample(), sample(logprobs=()), tool, single], rollout)
    message = r"train round 3\.0, group 2, sample 1: 2 sampled tokens and 1 log-prob"
    with pytest.raises(DisagreementError, match=message):
        check_tokens([sample(logprobs=[(-0.5,)])], batch())
    with pytest.raises(DisagreementError, match="3 sampled tokens and 2 log-prob"):
        check_tokens([sample(turns=[(5, 6, 9)])], batch())


def test_a_batch_without_log_probabilities_names_the_count() -> None:
    """Training may lack one token: the sampled end of a turn."""
    without = batch(rollout=None)
    check_tokens([sample(logprobs=())], without)
    for count in (1, 2, 3, 4):
        drawn = sample(turns=[(5,) * count], logprobs=[(-1.0,) * count])
        is_good = count in (2, 3)
        message = f"{count} tokens were sampled, and 2 would be"
        with nullcontext() if is_good else pytest.raises(DisagreementError, match=message):
            check_tokens([drawn], without)


@pytest.mark.parametrize("fault", ["", "another prompt"])
def test_what_one_rank_finds_ends_all(fault: str) -> None:
    """Otherwise the others would wait in the next exchange until `--ddp_timeout`."""

    def work(ranks: RankGroup) -> str:
        logprobs = [(-0.5,)] if ranks.rank == 1 and not fault else [(-0.5, -1.0)]
        micro_batches = [([one], batch(), {}) for one in (sample(), sample(logprobs=logprobs))]
        with pytest.raises(DisagreementError) as raised:
            check_batches(micro_batches, arguments(), ranks, fault if ranks.rank == 1 else "")
        return str(raised.value)

    [first, second, third] = run_rank_groups(3, work)
    assert first == second == third
    assert (fault or "2 sampled tokens and 1 log-prob") in first
    check_batches([([sample()], batch(), {})], arguments(), RankGroup())


ROLLOUT = np.array([[0, 1, 1, 2, 9], [0, 1, 2, 3, 9], [0, 1, 1, 1, 9]], dtype=np.int32)
OTHER = np.array(ROLLOUT)
OTHER[:, 4] = 4


def placed(*rows: Any, padding: int = 0) -> torch.Tensor:
    """Return positions [3, batch, tokens] of samples with two tokens after their prompt's."""
    made = []
    for row in rows:
        behind = int(row.max()) + torch.arange(1, 3).expand(3, 2)
        made.append(torch.cat([torch.as_tensor(row), behind, torch.zeros(3, padding)], 1).long())
    return torch.stack(made, 1)


@pytest.mark.parametrize("how", ["right", "left", "packed"])
def test_positions_are_compared(how: str, warnings: list[str]) -> None:
    """In each layout of samples, only positions of the prompt are compared."""
    ids = [1, PAD, PAD, PAD, 2, 5, 6]
    rows = {"encoded": {"input_ids": ids}, "videos": ["a"]}
    positions = (None, ROLLOUT, None)
    samples = [sample(**rows, rollout_prompts=prompts(ids[:5], positions=p)) for p in positions]

    def check(*rows: Any, **changes: Any) -> None:
        positions = placed(*rows, padding=3)
        mask = (torch.arange(10) < 7).expand(3, -1)
        layouts = {
            "right": {"position_ids": positions, "attention_mask": mask},
            "left": {"position_ids": positions.roll(3, 2), "attention_mask": mask.flip(1)},
            "packed": {"position_ids": positions[:, :, :7].flatten(1)[:, None]},
        }
        check_positions(samples, layouts[how], arguments(**changes))

    check(OTHER, ROLLOUT, OTHER)
    check_positions(samples, {}, arguments())  # the model counts them
    message = r"sample 1, a row of video: .* from token 4 of 5 on \(\[9, 9, 9\] against \[4, 4, 4\]"
    with pytest.raises(DisagreementError, match=message):
        check(ROLLOUT, OTHER, ROLLOUT)
    check(ROLLOUT, OTHER, ROLLOUT, rollout_mismatch="warn")
    assert "different positions, from token 4" in warnings[-1]


def test_dropout_is_really_off() -> None:
    """Two passes in training mode agree afterwards. Dropouts of 0 are not counted."""
    model, ids = build("Qwen2"), torch.arange(8)[None]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    dropouts = (torch.nn.Dropout1d(0.1), torch.nn.Dropout(0.0))
    model.lm_head = torch.nn.Sequential(model.lm_head, *dropouts)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert switch_off_dropout(model) == 3
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.model.layers[0].self_attn.scaling == 0.25
    assert switch_off_dropout(model) == 0


# --- micro-batches that read a prompt once ---


class Collating(SimpleNamespace):
    """A template whose collator removes what it concatenates, as ms-swift's do."""

    padding_side, padding_free = "right", False
    tokenizer = SimpleNamespace(pad_token_id=0)

    def data_collator(self, rows: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        self.calls.append(len(rows))
        pixels = torch.cat([row.pop("pixel_values") for row in rows])
        return {**pad_texts(self, rows), "pixel_values": pixels, "loss_scale": 1}


SETTINGS: dict[str, Any] = {"device": torch.device("cpu"), "use_logits_to_keep": True}


def encoded(prompt: GroupPrompt | None, ids: list[int], own: int, **fields: Any) -> Any:
    """Return an encoded sample; its last `own` tokens are the response."""
    labels = [-100] * (len(ids) - own) + ids[len(ids) - own :]
    row = EncodedSample(
        input_ids=ids, labels=labels, length=len(ids), pixel_values=torch.ones(2, 4)
    )
    row.prompt = prompt
    logprobs = [[-1.0] * own]
    return sample(encoded=row, rollout_logprobs=logprobs, is_truncated=False, **fields)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_groups_media_are_collated_once(side: str) -> None:
    template: Any = Collating(calls=[], padding_side=side)
    shared = GroupPrompt({}, 3, ())
    samples = [encoded(shared, [1, 2, 3, 5], 1), encoded(shared, [1, 2, 3, 6, 7], 2)]
    samples.append(encoded(GroupPrompt({}, 2, ()), [1, 2, 8], 1))
    inputs, batch = collate_groups(samples, template, **SETTINGS)
    assert isinstance(inputs, SharedPromptInputs)
    assert template.calls == [2]
    assert inputs.heads["input_ids"].tolist()[0] == [1, 2, 3, 6, 7]  # the longest of its group
    assert len(inputs.heads["pixel_values"]) == 4
    assert not {"labels", "loss_scale"} & inputs.heads.keys()
    assert [group.prompt for group in inputs.groups] == [3, 0]
    assert [group.ids for group in inputs.groups] == [[[1, 2, 3, 5], [1, 2, 3, 6, 7]], [[1, 2, 8]]]
    # All rows are collated once if nothing is packed.
    assert inputs.plain() is inputs.plain()
    assert len(inputs.plain()["pixel_values"]) == 6
    assert template.calls == [2, 3]
    whole, _ = collate_groups([encoded(None, [1, 2, 8], 1)], template, **SETTINGS)
    assert not isinstance(whole, SharedPromptInputs)
    assert "labels" in whole
    plain, expected = collate_to_grpo_micro_batch(samples, template, **SETTINGS)
    assert torch.equal(batch.completion_mask, expected.completion_mask)
    assert batch.rollout_per_token_logps is not None
    assert torch.equal(batch.rollout_per_token_logps, expected.rollout_per_token_logps)
    assert torch.equal(inputs["input_ids"], plain["input_ids"])


def test_positions_are_compared_once_a_group() -> None:
    """They are compared in the group's collated row, the longest one."""
    shared, head = GroupPrompt({}, 5, ()), [1, PAD, PAD, PAD, 2]
    seen = {"images": ["a"], "rollout_prompts": prompts(head, positions=ROLLOUT)}
    samples = [encoded(shared, [*head, *own], len(own), **seen) for own in ([6], [6, 7])]
    inputs, _ = collate_groups(samples, Collating(calls=[]), **SETTINGS)
    assert isinstance(inputs, SharedPromptInputs)
    inputs.heads["position_ids"] = placed(ROLLOUT)
    check_positions(samples, inputs, arguments())
    inputs.heads["position_ids"] = placed(OTHER)
    with pytest.raises(DisagreementError, match=r"sample 1, a row of image: .* from token 4 of 5"):
        check_positions(samples, inputs, arguments())
