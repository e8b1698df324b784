"""Bad input is refused by name before a model is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from packaging.version import Version
from vllm import SamplingParams

from swift_grpo_ext.checks import preflight
from swift_grpo_ext.checks.finding import Finding, enforce, error, note, ok, warning
from swift_grpo_ext.rollout.placeholders import logit_bias
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE
from swift_grpo_ext.upstream.contract import TRIED
from tests.arguments import command_line_arguments, training_arguments

QUESTION = [{"role": "user", "content": "Which digit?"}]
GIB = 1024**3
GIVEN: dict[str, Any] = {
    **{"model": "org/name", "tuner_type": "full", "num_generations": 8, "temperature": 1.0},
    **{"dataset": ["rows.jsonl"], "model_meta": SimpleNamespace(is_multimodal=False)},
}
LORA = {"tuner_type": "lora", "vllm_enable_lora": True}


def arguments(**changes: Any) -> Any:
    """Of `swift rlhf`; with a `port`, of `swift rollout`. No model of this machine's is named."""
    if "port" in changes:
        return command_line_arguments("rollout", **{"model": "org/name", **changes})
    args = command_line_arguments("rlhf", **{**GIVEN, **changes})
    args.training_args = training_arguments(generation_batch_size=16)
    return args


@pytest.fixture(autouse=True)
def newest_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same findings beside each release."""
    monkeypatch.setattr(preflight, "swift_version", lambda: TRIED["ms-swift"][-1])
    monkeypatch.setattr(preflight, "_vllm_version", lambda: Version(TRIED["vllm"][-1]))


def said(findings: Iterable[Finding]) -> list[str]:
    return [f"{finding.level}: {finding.sentence}" for finding in findings]


def only(findings: Iterable[Finding]) -> str:
    [sentence] = said(findings)
    return sentence


# --- findings ---


def test_the_first_error_is_raised_after_the_warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("swift"), "propagate", True)
    found = [ok("a", "holds"), note("b", "is worth knowing"), warning("seed", "is odd.", "Leave.")]
    enforce(found)
    assert [record.getMessage() for record in caplog.records] == ["--seed: is odd. Leave."]
    two = [*found, error("model /none", "is no folder.", "Give one."), error("b", "is wrong.")]
    with pytest.raises(ValueError, match=r"^--model /none: is no folder\. Give one\.$"):
        enforce(two)
    enforce([])


def test_what_is_no_flag_gets_no_dashes() -> None:
    names = ("MASTER_PORT 7", "`swift rollout`", "seed", "vLLM")
    sentences = ["MASTER_PORT 7: x", "`swift rollout`: x", "--seed: x", "--vLLM: x"]
    assert [error(name, "x").sentence for name in names] == sentences
    assert str(warning("seed", "is odd.", "Leave.")) == "warning: seed: is odd. Leave."
    assert str(error("seed", "is odd.")) == "error: seed: is odd."


# --- arguments ---


def test_good_arguments_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["model", "seed", "use_vllm"]
    assert said(preflight.check_arguments(arguments(), given)) == []
    assert said(preflight.check_arguments(arguments(port=8000), given)) == []


@pytest.mark.parametrize(
    ("changes", "given", "expected"),
    [
        ({"rollout_timeout": 0.0}, [], "error: --rollout_timeout 0.0: expected a number of sec"),
        ({"model": "/none"}, [], "error: --model /none: there is no such directory."),
        ({**LORA, "use_dora": True}, [], "error: --use_dora true: does not go with --vllm_en"),
        ({"resume_from_checkpoint": "/none"}, [], "error: --resume_from_checkpoint /none: is no"),
        ({"seed": -1}, [], "error: --seed -1: expected 0 or more"),
        ({}, ["diversity_action"], "warning: --diversity_action: is read by nothing"),
        ({"port": 1}, ["logits_shim", "stop_token_ids"], "warning: --stop_token_ids: is ignored"),
    ],
)
def test_arguments_are_looked_at_by_every_check(
    changes: dict[str, Any], given: list[str], expected: str
) -> None:
    assert only(preflight.check_arguments(arguments(**changes), given)).startswith(expected)


def test_a_range_is_named_apart_from_its_text() -> None:
    [finding] = preflight.check_ranges(arguments(rollout_timeout=0.0))
    assert finding == error("rollout_timeout 0.0", "expected a number of seconds above 0.")
    assert said(preflight.check_ranges(arguments())) == []


@pytest.mark.parametrize("model", ["/none/model", "./none", "~/none", "a/b/c"])
def test_a_missing_model_directory(model: str) -> None:
    sentence = only(preflight.check_model(arguments(model=model)))
    assert sentence.startswith(f"error: --model {model}: there is no such directory. Give")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    args = arguments(model=str(tmp_path))
    expected = f"error: --model {tmp_path}: the directory holds no config.json. Give"
    assert only(preflight.check_model(args)).startswith(expected)
    (tmp_path / "config.json").write_text("{}")
    assert said(preflight.check_model(args)) == []


def test_no_model() -> None:
    assert only(preflight.check_model(arguments(model=None))).startswith("error: --model: is miss")


def test_hub_ids_are_left_to_ms_swift() -> None:
    assert said(preflight.check_model(arguments(model="Qwen/Qwen2.5-VL-7B-Instruct"))) == []


def test_vllm_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", asked.append)
    training = only(preflight.check_vllm(arguments()))
    assert training.startswith("error: --use_vllm true: needs vLLM, which is not installed. pip")
    server = only(preflight.check_vllm(arguments(port=8000)))
    assert server.startswith("error: `swift rollout`: needs vLLM")
    assert asked == ["vllm", "vllm"]
    assert said(preflight.check_vllm(arguments(use_vllm=False))) == []


def test_what_adapters_in_the_engine_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a vLLM that can reload weights under them, and with any ms-swift 4.6."""

    def look(*, enabled: bool) -> list[str]:
        return said(preflight.check_adapters(arguments(vllm_enable_lora=enabled)))

    monkeypatch.setattr(preflight, "swift_version", lambda: "4.6.0")
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    assert look(enabled=True) == []
    monkeypatch.setattr(preflight, "_vllm_version", lambda: Version("0.27.1"))
    [sentence] = look(enabled=True)
    assert "true: does not work without an accelerator with vLLM 0.27.1" in sentence
    assert "Install vLLM 0.28 or newer, or leave it out, here and on the other side" in sentence
    assert look(enabled=False) == []
    monkeypatch.setattr(preflight, "has_accelerator", lambda: True)
    assert look(enabled=True) == []
    monkeypatch.setattr(preflight, "swift_version", lambda: "4.5.3")
    assert look(enabled=True) == []
    monkeypatch.setattr(preflight, "_vllm_version", lambda: Version("0.28.0"))
    [sentence] = look(enabled=True)
    assert "true: does not work with ms-swift 4.5.3" in sentence
    assert "Install ms-swift 4.6, or" in sentence
    assert look(enabled=False) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_dora": True}, "--use_dora true"),
        ({"modules_to_save": ["a", "b"]}, "--modules_to_save a b"),
        ({"lora_bias": "all"}, "--lora_bias all"),
    ],
)
def test_adapters_that_vllm_does_not_know(changes: dict[str, Any], name: str) -> None:
    """As `tests/weights/test_adapters.py` sees vLLM refuse them; merged, they are no concern."""
    assert said(preflight.check_adapters(arguments(**LORA))) == []
    sentence = only(preflight.check_adapters(arguments(**LORA, **changes)))
    assert sentence.startswith(f"error: {name}: does not go with --vllm_enable_lora true: vLLM")
    for other in ({"vllm_enable_lora": False}, {"tuner_type": "full"}):
        assert said(preflight.check_adapters(arguments(**{**LORA, **changes, **other}))) == []
    assert said(preflight.check_adapters(arguments(**LORA, port=8000))) == []


