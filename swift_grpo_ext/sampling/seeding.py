"""The seed rule: computes the seed that a sample draws with.

A sample's seed depends on `--seed` and on the sample's id, and on nothing else: not on ranks,
replicas, batch sizes or the order of requests. Anyone can recompute it from a row of the record:

    sample_seed(42, SampleId(phase="train", step=3, number=0, group=5, index=2))

The rule, with `numpy.random.SeedSequence` (O'Neill's seed_seq, as numpy documents it) as the mixing
function, `key = (phase, step, number, turn)` and phase 0 for train, 1 for eval:

    low  = first 32 bits of SeedSequence(run_seed, spawn_key=key)
    high = first 32 bits of SeedSequence(run_seed, spawn_key=(*key, group)), shifted right by 2
    seed = high * 2**32 + (low + group * 2**14) mod 2**32 + index

- Child k of a vLLM request with seed s draws with s + k (vllm/v1/engine/parallel_sampling.py), so
  samples of a group have consecutive seeds, in one request or in several.
- If only the low 32 bits of a seed count (torch's generator on CPU), noise is still distinct
  within a round, for up to 2**14 samples a group and 2**18 groups.
- Over a run, the 62 bits of a group's base keep groups apart: with a million groups of 64, some two
  samples share a seed with probability 1.4e-5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

Phase = Literal["train", "eval"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MAX_GROUP_SIZE = 2**14
"""The most samples in a group; vLLM's limit for `n` (VLLM_MAX_N_SEQUENCES) is the same."""


class RoundId(NamedTuple):
    """Names a round of a run; `eval` sorts before `train`, then earlier steps before later ones."""

    phase: Phase
    step: int
    number: int

    def __str__(self) -> str:
        return f"{self.phase} round {self.step}.{self.number}"


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class SampleId:
    """Names a sample of a run."""

    phase: Phase
    step: int  # optimizer step at which its round begins; with `--async_generate`, that uses it
    number: int  # of the round in its step
    group: int  # in the round
    index: int  # in the group
    turn: int = 0  # of a conversation

    @property
    def round(self) -> RoundId:
        return RoundId(self.phase, self.step, self.number)

    @property
    def group_id(self) -> SampleId:
        """The id of the group's first sample; it identifies the group."""
        return replace(self, index=0)

    @property
    def prompt_id(self) -> str:
        """ms-swift's name of the group: `train-12.0-5` for round 12.0, group 5."""
        return f"{self.phase}-{self.step}.{self.number}-{self.group}"

    @property
    def request_id(self) -> str:
        """ms-swift's name of the sample, the same for all its turns: `train-12.0-5-3`."""
        return f"{self.prompt_id}-{self.index}"

    @classmethod
    def parse(cls, request_id: str) -> SampleId:
        """Return the id that a `request_id` names; raise ValueError if there is none."""
        match = re.fullmatch(r"(train|eval)-(\d+)\.(\d+)-(\d+)-(\d+)", request_id)
        if match is None:
            raise ValueError(f"{request_id!r} is no name of a sample, such as train-12.0-5-3.")
        phase: Phase = "train" if match[1] == "train" else "eval"
        step, number, group, index = map(int, match.groups()[1:])
        return cls(phase=phase, step=step, number=number, group=group, index=index)

    def __str__(self) -> str:
        turn = f", turn {self.turn}" if self.turn else ""
        return f"{self.round}, group {self.group}, sample {self.index}{turn}"


def sample_seed(run_seed: int, sample_id: SampleId) -> int:
    """Return a sample's seed, in [0, 2**62 + 2**14). Raise ValueError if the group is too large."""
    if not 0 <= sample_id.index < MAX_GROUP_SIZE:
        raise ValueError(
            f"index {sample_id.index} in a group: expected 0 to {MAX_GROUP_SIZE - 1}; use a "
            "smaller --num_generations."
        )
    key = (PHASES.index(sample_id.phase), sample_id.step, sample_id.number, sample_id.turn)
    # The groups of a round have steps of 2^14 from one `low`: a random 32-bit number for each group
    # would soon equal another.
    low, high = (
        int(np.random.SeedSequence(run_seed, spawn_key=k).generate_state(1, np.uint32)[0])
        for k in (key, (*key, sample_id.group))
    )
    # 62 bits: seeds stay below 2^63, the limit of torch's and vLLM's integers.
    base = (high >> 2 << 32) + (low + sample_id.group * MAX_GROUP_SIZE) % 2**32
    # No modulus: vLLM adds the index of a request's samples without one.
    return base + sample_id.index
