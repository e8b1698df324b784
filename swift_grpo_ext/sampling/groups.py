"""From samples to requests by groups, and from answers back to samples. Pure.

Groups are positional (SPEC G1): the order in which the sampler repeats prompts makes them. Prompts
are compared only to keep rows that differ out of one request (G3), and to count duplicates (G4).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeVar

from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId

T = TypeVar("T")

FINGERPRINT_FIELDS = (
    *("messages", "images", "videos", "audios", "tools", "objects"),
    "chat_template_kwargs",  # such as `enable_thinking`
)
"""What makes a prompt: its words, its media (SPEC G7), and what its template makes of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSlice:
    """Neighbouring samples of one group whose rows are equal: what one request can ask for."""

    sample_id: SampleId
    """Of the first sample; the others have the indices that follow."""

    count: int
    """Number of samples."""

    fingerprint: str
    """Of the row that all of them repeat."""

    @property
    def sample_ids(self) -> list[SampleId]:
        return [replace(self.sample_id, index=self.sample_id.index + i) for i in range(self.count)]

    def continues(self, other: GroupSlice) -> bool:
        """Whether this slice holds the samples that follow `other`'s, with the same row."""
        expected = replace(other.sample_id, index=other.sample_id.index + other.count)
        return self.sample_id == expected and self.fingerprint == other.fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, and the slices of the ranks that it serves."""

    group_slice: GroupSlice
    """All of them together."""

    slices: tuple[tuple[int, int], ...]
    """(rank, number of the slice on that rank), in the order of the samples."""


def sample_ids_at(round_: Round, positions: Iterable[int], group_size: int) -> list[SampleId]:
    """Ids of samples from their positions in the generation batch, over all ranks, from 0."""
    return [
        SampleId(
            phase=round_.phase,
            step=round_.step,
            number=round_.number,
            group=round_.first_group + position // group_size,
            index=position % group_size,
        )
        for position in positions
    ]


def make_slices(sample_ids: Sequence[SampleId], fingerprints: Sequence[str]) -> list[GroupSlice]:
    """The fewest slices that hold these samples, in order; one fingerprint for each sample."""
    slices: list[GroupSlice] = []
    for sample_id, fingerprint in zip(sample_ids, fingerprints, strict=True):
        single = GroupSlice(sample_id=sample_id, count=1, fingerprint=fingerprint)
        if slices and single.continues(slices[-1]):
            slices[-1] = replace(slices[-1], count=slices[-1].count + 1)
        else:
            slices.append(single)
    return slices


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """The requests of all ranks together."""

    slices_of_ranks: list[list[GroupSlice]]
    requests: list[Request]
    unequal: list[SampleId]
    """First samples of groups whose rows differ (SPEC G3): a custom sampler's, or a gym's."""


def plan_requests(slices_of_ranks: Sequence[Sequence[GroupSlice]], *, grouped: bool) -> RequestPlan:
    """The requests for all ranks' slices, in the order of ranks.

    A group that ranks share becomes one request. Each sample becomes a request of its own without
    `grouped`, and where the rows of its group differ.
    """
    rows: dict[SampleId, set[str]] = {}
    for group_slice in chain.from_iterable(slices_of_ranks):
        rows.setdefault(group_id(group_slice.sample_id), set()).add(group_slice.fingerprint)
    unequal = dict.fromkeys(i for i, prompts in rows.items() if len(prompts) > 1)
    plan = RequestPlan(slices_of_ranks=[], requests=[], unequal=[*unequal])

    def is_single(group_slice: GroupSlice) -> bool:
        return not grouped or group_id(group_slice.sample_id) in unequal

    for rank, slices in enumerate(slices_of_ranks):
        own: list[GroupSlice] = []
        for s in slices:
            own += [replace(s, sample_id=i, count=1) for i in s.sample_ids] if is_single(s) else [s]
        plan.slices_of_ranks.append(own)
        for number, group_slice in enumerate(own):
            last = plan.requests[-1] if plan.requests else None
            if last and not is_single(group_slice) and group_slice.continues(last.group_slice):
                whole = replace(last.group_slice, count=last.group_slice.count + group_slice.count)
                served = (*last.slices, (rank, number))
                plan.requests[-1] = Request(group_slice=whole, slices=served)
            else:
                plan.requests.append(Request(group_slice=group_slice, slices=((rank, number),)))
    return plan


def group_id(sample_id: SampleId) -> SampleId:
    """The id of a group's first sample, which names the group."""
    return replace(sample_id, index=0)


