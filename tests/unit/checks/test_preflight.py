"""Settings that cannot run are refused by name before a model is loaded, and those that have no
effect are warned of (R1, R6, T5); so are data sets that a training cannot use (M1)."""

import importlib.util
import json
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.arguments import RolloutArguments
from swift.rewards import ORM, orms
from swift.utils import find_free_port

from swift_grpo_ext.checks import preflight, rules
from swift_grpo_ext.checks.finding import enforce, error, note, ok, warning
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.upstream.contract import TRIED
from tests.rig.checks import arguments, assert_says

SERVER = {"port": 0}
SERVED = {"vllm_mode": "server"}
ALONE = {"use_vllm": False, "vllm_mode": None}
"""ms-swift generates, with the model itself."""

LORA = {"tuner_type": "lora", "vllm_enable_lora": True}
UNMERGED = ("adapter", "llamapro", "reft")
NO_EFFECT = "warning: --vllm_enable_lora true: has no effect without --use_vllm true, --tuner_t"
NO_SCHEDULER = "warning: --tool_timeout: has no effect without --multi_turn_scheduler."
REPLAY = {"router_replay_mode": "R3"}
NO_REPLAY = "error: --router_replay_mode R3: does not go with"
EXACT = {"full_determinism": True}
INEXACT = "warning: --full_determinism true: does not hold for a resumed run with"
TEACHER = {"teacher_model_server": "http://teacher:8000"}
NOT_TAKEN = "error: --vllm_enable_lora true: vLLM does not take the adapter"


@pytest.fixture(autouse=True)
def newest_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings are the same with each installed release."""
    newest = {name: versions[-1] for name, versions in TRIED.items()}
    monkeypatch.setattr(rules, "tried_packages", lambda: newest)


# --- findings ---


def test_the_first_error_is_raised_after_the_warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that is no flag gets no dashes."""
    monkeypatch.setattr(logging.getLogger("swift"), "propagate", True)
    findings = [ok("a", "holds"), note("b", "is so"), warning("seed", "is odd.", "Leave it.")]
    for first, said_of_it in (("model /none", "--model /none"), ("MASTER_PORT 7", "MASTER_PORT 7")):
        caplog.clear()
        with pytest.raises(ValueError, match=rf"^{said_of_it}: is no folder\. Give one\.$"):
            enforce([*findings, error(first, "is no folder.", "Give one."), error("b", "is bad.")])
        assert [record.getMessage() for record in caplog.records] == ["--seed: is odd. Leave it."]


