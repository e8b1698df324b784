"""A real training with ms-swift's trainer, and a recording engine in place of vLLM."""

from __future__ import annotations

import gc
import json
import os
import pickle
import traceback
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from swift.infer_engine.protocol import RolloutOutput, UsageInfo
from swift.pipelines import rlhf_main
from swift.rewards import ORM, orms
from swift.utils import get_logger
from transformers import TrainerState

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.rollout import engine as engine_module
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import AnsweredResponse
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.sampling.seeding import sample_seed

ROOT = Path(__file__).resolve().parents[3]
END_OF_TURN = 151645
logger = get_logger()


class RecordingEngine:
    """Returns two tokens that depend on the seed; keeps requests and weights."""

    made: ClassVar[list[RecordingEngine]] = []

    def __init__(self, model_dir: str, *, template: Any, **_: Any) -> None:
        self.template = copy(template)
        self.template.set_mode("vllm")
        self.rounds: list[list[tuple[str, RequestMetadata]]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.engine = self.inner_model = self.model = self
        self.model_config = SimpleNamespace(quantization=None)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=self))
        self.inner_model_executor = SimpleNamespace(is_sleeping=False, driver_worker=worker)
        self.calls: list[tuple[str, bool]] = []
        self._note("made")
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("reset_"):
            return lambda: self._note(name)
        raise AttributeError(name)

    def _note(self, name: str) -> None:
        self.calls.append((name, torch.are_deterministic_algorithms_enabled()))

    def reload_weights(self, weights_iterator: Any) -> None:
        self.load_weights(weights_iterator)

    def named_parameters(self) -> list[Any]:
        return []

    def load_weights(self, weights: Any) -> set[str]:
        self._note("load_weights")
        self.weights.append({name: tensor.clone() for name, tensor in weights})
        return set(self.weights[-1])

    def infer(self, requests: list[Any], config: Any, use_tqdm: bool) -> list[RolloutOutput]:
        found: list[Any] = [wire.read_metadata(request.data_dict) for request in requests]
        pairs = [(r.messages[-1]["content"], m) for r, m in zip(requests, found, strict=True)]
        self.rounds.append(pairs)
        self._note("infer")
        return [self._output(r, m) for r, m in zip(requests, found, strict=True)]

    def _output(self, request: Any, metadata: RequestMetadata) -> RolloutOutput:
        completions = [
            Completion(
                text=f"<{seed}>",
                token_ids=[100 + (seed or 0) % 1000, END_OF_TURN],
                logprobs=[-1.0, -1.0],
                finish_reason="stop",
                seed=seed,
            )
            for seed in map(metadata.seed_of, range(metadata.count))
        ]
        prompt = Prompt(self.template.encode({"messages": request.messages})["input_ids"])
        response = AnsweredResponse(
            model="", choices=[], usage=UsageInfo(1, 1, 2), answer=Answer(completions, prompt)
        )
        return RolloutOutput(response=response)


class Odd(ORM):
    """Rewards that differ within every group."""

    is_deterministic: ClassVar[set[bool]] = set()

    def __call__(
        self, completions: list[str], trainer_state: TrainerState, **kwargs: Any
    ) -> list[float]:
        if trainer_state.max_steps:  # 0 while it is tried before the training
            self.is_deterministic.add(torch.are_deterministic_algorithms_enabled())
        return [float(i % 2) for i in range(len(completions))]


class Trained(NamedTuple):
    """The results of a training."""

    rounds: list[list[tuple[str, RequestMetadata]]]
    """The engine's calls: each request's question and metadata."""

    weights: list[float]
    """The sum of all tensors, for each update."""

    log: list[dict[str, Any]]
    samples: list[SampleRow]
    warnings: list[str]
    calls: list[tuple[str, bool]]
    """The engine's calls, each with whether torch's deterministic mode was on."""

    beside_engine: set[bool]
    """The values of that mode in reward functions."""

    blocks_launches: bool


def train(argv: list[str], folder: Path) -> Trained:
    """Train in this process, and change its globals for good."""
    os.environ["MASTER_PORT"] = "0"  # any free one: another training may hold the usual one
    orms["odd"] = Odd
    warnings: list[str] = []
    logger.warning = warnings.append  # type: ignore[assignment, method-assign]
    logger.warning_once = lambda text, **_: warnings.append(text)  # type: ignore[attr-defined]
    engine_module.RolloutEngine = RecordingEngine  # type: ignore[assignment, misc]
    rlhf_main(argv)
    [engine] = RecordingEngine.made
    log = (folder / "logging.jsonl").read_text(encoding="utf-8").splitlines()
    samples = sorted(to_rows(read_samples(folder)), key=lambda row: row.sample_id)
    sums = [sum(float(tensor.sum()) for tensor in held.values()) for held in engine.weights]
    log_rows = list(map(json.loads, log))
    return Trained(
        engine.rounds,
        sums,
        log_rows,
        samples,
        warnings,
        engine.calls,
        Odd.is_deterministic,
        "CUDA_LAUNCH_BLOCKING" in os.environ,
    )


