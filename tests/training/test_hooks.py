"""What the trainer does in each of ms-swift's hooks; ms-swift's own part is a recording fake.

`tests/training/test_trainer.py` runs both together."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import swift_grpo_ext
from swift_grpo_ext.record.reader import read_rewards
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.sampling.groups import request_id
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.training import trainer as trainer_module
from swift_grpo_ext.training.agreement import DisagreementError
from swift_grpo_ext.training.checkpoints import CheckpointError
from swift_grpo_ext.weights.checksums import WeightUpdateError
from tests.arguments import training_arguments
from tests.ranks import ThreadRanks, run_rank_groups
from tests.training.hooked import (
    IMAGE,
    RANKS,
    Model,
    batch,
    drawn_sample,
    rows,
    samples_of,
    trainer_of,
)


@pytest.fixture(autouse=True)
def _ranks_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "training_ranks", lambda _: RANKS.own)


def calls_of(trainer: Any, name: str) -> list[Any]:
    return [value for called, value in trainer.calls if called == name]


def named(trainer: Any, *questions: str) -> Any:
    return trainer._add_prompt_id_to_inputs(samples_of(*questions))


def ids(samples: Any) -> list[str]:
    return [sample.request_id for sample in samples]


# --- the model ---


def test_dropout_is_off_in_training_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over the same values agree, which is what ratios compare."""
    told: list[str] = []
    monkeypatch.setattr(trainer_module.logger, "info", told.append)
    model = trainer_of(tmp_path).model
    assert model.training
    assert (model.dropout.p, model.attention.attention_dropout) == (0.0, 0.0)
    values = torch.ones(16, 4)
    assert torch.equal(model(values), model(values))
    [text] = told
    assert "switched off in 2 places" in text


@pytest.mark.parametrize("async_generate", [False, True])
def test_the_encoder_cache_leaves_its_memory_to_the_engine(
    async_generate: bool, tmp_path: Path
) -> None:
    """Where rollouts run beside the training, it is empty when a batch is made, and not before."""
    told: list[str] = []
    trainer = trainer_of(tmp_path, async_generate=async_generate)
    trainer._encoder_cache = SimpleNamespace(forget=partial(told.append, "forget"), towers=[])
    named(trainer, "a")
    assert told == ["forget"] * (not async_generate)


def test_placeholders_have_no_probability_in_any_model(tmp_path: Path) -> None:
    """Policy, reference and local teacher."""
    reference, teacher = Model().eval(), Model().eval()
    trainer = trainer_of(tmp_path, parts={"ref_model": reference, "teacher_model": teacher})
    for model in (trainer.model, reference, teacher):
        probabilities = model(torch.ones(1, 4)).softmax(-1)[0]
        assert probabilities[IMAGE] == 0
        assert probabilities.count_nonzero() == 7
    assert reference.dropout.p == 0.5  # in eval mode it does nothing


def test_placeholders_have_no_probability_in_ligers_loss(tmp_path: Path) -> None:
    def liger_grpo_loss(*, _input: Any, lin_weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.nn.functional.linear(_input, lin_weight, bias).softmax(-1)

    parts = {"liger_grpo_loss": liger_grpo_loss}
    trainer = trainer_of(tmp_path, parts=parts, use_liger_kernel=True)
    [probabilities] = trainer.liger_grpo_loss(
        _input=torch.ones(1, 4), lin_weight=torch.ones(8, 4), bias=None
    )
    assert probabilities[IMAGE] == 0
    assert probabilities.count_nonzero() == 7


# --- a round's name ---


def test_rounds_begin_with_their_batches(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=1)
    found = []
    for step in range(4):
        trainer._step = trainer.state.global_step = step
        assert trainer._prepare_inputs("inputs") == "inputs"
        found.append(named(trainer, "a", "a", "b", "b")[2].request_id)
    assert found == ["train-0.0-1-0", "train-0.0-1-0", "train-2.0-1-0", "train-2.0-1-0"]
    assert calls_of(trainer, "prepare_inputs") == [0, 1, 2, 3]


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=1)
    trainer.state.global_step = 6
    trainer._prepare_inputs("inputs")
    assert calls_of(trainer, "prepare_inputs") == [6]
    assert ids(named(trainer, "a", "a")) == ["train-6.0-0-0", "train-6.0-0-1"]


def test_async_generation_names_the_next_round(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, async_generate=True, gradient_accumulation_steps=1)
    trainer._prepare_inputs("inputs")
    assert ids(named(trainer, "a")) == ["train-2.0-0-0"]


