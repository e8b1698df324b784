"""The loss of distillation equals ms-swift's, over layouts and teachers; a teacher sees each row of
a round, or the run stops (L1, M3, R2)."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from swift.model import get_processor
from swift.rl_core.data import GKDBatch, GRPOBatch
from swift.rlhf_trainers import GKDTrainer
from swift.rlhf_trainers.gkd_helpers import encode_gkd_samples
from swift.rlhf_trainers.gkd_loss import DataSource
from swift.template import get_template
from torch import Tensor

from swift_grpo_ext.checks.rows import RowError
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shim import LogitsShim
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.record.rewards import RewardRecorder
from swift_grpo_ext.rollout.sample import RolloutGKDSample
from swift_grpo_ext.timing.step_clock import StepClock
from swift_grpo_ext.training import RolloutGKDTrainer
from swift_grpo_ext.training.batch import complete_teacher_views
from swift_grpo_ext.training.distillation import check_teacher, completions_of
from swift_grpo_ext.training.gap import GapCheck
from swift_grpo_ext.training.group import DisagreementError
from swift_grpo_ext.training.prompts import named_rows
from swift_grpo_ext.training.rollouts import Round
from tests.rig.arguments import distillation_arguments
from tests.rig.logits.batch import UNEQUAL, Batch
from tests.rig.logits.compare import assert_close, counted_positions, values_and_gradients
from tests.rig.logits.models import build
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.rig.training import samples

TOP = 5


class Upstream(GKDTrainer):
    """ms-swift's trainer, with the attributes that its loss uses."""

    def __init__(self, args: Any, teacher: Any, *, top: int | None, served: bool) -> None:
        self.args, self.teacher_model, self.gkd_logits_topk = args, teacher, top
        self.beta, self.temperature = args.beta, 1.3
        self.use_liger_gkd_loss, self.use_teacher_api = False, served
        self._is_self_distillation = self._teacher_use_disable_adapter = teacher is None
        self.template = SimpleNamespace(padding_free=False, sequence_parallel_size=1)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_main_process=False)
        self.get_use_logits_to_keep = lambda default_value=True: False
        self.load_teacher_model_context = nullcontext


class Ours(RolloutGKDTrainer):
    """Our trainer, with the same attributes."""

    def __init__(self, args: Any, teacher: Any, *, top: int | None, served: bool) -> None:
        Upstream.__init__(self, args, teacher, top=top, served=served)
        self.model = SimpleNamespace(training=False)  # measures no gap
        self.completion_logps = CompletionLogps(args, self.template)
        self.accelerator.device = torch.device("cpu")
        self._clock = StepClock(self)


def score(gkd_batch: GKDBatch, labels: Tensor, lacks: int | slice = slice(0)) -> None:
    """Set the scores of a teacher's server; tokens in `lacks` have none."""
    torch.manual_seed(3)
    shape = (*labels.shape, TOP)
    gkd_batch.teacher_topk_logprobs = torch.randn(shape).log_softmax(-1)
    gkd_batch.teacher_topk_indices = torch.randint(150, shape)
    rows, columns = labels.ne(-100).nonzero()[lacks].view(-1, 2).unbind(1)
    gkd_batch.teacher_topk_logprobs[rows, columns - 1] = float("-inf")


def inputs_of(batch: Batch, source: DataSource, **more: Any) -> dict[str, Any]:
    encoded = {**batch.inputs, "labels": batch.labels}
    both = {"model_inputs": dict(encoded), "teacher_model_inputs": dict(encoded)}
    return {**both, "gkd_batch": GKDBatch(data_source=source), **more}


def run(
    host: type[Any], model: Any, teacher: Any, batch: Batch, top: int | None, **flags: Any
) -> tuple[Any, list[int]]:
    """Return the loss with its gradients, and the numbers of positions at the student's head."""
    chunk_size = flags.pop("chunk_size", 1024)
    is_served = teacher in ("served", "silent")
    given = None if isinstance(teacher, str) else teacher
    trainer = host(distillation_arguments(**flags), given, top=top, served=is_served)
    source = DataSource.DATASET if trainer.args.sft_alpha > 0 else DataSource.STUDENT
    inputs = inputs_of(batch, source)
    if is_served:
        lacks = 2 if teacher == "served" else slice(None)
        score(inputs["gkd_batch"], batch.labels, lacks)

    def loss() -> Tensor:
        return trainer.compute_loss(model, {name: copy(each) for name, each in inputs.items()})[
            None
        ]

    with patch.object(LogitsShim, "chunk_size", chunk_size), counted_positions(model) as counts:
        found = values_and_gradients(model, loss)
    return found, counts


