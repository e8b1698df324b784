"""`swift-grpo-ext selftest` on the tiny model: a sound stack, and faults that it has to find.

    python -m tests.stack.test_selftest OUTPUT.json ARGV_OF_SWIFT_RLHF...

runs the checks on one engine: sound, then with each fault.
"""

import json
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from swift.cli.main import parse_yaml_args

from swift_grpo_ext.tools.harness import with_trainer
from swift_grpo_ext.tools.selftest.command import attempt
from swift_grpo_ext.tools.selftest.outcome import SAME_TOKENS
from tests.rig.processes import run_module
from tests.rig.rounds import HOT, PRESET, write_lines
from tests.rig.seeing import FAULTS as SEEN_WRONGLY
from tests.rig.seeing import STOP, unequal_rows

SAMPLES = 64
"""Samples of the collision test; users get more."""

ENGINE_FAULTS = [
    ("one seed for all", "seeds", "samples share noise that should differ"),
    ("one seed for all", SAME_TOKENS, "more than rounding explains"),
    ("stale weights", "weights", "(stale)"),
    # Of what an engine sees wrongly; a training names all faults of this kind (`seeing.py`).
    ("another checkpoint's tower", "weights", ""),
    ("M-RoPE rows dropped", "weights", ""),
    ("one of several images blank", "weights", ""),
]
"""Faults of `engine_faults.py`, the check that has to find it, and a part of the reason."""

TRAINERS_FAULTS = [
    ("stops forgotten", "stops", "'</digit>': "),
    ("asked otherwise", "prompts", "the rollout saw a prompt of "),
    ("other tokens", "logits", "log-probabilities lie "),
]


@contextmanager
def faulty(trainer: Any, fault: str) -> Iterator[None]:
    """The engine gets other requests than the trainer sends, as with another template; or
    log-probabilities at the head are those of the next token ids."""
    from swift_grpo_ext.logits import shim

    send, token_logps = trainer._engine_infer, shim.token_logps

    def infer(requests: Any, config: Any, **kwargs: Any) -> Any:
        config = copy(config)
        if fault == "stops forgotten":
            config.stop = []
        if fault == "asked otherwise":
            for request in requests:
                last = request.messages[-1]
                request.messages[-1] = {**last, "content": f"{last['content']} Please."}
        return send(requests, config, **kwargs)

    def logps(logits_NV: Any, targets_N: Any, **kwargs: Any) -> Any:
        return token_logps(logits_NV, targets_N + (fault == "other tokens"), **kwargs)

    with patch.object(trainer, "_engine_infer", infer), patch.object(shim, "token_logps", logps):
        yield


def main(output: Path, argv: list[str]) -> None:
    from tests.rig.engine_faults import set_fault  # before the engine is made

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

        found: dict[str, Any] = {"healthy": {name: tried(name) for name in all_checks}}
        for fault, check, _ in ENGINE_FAULTS:
            set_fault(fault)
            found[f"{fault}, {check}"] = tried(check)
            set_fault("")
            rig.update_weights()
        for fault, check, _ in TRAINERS_FAULTS:
            with faulty(trainer, fault):
                found[f"{fault}, {check}"] = tried(check)
        found["again"] = tried("weights")
        output.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")

    parse_yaml_args(argv)
    with_trainer(argv, use)


@pytest.fixture(scope="module")
def found(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the sound stack and of each fault."""
    folder = tmp_path_factory.mktemp("selftest")
    rows = write_lines(folder / "rows.jsonl", unequal_rows(assets, folder))
    argv = [
        *(str(PRESET), "--model", str(assets / "tiny_vlm"), "--dataset", str(rows), *HOT),
        *("--num_generations", "4", "--per_device_train_batch_size", "16"),
        *("--stop_words", STOP, "--output_dir", str(folder / "run"), "--add_version", "false"),
        *("--sample_log", "none", "--max_steps", "1", "--freeze_vit", "false"),
        # Fewer tokens than the text of the check's grammar has.
        *("--truncation_strategy", "delete", "--max_completion_length", "8"),
    ]
    output, env = folder / "found.json", {"ENGINE_FAULTS": str(folder)}
    run_module(__name__, str(output), *argv, log=folder / "log", env=env)
    return dict(json.loads(output.read_text(encoding="utf-8")))


def test_a_healthy_stack_holds(found: dict[str, Any]) -> None:
    healthy = found["healthy"]
    assert {name: r["reason"] for name, r in healthy.items() if r["status"] != "holds"} == {}
    assert healthy["seeds"]["values"]["surprisal of all (bits)"] > 1000
    weights = healthy["weights"]["values"]
    for change, clear in (("an update", 4), ("an update of the tower", 1)):
        moved = weights[f"{change} moved log-probabilities by (nats)"]
        assert moved >= clear * weights["limit (nats)"]
    logits = healthy["logits"]["values"]
    shortest, _, longest = logits["completions (tokens)"].partition(" to ")
    assert (logits["samples"], int(shortest) < int(longest)) == (4, True)
    assert found["again"]["status"] == "holds", "a fault left something behind"


@pytest.mark.parametrize(("fault", "check", "reason"), [*ENGINE_FAULTS, *TRAINERS_FAULTS])
def test_a_fault_is_found(fault: str, check: str, reason: str, found: dict[str, Any]) -> None:
    """An engine that sees images wrongly agrees in rows of text. Some rows with media differ by
    more than rounding."""
    result = found[f"{fault}, {check}"]
    assert result["status"] == "does not hold"
    assert result["remedy"]
    assert reason in result["reason"]
    if not reason:
        kinds = set(re.findall(r"rows of (\S+) lie", result["reason"]))
        assert set() < kinds <= SEEN_WRONGLY[fault]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
