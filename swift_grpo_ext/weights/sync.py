"""One weight update at the trainer's end: sent, verified on every engine, proved by the canary.

1. `WeightSync.update` sends the trainer's weights. Each engine (`receiver.py`, or the colocated
   one) loads them; their checksums (`checksums.py`) must be the trainer's. A failure on one rank
   is logged there at once, and raised where all ranks meet.
2. `WeightCanary.generate` has each engine generate a few tokens for one fixed prompt, before the
   next round is generated.
3. `WeightCanary.judge` holds their log-probabilities against the trainer's model, before that
   trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from peft import LoraConfig
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.utils import get_logger
from torch import Tensor

from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.weights.adapters import recorded_adapter
from swift_grpo_ext.weights.checksums import (
    Loads,
    WeightChecksums,
    WeightUpdateError,
    compare,
    note_unfilled,
    plain_name,
    recorded_loads,
    weight_checksums,
)
from swift_grpo_ext.weights.layout import StateDict

if TYPE_CHECKING:
    from swift.infer_engine import GRPOVllmEngine
    from swift.rlhf_trainers.vllm_client import VLLMClient

logger = get_logger()

T = TypeVar("T")
Load = Callable[[StateDict], None]
"""ms-swift's own way of giving tensors to its engine, or engines."""


class Servers(Protocol):
    """The rollout servers of a training (`server/client.py`)."""

    def reconnect(self, *, again: bool = False) -> bool:
        """Connect to the servers as they are now; return whether a group was made anew."""

    def bounded(self) -> AbstractContextManager[None]:
        """Bound what is broadcast meanwhile."""

    def loaded_checksums(self) -> list[tuple[str, WeightChecksums]]:
        """Return each worker's name and what it loaded in the last update."""


class WeightSync:
    """Makes and verifies the weight updates of one training (docs/promises.md, M4).

    Args:
        ranks: all training ranks.
        servers: on the rank that sends to them; None on others, and with colocated engines.
    """

    def __init__(self, ranks: RankGroup, servers: Servers | None) -> None:
        self._ranks = ranks
        self._servers = servers
        self._name = f"The colocated engine of rank {ranks.rank}"
        self._begin()

    def _begin(self) -> None:
        self._sent: WeightChecksums = {}
        self._failure: Exception | None = None
        self._made_anew = False
        self._engine: GRPOVllmEngine | None = None
        """The colocated engine, once it was given whole weights."""

        self._loads = Loads()

    def update(self, move: Callable[[bool], None]) -> None:
        """Make one update, on every rank. One that cannot be sent is made once more, with those
        replicas that are left: it brings all weights, so that what has arrived does no harm.

        Args:
            move: ms-swift's update, which calls `load_colocated`, `send` or their counterparts for
                adapters with what it gathers; told whether replicas may have nothing yet.

        Raises:
            WeightUpdateError: on every rank, where it failed on one.
        """
        for is_last in (False, True):
            self._begin()
            with self._noted():
                if self._servers is not None:
                    self._made_anew = self._servers.reconnect(again=is_last)
            # Before the first rank gathers weights: the others would wait there for one that
            # failed.
            made_anew = self._meet()
            with self._noted():
                move(made_anew)
                if self._failure is None:
                    self._verify()
            if is_last or not self._was_not_sent():
                break
        self._meet()

    def _verify(self) -> None:
        if self._engine is not None:
            note_unfilled(self._engine.inner_model, self._loads, self._engine.engine.model_config)
            compare(self._sent, self._loads.checksums, self._name)
        if self._servers is not None and self._sent:
            for worker, loaded in self._servers.loaded_checksums():
                compare(self._sent, loaded, worker)

    def _was_not_sent(self) -> bool:
        """Return, on every rank, whether servers did not take the update though all ranks made
        it."""
        failure = self._failure
        can_repeat = self._servers is not None and not isinstance(failure, WeightUpdateError)
        kinds = self._ranks.all_gather(failure and ("servers" if can_repeat else "rank"))
        if set(kinds) - {None} != {"servers"}:
            return False
        if failure is not None:
            logger.warning("The weight update is made once more.")
        return True

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep a failure until all ranks meet, and log it where it happened, at once: the launcher
        may end this rank first."""
        try:
            yield
        except Exception as e:
            self._failure = self._failure or e
            logger.error(f"The weight update failed on rank {self._ranks.rank}: {_text(e)}")

    def _meet(self) -> bool:
        """Return, on every rank, whether a group was made anew; raise a failure of any rank."""
        failure = self._failure
        of_ranks = self._ranks.all_gather((failure and _text(failure), self._made_anew))
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(of_ranks):
            if text:
                raise WeightUpdateError(f"The weight update failed on rank {rank}: {text}")
        return any(made_anew for _, made_anew in of_ranks)

    # --- what ms-swift's update calls ---

    def load_colocated(self, state_dict: StateDict, engine: GRPOVllmEngine, load: Load) -> None:
        """Give tensors to this process's engine."""
        self._engine = engine
        self._sent |= weight_checksums(state_dict.items())
        with recorded_loads(engine.inner_model, self._loads):
            if has_accelerator():
                load(state_dict)
            else:
                engine.reload_weights((plain_name(n), t) for n, t in state_dict.items())

    def send(self, state_dict: StateDict, load: Load) -> None:
        """Send tensors to the servers, and take their checksums. After a failure rank 0 still
        gathers with the others, and sends nothing."""
        if self._ranks.rank > 0:
            load(state_dict)  # takes part in what rank 0 sends
            return
        if self._failure is None:
            with self._noted(), self._servers.bounded() if self._servers else nullcontext():
                self._sent |= weight_checksums(state_dict.items())
                load(state_dict)

    def load_adapter(self, engine: GRPOVllmEngine, move: Callable[[], None]) -> None:
        """Give an adapter to this process's engine, which has to generate with it.

        Args:
            move: ms-swift's own way, which gathers it before.
        """
        worker = engine.inner_model_executor.driver_worker.worker
        with recorded_adapter(worker.model_runner.lora_manager):
            move()

    def send_adapter(self, client: VLLMClient, move: Callable[[], None]) -> None:
        """Send an adapter to the servers as whole weights are sent.

        Args:
            client: ms-swift's, on the rank that sends.
            move: ms-swift's own way, which gathers the adapter and calls the client.
        """
        if self._ranks.rank > 0:
            move()  # takes part in what rank 0 gathers
            return
        send, send_parts = client.update_adapter_flattened_param, client.update_adapter_param

        def send_recorded(config: LoraConfig, metadatas: list[Any], flattened: Tensor) -> None:
            bucket = FlattenedTensorBucket(flattened_tensor=flattened, metadata=metadatas)
            self.send(bucket.reconstruct_tensors(), lambda _: send(config, metadatas, flattened))

        def send_parts_recorded(config: LoraConfig, tensors: StateDict) -> None:
            self.send(tensors, partial(send_parts, config))

        client.update_adapter_flattened_param = send_recorded
        client.update_adapter_param = send_parts_recorded
        try:
            move()
        finally:
            del client.update_adapter_flattened_param, client.update_adapter_param


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


