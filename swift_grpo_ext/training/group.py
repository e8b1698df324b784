"""Defines a group in training: the samples of one prompt, from encoding to the loss.

Before encoding, `SampleId` identifies a sample's group. Encoding gives the samples of a group one
`GroupPrompt` (`encode.py`), and `groups_of` finds the groups of a micro-batch by that object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swift_grpo_ext.checks.rows import media_of
from swift_grpo_ext.logits.packed import PER_TOKEN, GroupRows
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.upstream.rows import KINDS

if TYPE_CHECKING:
    from swift_grpo_ext.rollout.sample import RolloutSample


class DisagreementError(RuntimeError):
    """Rollout and training have different prompts, positions, tokens or log-probabilities."""


class EncodedSample(dict[str, Any]):
    """An encoded sample, in the form that a template's collator expects."""

    prompt: GroupPrompt | None = None  # None if the row was not split into prompt and response


@dataclass(frozen=True, eq=False)
class GroupPrompt:
    """The encoded prompt of a group."""

    # An encoded sample with its media; per-token values are cut where the response begins.
    entries: Mapping[str, Any]
    num_tokens: int
    rollout: Sequence[int]  # the prompt's token ids in the rollout

    @classmethod
    def of(
        cls, encoded: Mapping[str, Any], response: Sequence[int], rollout: Sequence[int]
    ) -> GroupPrompt | None:
        """Return the prompt of a whole encoded row; None if the row does not end with its response,
        or has its ids as a tensor."""
        ids = encoded["input_ids"]
        num_tokens = len(ids) - len(response)
        if not isinstance(ids, list) or ids[num_tokens:] != list(response):
            return None
        entries = dict(encoded)
        for name in ("input_ids", "labels", "loss_scale", *PER_TOKEN):
            if has_values(entries.get(name), len(ids)):  # some templates give one value per medium
                values = entries[name]
                is_tensor = isinstance(values, torch.Tensor)
                entries[name] = values[..., :num_tokens] if is_tensor else values[:num_tokens]
        return cls(entries, num_tokens, rollout)

    def with_response(self, ids: Sequence[int], weights: Sequence[float]) -> EncodedSample:
        """Return the encoded sample with this response; `weights` are its tokens' loss weights."""
        made = EncodedSample(self.entries)
        made.prompt = self
        made["input_ids"] = [*made["input_ids"], *ids]
        trained = [i if weight else -100 for i, weight in zip(ids, weights, strict=True)]
        made["labels"] = [*made["labels"], *trained]
        if made.get("loss_scale") is not None:
            made["loss_scale"] = [*made["loss_scale"], *map(float, weights)]
        for name in PER_TOKEN:
            if not has_values(made.get(name), self.num_tokens):
                continue
            values = made[name]
            if isinstance(values, torch.Tensor):
                made[name] = torch.nn.functional.pad(values, (0, len(ids)))
            else:
                made[name] = [*values, *[0] * len(ids)]
        for name in ("length", "lengths"):
            if name in made:
                length = len(made["input_ids"])
                made[name] = [length] if isinstance(made[name], list) else length
        return made


def has_values(values: Any, num_tokens: int) -> bool:
    """Return whether an entry has exactly one value per token."""
    if isinstance(values, torch.Tensor):
        return values.shape[-1] == num_tokens
    return values is not None and len(values) == num_tokens


class Group(NamedTuple):
    """Adjacent samples of a micro-batch with the same prompt."""

    prompt: GroupPrompt | None
    samples: list[RolloutSample]

    @property
    def longest(self) -> RolloutSample:
        return max(self.samples, key=lambda sample: len(sample.encoded["input_ids"]))

    @property
    def rows(self) -> GroupRows:
        return GroupRows(
            prompt=self.prompt.num_tokens if self.prompt and len(self.samples) > 1 else 0,
            ids=[sample.encoded["input_ids"] for sample in self.samples],
            labels=[sample.encoded["labels"] for sample in self.samples],
            kind=kind_of_row(self.longest),
        )


def groups_of(samples: Iterable[RolloutSample]) -> list[Group]:
    """Return the groups of encoded samples, in order. A sample without a prompt is a group."""

    def prompt_of(sample: RolloutSample) -> GroupPrompt | None:
        row = sample.encoded
        # Only a distillation teacher's row is another dictionary.
        return row.prompt if isinstance(row, EncodedSample) else None

    groups = [list(group) for _, group in groupby(samples, lambda s: id(prompt_of(s) or s))]
    return [Group(prompt_of(group[0]), group) for group in groups]


# --- a sample's tokens and media ---


def logprobs_of(sample: RolloutSample) -> list[float]:
    return list(flatten(sample.rollout_logprobs))


def trained_ids(sample: RolloutSample) -> list[int]:
    """Return the sampled tokens, without those that an environment inserted."""
    ids = list(flatten(sample.response_token_ids))
    mask = list(flatten(sample.response_loss_mask))
    return [i for i, is_own in zip(ids, mask, strict=True) if is_own] if mask else ids


def flatten(values: Iterable[Any] | None) -> Iterator[Any]:
    """Yield values from ms-swift's lists, which are nested if there are several turns."""
    return chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in values or ())


def kind_of_row(row: object) -> str:
    """Return a row's media in one word: `text`, `image`, `images`, `video`, `image+video` ..."""
    numbers = Counter(medium.kind for medium in media_of(row))
    kinds = [kind + "s" * (numbers[kind] > 1) for kind in KINDS if numbers[kind]]
    return "+".join(kinds) or "text"


def rollout_prompts(sample: RolloutSample) -> list[Prompt]:
    """Return the prompts of answered turns with known token ids."""
    return [prompt for prompt in sample.rollout_prompts if prompt.token_ids]
