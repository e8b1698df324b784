"""Training leaves out the pass of the old policy where the loss's own pass has its weights (M7); a
pass that measures rounding is off on GPUs (R8). A rollout that fails on one rank ends all ranks,
each with the cause (F3). A prompt that cannot be encoded is replaced as a whole group, the same on
each rank (M1). Duplicates and uneven groups are counted (G3, G4). Weights are loaded from a
checkpoint, whatever names its files use (S4)."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.training import RolloutGRPOTrainer, trainer
from swift_grpo_ext.training.checkpoints import holds_whole_model, load_whole_model
from swift_grpo_ext.training.prompts import (
    MAX_CANDIDATES,
    candidate_order,
    replace_failing_prompts,
    warn_duplicates,
    warn_uneven,
)
from swift_grpo_ext.training.rollouts import RolloutTraining
from tests.rig.logits.models import add_lora, build
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.rig.record.rows import sample_id
from tests.unit.training.samples import arguments

LOGPS = torch.tensor([[-1.0, -2.0]], requires_grad=True)


class Host(RolloutGRPOTrainer):
    """The attributes of ms-swift's trainer that the passes read."""

    def __init__(self, *, steps: int = 2, sp: int = 1, training: bool = True, **own: Any) -> None:
        counts = {"gradient_accumulation_steps": steps, "steps_per_generation": 2}
        self.args = arguments(**counts, use_vllm=own.get("use_vllm", True))
        self.template = SimpleNamespace(sequence_parallel_size=sp)
        self.model = SimpleNamespace(training=training)
        self._has_teacher_explicit = lambda: own.get("teacher", False)
        self.kl_in_reward, self.beta = own.get("kl_in_reward", False), own.get("beta", 0.0)
        self.use_liger_loss, self.ref_model = own.get("liger", False), own.get("reference")
        self.dynamic_num_samples = own.get("dynamic", False)


def test_which_rounds_need_the_old_policys_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"steps": 4, "beta": 0.04}, False),  # two rounds for an update; no reference's pass
        ({"steps": 1}, True),  # two updates from a round
        ({"steps": 1, "training": False}, False),  # an evaluation updates nothing
        ({"steps": 2, "sp": 2}, True),
        ({"teacher": True}, True),
        ({"kl_in_reward": True, "beta": 0.04}, True),
        ({"kl_in_reward": True}, False),
        ({"liger": True}, True),
        ({"dynamic": True}, True),
        # A reference of LoRA's `disable_adapter` fails on weights that only the generation's
        # inference mode has gathered.
        ({"zero3": True, "beta": 0.04, "use_vllm": False}, True),
        ({"zero3": True, "beta": 0.04}, False),
        ({"zero3": True, "beta": 0.04, "use_vllm": False, "reference": object()}, False),
        ({"beta": 0.04, "use_vllm": False}, False),
    ]
    for settings, needs in cases:
        is_zero3 = "zero3" in settings
        monkeypatch.setattr(trainer, "is_deepspeed_zero3_enabled", lambda on=is_zero3: on)
        assert Host(**settings).needs_old_logps() is needs
        assert Host(**settings).needs_old_logps(has_views=True)


