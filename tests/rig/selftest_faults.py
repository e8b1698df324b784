"""Runs the selftest's checks on one engine: sound, then with faults that the checks have to find.

    python -m tests.rig.selftest_faults OUTPUT.json ARGV_OF_SWIFT_RLHF...

Faults change the input of vLLM, or what the trainer sends to the engine.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from swift.cli.main import parse_yaml_args

from swift_grpo_ext.tools.harness import with_trainer
from swift_grpo_ext.tools.selftest.command import attempt
from swift_grpo_ext.tools.selftest.outcome import SAME_TOKENS
from tests.rig import seeing

SAMPLES = 64
"""Samples of the collision test; users get more."""

STOP = "</digit>"


def unequal_rows(assets: Path, folder: Path) -> list[dict[str, Any]]:
    """Return rows of all kinds with prompts of unequal lengths, and one that the template refuses
    because its images are missing."""
    rows = seeing.rows(assets, folder)[:8]
    for number, row in enumerate(rows):
        row["messages"][0]["content"] += " Look twice." * number
    rows[4]["images"] = [str(assets / "digits/none.png")]
    return rows


def shared_seeds(rig: Any) -> AbstractContextManager[Any]:
    """vLLM generates all requests with one seed."""
    engine = rig.trainer.engine.engine
    upstream = engine.add_request

    def add_request(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        params.seed = 7
        return upstream(request_id, prompt, params, *args, **kwargs)

    return patch.object(engine, "add_request", add_request)


@contextmanager
def ignored_update(rig: Any) -> Iterator[None]:
    """vLLM's model reports all weights as loaded, and keeps the first ones."""
    model = type(rig.trainer.engine.inner_model)
    load = model.load_weights
    first: list[tuple[str, Any]] = []

    def load_weights(self: Any, weights: Any) -> Any:
        new = [(name, tensor.clone()) for name, tensor in weights]
        first.extend(() if first else new)
        return load(self, first)

    with patch.object(model, "load_weights", load_weights):
        rig.update_weights()
        yield


def changed_requests(rig: Any, change: Callable[[Any, Any], None]) -> AbstractContextManager[Any]:
    """The engine gets other requests than the trainer sends."""
    upstream = rig.trainer._engine_infer

    def infer(requests: Any, config: Any, **kwargs: Any) -> Any:
        config = copy(config)
        change(requests, config)
        return upstream(requests, config, **kwargs)

    return patch.object(rig.trainer, "_engine_infer", infer)


def forget_stops(_: Any, config: Any) -> None:
    config.stop = []


def ask_otherwise(requests: Any, _: Any) -> None:
    """Change the prompts, as another template does."""
    for request in requests:
        last = request.messages[-1]
        request.messages[-1] = {**last, "content": f"{last['content']} Please."}


def other_tokens(_: Any) -> AbstractContextManager[Any]:
    """Log-probabilities at the head are those of the next token ids."""
    from swift_grpo_ext.logits import shim

    upstream = shim.token_logps

    def turned(logits_NV: Any, targets_N: Any, **kwargs: Any) -> Any:
        return upstream(logits_NV, targets_N + 1, **kwargs)

    return patch.object(shim, "token_logps", turned)


SIGHT = ("another checkpoint's tower", "M-RoPE rows dropped", "one of several images blank")
"""Faults in how the engine sees images: `weights` has to report rows with media alone. A training
names all faults of this kind (`seeing.py`)."""

FAULTS = {
    "seeds": (shared_seeds, "samples share noise that should differ"),
    SAME_TOKENS: (shared_seeds, "more than rounding explains"),
    "weights": (ignored_update, "(stale)"),
    "stops": (partial(changed_requests, change=forget_stops), "'</digit>': "),
    "prompts": (partial(changed_requests, change=ask_otherwise), "the rollout saw a prompt of "),
    "logits": (other_tokens, "log-probabilities lie "),
}
"""By the check that has to find it: the fault, and a part of the reason."""


def main(output: Path, argv: list[str]) -> None:
    from tests.rig import sight  # before the engine is made

    def use(trainer: Any) -> None:
        from swift_grpo_ext.tools.selftest import checks
        from swift_grpo_ext.tools.selftest.rig import Rig

        checks.NUM_COLLISION_SAMPLES = SAMPLES
        rig = Rig(trainer)
        first_round = output.with_suffix(".pickle")
        first_round.write_bytes(pickle.dumps(rig.first_round))
        all_checks = {
            **checks.CHECKS,
            SAME_TOKENS: partial(checks.check_same_tokens, path=first_round),
        }

        def tried(name: str) -> dict[str, Any]:
            # Results of the sound engine in a cache would hide a fault.
            for cache in ("prefix", "mm", "encoder"):
                getattr(trainer.engine.engine, f"reset_{cache}_cache")()
            vars(rig).pop("first_round", None)
            return asdict(attempt(rig, name, all_checks[name]))

        found = {"healthy": {name: tried(name) for name in all_checks}}
        found["faulty"] = {}
        for name, (fault, _) in FAULTS.items():
            with fault(rig):
                found["faulty"][name] = tried(name)
        rig.update_weights()
        for name in SIGHT:
            sight.set_fault(name)
            found["faulty"][name] = tried("weights")
        sight.set_fault("")
        found["again"] = {"weights": tried("weights")}
        output.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")

    parse_yaml_args(argv)
    with_trainer(argv, use)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
