"""The loss of distillation equals ms-swift's, over layouts and teachers; a teacher sees each row of
a round, or the run stops (L1, M3, R2)."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rl_core.data import GKDBatch, GRPOBatch
from swift.rlhf_trainers import GKDTrainer
from swift.rlhf_trainers.gkd_loss import DataSource

from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shim import LogitsShim
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.rollout.sample import RolloutGKDSample
from swift_grpo_ext.training import RolloutGKDTrainer
from swift_grpo_ext.training.batch import complete_teacher_views
from swift_grpo_ext.training.distillation import completions_of
from swift_grpo_ext.training.group import DisagreementError
from swift_grpo_ext.training.rollouts import Round
from tests.rig.arguments import distillation_arguments
from tests.rig.logits.batch import (
    UNEQUAL,
    Batch,
    assert_close,
    counted_positions,
    values_and_gradients,
)
from tests.rig.logits.models import build
from tests.rig.ranks import ThreadRanks, run_rank_groups

TOP = 5


class Upstream(GKDTrainer):
    """ms-swift's trainer, with the attributes that its loss uses."""

    def __init__(
        self, teacher: Any = None, *, top: int | None = None, served: bool = False, **flags: Any
    ) -> None:
        self.args = distillation_arguments(**flags)
        self.teacher_model, self.gkd_logits_topk = teacher, top
        self.beta, self.temperature = self.args.beta, 1.3
        self.use_liger_gkd_loss, self.use_teacher_api = False, served
        self._is_self_distillation = self._teacher_use_disable_adapter = teacher is None
        self.template = SimpleNamespace(padding_free=False, sequence_parallel_size=1)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_main_process=False)
        self.get_use_logits_to_keep = lambda default_value=True: False
        self.load_teacher_model_context = nullcontext


class Ours(RolloutGKDTrainer):
    """Our trainer, with the same attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Upstream.__init__(self, *args, **kwargs)
        self.model = SimpleNamespace(training=False)  # measures no gap
        self.completion_logps = CompletionLogps(self.args, self.template)


def inputs_of(
    batch: Batch, lacks: slice = slice(0), source: DataSource = DataSource.STUDENT, **more: Any
) -> dict[str, Any]:
    """Return the inputs of a loss. A teacher's server has scored all tokens except `lacks`."""
    torch.manual_seed(3)
    shape = (*batch.labels.shape, TOP)
    logprobs = torch.randn(shape).log_softmax(-1)
    rows, columns = batch.labels.ne(-100).nonzero()[lacks].unbind(1)
    logprobs[rows, columns - 1] = float("-inf")
    scores = {"teacher_topk_logprobs": logprobs, "teacher_topk_indices": torch.randint(150, shape)}
    encoded = {**batch.inputs, "labels": batch.labels}
    both = {"model_inputs": dict(encoded), "teacher_model_inputs": dict(encoded)}
    return {**both, "gkd_batch": GKDBatch(data_source=source, **scores), **more}


