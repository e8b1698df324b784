"""A real training of ms-swift's trainer sends each round's requests, records its samples, and
updates the engine's weights (S2, V1, M1, M4, R9). A recording engine takes vLLM's place."""

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
        self.weights: list[float] = []
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
        held = dict(weights)
        self.weights.append(sum(float(tensor.sum()) for tensor in held.values()))
        return set(held)

    def infer(self, requests: list[Any], config: Any, use_tqdm: bool) -> list[RolloutOutput]:
        self._note("infer")
        found: list[Any] = [wire.read_metadata(request.data_dict) for request in requests]
        words = [request.messages[-1]["content"] for request in requests]
        self.rounds.append(list(zip(words, found, strict=True)))
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

    rounds: list[list[tuple[str, RequestMetadata]]]  # each request's question and metadata
    weights: list[float]  # the sum of all tensors, for each update
    calls: list[tuple[str, bool]]  # the engine's, and whether torch's deterministic mode was on
    log: list[dict[str, Any]]
    samples: list[SampleRow]
    warnings: list[str]
    beside_engine: set[bool]  # the values of that mode in reward functions
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
    return Trained(
        *(engine.rounds, engine.weights, engine.calls),
        log=[*map(json.loads, (folder / "logging.jsonl").read_text().splitlines())],
        samples=sorted(to_rows(read_samples(folder)), key=lambda row: row.sample_id),
        warnings=warnings,
        beside_engine=Odd.is_deterministic,
        blocks_launches="CUDA_LAUNCH_BLOCKING" in os.environ,
    )


@pytest.fixture(scope="module")
def trained(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training with two prompts a round and two steps a round; one of four prompts is too long.
    It runs in a child of this process, which has imported everything."""
    folder = tmp_path_factory.mktemp("training")
    words = ["one", "two", "three", "too long " * 80]
    rows = [json.dumps({"messages": [{"role": "user", "content": word}]}) for word in words]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    argv = [
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
        *("--full_determinism", "true", "--output_dir", str(folder)),
    ]
    result = folder / "trained.pickle"
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


def test_an_engine_that_does_not_sample_with_its_weights_is_named(trained: Trained) -> None:
    """The recording engine invents its log-probabilities."""
    told, *_ = [text for text in trained.warnings if "differ by more than" in str(text)]
    assert told.startswith("Step 0: log-probabilities of the rollout and of training")
    assert "rank 0 rows of text: " in told
    gaps = [row["rollout_gap/mean"] for row in trained.log if "rollout_gap/mean" in row]
    assert gaps
    assert min(gaps) > 1


TRAIN = [["train-0.0-0-0", "train-0.0-1-0"], ["train-2.0-0-0", "train-2.0-1-0"]]


def evaluation(step: int) -> list[list[str]]:
    return [[f"eval-{step}.0-{group}-0" for group in groups] for groups in ((0, 1), (2, 3))]


def test_rounds_and_requests(trained: Trained) -> None:
    """A round serves two iterations. An evaluation numbers its groups over batches. The last step
    is evaluated too."""
    names = [[each.sample_id.request_id for _, each in pairs] for pairs in trained.rounds]
    assert names == [TRAIN[0], *evaluation(2), TRAIN[1], *evaluation(3)]
    for pairs in trained.rounds:
        for words, metadata in pairs:
            assert words in ("one", "two", "three")
            assert (metadata.count, metadata.run_seed, metadata.as_arrays) == (2, 42, True)
            assert metadata.stop_token_ids == (5,)


def test_the_sample_log(trained: Trained) -> None:
    assert len(trained.samples) == 2 * sum(map(len, trained.rounds))
    for row in trained.samples:
        seed = sample_seed(42, row.sample_id)
        assert (row.seed, row.rank, row.replica) == (seed, 0, "rank 0")
        assert (row.text, list(row.token_ids)) == (f"<{seed}>", [100 + seed % 1000, END_OF_TURN])
        assert row.weight_version == row.sample_id.step


def test_prompts_that_are_too_long_are_replaced(trained: Trained) -> None:
    """Also in an evaluation."""
    replaced = [warning for warning in trained.warnings if "cannot be encoded" in warning]
    assert "eval round 2.0" in {warning.split(",")[0] for warning in replaced}
    logged = [line["eval_prompts/replaced"] for line in trained.log if "eval_loss" in line]
    assert logged == [0.5, 0.5]  # each time one of two batches


def test_weights_go_to_the_engine_once_they_have_changed(trained: Trained) -> None:
    """They are sent at steps 0, 2 and 3. An evaluation uses the weights of its step."""
    assert len(trained.weights) == len(set(trained.weights)) == 3


def test_the_engine_knows_nothing_of_full_determinism(trained: Trained) -> None:
    """Deterministic mode is off while it is made, takes weights or generates."""
    assert [name for name, is_deterministic in trained.calls if is_deterministic] == []
    assert trained.beside_engine == {True}
    assert not trained.blocks_launches
    names = [name for name, _ in trained.calls]
    assert names[0] == "made"
    assert names.count("infer") == len(trained.rounds)