def test_a_stream_cannot_repeat_prompts() -> None:
    """A server reads no data set."""
    for changes in ({}, {"streaming": False}, {"streaming": True, "port": 8000}):
        assert said(preflight.check_streaming(arguments(**changes))) == []
    sentence = only(preflight.check_arguments(arguments(streaming=True), []))
    assert sentence.startswith("error: --streaming true: expected false. A stream cannot repeat")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 0}, None),
        ({"seed": -1}, "error: --seed -1: expected 0 or more"),
        ({"seed": -1, "rollout_seed_mode": "engine"}, None),
        ({"num_generations": MAX_GROUP_SIZE}, None),
        (
            {"num_generations": MAX_GROUP_SIZE + 1},
            "--num_generations 16385: expected at most 16384",
        ),
        ({"num_generations_eval": 2**15}, "--num_generations_eval 32768: expected at most 16384"),
        ({"num_generations_eval": None}, None),
    ],
)
def test_what_the_seed_rule_takes(changes: dict[str, Any], message: str | None) -> None:
    found = said(preflight.check_seed(arguments(**changes)))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_a_teachers_server_knows_no_temperature() -> None:
    server = {"teacher_model_server": "http://teacher:8000"}
    assert said(preflight.check_arguments(arguments(temperature=1.0, **server), [])) == []
    assert said(preflight.check_arguments(arguments(temperature=0.9), [])) == []
    found = only(preflight.check_arguments(arguments(temperature=0.9, **server), []))
    assert found == (
        "warning: --teacher_model_server: its log-probabilities are those of temperature 1, the "
        "policy's those of --temperature 0.9: a teacher equal to the policy would still pull. Set "
        "--temperature 1, or load the teacher here (--teacher_model)."
    )


