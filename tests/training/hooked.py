"""Our trainer over a ms-swift trainer that records: for what a hook takes, hands on and returns."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from swift.infer_engine.protocol import RequestConfig, RolloutOutput, UsageInfo
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers import GRPOTrainer

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.draw import to_rollout_output
from swift_grpo_ext.rollout.engine import PackedResponse
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.rollout.wire import Completion
from swift_grpo_ext.training import RolloutGRPOTrainer
from tests.arguments import training_arguments

IMAGE = 3
"""Id of the token that stands for an image."""

END_OF_TURN = 1


class Model(torch.nn.Module):
    """With dropout in a layer and in a setting, and an output embedding."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.attention = torch.nn.Identity()
        self.attention.attention_dropout = 0.25  # type: ignore[assignment]
        self.head = torch.nn.Linear(4, 8, bias=False)
        torch.nn.init.constant_(self.head.weight, 1.0)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(values))
        return logits


class Tokenizer:
    def __len__(self) -> int:
        return 100

    def decode(self, ids: list[int]) -> str:
        return str(ids)


class Template:
    """What our trainer asks of ms-swift's template. Prompts that say "bad" cannot be encoded."""

    tokenizer = Tokenizer()
    placeholder_tokens = (IMAGE,)
    processor = None
    padding_free = False
    model_meta = SimpleNamespace(is_multimodal=True)
    model_info = SimpleNamespace(max_model_len=0)  # no limit is shorter
    truncation_strategy = "left"

    def __init__(self, *, max_length: int | None, sequence_parallel_size: int) -> None:
        self.max_length, self.sequence_parallel_size = max_length, sequence_parallel_size

    def _get_response_prefix(self) -> str:
        return ""

    def _load_image(self, image: Any) -> Any:
        return image

    def replace_video2image(self, load: Any, *_: Any) -> Any:
        return load

    def encode(self, row: dict[str, Any]) -> dict[str, Any]:
        if "bad" in row["messages"][0]["content"]:
            raise ValueError("too long")
        return {}

    def data_collator(self, batch: list[Any]) -> list[Any]:
        return batch


SETTINGS: dict[str, Any] = {"num_generations_eval": 2, "max_resample_times": 3, "ddp_timeout": 60}
SETTINGS |= {"rollout_canary": "off", "media_cache_gb": 4.0}


