"""The hooks of ms-swift that GRPO and distillation (GKD) share, in the order of a round: names and
seeds, engines, requests, the training batch, weights. Each rule stands in the collaborator that a
hook calls. `trainer.py` and `distillation.py` have the hooks of one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
from swift.rlhf_trainers.utils import profiling_context
from swift.utils import get_logger

from swift_grpo_ext.checks.rows import encoding_error
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.router_replay import RouterReplay, replayed_share
from swift_grpo_ext.ranks import RankGroup, TensorParallelGroup, training_ranks
from swift_grpo_ext.record.recorder import SampleRecorder
from swift_grpo_ext.record.rewards import RewardRecorder, training_scores
from swift_grpo_ext.record.tables import RewardRow
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.rollout.conversation import Conversations, attach_turns, servers_turns
from swift_grpo_ext.rollout.generate import RolloutSettings, begin_turn, generate
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.scheduler import warn_no_room
from swift_grpo_ext.rollout.wire import Answer, RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.rounds import RoundClock, RoundNames, sample_ids_at
from swift_grpo_ext.sampling.sampler import EpochSampler
from swift_grpo_ext.stops.templates import check_stop_settings
from swift_grpo_ext.timing.step_clock import StepClock
from swift_grpo_ext.training.batch import switch_off_dropout
from swift_grpo_ext.training.encode import GroupEncoder
from swift_grpo_ext.training.gap import gap_limit, judge_gap, measure_gap, sampling_shift
from swift_grpo_ext.training.prompts import (
    named_request,
    named_rows,
    replace_failing_prompts,
    warn_uneven,
)
from swift_grpo_ext.training.report import Round, RoundReport, warn_duplicates
from swift_grpo_ext.training.summary import RunSummary, what_is_on
from swift_grpo_ext.upstream.determinism import (
    deterministic,
    exact_unmerging,
    sum_gradients_one_by_one,
)
from swift_grpo_ext.upstream.encoding import answers_for_servers
from swift_grpo_ext.upstream.patches import Moment, apply, replaced
from swift_grpo_ext.upstream.placeholders import placeholder_texts
from swift_grpo_ext.weights.layout import StateDict, checkpoint_buffers, checkpoint_layout
from swift_grpo_ext.weights.sync import WeightSync

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RequestConfig, RolloutOutput
    from swift.template import Template
    from torch.utils.data import DataLoader, Dataset

    from swift_grpo_ext.record.tables import Fate
    from swift_grpo_ext.server.client import RolloutServers

logger = get_logger()


class RolloutTraining(RolloutTrainerMixin):
    """A trainer of ms-swift's, extended. It stands before ms-swift's own among base classes."""

    recorder: SampleRecorder  # its listeners get this rank's samples as they are generated
    # Called on all ranks together with how this rank's samples scored, once a round.
    score_listeners: list[Callable[[list[RewardRow]], None]]
    ranks: RankGroup  # all training ranks, for the exchange of Python objects
    # The module of ms-swift in which its trainer looks `encode_sample` up.
    encoding_module: ClassVar[ModuleType]
    completion_logps: CompletionLogps  # said here: mypy would infer it by the order of files
    _round: Round | None = None  # between its batch and its end
    _router_replay: RouterReplay | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        apply(Moment.TRAINER)
        config, template = kwargs["args"], kwargs["template"]
        check_stop_settings(config, template)  # before minutes go into an engine
        self.ranks = training_ranks(config.ddp_timeout)
        self._settings = RolloutSettings(config)
        self.recorder = SampleRecorder(
            config.output_dir,
            self.ranks,
            kept=config.sample_log,
            max_gb=config.sample_log_gb,
            keeps_diversity="diversity" in config.callbacks,
        )
        self.score_listeners = []

        # ms-swift's own makes engines and callbacks, which ask for what was made so far. It also
        # adjusts `config`: steps and batches of a round are final only behind it.
        super().__init__(*args, **kwargs)

        # Here model, reward functions and data set are known, and no round has begun.
        num_rows, parallel = len(self.train_dataset), template.sequence_parallel_size
        self._rounds = RoundNames(RoundClock.of(config, num_rows, parallel))
        # Under autocast, models of 32 bits compute in 16.
        is_half = config.bf16 or config.fp16
        self.number_bits = 16 if is_half else torch.finfo(self.model.dtype).bits
        self.gap_limit = gap_limit(min(self.number_bits, self._engine_bits), config.temperature)
        self.completion_logps = CompletionLogps(config, template)
        self._conversations = Conversations(template, has_scheduler=bool(self.multi_turn_scheduler))
        self._rewards = RewardRecorder(self.reward_func_names, self.reward_weights.tolist())
        # Behind all others: what they do at a step's end then counts in that step.
        self._clock = StepClock(self)
        self.add_callback(self._clock)
        num_dropouts, leaves_out = switch_off_dropout(self.model), not self.needs_old_logps()
        states = what_is_on(
            config, self.completion_logps, num_dropouts, leaves_out_old_pass=leaves_out
        )
        self._summary = RunSummary(self, states, self.gap_limit)
        if config.full_determinism:  # before `train` has accelerate wrap the model for DDP
            sum_gradients_one_by_one(self.accelerator)

    @property
    def _is_conversation(self) -> bool:
        return bool(self.multi_turn_scheduler or self.enable_server_multi_turn)

    @property
    def _group_size(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._summary.begin()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            self.ranks.end()
            raise
        finally:
            self._summary.end()
            self.recorder.finish()

    # --- engines ---

    def _prepare_vllm(self) -> None:
        # vLLM's sampler has CUDA kernels without a deterministic form, which would raise.
        with deterministic(False) if self.args.full_determinism else nullcontext():
            super()._prepare_vllm()
        self._servers: RolloutServers | None = None
        if not self.args.use_vllm:
            logger.info(
                "--use_vllm false: ms-swift generates. A seed for each sample, --stop_token_ids, "
                "--include_stop_str_in_output and log-probabilities of rollouts need vLLM."
            )
        # With `--rollout_seed_mode engine` ms-swift's own client asks the servers.
        elif self._settings.generates and self.vllm_mode == "server" and self.ranks.rank == 0:
            from swift_grpo_ext.server.client import connect_servers

            self._servers = connect_servers(self.vllm_client, self.args)
        self._weights = WeightSync(self.ranks, self._servers, self.args.rollout_mismatch)
        # Rank 0 alone knows the servers' lengths, and all ranks judge rows by the smallest: which
        # engine will draw a group is not known when its row is encoded.
        engine = self._servers or getattr(self, "engine", None)
        facts = [getattr(engine, name, None) for name in ("max_model_len", "number_bits")]
        lengths, bits = zip(*self.ranks.all_gather(facts), strict=True)
        self._max_model_len = min(filter(None, lengths), default=None)
        # ms-swift's own client does not ask a server; nearly all have numbers of 16 bits.
        self._engine_bits = min(filter(None, bits), default=16)

    def _prepare_vllm_engine(self) -> Any:
        from swift_grpo_ext.rollout import engine  # needs vLLM, which `--use_vllm false` does not

        engine.use_rollout_engine()
        return super()._prepare_vllm_engine()

    # --- a round begins: its name, its prompts ---

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> EpochSampler:
        def epoch() -> int:
            return self._rounds.clock.epoch_of_step(self.state.global_step)

        return EpochSampler(super()._get_train_sampler(train_dataset), epoch)

    def _prepare_inputs(self, inputs: list[dict[str, Any]]) -> Any:
        if self.model.training:
            # ms-swift counts batches from 0 in a resumed run too. It generates at multiples of a
            # round's batches, and would do so elsewhere than the run that was not interrupted.
            self._step: int = self._step or self._rounds.clock.batches_at(self.state.global_step)
            self._rounds.begin_training(self._step, ahead=self.args.async_generate)
        return super()._prepare_inputs(inputs)

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        self._rounds.begin_evaluation(self.state.global_step)
        self._eval_rows = dataloader.dataset
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def resample_encode_failed_inputs(
        self, inputs: list[Any], max_resample_rounds: int = 10, strip_response: bool = True
    ) -> list[Any]:
        """Replace failing prompts by whole groups, with `--truncation_strategy delete`."""
        is_training = self.model.training
        round_, first_group = self._rounds.upcoming(training=is_training)
        rows, replaced = replace_failing_prompts(
            inputs,
            others=self.train_dataset if is_training else self._eval_rows,
            round_=round_,
            first_group=first_group,
            group_size=self._group_size,
            seed=self.args.seed,
            ranks=self.ranks,
            error_of=lambda row: encoding_error(
                self.template, row, self._max_model_len, strip_response=strip_response
            ),
        )
        self._rewards.replaced(round_, [first_group + group for group in replaced])
        self._note({"prompts/replaced": float(len(replaced))})
        return rows

    # --- the rollout: samples are named, generated, and written down ---

    def _add_prompt_id_to_inputs(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        """Name each sample by its position; groups are never merged by their words."""
        # All ranks take part, one without samples too: ms-swift's own returns before its gather.
        sizes = self.ranks.all_gather(len(samples))
        num_groups = sum(sizes) // self._group_size
        round_, first_group = self._rounds.take_batch(num_groups, training=self.model.training)
        start = sum(sizes[: self.ranks.rank])
        positions = range(start, start + len(samples))
        sample_ids = sample_ids_at(round_, positions, self._group_size, first_group=first_group)
        for sample, sample_id in zip(samples, sample_ids, strict=True):
            sample.sample_id = sample_id
            sample.request_id, sample.prompt_id = sample_id.request_id, sample_id.prompt_id
        return samples

    def _generate_completions(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        with deterministic(False) if self.args.full_determinism else nullcontext():
            return super()._generate_completions(samples)

    def _preprocess_inputs(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        # Not in `__init__`, where the step of a resumed run is not known yet.
        self.recorder.open(start_step=self.state.global_step)
        samples = super()._preprocess_inputs(samples)
        # Behind it, as it adds the system prompt and takes a row's answer away.
        for sample in samples:
            sample.prompt_hash = prompt_hash(sample)
        return samples

    def samples2requests(self, samples: list[RolloutSample]) -> list[RolloutInferRequest]:
        """Return requests with metadata, for the rollouts that ms-swift makes itself."""
        requests = super().samples2requests(samples)
        for sample, request in zip(samples, requests, strict=True):
            if request is not sample:  # else it is a later turn's, and has its metadata
                metadata = self._settings.metadata(sample.sample_id)
                wire.write_metadata(request.data_dict, metadata)
        return requests

    def _rollout(
        self,
        samples: list[RolloutSample],
        request_config: RequestConfig,
        is_global_inputs: bool = False,
    ) -> list[RolloutOutput]:
        sample_ids = [begin_turn(s, self.args.multi_turn_scheduler) for s in samples]
        # An environment asks each sample its own question, and each turn is another prompt.
        is_multi_turn = bool(self.multi_turn_scheduler)
        prompts = [prompt_hash(s) if is_multi_turn else s.prompt_hash for s in samples]
        began = time.monotonic()
        if not self._settings.generates or self.enable_server_multi_turn:
            outputs = super()._rollout(samples, request_config, is_global_inputs)
        elif is_global_inputs and self.ranks.rank > 0:
            return []  # with `--async_generate` rank 0 generates for all
        else:
            samples2requests = super().samples2requests  # `generate` gives them their metadata
            placeholders = placeholder_texts(self.template)
            outputs, uneven = generate(
                sample_ids,
                prompts,
                make_request=lambda position: named_request(
                    samples[position], samples2requests, placeholders
                ),
                make_metadata=partial(self._settings.metadata, as_arrays=True),
                sharing=self._sharing(is_global_inputs),
                call_engine=self._call_engine,
            )
            if not is_multi_turn:  # else an environment asks, or turns before made prompts differ
                warn_uneven(uneven)
        if self.enable_server_multi_turn:
            return outputs  # the server's scheduler sends the turns with them
        self._conversations.note(samples, outputs, sample_ids, prompts, time.monotonic() - began)
        return outputs

    def _infer_single_or_multi_turn(
        self,
        samples: list[RolloutSample],
        request_config: RequestConfig,
        is_global_inputs: bool = False,
    ) -> list[RolloutSample]:
        # With `--async_generate` rank 0 generates for all, in a thread. Else all ranks meet before
        # NCCL, where they would wait for a rank that has failed.
        meets = self.ranks.size > 1 and not is_global_inputs
        began = time.monotonic()
        failure: Exception | None = None
        try:
            results = super()._infer_single_or_multi_turn(samples, request_config, is_global_inputs)
        except Exception as e:
            # The other ranks may stand in a collective of ms-swift's, within a conversation or its
            # own client: this rank cannot join them, and `train` ends its group.
            if not meets or self._is_conversation or not self._settings.generates:
                raise
            failure = e
        if meets:
            seconds = self.ranks.all_gather_or_raise(time.monotonic() - began, failure)
            self._clock.note_wait(max(seconds) - fmean(seconds))
        return results

    def _sharing(self, is_global_inputs: bool) -> RankGroup:
        """Return the ranks that share an engine with this one."""
        if self.vllm_mode == "colocate" and self.vllm_tensor_parallel_size > 1:
            return TensorParallelGroup(self.tp_group)
        # In the thread of `--async_generate` a collective would meet those of the training.
        shares = self.vllm_mode == "server" and not is_global_inputs
        return self.ranks if shares else RankGroup()

    def _call_engine(
        self,
        requests: list[RolloutInferRequest],
        metadatas: Sequence[RequestMetadata],
        config: RequestConfig | None = None,
    ) -> Sequence[Answer]:
        config = config or self._get_request_config()
        if self._servers is not None:
            with profiling_context(self, "generate"), self._disable_sp_context():
                return self._servers.infer(requests, metadatas, config)
        answers = [answer_of(output) for output in self._engine_infer(requests, config)]
        rank = self.ranks.rank
        # A tensor-parallel group is one engine, which its first rank names.
        replica = f"rank {rank - rank % self.vllm_tensor_parallel_size}"
        return [
            Answer([replace(c, replica=replica) for c in completions], prompt)
            for completions, prompt in answers
        ]

    def _engine_infer(
        self,
        infer_requests: list[RolloutInferRequest],
        request_config: RequestConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        # `_call_engine` gives servers single turns; here ms-swift asks for whole conversations of
        # their own schedulers (`_server_rollout`).
        if self._servers is not None and request_config is not None:
            with profiling_context(self, "generate"), self._disable_sp_context():
                return self._servers.converse(infer_requests, request_config)
        return super()._engine_infer(infer_requests, request_config, **kwargs)

    # --- the training batch ---

    def _postprocess_rollout_outputs(
        self, samples: list[RolloutSample], outputs: list[RolloutOutput]
    ) -> list[RolloutSample]:
        if self.enable_server_multi_turn:
            turns_of_outputs = servers_turns(samples, outputs, self._settings.run_seed)
        else:
            turns_of_outputs = self._conversations.take(samples, outputs)
        # Copies the samples: several outputs may be of one (`dynamic_num_samples`).
        results = super()._postprocess_rollout_outputs(samples, outputs)
        for sample, turns in zip(results, turns_of_outputs, strict=True):
            attach_turns(sample, turns, is_conversation=self._is_conversation)
        if self._is_conversation:
            warn_no_room(outputs, self.template.max_length, self._max_model_len)
        self.recorder.record(
            results,
            turns_of_outputs,
            # With `--async_generate` rank 0 holds the samples of all ranks here.
            num_ranks=self.ranks.size if self.args.async_generate else 1,
            weight_version=self._last_loaded_step if self.args.use_vllm else self.state.global_step,
        )
        return results

    def _prepare_batch_inputs(self, samples: list[RolloutSample]) -> list[dict[str, Any]]:
        is_conversation = self._is_conversation
        self._encoder = GroupEncoder(self.template, self.args, is_conversation=is_conversation)
        encoding = replaced(self.encoding_module, "encode_sample", self._encode)
        with encoding, named_rows(self.template):
            return super()._prepare_batch_inputs(samples)

    def _encode(self, sample: RolloutSample, template: Template) -> dict[str, Any]:
        """Return a sample's entries, in the place of ms-swift's `encode_sample`."""
        return self._encoder.encode(sample)

    def split_by_mini_batches(self, samples: list[RolloutSample]) -> list[list[RolloutSample]]:
        # With sequence parallelism ms-swift gathers samples of several ranks there, as copies: what
        # it encodes and trains on is known from its own call alone.
        self._chunks: list[list[RolloutSample]] = super().split_by_mini_batches(samples)
        return self._chunks

    # --- the round ends ---

    def _end_round(self) -> None:
        """Check the observations of all ranks, and record how samples scored; all ranks call it
        together, before the first update from the round. Raises what `judge_gap` raises."""
        assert self._round is not None
        round_, self._round = self._round, None
        samples, micro_batches = round_.samples, round_.micro_batches
        replay, shift = self._router_replay, sampling_shift(self.args)
        reports = self.ranks.all_gather(
            RoundReport(
                gap=measure_gap(micro_batches, self.gap_limit, shift),
                prompt_hashes=[s.prompt_hash for s in samples if s.sample_id.index == 0],
                trained=[s.sample_id for s in samples] if self.args.dynamic_sample else [],
                sharing_failed=self.completion_logps.sharing_failed,
                num_replayed=replay.take_counts() if replay else (0.0, 0.0),
            )
        )
        if samples:
            warn_duplicates(reports, samples[0].sample_id)
        self.completion_logps.end_round(any(report.sharing_failed for report in reports))
        self._note(replayed_share([report.num_replayed for report in reports]))

        fate: Fate = "trained" if self.model.training else "evaluated"
        extras = training_scores(samples, micro_batches)
        kept = {name for report in reports for name in report.trained}
        rows = self._rewards.record(samples, round_.values, fate=fate, extras=extras, kept=kept)
        self.recorder.record_scores(rows)
        for listener in self.score_listeners:
            listener(rows)
        # Last, as it may end the run.
        gaps = [report.gap for report in reports]
        self._note(judge_gap(gaps, self.args, self.gap_limit, self.state.global_step))

    def needs_old_logps(self, *, has_views: bool = False) -> bool:
        """Return whether no pass of the old policy can be left out; distillation has none."""
        return True

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Have ms-swift log these with the next step's values."""
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _gather_teacher_requests(self, requests: list[RolloutInferRequest]) -> Any:
        return super()._gather_teacher_requests(list(answers_for_servers(requests)))

    # --- weights ---

    def _move_model_to_vllm(self, *args: Any, **kwargs: Any) -> None:
        upstream = super()._move_model_to_vllm

        def move(group_recreated: bool) -> None:
            # An adapter alone would find no base to go with, or leave behind what is trained beside
            # it, such as the tower of `lora_llm`.
            trained = (name for name, p in self.model.named_parameters() if p.requires_grad)
            if group_recreated or any(".lora_" not in name for name in trained):
                self.base_sync_done = False
            # PEFT adds adapters to base weights and subtracts them again, which rounds both.
            with exact_unmerging(self.model) if self.args.full_determinism else nullcontext():
                upstream(*args, **kwargs)

        self._weights.update(move)

    def _load_state_dict_to_vllm(self, state_dict: StateDict) -> None:
        # Called for each group of layers (`--move_model_batches`); buffers, which are small, come
        # with each.
        load = super()._load_state_dict_to_vllm
        state_dict = checkpoint_layout(self.model, state_dict)
        state_dict = checkpoint_buffers(self.model) | state_dict
        if self.vllm_mode == "colocate":
            self._weights.load_colocated(state_dict, self.engine, load)
        elif self.args.enable_flattened_weight_sync:
            self._weights.send(state_dict, load)
        else:  # NCCL sends memory as it lies
            for name, tensor in state_dict.items():
                self._weights.send({name: tensor.contiguous()}, load)

    def _move_adapter_to_vllm(self) -> None:
        move = super()._move_adapter_to_vllm
        if self.vllm_mode == "colocate":
            self._weights.load_adapter(self.engine, move)
        else:
            self._weights.send_adapter(self.vllm_client, move)