def test_the_first_pass_of_a_batch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's pass is made. The loss's first pass gives the old policy's values, to which a
    second iteration compares."""
    compute = "_get_per_token_logps_and_entropies"
    monkeypatch.setattr(GRPOTrainer, compute, lambda *_, **__: (LOGPS, None))
    host = Host()
    host._skips_old_pass = True
    batches = [SimpleNamespace(old_per_token_logps=None) for _ in range(2)]
    for batch in batches:
        assert host._get_per_token_logps_and_entropies(None, {}, batch)[0] is None
        reference, _ = host._get_per_token_logps_and_entropies(None, {}, batch)
        assert reference is LOGPS
        assert batch.old_per_token_logps is None
    host._skips_old_pass = False
    kept = SimpleNamespace(old_per_token_logps=-LOGPS)
    for batch, expected in ((batches[0], LOGPS), (kept, -LOGPS)):
        assert host._get_per_token_logps_and_entropies(None, {}, batch)[0] is LOGPS
        assert torch.equal(batch.old_per_token_logps, expected)
    assert not batches[0].old_per_token_logps.requires_grad


def test_early_rounds_have_a_pass_with_other_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"is_early": False}, False),
        ({"training": False}, False),  # an evaluation
        ({"bits": 8}, False),  # the noise has no steps of quantized numbers
        ({"top_p": 0.9}, False),  # sampling settings move log-probabilities
        ({"use_vllm": False}, False),
        ({"torch_compile": True}, False),  # compiled layers ignore the noise
        ({"gpu": True}, False),  # no GPU has run it
    ]
    for changes, is_compared in cases:
        host = Host(training=changes.get("training", True))
        host.least_bits = changes.get("bits", 16)
        host._gap_check = SimpleNamespace(is_early=changes.get("is_early", True))
        host.args = arguments(**{n: v for n, v in changes.items() if hasattr(host.args, n)})
        monkeypatch.setattr(trainer, "has_accelerator", lambda on="gpu" in changes: on)
        host.rounded_logps = list
        assert host._rounded_logps([{}, {}]) == ([{}, {}] if is_compared else [])


class Rank(RolloutTraining):
    """A rank without model and engine."""

    def __init__(self, ranks: RankGroup, *, generates: bool = True, **own: Any) -> None:
        self.ranks, self.waits = ranks, list[float]()
        self._settings = SimpleNamespace(generates=generates)
        self._clock = SimpleNamespace(record_wait=self.waits.append)
        self.multi_turn_scheduler = own.get("scheduler")
        self.enable_server_multi_turn = own.get("on_server", False)


def test_a_rollout_that_fails_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for another one, except between collectives of ms-swift: there, the other rank
    would not answer."""
    failing: list[int] = []

    def infer(self: Rank, samples: Any, *_: Any) -> Any:
        if self.ranks.rank in failing:
            raise OSError(f"disk {self.ranks.rank} is gone")
        return samples

    monkeypatch.setattr(RolloutTrainerMixin, "_infer_single_or_multi_turn", infer)

    def work(ranks: ThreadRanks) -> Any:
        rank = Rank(ranks)
        try:
            found = rank._infer_single_or_multi_turn(ranks.rank, None)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        assert len(rank.waits) == 1
        return found

    own = [f"OSError: disk {rank} is gone" for rank in range(2)]
    assert run_rank_groups(2, work) == [0, 1]
    failing.append(1)
    of_other = f"RolloutError: The rollout failed on rank 1: {own[1]}"
    assert run_rank_groups(2, work) == [of_other, own[1]]
    failing.append(0)
    assert run_rank_groups(2, work) == own
    for settings in ({"generates": False}, {"scheduler": object()}, {"on_server": True}):
        ranks = ThreadRanks(0, [None] * 2, threading.Barrier(2, timeout=0.1))  # nobody else comes
        alone = Rank(ranks, **settings)
        with pytest.raises(OSError, match="disk 0 is gone"):
            alone._infer_single_or_multi_turn(0, None)


def test_a_model_without_a_known_head_is_left_to_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim then calls ms-swift's method with the model that it was given."""
    made: list[Any] = []
    monkeypatch.setattr(
        GRPOTrainer, "_get_logps_via_local_forward", lambda self, *given: made.append(given)
    )
    trainer: Any = RolloutGRPOTrainer.__new__(RolloutGRPOTrainer)
    trainer.model_kwarg_keys, trainer.temperature = ["use_cache"], 1.0
    falls_back = SimpleNamespace(compute=lambda model, *given, **_: given[-1](f"restored {model}"))
    trainer.completion_logps = falls_back
    trainer._get_logps_via_local_forward("model", inputs := {}, 3, "ids", True)
    assert made == [("restored model", {"use_cache": False}, 3, "ids", True)]
    assert made[0][1] is inputs


# --- prompts ---

ROUND, FIRST = RoundId("eval", 3, 1), 7