def test_an_evaluation_takes_no_training_round(tmp_path: Path) -> None:
    """It counts its groups over batches; a second one at the same step has another number."""
    trainer = trainer_of(tmp_path, num_generations_eval=3)
    trainer._prepare_inputs("inputs")
    trainer.state.global_step = 5
    found = []
    for _ in range(2):
        trainer.model.eval()
        assert trainer.evaluation_loop(SimpleNamespace(dataset=rows("a"))) == "metrics"
        trainer._prepare_inputs("inputs")
        for questions in ("aaabbb", "ccc"):
            found.append(ids(named(trainer, *questions))[-1])
        trainer.model.train()
    assert found == ["eval-5.0-1-2", "eval-5.0-2-2", "eval-5.1-1-2", "eval-5.1-2-2"]
    assert named(trainer, "a")[0].request_id == "train-0.0-0-0"


def test_ranks_count_on(tmp_path: Path) -> None:
    def work(ranks: ThreadRanks) -> list[str]:
        trainer = trainer_of(tmp_path, ranks)
        return ids(named(trainer, *("abc" if ranks.rank == 0 else "d")))

    assert run_rank_groups(2, work) == [
        ["train-0.0-0-0", "train-0.0-0-1", "train-0.0-1-0"],
        ["train-0.0-1-1"],
    ]


def test_duplicates_of_a_batch_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, duplicate_prompts="error")
    named(trainer, "a", "a", "b", "b")
    with pytest.raises(ValueError, match="1 of 2 prompts"):
        named(trainer, "a", "a", "a", "a")


def test_each_epoch_has_its_order(tmp_path: Path) -> None:
    """8 rows, 2 a round: 4 rounds, each for one step, make an epoch."""
    trainer = trainer_of(tmp_path)
    sampler = trainer._get_train_sampler()
    first = list(sampler)
    trainer.state.global_step = 4
    second = list(sampler)
    assert sorted(first) == sorted(second) != []
    assert first != second
    trainer.state.global_step = 3
    assert list(sampler) == first


def test_resampled_rounds_have_rows_and_names_of_their_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dynamic_sample=True)
    trainer._prepare_resample_data_iterator()
    trainer._prepare_inputs("inputs")
    drawn, names = [], []
    for _ in range(2):
        added = next(trainer.dynamic_resample_iterator)
        drawn.append([row["messages"][0]["content"] for row in added])
        names.append(named(trainer, *drawn[-1])[0].request_id)
    assert names == ["train-0.1-0-0", "train-0.2-0-0"]
    assert all(words[0] == words[1] != words[2] == words[3] for words in drawn)
    assert not set(drawn[0]) & set(drawn[1])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(trainer.args.seed + 1))
    assert drawn[0] + drawn[1] == ["abcdefgh"[i] for i in order[:4] for _ in range(2)]