@pytest.mark.parametrize(
    ("teacher", "top", "flags"),
    [
        ("other", None, {}),
        ("larger", None, {}),  # has more tokens in its vocabulary
        ("other", None, {"chunk_size": 4, "beta": 0.0}),
        ("other", TOP, {"chunk_size": 4, "beta": 1.0}),
        ("itself", None, {}),
        ("served", TOP, {"chunk_size": 4}),
        ("served", TOP, {"sft_alpha": 0.7}),
        ("silent", TOP, {"sft_alpha": 0.7, "chunk_size": 4}),
        ("silent", TOP, {"beta": 0.0}),
        ("other", TOP, {"sft_alpha": 0.7, "chunk_size": 4}),
    ],
)
@pytest.mark.parametrize("layout", ["left", "packed"])
def test_the_loss_is_ms_swifts(
    teacher: Any, top: int | None, flags: dict[str, Any], layout: str
) -> None:
    model, batch = build("Qwen2", lora=True), Batch(UNEQUAL, layout)
    is_itself = teacher == "itself"
    if teacher in ("other", "larger"):
        added = 8 if teacher == "larger" else 0
        teacher = build("Mistral").eval()
        teacher.resize_token_embeddings(teacher.config.vocab_size + added)
    expected, theirs = run(Upstream, model, teacher, batch, top, **flags)
    found, counts = run(Ours, model, teacher, batch, top, **flags)
    assert_close(found, expected)
    num_tokens = int(batch.labels.ne(-100).sum())
    own = counts[-1:] if is_itself else counts
    assert max(own) == min(flags.get("chunk_size", 1024), num_tokens)
    assert sum(theirs) > num_tokens


def test_ranks_measure_together_where_a_teacher_says_less_on_one() -> None:
    """They log the gap of both, and the memory of the fullest."""
    models = [build("Qwen2"), build("Qwen2")]  # threads must not share its hooks
    metrics = [defaultdict[str, list[float]](list) for _ in models]

    def work(ranks: ThreadRanks) -> None:
        batch = Batch(UNEQUAL, "left")
        trainer = Ours(distillation_arguments(), None, top=TOP, served=True)
        trainer.model = SimpleNamespace(training=True)
        trainer._placeholders, trainer.ranks = [], ranks
        trainer.state, trainer._last_loaded_step = SimpleNamespace(global_step=4), 4
        trainer.accelerator.sync_gradients = True
        trainer._clock.memory.take = lambda: {"loss": 20.0 + ranks.rank}
        trainer._gap_check = GapCheck(trainer.args, 100.0)
        trainer._metrics = {"train": metrics[ranks.rank]}
        trainer._rewards, trainer.score_listeners = RewardRecorder([], []), []
        trainer.recorder = SimpleNamespace(record_scores=lambda rows: None)
        mask_BK = torch.ones(1, int(batch.labels.ne(-100).sum()), dtype=torch.bool)
        completions = GRPOBatch(
            completion_mask=mask_BK,
            truncated_mask=mask_BK[:, 0],
            seq_lengths=mask_BK.sum(1),
            rollout_per_token_logps=torch.zeros(mask_BK.shape),
        )
        drawn = samples.sample(rollout_infos={}, prompt_hash="h", is_truncated=False)
        trainer._round = Round([drawn], [([drawn], completions)], [()])
        inputs = inputs_of(batch, DataSource.STUDENT, rollout=([drawn], completions))
        score(inputs["gkd_batch"], batch.labels, lacks=2 if ranks.rank else slice(0))
        assert trainer.compute_loss(models[ranks.rank], inputs).isfinite()

    run_rank_groups(2, work)
    assert metrics[0] == metrics[1]
    assert metrics[0]["rollout_gap/mean"][0] > 0
    assert metrics[0]["memory/loss"] == [21.0]


@pytest.mark.parametrize("placeholders", [[], [3, 7, 11]])
def test_a_rollouts_logps_leave_placeholders_out(placeholders: list[int]) -> None:
    """The engine never samples them (M2)."""
    torch.manual_seed(1)
    logits, targets = 2 * torch.randn(9, 40), torch.arange(12, 21)
    trainer = Ours(distillation_arguments(), None, top=None, served=False)
    trainer._placeholders = placeholders
    masked = logits.index_fill(-1, torch.tensor(placeholders, dtype=torch.int64), -torch.inf)
    expected = (masked / trainer.temperature).log_softmax(-1).gather(-1, targets[:, None])
    found = trainer._sampled_logps(logits, targets)
    torch.testing.assert_close(found, expected.squeeze(-1), rtol=1e-6, atol=2e-6)