def test_a_server_says_what_the_trainer_decides() -> None:
    every = [*preflight.TRAINER_FLAGS, "rollout_timeout", "rollout_restarts", "port", "seed"]
    assert said(preflight.check_ignored_flags(arguments(), every)) == []
    found = said(preflight.check_ignored_flags(arguments(port=8000), every))
    assert found == [
        f"warning: --{name}: is ignored by `swift rollout`; `swift rlhf` decides. Leave it out."
        for name in (
            *("rollout_seed_mode", "rollout_mismatch", "media_cache_gb", "encoder_cache_gb"),
            "sample_log",
            *("sample_log_gb", "stop_token_ids", "include_stop_str_in_output"),
        )
    ]


def test_engine_settings_that_trainings_do_not_read() -> None:
    """ms-swift 4.6 parses them for `swift rlhf` too, and says nothing."""
    given = ["seed", *preflight.OF_SERVERS, "vllm_enforce_eager"]
    assert said(preflight.check_ignored_flags(arguments(port=8000), given)) == []
    assert said(preflight.check_ignored_flags(arguments(), given)) == [
        f"warning: --{name}: is read by nothing in `swift rlhf`: ms-swift gives it to servers "
        "alone. Leave it out, or give it to `swift rollout`."
        for name in preflight.OF_SERVERS
    ]
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

    read = inspect.getsource(RolloutTrainerMixin)
    assert [name for name in preflight.OF_SERVERS if f"args.{name}" in read] == []


def test_flags_of_a_monitor_that_is_not_there() -> None:
    given = ["diversity_action", "diversity_alarm_p", "seed"]
    watched = arguments(callbacks=["early_stop", "diversity"])
    assert said(preflight.check_ignored_flags(watched, given)) == []
    assert said(preflight.check_ignored_flags(arguments(), ["seed"])) == []
    for callbacks in (None, [], ["early_stop"]):
        found = said(preflight.check_ignored_flags(arguments(callbacks=callbacks), given))
        assert found == [
            f"warning: --{name}: is read by nothing without --callbacks diversity."
            for name in given[:2]
        ]


# --- the process: other ranks, ports ---


@contextmanager
def taken_port(port: int = 0) -> Iterator[int]:
    """A port on which somebody listens: this test, or whoever has it already."""
    with socket.socket() as taken:
        with suppress(OSError):
            taken.bind(("", port))
            taken.listen()
        yield port or taken.getsockname()[1]