def row(words: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}]}


def words_of(row: Any) -> str:
    return row["messages"][0]["content"]


def replaced(batch: str, others: str, num_ranks: int = 1) -> list[tuple[str, list[int]]]:
    """Return each rank's rows afterwards, as letters, and the replaced groups. Groups have two
    samples; capitals are bad prompts. `others` are the other rows, in the order of trying."""
    order = candidate_order(42, ROUND, FIRST, len(others))
    share = len(batch) // num_ranks

    def work(ranks: ThreadRanks) -> tuple[str, list[int]]:
        rows, groups = replace_failing_prompts(
            [row(letter) for letter in batch[ranks.rank * share : (ranks.rank + 1) * share]],
            others=[row(letter) for _, letter in sorted(zip(order, others, strict=True))],
            round_=ROUND,
            first_group=FIRST,
            group_size=2,
            seed=42,
            ranks=ranks,
            error_of=lambda row: "too long" if words_of(row).isupper() else None,
        )
        assert len({id(row) for row in rows}) == share  # ms-swift changes each sample's own
        return "".join(map(words_of, rows)), groups

    return run_rank_groups(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_bad_groups_at_once(num_ranks: int, warnings: list[str]) -> None:
    """Each gets another row, on whichever ranks it is; rank 0 names both."""
    results = replaced("AAbbCCbb", "defgh", num_ranks)
    assert "".join(rows for rows, _ in results) == "ddbbeebb"
    assert [groups for _, groups in results] == [[0, 2]] * num_ranks
    assert len(warnings) == 2
    for warning, group, words in zip(warnings, (7, 9), "AC", strict=True):
        name = f"eval round 3.1, group {group}: the row that asks '{words}'"
        assert warning.startswith(f"{name} cannot be encoded (too long)")


def test_which_prompt_comes(warnings: list[str]) -> None:
    assert replaced("bbcc", "d") == [("bbcc", [])]
    assert warnings == []
    assert replaced("AABB", "Cd")[0][0] == "dddd"  # there is only one
    assert replaced("bAcc", "d")[0][0] == "ddcc"  # rows of a group that differ are all looked at
    assert replaced("AA", "CCCCCCCCCd")[0][0] == "dd"


def test_where_nothing_is_left_every_rank_says_so() -> None:
    message = rf"1 prompts .* for 1 of them {MAX_CANDIDATES} other .*group 0: too long"
    with pytest.raises(ValueError, match=message):
        replaced("AAbb", "ABC", num_ranks=2)


def test_uneven_groups_and_duplicates_are_warned_of_once(warnings: list[str]) -> None:
    warn_uneven([])
    warn_duplicates([["a", "b"], ["c"]], sample_id(3))
    assert warnings == []
    for _ in range(2):
        warn_uneven([sample_id(3, group=1)])
        warn_duplicates([["a", "b", "b"], ["a"]], sample_id(3, number=1))
    uneven, duplicates = warnings
    assert uneven.startswith("1 groups hold rows that differ, the first in train round 3.")
    assert duplicates.startswith("train round 3.1: 2 of 4 prompts")


def test_every_parameter_comes_in_its_own_type(tmp_path: Path) -> None:
    """Another model is refused. An adapter is left to PEFT."""
    model, resumed = build("Qwen2.5-VL"), build("Qwen2.5-VL").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for parameter in resumed.parameters():
        torch.nn.init.zeros_(parameter)
    load_whole_model(resumed, tmp_path)
    loaded, saved = resumed.state_dict(), model.to(torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    build("Qwen2").save_pretrained(tmp_path)
    # Its configuration, else the vision tower would be a large one.
    model.config.save_pretrained(tmp_path)
    expected = r"does not hold the weights of .*Qwen2_5_VL.* has no .*visual.*--model"
    with pytest.raises(ValueError, match=expected):
        load_whole_model(model, tmp_path)
    add_lora(model).save_pretrained(adapter := tmp_path / "adapter")
    assert (holds_whole_model(tmp_path), holds_whole_model(adapter)) == (True, False)