# --- samples and their teacher ---


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


def told(words: str, answer: int, **columns: Any) -> RolloutGKDSample:
    """Return a sample whose answer is one token."""
    messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "7"}]
    made = RolloutGKDSample.from_row({"messages": messages, **columns})
    made.response_token_ids = [[answer]]
    return made


@pytest.fixture(scope="module")
def template(assets: Path) -> Any:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    template = get_template(processor, template_type="qwen2_5_vl")
    template.set_mode("train")
    return template


def test_rows_without_a_teachers_prompt_are_taught_with_their_own(
    template: Any, tmp_path: Path
) -> None:
    """ms-swift raises a TypeError if other rows of the micro-batch have a teacher's prompt."""
    Image.new("RGB", (56, 56)).save(small := str(tmp_path / "small.png"))
    Image.new("RGB", (112, 56)).save(wide := str(tmp_path / "wide.png"))
    samples = [
        told("<image>Which?", 22, images=[small], teacher_prompt="It is a 7."),
        told("<image>Which?", 23, images=[small], teacher_prompt=None, teacher_images=[wide]),
        told("Which?", 24, teacher_prompt=""),
        told("Which?", 25),
    ]
    complete_teacher_views(samples, RankGroup())
    students, teachers, has_views = encode_gkd_samples(samples, template)
    assert has_views
    pairs = list(zip(students, teachers, strict=True))
    ids = [tuple(list(each["input_ids"]) for each in pair) for pair in pairs]
    assert [student == teacher for student, teacher in ids] == [False, False, True, True]
    assert [len(teacher) - len(student) for student, teacher in ids[1:]] == [4, 0, 0]
    labels = [next(i for i in each["labels"] if i != -100) for pair in pairs for each in pair]
    assert labels == [22, 22, 23, 23, 24, 24, 25, 25]
    # Samples are unchanged. If no row has a view, none gets one.
    assert [len(sample.messages) for sample in samples] == [2] * 4
    plain = [told("Which?", 24), told("Which?", 25, teacher_prompt=None)]
    complete_teacher_views(plain, RankGroup())
    assert encode_gkd_samples(plain, template)[2] is False


def test_ranks_agree_on_teachers_views() -> None:
    """All ranks make the pass of a teacher whose weights are sharded."""
    plain, views = told("Which?", 25), list[bool]()

    def work(ranks: ThreadRanks) -> None:
        sample = told("Which?", 24, teacher_prompt="7") if ranks.rank else plain
        complete_teacher_views([sample], ranks)
        views.append(sample.build_teacher_view())

    run_rank_groups(2, work)
    assert views == [True, True]
    assert plain.teacher_messages == plain.messages


def test_a_teachers_image_is_named_by_its_own_column(template: Any, tmp_path: Path) -> None:
    """The error used to name `images[0]`, which exists (M1)."""
    Image.new("RGB", (56, 56)).save(good := tmp_path / "good.png")
    (cut := tmp_path / "cut.png").write_bytes(good.read_bytes()[:-40])
    sample = told("<image>Which?", 23, images=[str(good)], teacher_images=[str(cut)])
    named = rf"asks '<image>Which\?' cannot be encoded \(teacher_images\[0\]: '{cut}' is not an"
    complete_teacher_views([sample], RankGroup())
    with named_rows(template), pytest.raises(RowError, match=named):
        encode_gkd_samples([sample], template)


def test_a_teacher_that_scored_another_number_of_tokens_is_named() -> None:
    """The first token has no log-probability."""
    requests: list[Any] = [SimpleNamespace(uuid=f"train-0.0-{group}-0") for group in range(3)]
    parsed: list[Any] = [([[-1.0]] * 3, []), ([[-1.0]] * 2, []), ([], [])]
    check_teacher(requests, [4, 3, None], parsed)
    for numbers, message in (
        ([4, 2, None], "train-0.0-1-0: .* scored 3 tokens, and training has 2"),
        ([4, 3, 4], "train-0.0-2-0: .* scored 1 tokens, and training has 4"),
    ):
        with pytest.raises(DisagreementError, match=message):
            check_teacher(requests, numbers, parsed)