def test_a_server_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        assert said(preflight.check_process(arguments(port=0))) == []
        monkeypatch.setenv(name, value)
    sentence = only(preflight.check_process(arguments(port=0)))
    assert "`swift rollout`: found RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 in its" in sentence
    assert "env -u RANK -u WORLD_SIZE -u LOCAL_RANK swift rollout" in sentence
    assert said(preflight.check_process(arguments())) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert said(preflight.check_process(arguments(port=0))) == []


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with taken_port() as port:
        sentence = only(preflight.check_process(arguments(port=port)))
        assert waits == []  # what listens is not waited for
        assert sentence.startswith(f"error: --port {port}: is in use on this machine.")
        assert "--vllm_server_port" in sentence
    assert said(preflight.check_process(arguments(port=port))) == []


def test_old_connections_to_a_port_are_waited_for() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        accepted, _ = server.accept()
        server.close()
        end = Timer(0.5, lambda: (client.close(), accepted.close()))  # the client first
        begin = time.monotonic()
        end.start()
        assert said(preflight.check_port(arguments(port=port))) == []
        assert time.monotonic() - begin > 0.5


def test_connections_that_stay_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    infos: list[str] = []
    monkeypatch.setattr(preflight, "port_is_free", lambda port, reuse=True: reuse)
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(preflight.logger, "info", infos.append)
    assert "--port 7: is in use" in only(preflight.check_port(arguments(port=7)))
    assert waits == [1] * 75
    assert len(infos) == 1
    assert "old connections to port 7" in infos[0]