# --- arguments ---


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *(({**side, "temperature": 0.9}, None) for side in ({}, SERVER)),
        ({"rollout_timeout": 0.5}, "error: --rollout_timeout 0.5: expected a number of seconds"),
        ({"tool_timeout": 0.0}, "error: --tool_timeout 0.0: expected a number of seconds, more"),
        ({"rollout_timeout": 1.0, "sample_log_gb": 0.0}, None),
        ({"sample_log_gb": -0.5}, "error: --sample_log_gb -0.5: expected 0 or more"),
        *(({"tuner_type": n}, f"error: --tuner_type {n}: adds parts that ca") for n in UNMERGED),
        *(({"tuner_type": name, **ALONE}, None) for name in UNMERGED),
        *(({"tuner_type": name}, None) for name in ("full", "lora", *rules.MERGED_TUNERS)),
        ({"seed": -1}, "error: --seed -1: expected 0 or more"),
        ({"seed": -1, "rollout_seed_mode": "engine"}, None),
        ({"streaming": True}, "error: --streaming true: expected false: a stream cannot repeat"),
        # Experts that are replayed
        (REPLAY, None),
        ({**REPLAY, "torch_compile": True}, f"{NO_REPLAY} --torch_compile true: compiled layers"),
        ({**REPLAY, "use_liger_kernel": True}, f"{NO_REPLAY} --use_liger_kernel true: its loss"),
        ({**REPLAY, "teacher_model": "t"}, f"{NO_REPLAY} --teacher_model: a teacher has other"),
        ({**REPLAY, "sequence_parallel_size": 2}, f"{NO_REPLAY} --sequence_parallel_size: it spl"),
        ({**REPLAY, "use_vllm": False}, f"{NO_REPLAY} --use_vllm false: ms-swift's own rollouts"),
        # Settings that make two runs differ (R9)
        ({**EXACT, "dataloader_num_workers": 4, "use_liger_kernel": True, "bf16": True}, None),
        ({**EXACT, "rollout_seed_mode": "engine"}, f"{INEXACT} --rollout_seed_mode engine"),
        ({**EXACT, "rollout_seed_mode": "engine", "use_vllm": False}, None),
        ({**EXACT, "async_generate": True}, f"{INEXACT} --async_generate true"),
        ({**EXACT, "sync_ref_model": True}, f"{INEXACT} --sync_ref_model true"),
        ({**EXACT, "save_only_model": True}, f"{INEXACT} ...the optimizer's state. Leave that fl"),
        ({"save_only_model": True}, None),
        # Names
        ({"callbacks": ["diversity"]}, None),
        ({"model_type": "zzz"}, "error: --model_type zzz: is registered by...known: ... ..."),
        ({"reward_funcs": ["formt"]}, "error: --reward_funcs formt: is ...mean format?"),
        ({"reward_model_plugin": ["defualt"]}, "error: --reward_model_plugin ...mean default?"),
        (
            {**TEACHER, "temperature": 0.9},
            "warning: --teacher_model_server: gives log-probabilities at temperature 1, the policy "
            "at --temperature 0.9: ... Set --temperature 1",
        ),
    ],
)
def test_arguments(changes: dict[str, Any], expected: str | None) -> None:
    assert_says(rules.check_arguments(arguments(**changes), ["model", "seed"]), expected)


def test_flags_that_nobody_reads() -> None:
    cases: list[tuple[Any, ...]] = [
        (SERVER, ["logits_shim"], "warning: --logits_shim: is ignored by `swift rollout`; `swift"),
        (SERVER, ["rollout_timeout", *rules.ENGINE_FLAGS_OF_SERVERS], None),
        (SERVER, ["rollout_seed_mode", "sample_log", "sample_log_gb"], None),
        ({}, [n for n in flag_names() if not n.startswith(("diversity", "tool"))], None),
        *((side, ["tool_timeout"], NO_SCHEDULER) for side in ({}, SERVER)),
        ({"multi_turn_scheduler": "any"}, ["tool_timeout"], None),
        ({}, ["diversity_action"], "warning: --diversity_action: has no effect without --cal"),
        ({"callbacks": ["a", "diversity"]}, ["diversity_action"], None),
        ({}, ["vllm_max_lora_rank"], "warning: --vllm_max_lora_rank: has no effect with `swift rl"),
        ({}, ["vllm_max_model_len", "sleep_level"], None),
        (SERVED, ["sleep_level"], "warning: --sleep_level: has no effect with"),
        (SERVED, ["vllm_quantization"], "warning: --vllm_quantization: has no ef"),
        (SERVED, ["vllm_server_port", "vllm_enable_lora"], None),
    ]
    for changes, given, expected in cases:
        assert_says(rules.rules_of_ignored_flags(arguments(**changes), given), expected)


def test_only_whole_checkpoints_are_resumed_from(tmp_path: Path) -> None:
    """The last of them is named (S4)."""
    states = {8: '{"global_step": 8}', 9: '{"global_step": 9}', 10: None, 11: '{"global_st'}
    folders = {n: tmp_path / f"checkpoint-{n}" for n in (*states, "best", 70, 71)}
    for number, state in {**states, "best": None, 70: "[]", 71: "{}"}.items():
        folders[number].mkdir()
        if state is not None:
            (folders[number] / "trainer_state.json").write_text(state, encoding="utf-8")
    for folder, expected, changes in (
        (folders[9], None, {}),
        (folders[10], f"Resume from {folders[9]}, the last whole one.", {}),
        (folders[11], f"is missing or cut short. Resume from {folders[9]}", {}),
        (folders[10], None, {"resume_only_model": True}),
        (tmp_path / "none" / "checkpoint-1", "Start without it.", {}),
    ):
        args = arguments(resume_from_checkpoint=str(folder), **changes)
        refused = expected and f"error: --resume_from_checkpoint {folder}: is no whole checkpoint"
        assert_says(rules.check_arguments(args, ()), refused and f"{refused}...{expected}")