@pytest.mark.parametrize(
    ("teacher", "chunk_size", "flags"),
    [
        ("other", 1024, {}),
        ("larger", 1024, {}),  # has more tokens in its vocabulary
        ("other", 4, {"beta": 0.0}),
        ("other", 4, {"top": TOP, "beta": 1.0}),
        ("itself", 1024, {}),
        ("served", 4, {}),
        ("silent", 4, {}),
    ],
)
@pytest.mark.parametrize("layout", ["left", "packed"])
def test_the_loss_is_ms_swifts(
    teacher: str,
    chunk_size: int,
    flags: dict[str, Any],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent teacher's server has scored no token. Chunks of 4 are of a data set's answers."""
    monkeypatch.setattr(LogitsShim, "chunk_size", chunk_size)
    model, batch, local = build("Qwen2", lora=True), Batch(UNEQUAL, layout), None
    if teacher in ("other", "larger"):
        local = build("Mistral").eval()
        local.resize_token_embeddings(local.config.vocab_size + 8 * (teacher == "larger"))
    source = DataSource.DATASET if chunk_size == 4 else DataSource.STUDENT
    lacks, results = slice(None) if teacher == "silent" else slice(2, 3), []
    for host in (Upstream, Ours):
        trainer = host(local, served=teacher in ("served", "silent"), sft_alpha=0.7, **flags)

        def loss(trainer: Any = trainer) -> Any:
            return trainer.compute_loss(model, inputs_of(batch, lacks, source))[None]

        with counted_positions(model) as counts:
            results.append(values_and_gradients(model, loss))
    assert_close(results[1], results[0])
    num_tokens = int(batch.labels.ne(-100).sum())
    assert max(counts[-1:] if teacher == "itself" else counts) == min(chunk_size, num_tokens)


@pytest.mark.parametrize("placeholders", [[], [150, 152, 157]])
def test_the_loss_gives_the_rollouts_log_probabilities(placeholders: list[int]) -> None:
    """The engine never samples placeholders (M2). The round ends with its last micro-batch."""
    model, batch = build("Qwen2"), Batch(UNEQUAL, "left")
    logits = model(**batch.inputs).logits[batch.predicts_BT] / 1.3
    logits[:, placeholders] = -torch.inf
    expected = logits.log_softmax(-1).gather(-1, batch.targets_N[:, None])
    trainer = Ours(top=TOP, served=True)
    trainer._placeholders, trainer.accelerator.sync_gradients = placeholders, False
    mask_BK = torch.ones(1, len(expected), dtype=torch.bool)
    completions, later = (
        GRPOBatch(completion_mask=mask_BK, truncated_mask=mask_BK[:, 0], seq_lengths=mask_BK.sum(1))
        for _ in range(2)
    )
    ended: list[bool] = []
    trainer._end_round = lambda: ended.append(True)
    trainer._round = Round([], [([], completions), ([], later)], [])
    for micro_batch in (completions, later):
        assert ended == []
        inputs = inputs_of(batch, rollout=([], micro_batch))
        trainer.compute_loss(model, inputs)
    assert ended == [True]
    found = completions.old_per_token_logps
    torch.testing.assert_close(found, expected.T, rtol=1e-5, atol=1e-5)


def sample(ids: list[int], num_prompt: int, logprobs: list[float]) -> RolloutGKDSample:
    made = RolloutGKDSample.from_row({"messages": [{"role": "user", "content": "?"}]})
    made.encoded = {"input_ids": ids, "labels": [-100] * num_prompt + ids[num_prompt:]}
    made.rollout_logprobs = [logprobs] if logprobs else []
    return made


def test_completions_of_a_batch() -> None:
    rows = [sample([1, 2, 3, 4], 2, [-0.5, -1.0]), sample([1, 2, 3], 2, [-0.25])]
    both = completions_of(rows, torch.device("cpu"))
    assert both.completion_mask.tolist() == [[True, True], [True, False]]
    assert both.rollout_per_token_logps is not None
    assert both.rollout_per_token_logps.tolist() == [[-0.5, -1.0], [-0.25, 0.0]]
    silent = completions_of([rows[0], sample([1, 2], 1, [])], torch.device("cpu"))
    assert silent.rollout_per_token_logps is None


def test_a_dataset_row_keeps_its_end_and_its_columns() -> None:
    """`add_eos` None leaves the end to the template. Columns may have names of our fields."""
    row = {"messages": [{"role": "user", "content": "?"}], "sample_id": "mine", "prompt_hash": 1}
    made = RolloutGKDSample.from_row(row)
    assert made.add_eos is None
    assert made.extra == {"sample_id": "mine", "prompt_hash": 1}
    assert not made.rollout_prompts


def test_rows_without_a_teachers_prompt_are_taught_with_their_own() -> None:
    """Ranks agree: all make the pass of a teacher whose weights are sharded."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "7"}]
    columns = ({}, {"teacher_prompt": ""}, {"teacher_prompt": "It is a 7."}, {"teacher_images": []})
    rows = [RolloutGKDSample.from_row({"messages": messages, **each}) for each in columns]

    def work(ranks: ThreadRanks) -> bool:
        return complete_teacher_views(rows[2 * ranks.rank : 2 * ranks.rank + 2], ranks)

    assert not complete_teacher_views(rows[:2], RankGroup())
    assert [row.teacher_messages for row in rows[:2]] == [None, None]
    assert run_rank_groups(2, work) == [True, True]
    seen = [row.teacher_messages[0]["content"] for row in rows]
    assert seen == ["?", "?", "It is a 7.", "?"]


def test_a_teacher_that_scored_another_number_of_tokens_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token has no log-probability. A teacher's own prompt may have any length. Rank 0
    scatters the error in place of the answers."""
    samples = [sample([*range(number)], 1, []) for number in (4, 3, 9)]
    samples[2].teacher_prompt = "?"
    trainer, scored = Ours(served=True), [3, 2, 1]

    def infer(_: Any, handle: dict[str, Any], topk: int) -> Any:
        assert (topk, [request.data_dict for request in handle["all_requests"]]) == (TOP, [{}] * 3)
        return [([[-1.0]] * number, []) for number in scored]

    monkeypatch.setattr(GKDTrainer, "_infer_teacher_requests", infer)
    monkeypatch.setattr(GKDTrainer, "_scatter_teacher_parsed", lambda _, __, parsed: parsed[:1])

    def fetch() -> Any:
        handle = {"all_requests": trainer._build_teacher_requests(samples)}
        return trainer._scatter_teacher_parsed(handle, trainer._infer_teacher_requests(handle, TOP))

    assert fetch() == [([[-1.0]] * 3, [])]
    scored[1] = 1
    with pytest.raises(DisagreementError, match=r"scored 2 tokens, and training has 3"):
        fetch()
