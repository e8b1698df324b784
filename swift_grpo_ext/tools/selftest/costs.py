"""What weights, logits and rollouts take, on the user's model and rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch
from swift.trainers import disable_gradient_checkpointing

from swift_grpo_ext.checks.rows import MEDIA
from swift_grpo_ext.logits.logps import CompletionLogps, agreed_chunk_size, free_bytes
from swift_grpo_ext.media.encode import before_collating, join_late
from swift_grpo_ext.media.encoder_cache import EncoderCache, frozen_towers
from swift_grpo_ext.tools.selftest.peak import peak_bytes
from swift_grpo_ext.tools.selftest.result import Result, judged, untried
from swift_grpo_ext.tools.selftest.rig import Rig
from swift_grpo_ext.training.batch import trained_ids
from swift_grpo_ext.training.canary import encoded_batch
from swift_grpo_ext.weights import updates

GIB = 2**30
TURNS = 2

# --- weights ---

WIRES = {"GlooCommunicator": "gloo", "PyNcclCommunicator": "NCCL"}
VERIFICATION = ("compare", "compare_tensors", "weight_checksums_in_background")


def check_weights(rig: Rig) -> Result:
    """How long an update takes, with and without its verification, in turns; it raises where an
    engine has taken something else."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for is_verified in (False, True):
            with _verified(is_verified):
                seconds[is_verified].append(timed(rig.update_weights))
    names = rig.trainer.model.named_parameters()
    num_bytes = sum(p.numel() * p.dtype.itemsize for name, p in names if ".lora_" not in name)
    plain, verified = median(seconds[False]), median(seconds[True])
    values = {
        "weights (GiB)": round(num_bytes / GIB, 3),
        "seconds": round(verified, 3),
        "of the first update": round(rig.first_update_seconds, 3),
        "GiB / s": round(num_bytes / GIB / verified, 3),
        "verification's share": round(max(1 - plain / verified, 0.0), 3),
        "over": _wire(rig),
    }
    return judged(values, [])


def _wire(rig: Rig) -> str:
    if rig.is_colocated:
        return "the memory of one process"
    names = {type(c).__name__ for c in rig.trainer.vllm_client.pynccl_comms}
    return ", ".join(sorted(WIRES.get(name, name) for name in names))


@contextmanager
def _verified(is_on: bool) -> Iterator[None]:
    """Within the block the trainer's end of an update verifies, or does not."""
    upstream = {name: getattr(updates, name) for name in VERIFICATION}

    def nothing(*_: Any) -> Any:
        return dict

    try:
        for name in () if is_on else VERIFICATION:
            setattr(updates, name, nothing)
        yield
    finally:
        for name, value in upstream.items():
            setattr(updates, name, value)


def timed(work: Callable[[], object]) -> float:
    """Wall time in seconds, a device's work included."""
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# --- logits ---

CHUNK = 512
MAX_ROWS = 8
ROOM = 0.8
"""Of the free memory, that a pass may take."""

TOLERANCES = {16: 0.1, 32: 1e-3}
"""Nats between log-probabilities that are computed at once and in chunks, by bits of a number."""