def test_trained_modules_that_vllm_would_not_get(tmp_path: Path) -> None:
    """vLLM has one weight for a tied embedding and head; batches of weights leave modules out."""
    config = tmp_path / "config.json"
    both = {"model": str(tmp_path), "tuner_type": "lora", "modules_to_save": ["merger", "lm_head"]}
    refused = "error: --modules_to_save lm_head: vLLM has one weight for embedding and ...type full"
    for is_tied, changes, expected in (
        (True, {}, refused),
        (True, {"modules_to_save": ["all-embedding"]}, "error: --modules_to_save all-embedding: "),
        (True, {"modules_to_save": ["merger"]}, None),
        (
            *(False, {"modules_to_save": ["merger"], "move_model_batches": 2}),
            "error: --move_model_batches 2: leaves out --modules_to_save merger: ...flags out.",
        ),
        (True, {"use_vllm": False}, None),
        (True, {"tuner_type": "full"}, None),
        (False, {}, None),
    ):
        config.write_text(json.dumps({"tie_word_embeddings": is_tied}))
        assert_says(rules.check_arguments(arguments(**{**both, **changes}), []), expected)


# --- adapters ---


def test_adapters_that_vllm_refuses() -> None:
    """Otherwise vLLM refuses it after two minutes."""
    cases: list[tuple[dict[str, Any], str | None]] = [
        (LORA, None),
        ({**LORA, "use_dora": True}, f"{NOT_TAKEN}: vLLM does not ... Change the adapter, or leav"),
        ({**LORA, "modules_to_save": ["a", "b"]}, f"{NOT_TAKEN}: vLLM only supports modules_to_s"),
        ({**LORA, "lora_bias": "all"}, f"{NOT_TAKEN}: ...bias"),
        *(({**LORA, "init_weights": name}, None) for name in (True, False, "gaussian", "lora-ga")),
        ({"tuner_type": "lora", "use_dora": True, "init_weights": "olora"}, None),
        ({**LORA, "tuner_type": "lora_llm", "use_dora": True}, NO_EFFECT),
        ({**LORA, "tuner_type": "full"}, NO_EFFECT),
        ({**LORA, **ALONE}, NO_EFFECT),
        ({**LORA, **SERVED, "use_dora": True}, None),  # servers are asked, on the first rank
        ({**SERVER, "vllm_enable_lora": True}, None),
    ]
    for changes, expected in cases:
        assert_says(preflight.check_model(arguments(**changes)), expected)


def test_vllm_before_0_28_needs_an_accelerator_for_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = "does not work without an accelerator with vLLM 0.27.1... or leave it out, here and on"
    for vllm, has_gpu, expected in (
        ("0.28.0", False, None),
        ("0.27.1", False, f"error: --vllm_enable_lora true: {old}"),
        ("0.27.1", True, None),
    ):
        monkeypatch.setattr(rules, "tried_packages", lambda vllm=vllm: {"vllm": vllm})
        monkeypatch.setattr(rules, "has_accelerator", lambda has_gpu=has_gpu: has_gpu)
        for asked in (LORA, {**SERVER, "vllm_enable_lora": True}):
            assert_says(preflight.check_model(arguments(**asked)), expected)
        assert_says(preflight.check_model(arguments()), None)


