"""Rounds in, records and alarms out: what the monitor does on the main rank. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from swift_grpo_ext.diversity.collision import CollisionTest, Sharing, collision_test, format_p
from swift_grpo_ext.diversity.drawn import DrawnSample, Origin, to_groups
from swift_grpo_ext.diversity.memory import PromptMemory
from swift_grpo_ext.diversity.metrics import round_metrics
from swift_grpo_ext.diversity.record import RoundRecord, make_record
from swift_grpo_ext.diversity.verdict import judge

LOG10_2 = math.log10(2)
LOW_32_BITS = 2**32
MAX_NAMED_SHARINGS = 3
MAX_NAMED_ORIGINS = 4


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What the flags say."""

    alarm_p: float
    patience: int
    """Collapsed rounds in a row that make an alarm. Broken randomness is one at once: its p-value
    says already how odd one round is."""

    is_greedy: bool
    """Equal completions are then right: nothing is tested."""

    seed_mode: str


class RoundWatch:
    """Watches rounds as they come, in the order of the run."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._memory = PromptMemory()
        self._in_a_row: dict[tuple[str, str], int] = {}

    def watch(self, samples: Sequence[DrawnSample]) -> list[RoundRecord]:
        """What is found in the rounds of these samples, all ranks' together."""
        groups = to_groups(samples)
        by_round = groupby(groups, key=lambda group: _round_of(group[0]))
        return [self._watch_round(list(of_round)) for _, of_round in by_round]

    def _watch_round(self, groups: Sequence[Sequence[DrawnSample]]) -> RoundRecord:
        start = time.perf_counter()
        samples = [sample for group in groups for sample in group]
        test = CollisionTest(num_untested=len(samples))
        if not self._settings.is_greedy:
            test = collision_test(samples, self._memory)
            self._memory.remember(samples)
        verdict = judge(groups, test, self._settings.alarm_p)
        record = make_record(groups, verdict, round_metrics(groups))
        if self._is_alarm(record):
            record.alarm = self._describe(record, test)
        record.seconds = time.perf_counter() - start
        record.time = time.time()
        return record

    def _is_alarm(self, record: RoundRecord) -> bool:
        for kind in ("collapse", "broken"):
            key = (record.phase, kind)
            self._in_a_row[key] = (self._in_a_row.get(key, 0) + 1) * (record.verdict == kind)
        collapsed = self._in_a_row[record.phase, "collapse"]
        return record.verdict == "broken" or collapsed >= self._settings.patience > 0

    def _describe(self, record: RoundRecord, test: CollisionTest) -> str:
        if record.verdict == "broken":
            return describe_broken(record, test, self._settings.seed_mode)
        return describe_collapse(record, self._in_a_row[record.phase, "collapse"])


def _round_of(sample: DrawnSample) -> tuple[str, int, int]:
    sample_id = sample.origin.sample_id
    return sample_id.phase, sample_id.step, sample_id.number


def describe_broken(record: RoundRecord, test: CollisionTest, seed_mode: str) -> str:
    """One line: round, groups, samples, ranks, replicas, p-value, remedy."""
    named = "; ".join(map(describe_sharing, test.sharings[:MAX_NAMED_SHARINGS]))
    others = len(test.sharings) - MAX_NAMED_SHARINGS
    more = f"; and {others} more" if others > 0 else ""
    return (
        f"diversity: broken randomness in {record.round_name}, p = {format_p(test.log2_p)}: "
        f"samples share noise. {named}{more}. {_remedy(test.sharings, seed_mode)}"
    )


def describe_sharing(sharing: Sharing) -> str:
    """Who shares what."""
    what = f"share their first {sharing.num_tokens} tokens ({sharing.bits:.0f} bits of surprisal)"
    who = _name(sharing.samples)
    if sharing.kind == "frozen":
        earlier = sharing.earlier[-1]
        rounds = (
            f"{earlier.sample_id.phase} round {earlier.sample_id.step}.{earlier.sample_id.number}"
        )
        verb = what if len(sharing.samples) > 1 else what.replace("share their", "shares its")
        return f"{who} {verb} with {rounds}, {_name([earlier])} (frozen noise)"
    return f"{who} {what}{_common_seed(sharing.samples)}"


def _name(origins: Sequence[Origin]) -> str:
    """Groups, samples, ranks and replicas."""
    words = [
        f"group {o.sample_id.group} sample {o.sample_id.index}"
        f"{f' turn {o.sample_id.turn}' if o.sample_id.turn else ''}"
        f" (rank {o.rank}{f', replica {o.replica!r}' if o.replica else ''})"
        for o in origins[:MAX_NAMED_ORIGINS]
    ]
    others = len(origins) - MAX_NAMED_ORIGINS
    return ", ".join(words) + (f" and {others} more" if others > 0 else "")


def _common_seed(origins: Sequence[Origin]) -> str:
    seeds = [o.seed for o in origins]
    known = [seed for seed in seeds if seed is not None]
    if len(known) < len(seeds):
        return ", with seeds that the engine chose"
    if len(set(known)) == 1:
        return f", all with seed {known[0]}"
    if len({seed % LOW_32_BITS for seed in known}) == 1:
        return f", with seeds whose low 32 bits are all {known[0] % LOW_32_BITS}"
    return ", although their seeds differ"


def _remedy(sharings: Sequence[Sharing], seed_mode: str) -> str:
    if seed_mode != "sample":
        return "Remedy: --rollout_seed_mode sample, which gives every sample noise of its own."
    within = [{o.seed for o in sharing.samples} for sharing in sharings if sharing.kind == "shared"]
    if any(len(seeds) == 1 for seeds in within):
        return (
            "Remedy: none of yours, the seed rule gives no two samples one seed; please report it."
        )
    return (
        "Remedy: their engines did not heed the seeds; start every server with this version of the "
        "plugin, and look at the replicas named."
    )


def describe_collapse(record: RoundRecord, rounds: int) -> str:
    """One line: round, extent, what it is not, remedy."""
    return (
        f"diversity: collapsed policy, {rounds} rounds in a row to {record.round_name}: "
        f"{record.metrics['copied_ratio']:.0%} of the samples that could differ repeat another of "
        f"their group ({record.num_groups} groups, all ranks), {record.metrics['common_mode']:.0%} "
        f"of the prompts get one and the same completion, and sound noise explains it (p = "
        f"{format_p(record.log10_p / LOG10_2)}). With a high reward the prompts may be solved; "
        "else look at what the reward favours, raise --temperature or --beta, or go back to an "
        "earlier checkpoint."
    )
