"""How a round is drawn: samples named, groups asked for once, each sample written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.utils import profiling_context
from swift.utils import get_logger

from swift_grpo_ext.record.collect import sample_row
from swift_grpo_ext.record.log import SampleLog, next_session
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.rank_group import (
    MainRankGroup,
    RankGroup,
    SingleRank,
    TensorParallelGroup,
)
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.groups import (
    count_duplicates,
    describe,
    fingerprint,
    fingerprints,
    parse_request_id,
    request_id,
    sample_ids_at,
)
from swift_grpo_ext.sampling.rounds import RoundNames
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.upstream.contract import Pin, verify

PINS = (
    Pin("swift.rlhf_trainers", "GRPOTrainer._add_prompt_id_to_inputs", ("self", "samples")),
    Pin("swift.rlhf_trainers", "GRPOTrainer.samples2requests", ("self", "samples")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._get_request_config", ("self",)),
    Pin("swift.rlhf_trainers", "GRPOTrainer._engine_infer",
        ("self", "infer_requests", "request_config", "use_tqdm")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._rollout",
        ("self", "samples", "request_config", "is_global_inputs")),
)  # fmt: skip
verify(PINS)

logger = get_logger()


class RolloutRounds(GRPOTrainer):
    """The hooks through which ms-swift's trainer draws its samples."""

    _round_names: RoundNames
    sample_listeners: list[Callable[[list[SampleRow]], None]]
    """Told of this rank's samples as they are drawn, perhaps from another thread."""

    _servers: Any
    _sample_log: Any = None
    _has_warned_of_uneven_groups = False
    _has_warned_of_duplicates = False

    def _add_prompt_id_to_inputs(self, samples: list[Any]) -> list[Any]:
        """Name each sample by its place; groups are positional, and never merged by their words."""
        training = self.model.training
        group_size = self.num_generations if training else self.num_generations_eval
        session = next_session(self.args.output_dir) if self._opens_log else None
        told = gather_object([(len(samples), session)])
        self._open_log(told[0][1])
        sizes = [size for size, _ in told]
        start = sum(sizes[: self.accelerator.process_index])
        if training:
            round_ = self._round_names.current
        else:
            round_ = self._round_names.take_eval_batch(sum(sizes) // group_size)
        sample_ids = sample_ids_at(round_, range(start, start + len(samples)), group_size)
        for sample, sample_id in zip(samples, sample_ids, strict=True):
            sample.request_id = request_id(sample_id)
            sample.prompt_id = sample.request_id.rpartition("-")[0]
        self._check_duplicates(samples, sample_ids)
        return samples

    def _check_duplicates(self, samples: Sequence[Any], sample_ids: Sequence[SampleId]) -> None:
        action = self.args.duplicate_prompts
        if action == "allow":
            return
        firsts = zip(samples, sample_ids, strict=True)
        prints = gather_object([fingerprint(s) for s, sample_id in firsts if sample_id.index == 0])
        duplicates = count_duplicates(prints)
        if duplicates == 0 or (action == "warn" and self._has_warned_of_duplicates):
            return
        message = (
            f"{describe(sample_ids[0])}: {duplicates} of {len(prints)} prompts of the generation "
            "batch stand in it twice, media included; each is a group of its own, with its own "
            "noise."
        )
        if action == "error":
            raise ValueError(f"--duplicate_prompts error: {message} Remove them from the data set.")
        self._has_warned_of_duplicates = True
        logger.warning(f"{message} (--duplicate_prompts warn: said once.)")

    # --- the sample log ---

    @property
    def _opens_log(self) -> bool:
        return self._sample_log is None and self.accelerator.is_main_process

    def _open_log(self, session: int | None) -> None:
        if session is not None:
            self._sample_log = SampleLog(
                self.args.output_dir,
                session=session,
                start_step=self.state.global_step,
                rank=self.accelerator.process_index,
            )

    def _log_samples(
        self, drawn: Sequence[tuple[SampleId, Any, str]], outputs: Sequence[Any], ranks: int
    ) -> None:
        """Write down what was drawn: this rank's samples, or those of `ranks` ranks in order."""
        if len(outputs) != len(drawn):
            return  # a server's scheduler made several training samples of one: they have no place
        steps = self._last_loaded_step if self.args.use_vllm else self.state.global_step
        rows = [
            sample_row(
                sample_id,
                sample,
                output,
                seed=None if self._run_seed is None else sample_seed(self._run_seed, sample_id),
                fingerprint=fingerprint,
                rank=self.accelerator.process_index + number * ranks // len(drawn),
                weight_version=steps,
            )
            for number, ((sample_id, sample, fingerprint), output) in enumerate(
                zip(drawn, outputs, strict=True)
            )
        ]
        self._sample_log.append(rows)
        for listener in self.sample_listeners:
            listener(rows)

    # --- rollouts ---

    @property
    def _is_ours(self) -> bool:
        """Whether rounds are drawn our way; else ms-swift's, with its seeds."""
        args = self.args
        ours = args.rollout_seed_mode == "sample" or args.rollout_group_requests
        return bool(args.use_vllm and ours)

    @property
    def _run_seed(self) -> int | None:
        args = self.args
        return args.seed if args.use_vllm and args.rollout_seed_mode == "sample" else None

    @property
    def _stops(self) -> dict[str, Any]:
        """What ends a completion, beside `--stop_words`, which ms-swift sends itself."""
        args = self.args
        return {
            "stop_token_ids": tuple(args.stop_token_ids),
            "include_stop_str_in_output": args.include_stop_str_in_output,
        }

    def samples2requests(self, samples: list[Any]) -> list[Any]:
        requests = super().samples2requests(samples)
        for sample, request in zip(samples, requests, strict=True):
            if request is not sample:  # else it is a later turn's, and has its envelope
                sample_id = parse_request_id(sample.request_id)
                metadata = RequestMetadata(
                    sample_id=sample_id,
                    count=1,
                    run_seed=self._run_seed,
                    packed=False,
                    **self._stops,
                )
                wire.write_metadata(request.data_dict, metadata)
        return requests

    def _rollout(
        self, samples: list[Any], request_config: Any, is_global_inputs: bool = False
    ) -> list[Any]:
        sample_ids = [self._begin_turn(sample) for sample in samples]
        drawn = list(zip(sample_ids, samples, fingerprints(samples), strict=True))
        if not self._is_ours or self.enable_server_multi_turn:
            outputs = super()._rollout(samples, request_config, is_global_inputs)
        elif is_global_inputs and not self.accelerator.is_main_process:
            return []  # the main rank draws for all
        else:
            outputs = self._draw(drawn, is_global_inputs)
        self._log_samples(drawn, outputs, self.accelerator.num_processes if is_global_inputs else 1)
        return outputs

    def _draw(
        self, drawn: Sequence[tuple[SampleId, Any, str]], is_global_inputs: bool
    ) -> list[Any]:
        from swift_grpo_ext.rollout.draw import RankBatch, draw

        rank_batch = RankBatch(
            sample_ids=[sample_id for sample_id, _, _ in drawn],
            fingerprints=[fingerprint for _, _, fingerprint in drawn],
            request=lambda number: self.samples2requests([drawn[number][1]])[0],
            run_seed=self._run_seed,
            grouped=self.args.rollout_group_requests,
            packed=not self.multi_turn_scheduler,
            **self._stops,
        )
        outputs, unequal = draw(rank_batch, self._rank_group(is_global_inputs), self._generate)
        self._warn_of_uneven_groups(unequal)
        return outputs

    def _begin_turn(self, sample: Any) -> SampleId:
        """The place of a sample, or of a multi-turn conversation's request for its next turn."""
        if hasattr(sample, "request_id"):
            return parse_request_id(sample.request_id)
        metadata = wire.read_metadata(sample.data_dict)
        if metadata is None:
            raise ValueError(
                f"--multi_turn_scheduler {self.args.multi_turn_scheduler}: its `step` returned a "
                f"request without `data_dict['{wire.KEY}']`, from which its seed is made. Return "
                "the request that it was given, or a copy with the same `data_dict`."
            )
        wire.write_metadata(sample.data_dict, metadata.next_turn())
        return metadata.next_turn().sample_id

    def _rank_group(self, is_global_inputs: bool) -> RankGroup:
        if self.vllm_mode == "colocate" and self.vllm_tensor_parallel_size > 1:
            return TensorParallelGroup(self.tp_group)
        if self.vllm_mode == "server" and not is_global_inputs and dist.is_initialized():
            return MainRankGroup()
        return SingleRank()

    def _generate(self, requests: list[Any], metadatas: list[RequestMetadata]) -> list[list[Any]]:
        from swift_grpo_ext.rollout.draw import to_rollout_output, to_rollout_outputs

        config = self._get_request_config()
        if self.vllm_mode == "server":
            with profiling_context(self, "generate"), self._disable_sp_context():
                answers = self._servers.infer(requests, metadatas, config)
            return [[to_rollout_output(c, prompt_ids) for c in cs] for cs, prompt_ids in answers]
        outputs = self._engine_infer(requests, config)
        rank = self.accelerator.process_index
        replica = f"rank {rank - rank % self.vllm_tensor_parallel_size}"
        pairs = zip(outputs, metadatas, strict=True)
        return [to_rollout_outputs(output, metadata, replica) for output, metadata in pairs]

    def _warn_of_uneven_groups(self, unequal: list[SampleId]) -> None:
        # An environment gives each sample of a group a question of its own: nothing to warn about.
        if unequal and not self.multi_turn_scheduler and not self._has_warned_of_uneven_groups:
            self._has_warned_of_uneven_groups = True
            logger.warning(
                f"{len(unequal)} groups hold rows that differ, the first in "
                f"{describe(unequal[0])}: their samples are asked for singly. Advantages compare "
                "the samples of a group; a custom sampler must repeat each row --num_generations "
                "times. (Said once.)"
            )