def split_by_rank(
    requests: Sequence[Request],
    answers: Sequence[Sequence[T]],
    slices_of_ranks: Sequence[Sequence[GroupSlice]],
) -> list[list[T]]:
    """For each rank the answers of its samples, in their order.

    Args:
        answers: of each request, with one item for each sample.

    Raises:
        ValueError: an answer has another number of samples than its request.
    """
    items: list[list[T]] = [[] for _ in slices_of_ranks]
    for request, answer in zip(requests, answers, strict=True):
        if len(answer) != request.group_slice.count:
            raise ValueError(
                f"{request.group_slice.sample_id}: the request was for "
                f"{request.group_slice.count} samples, and {len(answer)} came back."
            )
        rest = iter(answer)
        for rank, number in request.slices:  # requests are in the order of ranks and slices
            items[rank] += islice(rest, slices_of_ranks[rank][number].count)
    return items


def count_duplicates(fingerprints: Iterable[str]) -> int:
    """How many prompts repeat an earlier one."""
    return sum(count - 1 for count in Counter(fingerprints).values())


def request_id(sample_id: SampleId) -> str:
    """A sample's name, unique in a run: `train-12.0-5-3` for round 12.0, group 5, index 3."""
    return (
        f"{sample_id.phase}-{sample_id.step}.{sample_id.number}-{sample_id.group}-{sample_id.index}"
    )


def parse_request_id(request_id: str) -> SampleId:
    """The id that `request_id` names.

    Raises:
        ValueError: it names none.
    """
    match = re.fullmatch(r"(train|eval)-(\d+)\.(\d+)-(\d+)-(\d+)", request_id)
    if match is None:
        raise ValueError(f"{request_id!r} is no name of a sample, such as train-12.0-5-3.")
    phase, *numbers = match.groups()
    step, number, group, index = map(int, numbers)
    return SampleId(phase=phase, step=step, number=number, group=group, index=index)  # type: ignore[arg-type]


def fingerprint(row: Any) -> str:
    """What a prompt is, as 32 hex digits: equal for equal words and media, else different.

    Args:
        row: a data set's row, or an object with the fields of `FINGERPRINT_FIELDS`, such as
            ms-swift's `OnPolicySample` or `InferRequest`. Media count as they are given: a path by
            its name, bytes and base64 by their content, decoded images by their pixels.

    Raises:
        ValueError: a field holds what has no form as JSON; names it.
    """
    return fingerprints([row])[0]


def fingerprints(rows: Iterable[Any]) -> list[str]:
    """Of each row, in order. A row like the one before, as in a group, is compared, not hashed."""
    found: list[str] = []
    before: dict[str, Any] | None = None
    for row in rows:
        fields = _prompt_fields(row)
        found.append(found[-1] if _are_equal(fields, before) else _digest(fields))
        before = fields
    return found


def _prompt_fields(row: Any) -> dict[str, Any]:
    values = {name: _read(row, name) for name in FINGERPRINT_FIELDS}
    return {name: value for name, value in values.items() if not _is_empty(value)}


def _read(row: Any, name: str) -> Any:
    if isinstance(row, Mapping):
        return row.get(name)
    if hasattr(row, name):
        return getattr(row, name)
    # Columns for which ms-swift's sample has no field.
    return (getattr(row, "extra", None) or {}).get(name)


def _is_empty(value: Any) -> bool:
    try:
        return value is None or len(value) == 0
    except TypeError:  # numbers and images have no length
        return False


def _are_equal(value: Any, other: Any) -> bool:
    """Whether two values are known to have one fingerprint: equal, and equal numbers of one type,
    as `True` and `1` are written differently."""
    if type(value) is not type(other):
        return False
    try:
        if isinstance(value, dict):
            return value.keys() == other.keys() and all(
                _are_equal(item, other[key]) for key, item in value.items()
            )
        if isinstance(value, (list, tuple)):
            return len(value) == len(other) and all(map(_are_equal, value, other))
        if isinstance(value, float):
            return repr(value) == repr(other)  # 0.0 is not -0.0
        return bool(value == other)
    except (ValueError, RuntimeError):  # arrays and tensors have no truth; depth without end
        return False


def _digest(fields: dict[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)

    def content(value: Any) -> str:
        """Binary values go into the digest, a mark of their size into the text."""
        if hasattr(value, "detach"):  # a torch tensor
            value = value.detach().cpu().numpy()
        if isinstance(value, (bytes, bytearray)):
            data = bytes(value)
        elif hasattr(value, "tobytes"):  # PIL images, numpy arrays
            pixels = value.tobytes()
            palette = value.getpalette() if hasattr(value, "getpalette") else None
            form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
            data = repr((*form, palette)).encode() + pixels
        else:
            data = repr(value).encode()
        digest.update(data)
        return f"<{type(value).__name__} of {len(data)} bytes>"

    try:
        text = json.dumps(fields, sort_keys=True, default=content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(
            f"A prompt's fields {', '.join(fields)} cannot be told from others ({e}): expected "
            "what JSON holds, bytes, arrays or images, and texts as keys."
        ) from e
    digest.update(text.encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()
