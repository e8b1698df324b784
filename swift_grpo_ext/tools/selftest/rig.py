"""What checks work with: the real trainer with its engine, the user's rows, ways to draw them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
from swift.rlhf_trainers.utils import (
    aggressive_empty_cache,
    set_expandable_segments,
)
from swift.utils import remove_response

from swift_grpo_ext.checks.rows import MEDIA, prompt_of
from swift_grpo_ext.rollout.generate import generate
from swift_grpo_ext.sampling.groups import sample_ids_at
from swift_grpo_ext.sampling.prompt_hash import prompt_hash, prompt_hashes
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.selftest.flips import Drawn

NUM_PROMPTS = 4
MAX_GROUP_SIZE = 8
MAX_TOKENS = 64
"""Of a completion, where the user's own limit is higher."""

ROWS_LOOKED_AT = 500
"""Of the data set, evenly spread."""


class Rig:
    """A trainer that draws and computes, and never trains. All ranks make the same calls.

    Args:
        trainer: a `RolloutGRPOTrainer` as `swift rlhf` makes it.
        topology: in words, as results name it.
        deadline: in seconds since 1970; checks begin before it.
    """

    def __init__(self, trainer: Any, topology: str, deadline: float) -> None:
        self.trainer, self.topology, self.deadline = trainer, topology, deadline
        self.is_colocated = trainer.vllm_mode == "colocate"
        # As the training does before its first step: number types of mixed precision, no DDP yet.
        trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.train()
        if self.is_colocated and trainer.args.sleep_level > 0:
            self._wake()
        start = time.perf_counter()
        self.update_weights()
        self.first_update_seconds = time.perf_counter() - start
        self.seconds_per_token: float | None = None
        """Of a training pass, once it was measured."""

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent, on rank 0's clock."""
        return bool(self.trainer.ranks.all_gather(time.time() >= self.deadline)[0])

    # --- rows ---

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """A few different prompts of the data set."""
        found: dict[str, dict[str, Any]] = {}
        for row in self._rows():
            found.setdefault(prompt_hash(prompt_of(row)), row)
            if len(found) == NUM_PROMPTS:
                break
        return list(found.values())

    def hardest_prompts(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """The longest texts, and the rows with most media, each with its number in words."""
        rows = list(enumerate(self._rows()))
        by_text = sorted(rows, key=lambda pair: -len(str(pair[1].get("messages"))))
        by_media = sorted(rows, key=lambda pair: -sum(len(pair[1].get(k) or ()) for k in MEDIA))
        numbered = dict((*by_text[:count], *by_media[:count], *rows[:1]))
        return [(f"prompt {n} of those looked at", row) for n, row in numbered.items()]

    def _rows(self) -> Iterator[dict[str, Any]]:
        data = self.trainer.train_dataset
        numbers = np.linspace(0, len(data) - 1, min(len(data), ROWS_LOOKED_AT)).astype(int)
        yield from (data[int(number)] for number in numbers)

    @property
    def group_size(self) -> int:
        return min(int(self.trainer.num_generations), MAX_GROUP_SIZE)

    @property
    def max_tokens(self) -> int:
        return min(int(self.trainer.max_completion_length), MAX_TOKENS)

    @property
    def bits(self) -> int:
        """Of the numbers that the model computes with (`gap_limit`)."""
        args = self.trainer.args
        return 16 if args.bf16 or args.fp16 else 8 * self.trainer.model.dtype.itemsize

    def samples(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        """ms-swift's samples, as a round begins with them."""
        samples = self.trainer._set_inputs_system(self.trainer.to_samples(deepcopy(list(rows))))
        for sample in samples:
            remove_response(sample.messages)
        return list(samples)

    # --- drawing ---

    def config(self, max_tokens: int | None = None) -> Any:
        """The user's request config, for so many tokens."""
        config = self.trainer._get_request_config()
        config.max_tokens = max_tokens or self.max_tokens
        return config

    def ids(self, step: int, num_groups: int, group_size: int | None = None) -> list[SampleId]:
        """Of a round's samples."""
        size = group_size or self.group_size
        round_ = Round(phase="train", step=step, number=0)
        return sample_ids_at(round_, range(num_groups * size), size)

    def outputs(
        self,
        rows: Sequence[dict[str, Any]],
        ids: Sequence[SampleId],
        *,
        config: Any = None,
        run_seed: int | None = None,
        grouped: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """Draw samples as the training does; gives ms-swift's samples and their outputs.

        Args:
            rows: one for each sample.
            run_seed: instead of `--seed`.
            grouped: ask for each group in one request.
        """
        trainer, settings = self.trainer, self.trainer._settings
        if run_seed is not None:
            settings = replace(settings, run_seed=run_seed)
        ranks = trainer.ranks
        cuts = [len(ids) * rank // ranks.size for rank in range(ranks.size + 1)]
        own = slice(cuts[ranks.rank], cuts[ranks.rank + 1])
        samples = self.samples(rows)
        # Rows that differ are requested one by one.
        prompts = prompt_hashes(samples[own]) if grouped else [str(i) for i in ids[own]]
        call = partial(trainer._call_engine, config=config or self.config())
        with trainer.offload_context() if trainer.enable_offload else nullcontext():
            outputs, _ = generate(
                list(ids[own]),
                prompts,
                make_request=lambda position: samples[own][position].to_infer_request(),
                make_metadata=partial(settings.metadata, packed=True),
                sharing=trainer._sharing(is_global_inputs=False),
                call_engine=call,
            )
        return samples, [output for share in ranks.all_gather(outputs) for output in share]

    def draw(
        self, rows: Sequence[dict[str, Any]], ids: Sequence[SampleId], **how: Any
    ) -> list[Drawn]:
        """`outputs`, as plain values."""
        _, outputs = self.outputs(rows, ids, **how)
        return [to_drawn(*pair) for pair in zip(ids, outputs, strict=True)]

    def draw_round(self, step: int = 0, **how: Any) -> list[Drawn]:
        """All samples of a round of the few prompts."""
        ids = self.ids(step, len(self.prompts))
        return self.draw([self.prompts[i.group] for i in ids], ids, **how)

    @cached_property
    def base(self) -> list[Drawn]:
        """Round 0, with which others are compared."""
        return self.draw_round()

    def drawn_samples(
        self, rows: Sequence[dict[str, Any]], ids: Sequence[SampleId], **how: Any
    ) -> list[Any]:
        """Samples with their completions, ready for training."""
        samples, outputs = self.outputs(rows, ids, **how)
        for sample, sample_id in zip(samples, ids, strict=True):
            sample.sample_id, sample.request_id = sample_id, sample_id.request_id
        return list(self.trainer._postprocess_rollout_outputs(samples, outputs))

    # --- weights ---

    def update_weights(self) -> None:
        """Give the engines the trainer's weights, verified."""
        self.trainer._move_model_to_vllm(skip_async_check=True)

    @contextmanager
    def engine_asleep(self) -> Iterator[None]:
        """With `--sleep_level`, a colocated engine gives its memory back, as while training."""
        level = self.trainer.args.sleep_level if self.is_colocated else 0
        if not level:
            yield
            return
        engine = self.trainer.engine.engine
        engine.reset_prefix_cache()
        engine.sleep(1)
        try:
            yield
        finally:
            self._wake()

    def _wake(self) -> None:
        """As ms-swift does before a rollout (`_fast_infer`)."""
        aggressive_empty_cache()
        set_expandable_segments(False)
        self.trainer.engine.engine.wake_up()

    def forget(self, *, media: bool = True) -> None:
        """Empty the engines' caches of prefixes, and of media."""
        trainer = self.trainer
        if self.is_colocated:
            trainer.engine.engine.reset_prefix_cache()
            if media:
                trainer.engine.engine.reset_mm_cache()
                trainer.engine.engine.reset_encoder_cache()
        elif trainer.ranks.rank == 0:
            trainer.vllm_client.reset_prefix_cache()
            if media:
                trainer.vllm_client.reset_mm_cache()
                trainer.vllm_client.reset_encoder_cache()


def to_drawn(sample_id: SampleId, output: Any) -> Drawn:
    choice = output.response.choices[0]
    return Drawn(
        sample_id=sample_id,
        token_ids=list(choice.token_ids),
        logprobs=list(chain(*(output.rollout_logprobs or ()))),
        text=choice.message.content,
        prompt_ids=list(output.response.prompt_token_ids),
        finish_reason=choice.finish_reason,
        stop_reason=getattr(choice, "stop_reason", None),
    )