def check_logits(rig: Rig) -> Result:
    """A forward and backward at the user's lengths, all at once and in chunks: peak and time."""
    trainer = rig.trainer
    _, row = rig.hardest_prompts(1)[0]
    samples = _full_length_group(rig, row)
    inputs, batch = encoded_batch(trainer, samples)
    num_tokens = int(batch.completion_mask.sum())
    auto = agreed_chunk_size(trainer.model, trainer.ranks.all_gather)
    sizes = [size for size in sorted({CHUNK, auto}) if size < num_tokens] or [num_tokens // 4]
    ways = {size: _measured(rig, inputs, batch, size) for size in (0, *sizes)}
    whole = ways[0][0]
    apart = {size: float((logps - whole).abs().max()) for size, (logps, _, _) in ways.items()}
    limit = TOLERANCES[16 if rig.bits <= 16 else 32]
    faults = [
        f"--logps_chunk_size {size}: {gap:.3g} nats from all at once, above {limit:g}"
        for size, gap in apart.items()
        if not gap <= limit
    ]
    free = free_bytes(trainer.model.device)
    best = recommended({s: (peak, secs) for s, (_, peak, secs) in ways.items()}, ROOM * free)
    rig.seconds_per_token = ways[best][2] / num_tokens
    values: dict[str, Any] = {"rows": len(samples), "completion tokens": num_tokens}
    for size, (_, peak, seconds) in ways.items():
        values[f"chunks of {size}" if size else "at once"] = _words(peak, seconds)
    values["recommended --logps_chunk_size"] = best
    return judged(values, faults, "Report it with this page; --logps_chunk_size 0 until then.")


def _full_length_group(rig: Rig, row: dict[str, Any]) -> list[Any]:
    """As many samples of one prompt as a batch holds, with completions as long as they may get."""
    trainer = rig.trainer
    num_rows = min(int(trainer.args.per_device_train_batch_size), MAX_ROWS)
    samples = rig.drawn_samples([row] * num_rows, rig.ids(0, 1, num_rows))
    length = int(trainer.max_completion_length)
    for sample in samples:
        sample.response_token_ids = (trained_ids(sample) * length)[:length]
        sample.rollout_logprobs, sample.response_loss_mask = [], []
    return samples


def _words(peak: int, seconds: float) -> str:
    return f"{peak / GIB:.3g} GiB, {seconds:.3g} s"


def recommended(ways: dict[int, tuple[int, float]], room: float) -> int:
    """The chunk size to take: of those that fit, the one with the least memory among those that are
    at most a tenth slower than the fastest; where none fits, the one with the least memory.

    Args:
        ways: peak in bytes and seconds, by chunk size.
        room: bytes.
    """
    fitting = {size: way for size, way in ways.items() if way[0] <= room}
    if not fitting:
        return min(ways, key=lambda size: ways[size][0])
    fastest = min(seconds for _, seconds in fitting.values())
    fast = [size for size, (_, seconds) in fitting.items() if seconds <= 1.1 * fastest]
    return min(fast, key=lambda size: ways[size][0])


def _measured(
    rig: Rig, inputs: Any, batch: Any, size: int | str
) -> tuple[torch.Tensor, int, float]:
    """Log-probabilities, peak in bytes, seconds."""
    trainer = rig.trainer
    args = copy(trainer.args)
    args.logps_chunk_size = str(size)
    before = trainer._logps
    trainer._logps = CompletionLogps(args, trainer.template, agree=before.agree, limit=before.limit)
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.clear()
        logps, _ = trainer._get_per_token_logps_and_entropies(trainer.model, dict(inputs), batch)
        kept.append(logps.detach().float().cpu())
        logps.sum().backward()
        trainer.model.zero_grad(set_to_none=False)

    checkpointing = disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    )
    try:
        with rig.engine_asleep(), _own_checkpointing(trainer, checkpointing):
            work()  # warms up; gradients are there from now on
            seconds = min(timed(work) for _ in range(TURNS))
            return kept[0], peak_bytes(work), seconds
    finally:
        trainer._logps = before
        trainer.model.zero_grad(set_to_none=True)


@contextmanager
def _own_checkpointing(trainer: Any, off: Any) -> Iterator[None]:
    """With `--gradient_checkpointing` as the settings have it."""
    if trainer.args.gradient_checkpointing:
        yield
        return
    with off:
        yield


# --- the vision tower ---

LEAST_GAIN = 0.05
"""Share of a pass that the tower has to take for the flag to be worth it."""