def test_an_adapter_that_is_trained_on_keeps_its_settings(tmp_path: Path) -> None:
    """vLLM reads the settings of the checkpoint, not the flags."""
    args = arguments(**LORA, adapters=[str(tmp_path)], init_weights="olora")
    lora = {"r": 8, "lora_alpha": 8, "target_modules": []}
    for has, expected in (
        ({"use_dora": True, "bias": "none"}, "vLLM does not yet support DoRA"),
        ({"init_lora_weights": "gaussian", "modules_to_save": None}, None),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**lora, **has}))
        expected = expected and f"{NOT_TAKEN} of {tmp_path}: {expected}"
        assert_says(preflight.check_model(args), expected)


def test_servers_say_whether_they_hold_adapters_apart() -> None:
    """The training may not give `--vllm_enable_lora` itself, or give it with other servers."""
    merged = rules.MERGED_TUNERS[0]
    for tuner, serves, trains, expected in (
        (merged, True, False, f"error: --tuner_type {merged}: does not go with"),
        ("lora_llm", True, True, None),
        (merged, False, False, None),
        ("full", False, True, NO_EFFECT),
    ):
        args = arguments(tuner_type=tuner, vllm_mode="server", vllm_enable_lora=trains)
        args.target_modules = ["q_proj"]
        args.vllm_client = SimpleNamespace(get_engine_type=lambda: None, enable_lora=serves)
        assert_says(preflight.check_model(args), expected)


# --- the process: other ranks, ports, devices, packages ---


def test_a_server_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        assert_says(preflight.check_server_process(0), None)
        monkeypatch.setenv(name, value)
    assert_says(
        preflight.check_server_process(0),
        "error: `swift rollout`: is one process, ...RANK, WORLD_SIZE, LOCAL_RANK. Start it with env"
        " -u RANK -u WORLD_SIZE -u LOCAL_RANK swift rollout",
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert_says(preflight.check_server_process(0), None)


def test_a_port_in_use_is_refused_and_old_connections_hold_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ms-swift would take the next port, where no trainer looks for the server."""
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        expected = f"error: --port {port}: is in use on this machine. ...--vllm_server_port"
        assert_says(preflight.check_server_process(port), expected)
        client.connect(("127.0.0.1", port))
        server.accept()[0].close()  # the server first
    args = arguments(port=find_free_port(port))
    assert args.port != port
    vars(args)["_given_port"] = port
    assert_says(preflight.check_server_process(port), None)
    monkeypatch.setattr(preflight, "check_model", lambda _: ())
    monkeypatch.setattr(RolloutArguments, "_check_device_count", lambda _: None)
    args._check_device_count()
    assert args.port == port


def test_sharding_and_sleep_need_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, `--fsdp` would train unsharded, with empty reference models on all ranks but one."""

    def check(expected: str | None, **changes: Any) -> None:
        assert_says(rules.check_arguments(arguments(**changes), []), expected)

    monkeypatch.setattr(rules, "has_accelerator", lambda: False)
    for name, value in (("deepspeed", "zero3"), ("fsdp", "fsdp2"), ("sleep_level", 1)):
        check(f"error: --{name} {value}: needs accelerators, and this machine", **{name: value})
    check(None, sleep_level=1, vllm_mode="server")  # ms-swift sets it to 0
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")  # accelerate is told to take it for one
    check(None, fsdp="fsdp2")
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    monkeypatch.setattr(rules, "has_accelerator", lambda: True)
    check(None, deepspeed="zero3")


def test_ranks_that_cannot_share_an_engine_and_a_missing_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ms-swift's trainer would refuse the ranks after it has loaded the model."""
    uneven = "error: --vllm_tensor_parallel_size 2: does not divide the 7 training ranks"
    missing = "error: The package vllm: is not installed. pip"
    cases = ((7, "colocate", uneven), (8, "colocate", None), (7, "server", None))
    for ranks, mode, expected in cases:
        monkeypatch.setattr(rules, "get_dist_setting", lambda ranks=ranks: (0, 0, ranks, ranks))
        args = arguments(vllm_tensor_parallel_size=2, vllm_mode=mode)
        assert_says(rules.check_arguments(args, []), expected)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else name)
    for changes, expected in (({}, missing), (SERVER, missing), (ALONE, None)):
        assert_says(rules.check_arguments(arguments(**changes), []), expected)