class RecordingSwift(GRPOTrainer):
    """ms-swift's part of each hook: notes the call, answers with what the test has set."""

    def __init__(self, *, args: Any, template: Template, model: Model, **parts: Any) -> None:
        self.args, self.template, self.model = args, template, model
        self.ref_model, self.teacher_model = parts.get("ref_model"), parts.get("teacher_model")
        self.use_liger_loss = args.use_liger_kernel
        self.liger_grpo_loss = parts.get("liger_grpo_loss")
        self.train_dataset = parts.get("train_dataset") or rows(*"abcdefgh")
        self.calls: list[tuple[str, Any]] = []
        self.state = SimpleNamespace(global_step=0, best_model_checkpoint=None, best_metric=0.5)
        self.control = SimpleNamespace(should_evaluate=False)
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._step = self._last_loaded_step = 0
        self.num_generations = args.num_generations
        self.num_generations_eval = args.num_generations_eval
        self.vllm_mode = args.vllm_mode
        self.vllm_tensor_parallel_size = args.vllm_tensor_parallel_size
        self.tp_group = self.multi_turn_scheduler = None
        self.enable_server_multi_turn = self.dynamic_num_samples = False
        self.dynamic_sample, self.async_generate = args.dynamic_sample, args.async_generate
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.reward_func_names, self.reward_weights = ["right"], torch.tensor([2.0])
        self.engine: Any = Engine()
        self.request_config, self.temperature = RequestConfig(), 1.0
        self.shuffle_dataset, self.num_iterations = True, args.num_iterations
        self.batches: list[Any] = []
        self.rewards: list[list[float]] = []

    def note(self, name: str, value: Any = None) -> None:
        self.calls.append((name, value))

    def is_world_process_zero(self) -> bool:
        return True

    def _disable_sp_context(self) -> Any:
        return nullcontext()

    def _get_request_config(self) -> RequestConfig:
        return self.request_config

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.note("prepare_inputs", self._step)
        return inputs

    def evaluation_loop(self, dataloader: Any, *_: Any, **__: Any) -> Any:
        self.note("evaluation_loop", dataloader)
        return "metrics"

    def _prefetch(self, dataloader: Any) -> None:
        self.note("prefetch", (list(dataloader), self.model.training))

    def _prepare_resample_data_iterator(self) -> None:
        self.dynamic_resample_iterator: Iterator[Any] = iter(())

    def _rollout(self, samples: Any, request_config: Any, is_global_inputs: bool = False) -> Any:
        self.note("rollout", len(samples))
        return [answer(sample.request_id) for sample in samples]

    def _engine_infer(self, requests: Any, config: Any = None, *, use_tqdm: Any = False) -> Any:
        metadatas = [wire.read_metadata(request.data_dict) for request in requests]
        self.note("engine_infer", metadatas)
        return [packed(metadata) for metadata in metadatas]

    def _prepare_batch_inputs(self, samples: Any) -> Any:
        self.note("prepare_batch_inputs", len(samples))
        return [{"grpo_batch": batch} for batch in self.batches]

    def split_by_mini_batches(self, inputs: Any) -> Any:
        size = len(inputs) // len(self.batches)
        return [inputs[start : start + size] for start in range(0, len(inputs), size)]

    def _get_logps_via_local_forward(self, model: Any, model_inputs: Any, *_: Any) -> Any:
        self.note("local_forward", dict(model_inputs))

    def _compute_rewards_per_func(self, samples: Any) -> torch.Tensor:
        return torch.tensor(self.rewards)

    def _postprocess_batch(self, samples: Any, batch_encoded_inputs: Any) -> None:
        self._rewards_per_func = torch.tensor(self.rewards)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.note("log", dict(logs))

    def _move_model_to_vllm(self, skip_async_check: bool = False) -> None:
        self.note("move", skip_async_check)
        self._load_state_dict_to_vllm({"w": torch.ones(2)})

    def _load_state_dict_to_vllm(self, state_dict: Any) -> None:
        self.note("load", list(state_dict))

    def _prepare_vllm(self) -> None:
        self.note("prepare_vllm")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.note("save")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.note("load_from", resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.note("load_best")


class Trainer(RolloutGRPOTrainer, RecordingSwift):  # type: ignore[misc]
    """Our hooks over the recording ones; ms-swift's other methods are its own."""


class VllmModel(torch.nn.Module):
    """Holds the weights that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> set[str]:
        self.weights.update(weights)
        return set(self.weights)


class Engine:
    """A colocated engine, which loads the weights that it is given, or others."""

    model_config = None

    def __init__(self) -> None:
        self.inner_model = VllmModel()
        self.weights = self.inner_model.weights
        self.engine = self
        self.template: Any = Template(max_length=None, sequence_parallel_size=1)
        self.error = 0.0

    def reload_weights(self, weights: Any) -> None:
        self.inner_model.load_weights([(name, tensor + self.error) for name, tensor in weights])


RANKS = threading.local()
"""`own`: the ranks of a trainer that this thread makes."""


def trainer_of(
    folder: Path, ranks: Any = None, *, template: Any = None, parts: Any = None, **flags: Any
) -> Any:
    """A trainer with these flags, ready for its first round; `drawn`: what its listeners heard."""
    RANKS.own = ranks or SingleRank()
    args = training_arguments(**(SETTINGS | {"output_dir": str(folder)} | flags))
    made = Template(**({"max_length": None, "sequence_parallel_size": 1} | (template or {})))
    trainer: Any = Trainer(args=args, template=made, model=Model(), **(parts or {}))
    trainer._prepare_vllm()
    trainer.drawn = []
    trainer.sample_listeners.append(trainer.drawn.extend)
    return trainer


def rows(*questions: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": text}]} for text in questions]


def samples_of(*questions: str) -> list[GRPOSample]:
    return [GRPOSample(messages=row["messages"]) for row in rows(*questions)]


def packed(metadata: Any) -> RolloutOutput:
    """A colocated engine's answer: two tokens for each sample, and a prompt of two."""
    completions = [
        Completion(
            text=f"{metadata.sample_id.group}.{metadata.sample_id.index + k}",
            token_ids=[5 + k, END_OF_TURN],
            logprobs=[-0.5, -0.25],
            finish_reason="stop",
            seed=metadata.seed_of(k),
        )
        for k in range(metadata.count)
    ]
    response = PackedResponse(
        model="",
        choices=[],
        usage=UsageInfo(2, 2, 4),
        prompt_token_ids=[1, 2],
        completions=completions,
    )
    return RolloutOutput(response=response)


def answer(text: str) -> RolloutOutput:
    """One of ms-swift's own rollouts."""
    completion = Completion(
        text=text, token_ids=[5, END_OF_TURN], logprobs=[-0.5, -0.25], finish_reason="stop"
    )
    return to_rollout_output(completion, [1, 2])


def drawn_sample(request_id: str, prompt_ids: Sequence[int] = (1, 2), **fields: Any) -> Any:
    """A sample that was drawn and encoded: a prompt of two tokens, and two that were sampled."""
    values = {
        "response_token_ids": [[5, END_OF_TURN]],
        "rollout_logprobs": [[-0.5, -0.25]],
        "encoded": {"input_ids": torch.tensor([[1, 2, 5, END_OF_TURN]])},
    }
    [made] = samples_of("a")
    made.request_id = request_id
    made.advantages = 0.5
    made.rollout_prompt_ids = list(prompt_ids)  # type: ignore[attr-defined]
    for name, value in (values | fields).items():
        setattr(made, name, value)
    return made


def batch(count: int = 1, gap: float = 0.0) -> Any:
    """The `GRPOBatch` of so many such samples; log-probabilities in training are lower by `gap`."""
    rollout = torch.tensor([[-0.5, -0.25]] * count)
    return SimpleNamespace(
        rollout_per_token_logps=rollout,
        old_per_token_logps=rollout - gap,
        completion_mask=torch.ones(count, 2),
    )