def test_without_dynamic_sampling_the_iterator_is_ms_swifts(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer._prepare_resample_data_iterator()
    assert list(trainer.dynamic_resample_iterator) == []


def test_prefetch_draws_the_batch_before_the_first(tmp_path: Path) -> None:
    """An evaluation's own batch, under its names and G; else the rows of the round before the one
    that `_prepare_inputs` names, in training mode."""
    trainer = trainer_of(tmp_path, async_generate=True, gradient_accumulation_steps=1)
    trainer.control.should_evaluate = True
    trainer._prefetch(["of the evaluation"])
    trainer.control.should_evaluate = False
    trainer.state.global_step = 4
    trainer.model.eval()
    trainer._prefetch(["not taken"])
    assert not trainer.model.training
    evaluation, (drawn, in_training) = calls_of(trainer, "prefetch")
    assert (evaluation, in_training) == ((["of the evaluation"], False), True)
    order = list(trainer._get_train_sampler())  # each generation batch of 4 comes twice
    assert drawn == [[trainer.train_dataset[i] for i in order[8:12]]]
    trainer.model.train()
    assert ids(named(trainer, "a")) == ["train-4.0-0-0"]


# --- bad prompts ---


def test_bad_prompts_of_training_and_evaluation(tmp_path: Path, warnings: list[str]) -> None:
    """Each phase takes rows of its own data set and its own size of a group, whole groups at once,
    and the record says so."""
    trainer = trainer_of(tmp_path, num_generations_eval=3)
    kept = trainer.resample_encode_failed_inputs(rows("bad", "bad", "z", "z"))
    assert [row["messages"][0]["content"] for row in kept[2:]] == ["z", "z"]
    assert kept[0]["messages"] == kept[1]["messages"]
    assert kept[0]["messages"][0]["content"] in "abcdefgh"
    trainer.model.eval()
    trainer.evaluation_loop(SimpleNamespace(dataset=rows("bad", "y")))
    kept = trainer.resample_encode_failed_inputs(rows("x", "x", "x", "bad", "bad", "bad"))
    assert [row["messages"][0]["content"] for row in kept] == [*"xxxyyy"]
    assert trainer._metrics["train"]["prompts/replaced"] == [1.0]
    assert trainer._metrics["eval"]["prompts/replaced"] == [1.0]
    assert [text.split(":")[0] for text in warnings] == [
        "train round 0.0, group 0",
        "eval round 0.0, group 1",
    ]


# --- the rollout ---


@pytest.mark.parametrize("grouped", [True, False])
def test_samples_of_two_engines_are_written_with_rank_and_replica(
    tmp_path: Path, grouped: bool
) -> None:
    """A group is one request, or each sample is; the seeds are the same."""

    def work(ranks: ThreadRanks) -> tuple[list[int], list[Any]]:
        trainer = trainer_of(tmp_path, ranks, rollout_group_requests=grouped)
        trainer._last_loaded_step = 4
        outputs = trainer._rollout(named(trainer, "a", "a"), None)
        assert [output.rollout_infos["replica"] for output in outputs] == [f"rank {ranks.rank}"] * 2
        [metadatas] = calls_of(trainer, "engine_infer")
        assert all(metadata.packed and metadata.run_seed == 42 for metadata in metadatas)
        return [metadata.count for metadata in metadatas], trainer.drawn

    counts, drawn = zip(*run_rank_groups(2, work), strict=True)
    assert counts == ([2] if grouped else [1, 1],) * 2
    found = [row for of_rank in drawn for row in of_rank]
    assert [(row.rank, row.replica) for row in found] == [
        *[(0, "rank 0")] * 2,
        *[(1, "rank 1")] * 2,
    ]
    assert [request_id(row.sample_id) for row in found] == [
        f"train-0.0-{group}-{index}" for group in (0, 1) for index in (0, 1)
    ]
    assert [row.seed for row in found] == [sample_seed(42, row.sample_id) for row in found]
    assert {row.weight_version for row in found} == {4}


@pytest.mark.parametrize(("rank", "replica"), [(0, "rank 0"), (1, "rank 0"), (3, "rank 2")])
def test_a_tensor_parallel_engine_has_the_name_of_its_first_rank(
    rank: int, replica: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "TensorParallelGroup", lambda _: SingleRank())
    ranks = SimpleNamespace(rank=rank, size=4, all_gather=lambda value: [value] * 4)
    flags = {"duplicate_prompts": "allow", "sample_log": "none"}
    trainer = trainer_of(tmp_path, ranks, vllm_tensor_parallel_size=2, **flags)
    trainer._rollout(named(trainer, "a", "a"), None)
    assert [(row.rank, row.replica) for row in trainer.drawn] == [(rank, replica)] * 2


def test_rank_0_draws_for_all_when_inputs_are_global(tmp_path: Path) -> None:
    def work(ranks: ThreadRanks) -> tuple[int, list[tuple[int, str]]]:
        trainer = trainer_of(tmp_path, ranks)
        samples = named(trainer, "a", "a")
        gathered = [sample for of_rank in ranks.all_gather(samples) for sample in of_rank]
        outputs = trainer._rollout(gathered, None, is_global_inputs=True)
        return len(outputs), [(row.rank, row.replica) for row in trainer.drawn]

    written = [(0, "rank 0"), (0, "rank 0"), (1, "rank 0"), (1, "rank 0")]
    assert run_rank_groups(2, work) == [(4, written), (0, [])]


def test_ms_swifts_own_rollouts_are_written_without_seeds(tmp_path: Path) -> None:
    flags = {"rollout_seed_mode": "engine", "rollout_group_requests": False}
    trainer = trainer_of(tmp_path, **flags)
    trainer._rollout(named(trainer, "a", "a"), None)
    assert calls_of(trainer, "rollout") == [2]
    assert [(row.text, row.seed) for row in trainer.drawn] == [
        ("train-0.0-0-0", None),
        ("train-0.0-0-1", None),
    ]


def test_without_vllm_weights_are_those_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "swift_grpo_ext.rollout.transformers_engine.RolloutTransformersEngine",
        lambda *_, **__: None,
    )
    trainer = trainer_of(tmp_path, use_vllm=False)
    trainer.state.global_step, trainer._last_loaded_step = 3, -1
    trainer._rollout(named(trainer, "a"), None)
    assert [row.weight_version for row in trainer.drawn] == [3]