# --- data sets and models ---

STEPS, EPOCH = {"eval_strategy": "steps"}, {"eval_strategy": "epoch"}
ONE = {"num_generations_eval": 1}
FILE = {"val_dataset": ["v.jsonl"]}


def test_rows_that_fill_no_batch() -> None:
    """A batch has 8 prompts, and 4 in an evaluation."""
    for num_rows, num_eval, training, changes, expected in (
        (16, 8, STEPS, {}, None),
        (7, None, {}, {}, "error: --dataset rows.jsonl: 7 rows are fewer than the 8"),
        (16, 5, STEPS, {}, "warning: --split_dataset_ratio: 1 of 5 rows are left out of each eval"),
        (16, 5, STEPS, FILE, "warning: --val_dataset: 1 of 5 rows are left out"),
        (16, 6, STEPS, ONE, "error: "),
        (16, 8, STEPS, ONE, None),
        (16, 3, EPOCH, {}, "error: --split_dataset_ratio: 3 rows make no batch"),
        (16, 5, {}, {}, None),
        (16, 5, {}, FILE, "warning: --val_dataset v.jsonl: is never evaluated"),
    ):
        sizes = {"per_device_eval_batch_size": 8, "eval_strategy": "no"}
        args = arguments({**sizes, **training}, **{"num_generations": 2, **changes})
        rows = None if num_eval is None else range(num_eval)
        assert_says(rules.rules_of_data(args, range(num_rows), rows), expected)


def test_checkpoints_in_the_middle_of_a_round() -> None:
    """The gradients of two batches make an update. Such a checkpoint breaks R9."""
    for training, updates in (
        ({}, 0),
        ({"num_iterations": 2}, 2),
        ({"num_iterations": 2, "save_steps": 4}, 0),
        ({"num_iterations": 2, "save_strategy": "epoch"}, 0),
        ({"num_iterations": 2, "save_steps": 0.5}, 0),
        ({"steps_per_generation": 6}, 3),
    ):
        settings = {"steps_per_generation": 2, "save_steps": 1, **training}
        args = arguments(settings, full_determinism=True)
        expected = (
            f"warning: --full_determinism true: ...one rollout serves {updates} updates, and "
            f"--save_steps 1 saves between them...a multiple of {updates}."
        )
        assert_says(rules.rules_of_data(args, range(9), None), expected if updates else None)
        args.full_determinism = False
        assert_says(rules.rules_of_data(args, range(9), None), None)


QUESTION = [{"role": "user", "content": "Which digit?"}]
GOOD = [{"messages": QUESTION, "images": ["http://x"]}, {"messages": [], "images": []}]
BAD = [*GOOD, {"messages": QUESTION, "images": ["/none.png"]}]
TEXT: list[dict[str, Any]] = [{"messages": QUESTION}, {"messages": [], "videos": []}]
ANSWERED = {**GOOD[0], "messages": [*QUESTION, {"role": "assistant", "content": "7"}]}
UNREWARDED: dict[str, Any] = {"reward_funcs": []}


def test_data_sets() -> None:
    cases: list[tuple[Any, ...]] = [
        (GOOD, GOOD, {}, None),
        (BAD, GOOD, {}, "error: --dataset: the row"),
        (GOOD, BAD, {}, "error: --val_dataset: the row"),
        (BAD, None, {"truncation_strategy": "delete"}, "warning: --dataset: 1 of 3 rows cannot be"),
        (TEXT, None, {}, "warning: --dataset: no row holds `images`"),
        ([*TEXT, {"audios": ["http://x"]}], None, {}, None),  # one row is enough
        (TEXT, None, {"model_meta": SimpleNamespace(is_multimodal=False)}, None),
        ([GOOD[0], ANSWERED], None, {}, "warning: --dataset: 1 of 2 rows repeat an"),
        (GOOD, None, UNREWARDED, "error: --reward_funcs: is missing"),
        (GOOD, None, {**UNREWARDED, "gym_env": "maze"}, None),
        (GOOD, None, {**UNREWARDED, "teacher_model": "org/teacher"}, None),
        (GOOD, None, {**UNREWARDED, "vllm_mode": "server"}, None),  # with a gym, perhaps
        ([{**GOOD[0], "teacher_prompt": "?"}, GOOD[1]], None, UNREWARDED, None),
    ]
    for rows, eval_rows, changes, expected in cases:
        assert_says(preflight.check_datasets(arguments(**changes), rows, eval_rows), expected)