def test_a_single_process_gets_a_free_port_where_none_was_named() -> None:
    """In processes of their own: what one began with cannot be changed later."""
    code = (
        "import os\n"
        "from swift.utils import set_default_ddp_config\n"
        "from swift_grpo_ext.checks import preflight\n"
        "set_default_ddp_config()\n"
        "preflight.choose_master_port()\n"
        "print(os.environ['MASTER_PORT'], [*preflight.check_master_port()])\n"
    )
    launchers = ("MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    env = {name: value for name, value in os.environ.items() if name not in launchers}

    def port_and_findings(**named: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env | named, stdout=subprocess.PIPE, check=True
        )
        return done.stdout.decode().splitlines()[-1].split(maxsplit=1)

    with taken_port(29500):
        port, findings = port_and_findings()
        assert port != "29500"
        assert findings == "[]"
        port, findings = port_and_findings(MASTER_PORT="29500")
        assert port == "29500"
        assert "MASTER_PORT 29500" in findings


def test_torchruns_port_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    preflight.choose_master_port()
    assert os.environ["MASTER_PORT"] == "29500"


def test_the_port_of_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with taken_port() as port:
        assert said(preflight.check_process(arguments())) == []
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert said(preflight.check_process(arguments())) == []
        monkeypatch.setenv("WORLD_SIZE", "1")
        sentence = only(preflight.check_process(arguments()))
        assert sentence.startswith(f"error: MASTER_PORT {port}: is in use on this machine")
        assert sentence.endswith("to a free port, or leave it out.")
        assert "MASTER_PORT" in only(preflight.check_process(arguments(port=0)))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun listens there itself
        assert said(preflight.check_process(arguments())) == []
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert said(preflight.check_process(arguments())) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert said(preflight.check_process(arguments())) == []


def test_a_tied_head_is_not_trained_apart(tmp_path: Path) -> None:
    """vLLM has one weight for embedding and head."""
    config = tmp_path / "config.json"
    config.write_text('{"tie_word_embeddings": true}')
    own = {"model": str(tmp_path), "tuner_type": "lora", "modules_to_save": ["merger", "lm_head"]}
    sentence = only(preflight.check_arguments(arguments(**own), []))
    assert sentence.startswith("error: --modules_to_save lm_head: embedding and head of ")
    assert "--tuner_type full" in sentence
    embedding = {**own, "modules_to_save": ["all-embedding"]}
    assert "--modules_to_save all-embedding:" in only(
        preflight.check_arguments(arguments(**embedding), [])
    )
    for other in (
        {"modules_to_save": ["merger"]},
        {"use_vllm": False},
        {"tuner_type": "full"},
    ):
        assert said(preflight.check_arguments(arguments(**{**own, **other}), [])) == []
    assert said(preflight.check_arguments(arguments(port=8000, model=str(tmp_path)), [])) == []
    config.write_text('{"tie_word_embeddings": false}')
    assert said(preflight.check_arguments(arguments(**own), [])) == []
    assert said(preflight.check_arguments(arguments(), [])) == []


def test_speculation_cannot_leave_placeholders_out() -> None:
    """vLLM would refuse the first request."""
    parameters = SamplingParams(logit_bias=logit_bias([7]))
    if hasattr(parameters, "_validate_spec_decode"):  # not vLLM 0.11
        # A `ValueError` in vLLM 0.23, an error of vLLM's own since.
        with pytest.raises(Exception, match="logit_bias sampling parameters are not yet"):
            parameters._validate_spec_decode(SimpleNamespace())
    config = {"method": "ngram", "num_speculative_tokens": 2}
    meta = SimpleNamespace(is_multimodal=True)
    of_server = arguments(port=8000, vllm_speculative_config=config, model_meta=meta)
    sentence = only(preflight.check_speculation(of_server))
    assert sentence.startswith("error: --vllm_speculative_config {'method': 'ngram'")
    in_kwargs = {"speculative_config": config}
    for args in (of_server, arguments(vllm_engine_kwargs=in_kwargs, model_meta=meta)):
        assert only(preflight.check_speculation(args)).startswith(
            "error: --vllm_speculative_config"
        )
        args.model_meta = SimpleNamespace(is_multimodal=False)
        assert said(preflight.check_speculation(args)) == []
    without = arguments(port=8000, vllm_speculative_config=None, vllm_engine_kwargs=None)
    assert said(preflight.check_speculation(without)) == []
    unread = arguments(vllm_speculative_config=config)  # of a training: see OF_SERVERS
    assert said(preflight.check_speculation(unread)) == []


def test_sharding_and_sleep_need_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, `--fsdp` would train unsharded, with empty reference models on all ranks but one."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    for setting in ({"deepspeed": "zero3"}, {"fsdp": "fsdp2"}, {"sleep_level": 1}):
        [(name, value)] = setting.items()
        sentence = only(preflight.check_process(arguments(**setting)))
        assert sentence.startswith(f"error: --{name} {value}: needs accelerators, of which this")
        assert said(preflight.check_process(arguments(**{name: None}))) == []
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")  # accelerate is told to take it for one
    assert said(preflight.check_process(arguments(fsdp="fsdp2"))) == []
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    monkeypatch.setattr(preflight, "has_accelerator", lambda: True)
    assert said(preflight.check_process(arguments(deepspeed="zero3"))) == []


# --- data ---


def test_fewer_rows_than_prompts_of_a_batch() -> None:
    rows = [{"images": []}]
    sentence = only(preflight.check_datasets(arguments(dataset=["a", "b"]), rows, None))
    assert "--dataset a b: 1 rows are fewer than the 2 prompts of one" in sentence
    assert "batch (16 samples / --num_generations 8)" in sentence
    rows.append({"images": [], "messages": QUESTION})  # type: ignore[dict-item]
    assert said(preflight.check_datasets(arguments(), rows, None)) == []


def test_both_data_sets_are_looked_at() -> None:
    good = [{"messages": QUESTION, "images": []}, {"messages": [], "images": []}]
    bad = [*good, {"messages": QUESTION, "images": ["/none.png"]}]
    train = only(preflight.check_datasets(arguments(), bad, good))
    assert "--dataset: in the row" in train
    validation = only(preflight.check_datasets(arguments(), good, bad))
    assert "--val_dataset: in the row" in validation
    for strategy, level in (("delete", "warning"), ("raise", "warning"), ("left", "error")):
        args = arguments(truncation_strategy=strategy)
        assert only(preflight.check_datasets(args, bad, None)).startswith(level)


def test_images_are_expected_by_a_model_that_takes_them() -> None:
    rows = [{"messages": QUESTION}, {"messages": []}]

    def look(*, is_multimodal: bool) -> list[str]:
        args = arguments(model_meta=SimpleNamespace(is_multimodal=is_multimodal))
        return said(preflight.check_datasets(args, rows, None))

    assert look(is_multimodal=True)[0].startswith("warning: --dataset: no row holds `images`")
    assert look(is_multimodal=False) == []


def test_rows_that_stand_twice() -> None:
    rows = [{"images": [], "messages": QUESTION}] * 2
    sentence = only(preflight.check_datasets(arguments(), rows, None))
    assert sentence.startswith("warning: --dataset: 1 of 2 rows repeat a prompt")


def test_a_stream_has_no_length_to_check() -> None:
    assert said(preflight.check_datasets(arguments(), iter([]), iter([]))) == []


# --- memory ---


def weights_of(folder: Path, size: int) -> None:
    with (folder / "model.safetensors").open("wb") as f:
        f.truncate(size)  # a sparse file


def free_memory(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


@pytest.mark.parametrize(
    ("changes", "copies", "other"),
    [
        ({}, 5, 3.5),
        ({"vllm_mode": "server"}, 4, 1.0),
        ({"use_vllm": False}, 4, 1.0),
        ({"tuner_type": "lora"}, 2, 3.5),
    ],
)
def test_too_little_memory(
    changes: dict[str, Any],
    copies: int,
    other: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights_of(tmp_path, 2 * GIB)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    monkeypatch.setattr(preflight, "_resident_bytes", lambda: 1000)
    args = arguments(model=str(tmp_path), local_world_size=2, **changes)
    needed = 2 * (copies * 2 * GIB + other * GIB - 1000)

    free_memory(monkeypatch, needed - 1)
    sentence = only(preflight.check_training_memory(args))
    assert f"2 training rank(s) on this machine need at least {needed / GIB:.1f} GiB" in sentence
    assert f"(each {copies} x 2.0 GiB of weights and optimizer, {other:g} GiB for lib" in sentence
    assert f"and {needed / GIB:.1f} GiB are free" in sentence
    free_memory(monkeypatch, needed)
    assert said(preflight.check_training_memory(args)) == []
    free_memory(monkeypatch, 0)
    one = arguments(model=str(tmp_path), local_world_size=0, **changes)
    assert "1 training rank" in only(preflight.check_training_memory(one))
    monkeypatch.setattr(preflight, "has_accelerator", lambda: True)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")  # which nobody sets where there is a GPU
    assert said(preflight.check_training_memory(args)) == []


def test_too_little_memory_for_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_of(tmp_path, GIB)
    monkeypatch.setattr(preflight, "has_accelerator", lambda: False)
    kwargs = {"kv_cache_memory_bytes": GIB // 2}
    args = arguments(model=str(tmp_path), vllm_data_parallel_size=3, vllm_engine_kwargs=kwargs)
    needed = 3 * (1 + 0.5 + 1.5) * GIB
    free_memory(monkeypatch, needed - 1)
    sentence = only(preflight.check_server_memory(args))
    assert "3 replica(s) on this machine need" in sentence
    assert "(each 1 x 1.0 GiB of weights and optimizer, 2 GiB for libraries" in sentence
    assert "fewer replicas (--vllm_data_parallel_size)" in sentence
    free_memory(monkeypatch, needed)
    assert said(preflight.check_server_memory(args)) == []


def test_the_weights_of_a_model(tmp_path: Path) -> None:
    assert preflight._weight_bytes(tmp_path) == 0
    weights_of(tmp_path, 5)
    (tmp_path / "adapter.safetensors").write_bytes(b"1234567")
    assert preflight._weight_bytes(tmp_path) == 12
    index = {"metadata": {"total_size": 99}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert preflight._weight_bytes(tmp_path) == 99


def test_what_a_process_holds_is_its_resident_memory() -> None:
    assert preflight._resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
