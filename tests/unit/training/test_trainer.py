"""A real training of ms-swift's trainer sends each round's requests, records its samples, and
updates the engine's weights (S2, V1, M1, R9). A recording engine takes vLLM's place."""

import gc
import json
import os
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from swift.infer_engine.protocol import RolloutOutput, UsageInfo
from swift.pipelines import rlhf_main
from swift.rewards import ORM, orms
from swift.utils import get_logger
from transformers import TrainerState

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from swift_grpo_ext.rollout import engine as engine_module
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import AnsweredResponse
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.version import __version__
from tests.rig.arguments import BOTH, TRAINING

END_OF_TURN = 151645
logger = get_logger()


class RecordingEngine:
    """Returns two tokens that depend on the seed; keeps requests and sums of weights."""

    rounds: ClassVar[list[list[tuple[str, RequestMetadata]]]] = []
    weights: ClassVar[list[float]] = []
    is_deterministic: ClassVar[set[bool]] = set()  # torch's mode in each call

    def __init__(self, model_dir: str, *, template: Any, **_: Any) -> None:
        self.template = copy(template)
        self.template.set_mode("vllm")
        self.engine = self.inner_model = self.model = self
        self.model_config = SimpleNamespace(quantization=None)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=self))
        self.inner_model_executor = SimpleNamespace(is_sleeping=False, driver_worker=worker)
        self._note()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("reset_"):
            return self._note
        raise AttributeError(name)

    def _note(self) -> None:
        self.is_deterministic.add(torch.are_deterministic_algorithms_enabled())

    def named_parameters(self) -> list[Any]:
        return []

    def load_weights(self, weights: Any) -> set[str]:
        self._note()
        held = dict(weights)
        self.weights.append(sum(float(tensor.sum()) for tensor in held.values()))
        return set(held)

    def reload_weights(self, weights_iterator: Any) -> None:
        self.load_weights(weights_iterator)

    def infer(self, requests: list[Any], config: Any, use_tqdm: bool) -> list[RolloutOutput]:
        self._note()
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
    """Rewards that differ within each group, except in the first round."""

    is_deterministic: ClassVar[set[bool]] = set()

    def __call__(
        self, completions: list[str], trainer_state: TrainerState, **kwargs: Any
    ) -> list[float]:
        is_first = not self.is_deterministic
        if trainer_state.max_steps:  # 0 while it is tried before the training
            self.is_deterministic.add(torch.are_deterministic_algorithms_enabled())
        return [0.0 if is_first else float(i % 2) for i in range(len(completions))]


def train(argv: list[str]) -> Any:
    """Train in this process, and change its globals for good. Return what the engine got, the log,
    and the modes of the engine's calls and of reward functions."""
    os.environ["MASTER_PORT"] = "0"  # any free one: another training may hold the usual one
    orms["odd"] = Odd
    log: list[str] = []
    for name in ("info", "warning", "warning_once"):
        setattr(logger, name, lambda text, *_, **__: log.append(str(text)))
    engine_module.RolloutEngine = RecordingEngine  # type: ignore[assignment, misc]
    rlhf_main(argv)
    engine = RecordingEngine
    return engine.rounds, engine.weights, log, engine.is_deterministic, Odd.is_deterministic