class Exact(ORM):
    def __call__(self, completions: list[str], solution: list[str], **_: Any) -> list[float]:
        return [float(c == s) for c, s in zip(completions, solution, strict=True)]


def test_rewards_are_tried_unless_a_scheduler_may_add_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(orms, "exact", Exact)
    for scheduler, expected in (
        (None, "...: --reward_funcs exact: ...solution..."),
        ("mine", None),
    ):
        args = arguments(reward_funcs=["exact"], multi_turn_scheduler=scheduler)
        assert_says(preflight.check_datasets(args, GOOD, None), expected)


def test_one_rank_of_a_machine_looks_at_rows(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders in a text would end the run in the first training forward."""
    args = arguments(model_dir=str(assets / "tiny_vlm"))
    typed = {"role": "user", "content": "<image><|vision_start|><|image_pad|><|vision_end|>Which?"}
    rows: Any = [*GOOD, {"messages": [typed], "images": ["http://x"]}]
    refused = "error: --dataset: the row that asks '<image><|vision_start|>...holds '<|image_pad|>'"
    for rank, expected in (("0", refused), ("1", None)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert_says(preflight.check_datasets(args, rows, None), expected)


CONFIG = {"method": "ngram", "num_speculative_tokens": 2}
SPECULATES = {"vllm_engine_kwargs": {"speculative_config": CONFIG}}
REFUSED = "error: --vllm_speculative_config {'method': 'ngram'"
NO_EXPERTS = "error: --router_replay_mode R3: expected a mixture of experts...; qwen3_vl has no"


def test_models() -> None:
    """A speculation cannot leave placeholders out: vLLM would refuse the first request."""
    cases: list[tuple[Any, ...]] = [
        ({"port": 8000, "vllm_speculative_config": CONFIG}, True, False, REFUSED),
        ({"port": 8000, "vllm_speculative_config": CONFIG}, False, False, None),
        ({"port": 8000}, True, False, None),
        (SPECULATES, True, False, REFUSED),
        (SPECULATES, False, False, None),
        ({"vllm_speculative_config": CONFIG}, True, False, None),  # a training does not read it
        (REPLAY, True, True, None),
        (REPLAY, True, False, NO_EXPERTS),
    ]
    for changes, is_multimodal, has_experts, expected in cases:
        args = arguments(**changes)
        args.model_meta = SimpleNamespace(is_multimodal=is_multimodal, model_type="qwen3_vl")
        args.model_info = SimpleNamespace(is_moe_model=has_experts)
        assert_says(rules.rules_of_model(args), expected)


def test_new_tokens_need_free_rows_of_the_model_on_disk(assets: Path) -> None:
    """The tiny model has 151,936 rows, and its tokenizer 151,665 tokens."""
    new = [f"<|new-{i}|>" for i in range(272)]
    refused = (
        "error: --new_special_tokens <|new-0|> ...: 272 new tokens do not fit ..."
        "(151936 rows, 151665 taken, 271 free)...Save a model that has them"
    )
    for tokens, changes, expected in (
        ([*new[1:], "<|endoftext|>"], {}, None),
        (new, {"use_vllm": False}, None),
        ([], {"model_dir": "nothing is read"}, None),
        (new, {}, refused),
        (new, {"port": 0}, refused),
    ):
        model = {"model_dir": str(assets / "tiny_vlm"), "new_special_tokens": tokens}
        assert_says(rules.rules_of_model(arguments(**{**model, **changes})), expected)
