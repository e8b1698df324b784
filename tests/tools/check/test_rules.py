"""Settings of a run are read as `swift` reads them, and must hold together: presets do."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools import share
from swift_grpo_ext.tools.check import glance
from swift_grpo_ext.tools.check.glance import COMMANDS, Side, check_names, upstream_flags
from swift_grpo_ext.tools.check.rules import check_settings
from swift_grpo_ext.tools.check.settings import Run, _parsers, parse, read_run

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples/presets"
SERVED, COLOCATED = "server_2x6_lora", "colocate_8gpu"


def load(name: str) -> Run:
    is_served = (FOLDER / f"{name}.train.yaml").is_file()
    return read_run(FOLDER / name if is_served else (FOLDER / name).with_suffix(".yaml"))


def said(run: Run) -> list[str]:
    found = [f for f in check_settings(run) if f.level in ("error", "warning")]
    return [f"{f.level}: {f.sentence}" for f in found]


def changed(run: Run, training: dict[str, Any], rollout: dict[str, Any] | None = None) -> Run:
    """Return the run with other settings; `None` leaves a setting out."""
    sides: dict[str, Any] = {"training": training, "rollout": rollout or {}}
    for side, changes in sides.items():
        settings = {**copy.deepcopy(dict(getattr(run, side) or {})), **changes}
        sides[side] = {k: v for k, v in settings.items() if v is not None} or None
    return replace(run, **sides)


@pytest.mark.parametrize("name", [*share.presets(), ROOT / "examples/digits/grpo.yaml"])
def test_a_preset_holds_together(name: str) -> None:
    assert said(load(name)) == []


def test_distillation_asks_for_no_rewards_and_has_no_groups() -> None:
    run = changed(load(COLOCATED), {**BARE, "rlhf_type": "gkd", "num_generations": 7})
    assert said(run) == []
    assert run.batch().num_generations == 1


ENV = "ENV"
BARE = {"reward_funcs": None, "reward_weights": None}
TWO = {"vllm_server_host": ["a", "a"]}


@pytest.mark.parametrize(
    ("name", "training", "rollout", "expected"),
    [
        (
            SERVED,
            {"external_plugins": ["other.py"]},
            {},
            "`swift rlhf` does not load grpo_ext",
        ),
        (SERVED, {}, {"external_plugins": None}, r"`swift rollout` does not load grpo_ext\.py"),
        (COLOCATED, {"rlhf_type": "dpo"}, {}, r"--rlhf_type: is dpo; expected grpo or gkd\."),
        # Rewards, batches, engines
        (COLOCATED, BARE, {}, "--reward_funcs: is missing"),
        (SERVED, BARE, {}, "--reward_funcs: is missing"),
        (
            COLOCATED,
            {"num_generations": 7},
            {},
            "--num_generations 7: does not divide the 128 s",
        ),
        (
            COLOCATED,
            {"eval_strategy": "steps", "num_generations_eval": 5, "split_dataset_ratio": 0.1},
            {},
            r"--num_generations 8: The global eval batch size .*num_generations_eval \(5\)",
        ),
        (COLOCATED, {"vllm_tensor_parallel_size": 16}, {}, "16 does not divide the 8 training"),
        (COLOCATED, {"truncation_strategy": "left"}, {}, "warning: --truncation_strategy: left cu"),
        (
            SERVED,
            {},
            {ENV: {"CUDA_VISIBLE_DEVICES": "1,2", "MAX_PIXELS": 602112}},
            "GPU 2 is named by both sides",
        ),
        # Servers
        (SERVED, {**TWO, "vllm_server_port": [8000] * 2}, {}, "a:8000 is given for 2 servers"),
        (
            SERVED,
            {**TWO, "vllm_server_port": [8000, 8001], "vllm_server_group_port": [9, 9]},
            {},
            "--vllm_server_group_port: holds one port twice",
        ),
        (SERVED, {}, {"port": 8111}, "--port: 8111 of `swift rollout` is not among vllm_server_p"),
        # What both sides have to agree on
        (SERVED, {}, {"model": "Qwen/Other"}, "--model: is .* and 'Qwen/Other' of .*the same"),
        (SERVED, {"max_turns": 1}, {}, "--max_turns: is 1 of .* and not set of .*the same"),
        (SERVED, {"system": "a"}, {"system": "b"}, "--system: is 'a' of .* and 'b' of"),
        (SERVED, {}, {ENV: {"MAX_PIXELS": 7}}, "ENV MAX_PIXELS: is 602112 of .* and 7 of .* same"),
        (
            SERVED,
            {"vllm_enable_lora": True, "lora_rank": 64},
            {"vllm_enable_lora": True, "vllm_max_lora_rank": 8},
            "--vllm_max_lora_rank: 8 is less than the training's lora_rank 64",
        ),
    ],
)
def test_settings_that_do_not_hold_together(
    name: str, training: dict[str, Any], rollout: dict[str, Any], expected: str
) -> None:
    [sentence] = said(changed(load(name), training, rollout))
    assert re.search(expected, sentence), sentence


@pytest.mark.parametrize(
    ("name", "training", "rollout"),
    [
        (COLOCATED, {**BARE, "gym_env": "maze"}, {}),
        (SERVED, BARE, {"gym_env": "maze"}),
        (SERVED, BARE, {"use_gym_env": True}),
        (COLOCATED, {**BARE, "teacher_model": "Org/teacher", "num_generations": 1}, {}),
        (SERVED, {}, {"multi_turn_scheduler": "search", "max_turns": 3, "system": None}),
        (SERVED, {"system": "a"}, {}),
        (SERVED, {}, {"vllm_enable_lora": True}),
        (COLOCATED, {"gradient_accumulation_steps": 3, "steps_per_generation": 2}, {}),
        (COLOCATED, {"eval_strategy": "steps", "per_device_eval_batch_size": 3}, {}),
    ],
)
def test_a_recipe_that_trains_is_not_refused(
    name: str, training: dict[str, Any], rollout: dict[str, Any]
) -> None:
    assert said(changed(load(name), training, rollout)) == []


def test_unknown_servers_may_run_a_gym() -> None:
    assert said(replace(changed(load(SERVED), BARE), rollout=None)) == []


# --- reading ---


def test_arguments_win_over_a_file() -> None:
    argv = ["--num_generations", "4", "--stop_words", "</a>", "b", "--deepspeed=zero2"]
    for path in (SERVED, f"{SERVED}.train.yaml", f"{SERVED}.rollout.yaml"):  # any means both
        run = read_run(FOLDER / path, model="x", overrides=argv)
        given = [run.train(name) for name in ("num_generations", "stop_words", "deepspeed")]
        assert given == [4, ["</a>", "b"], "zero2"]
        assert run.train("model") == run.serve("model") == "x"
        assert run.train("max_completion_length") == 1024
        assert (run.num_ranks, run.batch().generation_batch_size) == (6, 96)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"diversity_acton": 4}, r"swift rlhf: diversity_acton \(did you mean diversity_action\?"),
        ({"max_lenght": 9}, r"max_lenght \(did you mean max_length\?\)"),
        ({"vllm_mode_": "server"}, r"vllm_mode_ \(did you mean vllm_mode\?\)"),
        ({"zzz_zzz": 4}, r"of swift rlhf: zzz_zzz \(leave it out\)\.$"),
        (
            {"num_generation": 4, "lerning_rate": 1, "zzz_zzz": 4},
            r"num_generation \(did you mean num_generations or num_generations_eval\?\), "
            r"lerning_rate \(did you mean learning_rate\?\), zzz_zzz",
        ),
        ({"num_generations": "many"}, "num_generations.*: invalid int value: 'many'"),
        ({"logits_shim": "of"}, "logits_shim.*: invalid choice: 'of'"),
        ({"lora_rank": []}, "lora_rank.*: expected one argument"),
        ({"max_length": None}, "max_length: is empty, and arrives as the text 'None'"),
    ],
)
def test_what_the_parser_does_not_take(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse("training", settings)


def test_settings_get_the_types_that_swift_gives_them() -> None:
    settings = {"reward_funcs": "format", "vllm_engine_kwargs": {"a": 1}, "ENV": {"A": 1}}
    settings |= {"num_generations_e": 4, "logits_shim": False, "num_generations": "8"}
    assert parse("training", settings) == {
        "ENV": {"A": 1},
        "reward_funcs": ["format"],
        "vllm_engine_kwargs": '{"a": 1}',
        "num_generations_eval": 4,  # ms-swift takes abbreviations of its flags
        "logits_shim": "off",  # which YAML 1.1 reads as a boolean
        "num_generations": 8,
    }
    names = ["reward_funcs", "num_generations_e", "no_include_stop_str_in_output"]
    check_names("training", names)
    with pytest.raises(ValueError, match="no setting of swift rollout: num_generations"):
        parse("rollout", {"num_generations": 8})


@pytest.mark.parametrize("side", COMMANDS)
def test_names_of_flags_are_known_without_ms_swift(side: Side) -> None:
    """They are read from its source, for it takes ten seconds to import."""
    parser, upstream = _parsers(side)
    known = {action.dest for action in upstream._actions} - {"help"}
    assert upstream_flags(side) == known
    assert {action.dest for action in parser._actions} == {*known, *flag_names(), "help"}


def test_a_class_that_is_not_found_leaves_names_to_the_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(glance, "SOURCES", glance.SOURCES[:1])
    monkeypatch.setattr(glance, "upstream_flags", glance.upstream_flags.__wrapped__)
    assert glance.upstream_flags("training") == frozenset()
    check_names("training", ["num_generation"])
    with pytest.raises(ValueError, match="ambiguous option: --num_generation could match"):
        parse("training", {"num_generation": 8})


def test_a_command_that_was_pasted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    argv = ["NPROC_PER_NODE=8", "swift", "rlhf", "--num_generations", "4"]
    run = read_run(None, model="x", overrides=argv)
    assert (run.num_ranks, run.training, run.rollout) == (
        8,
        {"ENV": {"NPROC_PER_NODE": "8"}, "model": "x", "num_generations": 4},
        None,
    )
    monkeypatch.setenv("NPROC_PER_NODE", "2")  # which wins over ENV in ms-swift
    assert run.num_ranks == 2
    file = str(FOLDER / f"{COLOCATED}.yaml")
    assert read_run(None, overrides=["swift", "rlhf", file]).train("num_generations") == 8
    served = read_run(None, overrides=["swift", "rollout", "--port", "8001"])
    assert (served.training, served.serve("port")) == (None, 8001)
    with pytest.raises(ValueError, match=r"sft: expected arguments of swift rlhf"):
        read_run(None, overrides=["swift", "sft", "--model", "x"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", r"^run\.yaml: is no YAML file"),
        ("- a", r"^run\.yaml: holds no settings"),
        (None, r"run\.yaml: there is no such file\. did you mean runs\.yaml\?$"),
    ],
)
def test_files_without_settings(text: str | None, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    (tmp_path / "runs.yaml").touch()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_run(file)