def test_requests_carry_the_name_of_their_sample(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, stop_token_ids=[7])
    requests = trainer.samples2requests(named(trainer, "a", "a"))
    found = [wire.read_metadata(request.data_dict) for request in requests]
    assert [request_id(metadata.sample_id) for metadata in found] == [
        "train-0.0-0-0",
        "train-0.0-0-1",
    ]
    assert {(m.count, m.run_seed, m.packed, m.stop_token_ids) for m in found} == {
        (1, 42, False, (7,))
    }


def test_groups_whose_rows_differ_are_named_once(tmp_path: Path, warnings: list[str]) -> None:
    """Not in conversations, where each environment asks its own question."""
    trainer = trainer_of(tmp_path)
    for _ in range(2):
        trainer._rollout(named(trainer, "a", "b"), None)
    assert ["rows that differ" in text for text in warnings] == [True]
    other = trainer_of(tmp_path)
    other.multi_turn_scheduler = "gym"
    other._rollout(named(other, "a", "b"), None)
    assert len(warnings) == 1
    assert not any(metadata.packed for metadata in calls_of(other, "engine_infer")[0])


def test_training_samples_keep_the_prompt_that_was_drawn_from(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    samples = named(trainer, "a", "a")
    results = trainer._postprocess_rollout_outputs(samples, trainer._rollout(samples, None))
    assert [sample.rollout_prompt_ids for sample in results] == [[1, 2], [1, 2]]
    assert [sample.response_token_ids for sample in results] == [[5, 1], [6, 1]]
    assert [sample.messages[-1]["content"] for sample in results] == ["0.0", "0.1"]


# --- the training batch ---


def test_a_prompt_that_training_sees_otherwise_stops_the_run(tmp_path: Path) -> None:
    """In any of the micro-batches."""
    trainer = trainer_of(tmp_path)
    trainer.batches = [batch(), batch()]
    good = [drawn_sample("train-0.0-0-0"), drawn_sample("train-0.0-0-1")]
    assert len(trainer._prepare_batch_inputs(good)) == 2
    bad = [good[0], drawn_sample("train-0.0-0-1", [1, 9])]
    with pytest.raises(DisagreementError, match=r"group 0, sample 1: .* from token 1 on"):
        trainer._prepare_batch_inputs(bad)


@pytest.mark.parametrize(
    ("max_length", "remedy"), [(2, "--max_length 2"), (3, "--prompt_mismatch warn")]
)
def test_the_remedy_follows_the_templates_limit(
    max_length: int, remedy: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, template={"max_length": max_length})
    trainer.batches = [batch()]
    with pytest.raises(DisagreementError, match=remedy):
        trainer._prepare_batch_inputs([drawn_sample("train-0.0-0-0", [2, 5])])


def test_tokens_that_lack_in_training_stop_the_run(tmp_path: Path) -> None:
    """Each micro-batch is held against its own samples."""
    trainer = trainer_of(tmp_path)
    lacking = batch()
    lacking.rollout_per_token_logps = None
    trainer.batches = [batch(), lacking]
    long = {"response_token_ids": [[5] * 9], "rollout_logprobs": [[-0.5] * 9]}
    good, bad = drawn_sample("train-0.0-0-0"), drawn_sample("train-0.0-0-1", **long)
    trainer._prepare_batch_inputs([bad, good])  # ms-swift took its log-probabilities
    with pytest.raises(DisagreementError, match="sample 1: 9 tokens were sampled, and 2 would"):
        trainer._prepare_batch_inputs([good, bad])


def test_counts_are_looked_at_before_anything_is_encoded(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.batches = [batch()]
    with pytest.raises(DisagreementError, match="2 sampled tokens and 1 log-prob"):
        trainer._prepare_batch_inputs([drawn_sample("train-0.0-0-0", rollout_logprobs=[[-1.0]])])
    assert calls_of(trainer, "prepare_batch_inputs") == []


def test_with_sequence_parallelism_prompts_are_split_and_not_compared(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, template={"sequence_parallel_size": 2})
    trainer.batches = [batch()]
    trainer._prepare_batch_inputs([drawn_sample("train-0.0-0-0", [1, 9])])


def test_the_gap_is_a_metric_of_its_phase(tmp_path: Path, warnings: list[str]) -> None:
    trainer = trainer_of(tmp_path)
    trainer.state.global_step = 8
    for mode, gap in (("train", 0.5), ("eval", 0.25)):
        trainer.model.train(mode == "train")
        trainer.batches = [batch(gap=gap), batch(gap=-gap)]
        samples = [drawn_sample(f"{mode}-0.0-0-{i}") for i in range(2)]
        trainer._prepare_batch_inputs(samples)
        metrics = trainer._metrics[mode]
        assert metrics["rollout_gap/mean"] == metrics["rollout_gap/max"] == [gap]
    assert [text.split(":")[0] for text in warnings] == ["Step 8"]


@pytest.mark.parametrize("takes_cache", [True, False])
def test_training_passes_keep_no_cache(takes_cache: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.model_kwarg_keys = {"use_cache"} if takes_cache else set()
    inputs: dict[str, Any] = {"use_cache": True} if takes_cache else {}
    trainer._get_logps_via_local_forward(trainer.model, inputs, 2, torch.ones(1, 2))
    assert calls_of(trainer, "local_forward") == [{"use_cache": False} if takes_cache else {}]


# --- scores ---


def test_each_rank_writes_the_scores_of_its_samples(tmp_path: Path) -> None:
    """With the advantage, the gap, and whether the prompt replaced another."""

    def work(ranks: ThreadRanks) -> None:
        trainer = trainer_of(tmp_path, ranks)
        trainer.resample_encode_failed_inputs(rows(*["bad" if ranks.rank else "z"] * 2))
        samples = named(trainer, "a", "a")
        trainer._rollout(samples, None)
        scored = [drawn_sample(sample.request_id, advantages=i) for i, sample in enumerate(samples)]
        trainer.rewards = [[1.0], [2.0], [3.0], [4.0]]  # of both ranks, as ms-swift gathers them
        batches = [{"grpo_batch": batch(gap=0.5)}, {"grpo_batch": batch(gap=0.25)}]
        trainer.batches = batches
        trainer._postprocess_batch(scored, batches)

    run_rank_groups(2, work)
    found = sorted(read_rewards(tmp_path).to_pylist(), key=lambda row: row["rewards"])
    assert [row["rewards"] for row in found] == [[("right", float(i))] for i in (1, 2, 3, 4)]
    assert [row["reward"] for row in found] == [2.0, 4.0, 6.0, 8.0]
    assert [(row["group"], row["index"]) for row in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["advantage"] for row in found] == [0.0, 1.0] * 2
    assert [row["gap_max"] for row in found] == [0.5, 0.25] * 2
    assert [row["replaced"] for row in found] == [False, False, True, True]
    assert {row["fate"] for row in found} == {"trained"}


def test_what_dynamic_sampling_left_out_is_dropped(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dynamic_sample=True, template={"sequence_parallel_size": 2})
    first = named(trainer, "a", "a")
    trainer._rounds.begin_resampling()
    second = named(trainer, "b", "b")
    for drawn in (first, second):
        trainer._rollout(drawn, None)
        trainer.rewards = [[1.0], [0.0]]
        assert trainer._compute_rewards_per_func(drawn).tolist() == trainer.rewards
    for sample in second:
        sample.advantages = 1.0
    trainer._postprocess_batch(second, [])
    found = read_rewards(tmp_path).to_pylist()
    assert {(row["number"], row["fate"], row["advantage"]) for row in found} == {
        (0, "dropped", None),
        (1, "trained", 1.0),
    }


def test_an_evaluation_is_scored_as_such(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dynamic_sample=True)
    trainer.model.eval()
    trainer.evaluation_loop(SimpleNamespace(dataset=rows("a")))
    asked = named(trainer, "a")
    trainer._rollout(asked, None)
    samples = [drawn_sample(i) for i in ids(asked)]
    trainer.rewards, trainer.batches = [[1.0]], [batch()]
    trainer._compute_rewards_per_func(samples)
    trainer._postprocess_batch(samples, [{"grpo_batch": batch()}])
    [row] = read_rewards(tmp_path).to_pylist()
    assert (row["phase"], row["fate"]) == ("eval", "evaluated")


def test_a_gradient_of_zero_is_said_before_the_log(tmp_path: Path, warnings: list[str]) -> None:
    trainer = trainer_of(tmp_path)
    trainer.state.global_step = 5
    trainer._metrics["train"]["frac_reward_zero_std"].append(0.5)
    trainer.log({"grad_norm": 0.0})
    assert calls_of(trainer, "log") == [{"grad_norm": 0.0}]
    assert [text.split(":")[0] for text in warnings] == ["Step 5"]


# --- weights and checkpoints ---


def test_a_colocated_engine_is_given_the_weights_and_they_are_compared(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer._move_model_to_vllm(skip_async_check=True)
    assert calls_of(trainer, "move") == [True]
    assert torch.equal(trainer.engine.weights["w"], torch.ones(2))
    trainer.engine.error = 1.0
    with pytest.raises(WeightUpdateError, match="colocated engine of rank 0"):
        trainer._move_model_to_vllm()


def test_weights_of_servers_are_sent_by_ms_swift(tmp_path: Path) -> None:
    def work(ranks: ThreadRanks) -> list[Any]:
        flags = {"rollout_seed_mode": "engine", "rollout_group_requests": False}
        trainer = trainer_of(tmp_path, ranks, vllm_mode="server", **flags)
        trainer._move_model_to_vllm()
        assert trainer.engine.weights == {}
        return calls_of(trainer, "load")

    assert run_rank_groups(2, work) == [[["w"]], [["w"]]]


@pytest.mark.parametrize("flags", [{}, {"rollout_seed_mode": "engine"}])
def test_rank_0_alone_connects_to_servers(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[Any] = []
    servers = SimpleNamespace(reconnect=lambda: None, loaded_checksums=list)
    monkeypatch.setattr(
        trainer_module, "connect_servers", lambda *parts: connected.append(parts) or servers
    )
    parts = {"vllm_mode": "server", "new_special_tokens": ["<a>"], **flags}
    for rank in (0, 1):
        ranks = SimpleNamespace(rank=rank, size=2, all_gather=lambda value: [value])
        monkeypatch.setattr(
            trainer_module.RolloutGRPOTrainer, "vllm_client", "client", raising=False
        )
        trainer_of(tmp_path, ranks, **parts)
        assert [client for client, _ in connected] == ["client"]
    assert connected[0][1].new_special_tokens == ["<a>"]


def test_a_checkpoint_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    trainer.state.global_step = 7
    trainer._save_checkpoint(None, None)
    assert calls_of(trainer, "save") == [None]

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer, "note", fail)
    with pytest.raises(CheckpointError, match=r"checkpoint-7 could not be written .* No space"):
        trainer._save_checkpoint(None, None)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Which model was given the weights of which checkpoint."""
    found: list[Any] = []
    monkeypatch.setattr(trainer_module, "load_whole_model", lambda *parts: found.append(parts))
    return found


def test_a_whole_model_is_read_with_its_names_translated(tmp_path: Path, loaded: list[Any]) -> None:
    """Adapters and sharded checkpoints are upstream's."""
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    for folder in (whole, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    save_file({"w": torch.ones(1)}, whole / "model.safetensors")
    trainer, other = trainer_of(tmp_path), Model()
    trainer._load_from_checkpoint(str(whole))
    trainer._load_from_checkpoint(str(whole), other)
    trainer._load_from_checkpoint(str(adapter))
    trainer.state.best_model_checkpoint = str(whole)
    trainer._load_best_model()
    assert loaded == [(trainer.model, whole), (other, whole), (trainer.model, whole)]
    assert calls_of(trainer, "load_from") == [str(adapter)]
    assert calls_of(trainer, "load_best") == []
    for flag in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        sharded = trainer_of(tmp_path)
        setattr(sharded, flag, True)
        sharded.state.best_model_checkpoint = str(whole)
        sharded._load_from_checkpoint(str(whole))
        sharded._load_best_model()
        assert calls_of(sharded, "load_from") == [str(whole)]
        assert len(calls_of(sharded, "load_best")) == 1
    assert len(loaded) == 3


# --- arguments ---

OF_OTHERS = {"get_text_config", "max_tokens"}
"""Of a model's configuration and of a request's, which are called `config` too."""


def test_settings_that_are_read_exist() -> None:
    """A message that read `args.max_length` ended runs with an `AttributeError` of its own."""
    package = Path(swift_grpo_ext.__file__).parent
    files = [*(package / "training").glob("*.py"), package / "logits/logps.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", getattr(node.value, "attr", "")) in ("args", "config")
    }
    assert len(read) > 40
    args = training_arguments()
    assert {name for name in read if not hasattr(args, name)} == OF_OTHERS