def forked(argv: list[str], folder: Path) -> Trained:
    """`train` in a child of this process, which has imported everything."""
    result = folder.with_suffix(".pickle")
    gc.freeze()  # if the child collected a group of gloo, it would wait for threads of the parent
    child = os.fork()
    if child == 0:
        try:
            result.write_bytes(pickle.dumps(train(argv, folder)))
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
    gc.unfreeze()
    found = pickle.loads(result.read_bytes())
    assert isinstance(found, Trained)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def argv(assets: Path, folder: Path) -> list[str]:
    """Arguments with two prompts a round, two steps a round; one of four prompts is too long."""
    words = ["one", "two", "three", "too long " * 80]
    rows = [json.dumps({"messages": [{"role": "user", "content": word}]}) for word in words]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return [
        *("--rlhf_type", "grpo", "--external_plugins", str(ROOT / "plugins/grpo_ext.py")),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(folder / "rows.jsonl")),
        *("--val_dataset", str(folder / "rows.jsonl"), "--eval_strategy", "steps"),
        *("--eval_steps", "2", "--per_device_eval_batch_size", "4", "--max_steps", "3"),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--tuner_type", "full"),
        *("--torch_dtype", "float32", "--check_model", "false", "--use_vllm", "true"),
        *("--vllm_mode", "colocate", "--split_dataset_ratio", "0"),
        *("--num_generations", "2", "--max_completion_length", "4", "--num_iterations", "2"),
        *("--reward_funcs", "odd", "--per_device_train_batch_size", "4", "--stop_token_ids", "5"),
        *("--learning_rate", "1e-3", "--warmup_steps", "0", "--max_length", "100"),
        *("--truncation_strategy", "delete", "--gradient_accumulation_steps", "1"),
        *("--gradient_checkpointing", "false", "--lazy_tokenize", "true"),
        *("--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--logging_steps", "1"),
        *("--dataloader_persistent_workers", "false", "--report_to", "none"),
        *("--save_strategy", "no", "--add_version", "false", "--rollout_mismatch", "warn"),
        *("--full_determinism", "true"),
    ]


@pytest.fixture(scope="module")
def whole(argv: list[str], folder: Path) -> Trained:
    return forked([*argv, "--output_dir", str(folder / "whole")], folder / "whole")


def names(rounds: list[list[tuple[str, RequestMetadata]]]) -> list[list[str]]:
    return [[metadata.sample_id.request_id for _, metadata in pairs] for pairs in rounds]


def test_an_engine_that_does_not_sample_with_its_weights_is_named(whole: Trained) -> None:
    """The recording engine invents its log-probabilities."""
    told, *_ = [text for text in whole.warnings if "differ by more than" in str(text)]
    assert told.startswith("Step 0: log-probabilities of the rollout and of training")
    assert "rank 0 rows of text: " in told
    assert "do not see the same weights" in told
    assert all(row["rollout_gap/mean"] > 1 for row in whole.log if "rollout_gap/mean" in row)
    assert any("rollout_gap/mean" in row for row in whole.log)


TRAIN = [["train-0.0-0-0", "train-0.0-1-0"], ["train-2.0-0-0", "train-2.0-1-0"]]


def evaluation(step: int) -> list[list[str]]:
    return [[f"eval-{step}.0-{group}-0" for group in groups] for groups in ((0, 1), (2, 3))]


def test_rounds_and_requests(whole: Trained) -> None:
    """A round serves two iterations. An evaluation numbers its groups over batches. The last step
    is evaluated too."""
    assert names(whole.rounds) == [TRAIN[0], *evaluation(2), TRAIN[1], *evaluation(3)]
    for pairs in whole.rounds:
        for words, metadata in pairs:
            assert words in ("one", "two", "three")
            assert (metadata.count, metadata.run_seed, metadata.as_arrays) == (2, 42, True)
            assert metadata.stop_token_ids == (5,)


def test_the_sample_log(whole: Trained) -> None:
    assert len(whole.samples) == 2 * sum(map(len, whole.rounds))
    for row in whole.samples:
        seed = sample_seed(42, row.sample_id)
        assert (row.seed, row.rank, row.replica) == (seed, 0, "rank 0")
        assert (row.text, list(row.token_ids)) == (f"<{seed}>", [100 + seed % 1000, END_OF_TURN])
        assert row.weight_version == row.sample_id.step


def test_prompts_that_are_too_long_are_replaced(whole: Trained) -> None:
    """Also in an evaluation."""
    replaced = [warning for warning in whole.warnings if "cannot be encoded" in warning]
    assert "eval round 2.0" in {warning.split(",")[0] for warning in replaced}
    logged = [line["eval_prompts/replaced"] for line in whole.log if "eval_loss" in line]
    assert logged == [0.5, 0.5]  # each time one of two batches


def test_weights_go_to_the_engine_once_they_have_changed(whole: Trained) -> None:
    """They are sent at steps 0, 2 and 3. An evaluation uses the weights of its step."""
    assert len(whole.weights) == len(set(whole.weights)) == 3


def test_the_engine_knows_nothing_of_full_determinism(whole: Trained) -> None:
    """Deterministic mode is off while it is made, takes weights or generates."""
    assert [name for name, is_deterministic in whole.calls if is_deterministic] == []
    assert whole.beside_engine == {True}
    assert not whole.blocks_launches
    names = [name for name, _ in whole.calls]
    assert names[0] == "made"
    assert names.count("infer") == len(whole.rounds)
