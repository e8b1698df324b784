"""Generates and encodes with the real trainer, its engine, and the user's rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from swift.infer_engine.protocol import RequestConfig
from swift.trainers import disable_gradient_checkpointing

from swift_grpo_ext.checks.finding import SettingsError
from swift_grpo_ext.checks.rows import encoding_error, media_of
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.sampling.rounds import sample_ids_at
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.tools.selftest.outcome import NotTriedError
from swift_grpo_ext.training.gap import BoundedGap, measure_gap
from swift_grpo_ext.training.group import DisagreementError, kind_of_row
from swift_grpo_ext.upstream.patches import replaced

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

NUM_PROMPTS = 4
MAX_GROUP_SIZE = 8
MAX_TOKENS = 64  # of a completion, if the user's own limit is higher
ROWS_LOOKED_AT = 500  # of the data set, evenly spread

Row = dict[str, Any]


class Rig:
    """A trainer that generates first turns, encodes them, and never trains. All ranks make the same
    calls.

    Raises:
        SettingsError: ms-swift generates the rollouts, or servers lead conversations.
    """

    def __init__(self, trainer: RolloutGRPOTrainer) -> None:
        if not trainer._settings.generates or trainer.enable_server_multi_turn:
            raise SettingsError(
                "ms-swift generates with these settings. Give --use_vllm true, --rollout_seed_mode "
                "sample, and servers without --multi_turn_scheduler."
            )
        self.trainer = trainer
        trainer.multi_turn_scheduler = None  # later turns depend on tools
        # The model gets the number types of mixed precision, as in training, and no DDP.
        trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.train()
        self._recorded: list[SampleRow] = []  # on rank 0
        trainer.recorder.listeners.append(self._recorded.extend)

    def update_weights(self) -> None:
        """Let the next rollout begin with an update of the engines' weights."""
        self.trainer._last_loaded_step = -1

    # --- rows ---

    @cached_property
    def rows(self) -> list[Row]:
        """Some rows of the data set, evenly spread."""
        data = self.trainer.train_dataset
        numbers = np.linspace(0, len(data) - 1, min(len(data), ROWS_LOOKED_AT)).astype(int)
        return [data[int(number)] for number in numbers]

    @cached_property
    def prompts(self) -> list[Row]:
        """A few rows that the template can encode, of as many kinds as possible."""
        seen, turns = Counter[str](), list[int]()
        for kind in map(kind_of_row, self.rows):
            turns.append(seen[kind])
            seen[kind] += 1
        by_turn = sorted(zip(turns, self.rows, strict=True), key=itemgetter(0))
        return self.usable((row for _, row in by_turn), NUM_PROMPTS)

    def hardest_prompts(self, count: int) -> list[Row]:
        """Return the rows with most media, and those with the longest texts."""
        by_text = sorted(self.rows, key=lambda row: -len(str(row.get("messages"))))
        by_media = sorted(self.rows, key=lambda row: -len(media_of(row)))
        return [*self.usable(by_media, count), *self.usable(by_text, count)]

    def usable(self, rows: Iterable[Row], count: int) -> list[Row]:
        """Return the first `count` rows that the template can encode, the same on all ranks; raise
        `NotTriedError` if there is none. A training replaces other rows, or ends."""
        given, numbers, reason = list(rows), list[int](), ""
        for number, row in enumerate(given):
            if len(numbers) == count:
                break
            if error := encoding_error(self.trainer.template, row, self.trainer._max_model_len):
                reason = reason or error
            else:
                numbers.append(number)
        # A URL may fail on one rank only: the first rank decides.
        numbers, *_ = self.trainer.ranks.all_gather(numbers)
        if not numbers:
            raise NotTriedError(f"the template refuses every prompt, the first one: {reason}")
        return [given[number] for number in numbers]

    # --- generating ---

    def ids(self, step: int, num_groups: int, group_size: int | None = None) -> list[SampleId]:
        """Return the ids of a round's samples."""
        size = group_size or min(int(self.trainer.num_generations), MAX_GROUP_SIZE)
        return sample_ids_at(RoundId("train", step, 0), range(num_groups * size), size)

    def config(self, max_tokens: int = MAX_TOKENS) -> RequestConfig:
        """Return the user's request config, for `max_tokens` at most."""
        config = self.trainer._get_request_config()
        config.max_tokens = min(int(self.trainer.max_completion_length), max_tokens)
        return config

    def generate(
        self,
        rows: Sequence[Row],
        ids: Sequence[SampleId],
        config: RequestConfig | None = None,
        run_seed: int | None = None,
    ) -> list[RolloutSample]:
        """Generate a sample of each row by the training's own method; return all samples on every
        rank. `ids` name the samples, `run_seed` takes the place of `--seed`."""
        trainer, ranks, settings = self.trainer, self.trainer.ranks, self.trainer._settings
        start, end = (len(ids) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        config, own_ids = config or self.config(), ids[start:end]

        def name(samples: list[RolloutSample]) -> list[RolloutSample]:
            for sample, sample_id in zip(samples, own_ids, strict=True):
                sample.sample_id, sample.request_id = sample_id, sample_id.request_id
            return samples

        with (
            replaced(trainer, "_add_prompt_id_to_inputs", name),
            replaced(trainer, "_get_request_config", lambda: config),
            replaced(settings, "run_seed", settings.run_seed if run_seed is None else run_seed),
        ):
            samples = trainer.to_samples([deepcopy(row) for row in rows[start:end]])
            samples = trainer._generate_completions(samples)
        return [sample for share in ranks.all_gather(samples) for sample in share]

    def generate_tokens(
        self, ids: Sequence[SampleId], run_seed: int | None = None
    ) -> list[SampleRow]:
        """Generate a sample for each id, of the prompt with the number of its group; return the
        rows of the record."""
        self._recorded.clear()
        rows = [self.prompts[sample_id.group] for sample_id in ids]
        self.generate(rows, ids, run_seed=run_seed)
        recorded, *_ = self.trainer.ranks.all_gather([*self._recorded])
        return recorded

    @cached_property
    def first_round(self) -> list[SampleRow]:
        """The samples of round 0, for `prompts`."""
        return self.generate_tokens(self.ids(0, len(self.prompts)))

    # --- training's view ---

    def encode(
        self, samples: Sequence[RolloutSample], *, mismatch: str = "warn"
    ) -> tuple[dict[str, Any], GRPOBatch]:
        """Return a micro-batch by the training's own method: the model's inputs, and the rest.
        `mismatch` takes the place of `--rollout_mismatch`.

        Raises:
            DisagreementError: rollout and training disagree about a sample.
        """
        with replaced(self.trainer.args, "rollout_mismatch", mismatch):
            [batch] = self.trainer._prepare_batch_inputs([*samples])
        return batch["model_inputs"], batch["grpo_batch"]

    def logps(self, inputs: dict[str, Any], batch: GRPOBatch) -> torch.Tensor:
        """Return the trainer's log-probabilities [samples, tokens] in nats; the batch's
        `completion_mask` marks the valid ones."""
        trainer = self.trainer
        checkpointing = disable_gradient_checkpointing(
            trainer.model, trainer.args.gradient_checkpointing_kwargs
        )
        with torch.no_grad(), checkpointing:
            values, _ = trainer._get_per_token_logps_and_entropies(trainer.model, inputs, batch)
        return values

    def measure_gaps(self, samples: Sequence[RolloutSample]) -> dict[str, BoundedGap]:
        """Return for each kind of row the gap between rollout and trainer, and how far rounding
        moves the trainer's log-probabilities. Samples that both sides encode differently are left
        out: the check `prompts` names them."""
        gaps = defaultdict[str, BoundedGap](BoundedGap)
        for sample in samples:
            with suppress(DisagreementError):
                inputs, batch = self.encode([sample], mismatch="stop")
                batch.old_per_token_logps = self.logps(inputs, batch)
                micro_batch = {"model_inputs": inputs, "grpo_batch": batch}
                rounded = self.trainer.rounded_logps([micro_batch])
                [(_, (_, kind), gap)] = measure_gap([([sample], batch)], rounded)
                gaps[kind] += gap
        return dict(gaps)