def test_a_training_of_three_steps(assets: Path, tmp_path: Path) -> None:
    """It has two prompts a round and two steps a round; one of four prompts is too long, as are the
    rows' own answers, which do not count. It runs in a child of this process, which has imported
    everything."""
    words = ["one", "two", "three", "too long " * 80]
    answer = {"role": "assistant", "content": words[3]}
    talks = [[{"role": "user", "content": word}, answer] for word in words]
    rows = [json.dumps({"messages": talk}) for talk in talks]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    argv = [
        *("--rlhf_type", "grpo", *BOTH, *TRAINING, "--steps_per_generation", "1"),
        *("--model", str(assets / "tiny_vlm"), "--model_type", "qwen2_5_vl"),
        *("--dataset", str(tmp_path / "rows.jsonl"), "--val_dataset", str(tmp_path / "rows.jsonl")),
        *("--eval_strategy", "steps", "--eval_steps", "2", "--per_device_eval_batch_size", "4"),
        *("--max_steps", "3", "--gradient_accumulation_steps", "1", "--num_iterations", "2"),
        *("--per_device_train_batch_size", "4", "--num_generations", "2", "--reward_funcs", "odd"),
        *("--dynamic_sample", "true", "--callbacks", "diversity", "--stop_token_ids", "5"),
        *("--max_completion_length", "4", "--max_length", "100", "--tuner_type", "full"),
        *("--truncation_strategy", "delete", "--torch_dtype", "float32"),
        *("--learning_rate", "1e-3", "--warmup_steps", "0", "--logging_steps", "1"),
        *("--dataloader_num_workers", "0", "--dataloader_persistent_workers", "false"),
        *("--save_strategy", "no", "--add_version", "false", "--rollout_mismatch", "warn"),
        *("--full_determinism", "true", "--output_dir", str(tmp_path)),
    ]
    gc.freeze()  # if the child collected a group of gloo, it would wait for threads of the parent
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        rounds, weights, lines, *modes = pool.submit(train, argv).result()
    gc.unfreeze()

    # A round serves two iterations. Dynamic sampling adds a round to the first one, in a second
    # wave, and then expects to need another one. An evaluation numbers its groups over batches, and
    # the last step is evaluated too.
    names = [[each.sample_id.request_id for _, each in pairs] for pairs in rounds]
    training = [
        [f"train-{name}-{group}-0" for name in of_wave for group in (0, 1)]
        for of_wave in (["0.0"], ["0.1"], ["2.0", "2.1"])
    ]
    evaluations = [
        [[f"eval-{step}.0-{group}-0" for group in groups] for groups in ((0, 1), (2, 3))]
        for step in (2, 3)
    ]
    assert names == [*training[:2], *evaluations[0], training[2], *evaluations[1]]
    for asked, metadata in (pair for pairs in rounds for pair in pairs):
        assert asked in words[:3]
        assert (metadata.count, metadata.run_seed, metadata.as_arrays) == (2, 42, True)
        assert metadata.stop_token_ids == (5,)

    # Weights are sent at steps 0, 2 and 3. An evaluation uses the weights of its step.
    assert len(weights) == len(set(weights)) == 3
    samples = to_rows(read_samples(tmp_path))
    assert len(samples) == 2 * sum(map(len, rounds))
    for row in samples:
        seed = sample_seed(42, row.sample_id)
        assert (row.seed, row.rank, row.replica) == (seed, 0, "rank 0")
        assert (row.text, list(row.token_ids)) == (f"<{seed}>", [100 + seed % 1000, END_OF_TURN])
        assert row.weight_version == row.sample_id.step

    # Evaluations replace prompts too: each time one of two batches has one that is too long.
    replaced = [text.split(",")[0] for text in lines if "cannot be encoded" in text]
    assert "eval round 2.0" in replaced
    log = [json.loads(line) for line in (tmp_path / "logging.jsonl").read_text().splitlines()]
    assert [line["eval_prompts/replaced"] for line in log if "eval_loss" in line] == [0.5, 0.5]
    # The recording engine invents its log-probabilities.
    assert min(line["rollout_gap/mean"] for line in log if "rollout_gap/mean" in line) > 1
    assert any("Step 0: log-probabilities of the rollout" in text for text in lines)
    begin, end = (text for text in lines if text.startswith(("swift-grpo-ext ", "Seen by ")))
    assert begin == (
        f"swift-grpo-ext {__version__}: a seed for each sample; training reads prompts once a group"
        " where that saves time; the loss's pass serves as the old policy's; the rollout gap is "
        "held to a limit; diversity is watched; samples are recorded. Look at it meanwhile: "
        f"swift-grpo-ext view {tmp_path}"
    )
    gap = max(line["rollout_gap/max"] for line in log if "rollout_gap/max" in line)
    assert end.startswith("Seen by swift-grpo-ext: 4 rounds of training, 2 of evaluation; a rollou")
    assert end.endswith(f"explains 0.14), {gap:.2g} at most; no alarm of diversity.")

    # Deterministic mode is off while the engine is made, takes weights or generates, and on in
    # reward functions.
    assert modes == [{False}, {True}]
