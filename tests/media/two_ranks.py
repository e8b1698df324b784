"""Two ranks on CPU (gloo) that share a frozen tower's weights (FSDP2), each with images of its own.

    python -m tests.media.two_ranks FOLDER

Writes `FOLDER/rankR.pt`: for each of `CASES`, how far outputs lie from those of a whole tower, how
many images each call had the tower run on, and whether the cache is on at last; or the error.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from swift_grpo_ext.media import encoder_cache
from swift_grpo_ext.media.encoder_cache import EncoderCache
from tests.media.test_encoder_cache import WIDE, fail, images, qwen, rows_of
from tests.ranks import start_two_processes

CASES = ("images of its own", "another kind of call first", "content that cannot be named")
"""What sets rank 1 apart."""

WAIT = timedelta(seconds=60)
"""A collective that only one rank takes part in fails after it."""


def run(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for case in CASES:
        try:
            results[case] = compare(rank, case)
        except RuntimeError as e:  # the group is lost: each further case would wait
            results[case] = {"error": f"{type(e).__name__}: {e}"}
            break
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def compare(rank: int, case: str) -> dict[str, Any]:
    torch.manual_seed(0)
    whole, sharded = qwen(), qwen()
    sharded.load_state_dict(whole.state_dict())
    for unit in (*sharded.visual.blocks, sharded.visual):
        fully_shard(unit)
    cache = EncoderCache(1.0, sharded)
    a, b, c = images(WIDE, WIDE, WIDE)
    calls: list[Any] = [([a, a, b], {}), ([a, b, b, c], {}), ([a, a, b], {})]
    name_images = encoder_cache.image_keys
    if rank and case == "images of its own":
        calls = [([c], {}), ([c, c], {}), ([a, b], {})]
    if rank and case == "another kind of call first":
        calls[0] = [c], {"lengths": torch.tensor([32])}
    if rank and case == "content that cannot be named":
        encoder_cache.image_keys = fail
    apart, runs = 0.0, list[list[int]]()
    for shown, others in calls:
        cache.forget()
        given = torch.cat(shown), torch.tensor([WIDE] * len(shown))
        expected = whole.visual(given[0], grid_thw=given[1], **others)
        found = sharded.visual(given[0], grid_thw=given[1], **others)
        runs.append(sharded.calls())
        apart = max(apart, float((rows_of(found) - rows_of(expected)).abs().max()))
    encoder_cache.image_keys = name_images
    cache.agree(gathered)
    return {"apart": apart, "runs": runs, "is_on": cache.is_on}


def gathered(share: Any) -> list[Any]:
    shares: list[Any] = [None, None]
    dist.all_gather_object(shares, share)
    return shares


if __name__ == "__main__":
    start_two_processes(run)
