"""Which prompts a round holds: their order, the round's name, whole groups, and resampling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.utils import get_logger, remove_response

from swift_grpo_ext.checks.rows import bad_media, question_of
from swift_grpo_ext.sampling.replacement import Replaced, Row, candidate_order, replace_groups
from swift_grpo_ext.sampling.rounds import RoundClock, RoundNames
from swift_grpo_ext.sampling.sampler import EpochSampler
from swift_grpo_ext.upstream.contract import Pin, verify

PINS = (
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_inputs", ("self", "inputs")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._get_train_sampler", ("self", "train_dataset")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_resample_data_iterator", ("self",)),
    Pin("swift.rlhf_trainers", "GRPOTrainer.evaluation_loop", ("self", "dataloader")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._prefetch", ("self", "dataloader")),
    Pin("swift.rlhf_trainers", "GRPOTrainer.resample_encode_failed_inputs", ("self", "inputs")),
    Pin("swift.template.base", "Template.encode", ("self", "inputs")),
)  # fmt: skip
verify(PINS)

logger = get_logger()

ENDLESS = 2**40
"""Training batches in an epoch of a stream."""


class RolloutPrompts(GRPOTrainer):
    """The hooks through which ms-swift's trainer takes its prompts."""

    _round_names: RoundNames
    _evaluated: Any = None
    """The data set that is being evaluated."""

    def _round_clock(self) -> RoundClock:
        args = self.args
        per_round = args.steps_per_generation * self.template.sequence_parallel_size
        per_round *= self.num_iterations
        prompts = args.generation_batch_size // self.num_generations
        has_length = hasattr(self.train_dataset, "__len__")
        rounds = len(self.train_dataset) // prompts if has_length else ENDLESS
        return RoundClock(
            batches_per_step=args.gradient_accumulation_steps,
            batches_per_round=per_round,
            batches_per_epoch=max(rounds, 1) * per_round,
            max_resamples=args.max_resample_times if self.dynamic_sample else 0,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        upstream = super()._get_train_sampler(train_dataset)
        return EpochSampler(upstream, self._epoch)

    def _epoch(self) -> int:
        """The epoch that is about to be iterated."""
        clock = self._round_names.clock
        return clock.epoch_at(clock.batches_at(self.state.global_step))

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self.model.training:
            clock = self._round_names.clock
            # A resumed run counts on, so that rounds begin where they would have.
            self._step: int = self._step or clock.batches_at(self.state.global_step)
            ahead = clock.batches_per_round if self.args.async_generate else 0
            self._round_names.begin_training(self._step + ahead)
        return super()._prepare_inputs(inputs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._round_names.begin_evaluation(self.state.global_step)
        self._evaluated = dataloader.dataset
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _prefetch(self, dataloader: Any) -> None:
        """With `--async_generate`: draw what the first training (or eval) batch will be made of."""
        if self.control.should_evaluate:
            super()._prefetch(dataloader)
            return
        clock = self._round_names.clock
        batch = clock.batches_at(self.state.global_step)
        self._round_names.begin_training(batch)
        # The prompts of the round before: this round's own are the next to be asked for.
        epoch, number = divmod(batch // clock.batches_per_round - 1, clock.rounds_per_epoch)
        was_training = self.model.training
        self.model.train()
        super()._prefetch([self._rows(self._get_train_sampler(), max(epoch, 0), number)])
        self.model.train(was_training)

    def _prepare_resample_data_iterator(self) -> None:
        super()._prepare_resample_data_iterator()
        if self.dynamic_sample:
            upstream = GRPOTrainer._get_train_sampler(self)
            upstream.seed = (upstream.seed or 0) + 1  # as ms-swift: not the order of training
            self.dynamic_resample_iterator = self._resampled_rows(EpochSampler(upstream, int))

    def _resampled_rows(self, sampler: EpochSampler) -> Any:
        while True:
            position = self._round_names.begin_resampling()
            yield self._rows(sampler, *divmod(position, sampler.num_batches))

    def _rows(self, sampler: EpochSampler, epoch: int, batch: int) -> list[Any]:
        """This rank's rows of a generation batch."""
        indices = sampler.batch(epoch, batch)
        share = len(indices) // self.accelerator.num_processes
        first = share * self.accelerator.process_index
        return [self.train_dataset[i] for i in indices[first : first + share]]

    # --- prompts that cannot be encoded ---

    def resample_encode_failed_inputs(self, inputs: Any, *args: Any, **kwargs: Any) -> list[Row]:
        """With `--truncation_strategy delete`: whole groups leave, and whole groups come."""
        mode = "train" if self.model.training else "eval"
        sizes = gather_object([len(inputs)])
        rows, replaced = replace_groups(
            inputs,
            start=sum(sizes[: self.accelerator.process_index]),
            group_size=self.num_generations if mode == "train" else self.num_generations_eval,
            error_of=self._encoding_error,
            draw=self._candidates(),
            gather=lambda value: gather_object([value]),
        )
        self._metrics[mode]["prompts/replaced"].append(float(len(replaced)))
        if self.accelerator.is_main_process:
            self._warn_of_replaced(replaced)
        return rows

    def _candidates(self) -> Callable[[int], Callable[[], Row] | None]:
        """Rows to try in this round, by their number; see `replace_groups`."""
        dataset = self.train_dataset if self.model.training else self._evaluated
        if not hasattr(dataset, "__len__"):
            return lambda number: self._next_of_stream
        round_ = self._round_names.upcoming(training=self.model.training)
        order = list(candidate_order(self.args.seed, round_, len(dataset)))

        def draw(number: int) -> Callable[[], Row] | None:
            return (lambda: dataset[order[number]]) if number < len(order) else None

        return draw

    def _next_of_stream(self) -> Row:
        return next(self.truncated_resample_iterator)[0]

    def _encoding_error(self, row: Row) -> str | None:
        """Why a row's prompt cannot be encoded, as `--truncation_strategy delete` sees it."""
        if not row.get("messages"):
            return "it has no messages"
        if bad := bad_media(row):
            return bad
        prompt = {**row, "messages": [dict(message) for message in row["messages"]]}
        remove_response(prompt["messages"])
        # `template.encode` would try three times; what loads a URL has retries of its own.
        encode = inspect.unwrap(type(self.template).encode)
        try:
            with torch.inference_mode():
                encode(self.template, prompt)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return None

    def _warn_of_replaced(self, replaced: Sequence[Replaced]) -> None:
        round_ = self._round_names.upcoming(training=self.model.training)
        for group in replaced:
            logger.warning(
                f"{round_.phase} round {round_.step}.{round_.number}, group "
                f"{round_.first_group + group.group}: the row that asks "
                f"{question_of(group.row)!r} cannot be encoded ({group.error}); another prompt "
                "takes the place of the whole group (--truncation_strategy delete)."
            )