def check_vision(rig: Rig) -> Result:
    """A forward and backward of a group with most media, whose images a frozen tower encodes for
    each sample as in ms-swift, and as they are held once it has encoded each: peak and time."""
    trainer = rig.trainer
    rows = [row for _, row in rig.hardest_prompts(1)]
    row = max(rows, key=lambda row: sum(len(row.get(kind) or ()) for kind in MEDIA))
    num_media = sum(len(row.get(kind) or ()) for kind in MEDIA)
    values: dict[str, Any] = {
        "frozen towers": ", ".join(name for name, _ in frozen_towers(trainer.model)) or "none",
        "media of a row": num_media,
    }
    if values["frozen towers"] == "none" or not num_media:
        return judged(values, [])
    samples = _full_length_group(rig, row)
    values["rows"] = len(samples)
    ways = {}
    for name, gigabytes in (("as ms-swift", 0.0), ("images encoded once", 1.0)):
        with _encoder_cache(trainer, gigabytes) as cache:
            template = trainer.template
            late = before_collating(template, join_late) if gigabytes else nullcontext()
            with late:
                inputs, batch = encoded_batch(trainer, deepcopy(samples))
            ways[name] = _measured(rig, inputs, batch, trainer.args.logps_chunk_size)
            is_on = cache.is_on
        values[name] = _words(*ways[name][1:])
    (whole, _, before), (shared, _, after) = ways.values()
    gap = float((shared - whole).abs().max())
    limit = TOLERANCES[16 if rig.bits <= 16 else 32]
    faults = [f"log-probabilities lie {gap:.3g} nats apart, above {limit:g}"] * (not gap <= limit)
    is_worth_it = is_on and not faults and after <= (1 - LEAST_GAIN) * before
    values["largest difference (nats)"] = float(f"{gap:.2g}")
    values["recommended"] = f"--encoder_cache_gb {int(is_worth_it)}"
    return judged(values, faults, "Report it with this page; --encoder_cache_gb 0 until then.")


@contextmanager
def _encoder_cache(trainer: Any, gigabytes: float) -> Iterator[EncoderCache]:
    """Within the block the trainer's model has another cache than the run's."""
    own = trainer._encoder_cache
    for tower in own.towers:
        tower.is_off = True
    cache = EncoderCache(gigabytes, trainer.model)
    try:
        yield cache
    finally:
        for tower in cache.towers:
            tower.remove()
        for tower in own.towers:
            tower.is_off = False


# --- speed ---


def check_speed(rig: Rig) -> Result:
    """Their rows, drawn by groups and as ms-swift draws them, with empty caches, in turns."""
    if rig.trainer.ranks.size > 1:
        return untried("several ranks: ms-swift's own path is measured with one")
    ids = rig.ids(1, len(rig.prompts))
    rows = [rig.prompts[i.group] for i in ids]
    ours: Callable[[], Any] = partial(rig.draw, rows, ids)
    theirs = partial(_as_upstream, rig, rows)
    ways: dict[str, Callable[[], Any]] = {"ours": ours, "ms-swift": theirs, "cached": ours}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):
        for way, draw in ways.items():
            rig.forget(media=way != "cached")
            taken = timed(draw)
            if turn:  # the first warms up
                seconds[way].append(taken)
    fast, slow, cached = (median(seconds[way]) for way in ways)
    tokens = sum(len(drawn.token_ids) for drawn in ours())
    values = {
        "prompts": len(rig.prompts),
        "samples": len(ids),
        "tokens": tokens,
        "ours (s)": round(fast, 3),
        "ms-swift's path (s)": round(slow, 3),
        "ms-swift's / ours": round(slow / fast, 2),
        "share of decoding and encoding media": round(max(1 - cached / fast, 0.0), 2),
        **_predicted(rig, fast / tokens),
    }
    return judged(values, [])


def _as_upstream(rig: Rig, rows: list[dict[str, Any]]) -> None:
    """One request a sample, each with its images, and no metadata of ours."""
    requests = [sample.to_infer_request() for sample in rig.samples(rows)]
    rig.trainer._engine_infer(requests, rig.config())


def _predicted(rig: Rig, seconds_per_token: float) -> dict[str, Any]:
    """A step of the settings on one engine and one rank, where every completion has full length:
    more than it takes, since larger batches draw faster."""
    args = rig.trainer.args
    tokens = int(args.generation_batch_size) * int(rig.trainer.max_completion_length)
    parts = {"rollout": seconds_per_token * tokens, "weights": rig.first_update_seconds}
    if rig.seconds_per_token is not None:
        # The policy's forward and backward, and the forward of old log-probabilities.
        parts["training"] = 4 / 3 * rig.seconds_per_token * tokens
    shown = ", ".join(f"{part} {seconds:.3g}" for part, seconds in parts.items())
    return {"a step at most (s, one engine and rank)": f"{sum(parts.values()):.3g} ({shown})"}