# --- the canary ---

MAX_TOKENS = 8
COMPLETIONS = 2
"""Completions of each engine, in one request. An engine is at fault where all of them say so: in 16
bits one expert that is chosen otherwise moves a few tokens by whole nats."""

MARGIN = 4.0
"""A mean over so few tokens lies further from 0 than one over a round, which the limit is for."""

ROUND = 2**31
"""Number of a round that no run has: the canary's noise is nobody else's."""

Generate = Callable[[OnPolicySample, Sequence[SampleId], RequestConfig], list[RolloutOutput]]
"""Generates one completion of a sample under each of some ids."""


class Gap(Protocol):
    """The distance of a completion's log-probabilities from the trainer's
    (`training/agreement.py`)."""

    @property
    def mean(self) -> float:
        """Mean of absolute differences, in nats."""

    @property
    def count(self) -> int:
        """Number of tokens."""


class WeightCanary:
    """Says whether engines sample with the trainer's weights; every rank calls each method.

    The prompt is the run's first with media, or its first where no rank begins with any. It is
    always the same, so that a prefix or encoder cache that outlived an update is seen as well as an
    engine that takes weights and does not use them. An update that changes less than rounding does
    is not told from none.

    Args:
        action: `--rollout_mismatch`: what to do about a gap.
        ranks: all training ranks.
        limit: the mean gap of a round, in nats, above which something is wrong (`gap_limit`).
        off: why there can be no canary in this run; "" where there can.
    """

    def __init__(
        self, action: Literal["stop", "warn"], ranks: RankGroup, limit: float, off: str
    ) -> None:
        self._action, self._ranks, self._limit = action, ranks, MARGIN * limit
        self._is_due = False
        self._prompt: OnPolicySample | None = None
        self._generated: list[OnPolicySample] = []
        if off and ranks.rank == 0:
            logger.info(f"No canary tests what engines sample with: {off}.")
        self._is_on = not off

    def weights_changed(self) -> None:
        self._is_due = self._is_on

    def generate(
        self,
        samples: Sequence[OnPolicySample],
        config: RequestConfig,
        num_engines: int,
        engines: Generate,
    ) -> None:
        """Let the engines generate, where weights have changed since the last time.

        Args:
            samples: of the round that begins; of the run's first round one is kept.
            config: the round's.
            num_engines: that this rank calls, alone or with all others.
            engines: asks engine k for the samples whose group is k; numbers from the last engine on
                begin anew with the first.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._prompt = self._prompt or self._choose(samples)
        sizes = self._ranks.all_gather(num_engines)
        # Every rank asks equally often: its forward over the answers is a collective.
        count = max(-(-max(sizes) // self._ranks.size), 1)
        ids = [
            SampleId(phase="eval", step=0, number=ROUND, group=group, index=index)
            for group in range(self._ranks.rank * count, (self._ranks.rank + 1) * count)
            for index in range(COMPLETIONS)
        ]
        for output in engines(self._prompt, ids, probe_config(config)):
            sample = deepcopy(self._prompt)
            sample.apply_rollout_output(rollout_output=output)
            sample.rollout_prompt_ids = output.response.prompt_token_ids
            self._generated.append(sample)

    def _choose(self, samples: Sequence[OnPolicySample]) -> OnPolicySample:
        """Return one sample, the same on all ranks."""

        def has_media(sample: OnPolicySample) -> bool:
            return bool(sample.images or sample.videos or sample.audios)

        offered = next(filter(has_media, samples), samples[0])
        of_ranks = self._ranks.all_gather(has_media(offered))
        chosen = of_ranks.index(True) if any(of_ranks) else 0
        # Only one rank's sample travels, with its images.
        gathered = self._ranks.all_gather(offered if self._ranks.rank == chosen else None)
        return deepcopy(gathered[chosen])

    def judge(
        self,
        encode: Callable[[list[OnPolicySample]], T],
        gaps_of: Callable[[list[OnPolicySample], T], Sequence[Gap | None]],
        step: int,
    ) -> float | None:
        """Compare what was generated with the trainer's own model, before it trains on.

        Args:
            encode: makes a batch of generated samples.
            gaps_of: compares generated samples with the model, in one forward (a collective where
                weights are sharded); None for a sample that cannot be compared.

        Returns:
            The largest mean gap of an engine in nats; None where nothing was generated or compared.

        Raises:
            WeightUpdateError: on every rank, with `--rollout_mismatch stop`; names the engine.
        """
        if not self._generated:
            return None
        generated, self._generated = self._generated, []
        starts = range(0, len(generated), COMPLETIONS)
        of_engines = [generated[start : start + COMPLETIONS] for start in starts]
        batches, failure = [], ""
        try:
            batches = [encode(samples) for samples in of_engines]
        except Exception as e:  # the others would wait in their forward
            failure = f"on rank {self._ranks.rank} {_text(e)}"
        if failures := [text for text in self._ranks.all_gather(failure) if text]:
            if self._ranks.rank == 0:
                logger.warning(
                    "The canary's prompt could not be encoded for training, so that no "
                    f"engine was compared after this update ({failures[0]})."
                )
            return None
        of_rank = []
        for samples, batch in zip(of_engines, batches, strict=True):
            gaps = [(gap.mean, gap.count) for gap in gaps_of(samples, batch) if gap is not None]
            if gaps:  # the least counts, or NaN, which nothing explains
                mean, count = min(gaps, key=lambda gap: (not isnan(gap[0]), gap[0]))
                engine = str((samples[0].rollout_infos or {}).get("replica", "The engine"))
                of_rank.append((mean, engine, count))
        compared = [gap for gaps in self._ranks.all_gather(of_rank) for gap in gaps]
        if not compared:
            return None
        mean, engine, count = max(compared, key=lambda gap: (isnan(gap[0]), gap[0]))
        if not mean <= self._limit:  # nor NaN
            text = (
                f"{engine} does not sample with the trainer's weights: at step {step} the canary's "
                f"log-probabilities lie {mean:.3g} nats from the trainer's in the mean of {count} "
                f"tokens, in each of {COMPLETIONS} completions above the {self._limit:g} that "
                "rounding explains. It has other weights, a cache of older ones, sees the prompt "
                "otherwise, or uses numbers of other precision. Start it anew and resume from the "
                "last checkpoint; where the precision is meant (a quantized engine), "
                "--rollout_mismatch warn."
            )
            if self._action == "stop":
                raise WeightUpdateError(text)
            if self._ranks.rank == 0:
                logger.warning(text)
        return mean


def probe_config(config: RequestConfig, max_tokens: int = MAX_TOKENS) -> RequestConfig:
    """Return a request config for so many tokens at most of the whole distribution, as in
    training."""
    config = copy(config)
    config.max_tokens = min(config.max_tokens or max_tokens, max_tokens)
    config.top_p, config.top_k, config.min_p, config.repetition_penalty = 1.0, -1, 0.0, 1.0
    config.structured_outputs_regex = None
    return config
