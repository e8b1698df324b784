"""The one list of what we change in ms-swift, vLLM and transformers for the rest of a process.

`patch` is the only way to change them, and refuses what `PATCHES` does not list
(`tests/upstream/test_patches.py` finds assignments that go around it). What is changed for the time
of a block, or on an object that is ours, is not listed; nor are the places that ms-swift has for
plugins, which `registry.py` fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Names that are replaced together, and the reason."""

    names: tuple[str, ...]
    """Each as `Class.name` or `module.name`, the module without the packages around it."""

    made_in: str
    """Our module that replaces them."""

    symptom: str
    """It happens without the patch."""

    upstream: str
    """The package and release that was looked at, and the file to change."""

    until: str
    """The patch can go then."""


def patch(owner: ModuleType | type, **values: Any) -> None:
    """Replace attributes of an upstream module or class for the rest of this process.

    Raises:
        LookupError: `PATCHES` does not list one of them.
    """
    for name, value in values.items():
        listed = f"{owner.__name__.rpartition('.')[2]}.{name}"
        if listed not in NAMES:
            raise LookupError(f"{listed} is no name of {__name__}.PATCHES; list it there.")
        setattr(owner, name, value)


PATCHES = (
    # --- flags and engines ---
    Patch(
        names=(
            "BaseArguments._init_model_kwargs",
            "SwiftRLHF.args_class",
            "SwiftRolloutDeploy.args_class",
        ),
        made_in="command_line",
        symptom="`--external_plugins` are imported after argparse has put our flags among the "
        "left-over arguments, which are then refused.",
        upstream="ms-swift 4.6, arguments/base_args/base_args.py and pipelines/base.py",
        until="ms-swift imports plugins before it parses arguments.",
    ),
    Patch(
        names=("infer_engine.GRPOVllmEngine", "rollout.GRPOVllmEngine"),
        made_in="rollout/engine, server/routes",
        symptom="The trainer and `swift rollout` make ms-swift's engine, which knows no seeds of "
        "samples, whole groups, or stops by token.",
        upstream="ms-swift 4.6, rlhf_trainers/rollout_mixin.py and pipelines/infer/rollout.py",
        until="ms-swift lets a plugin name the engine's class.",
    ),
    # --- `swift rollout` ---
    Patch(
        names=(
            "SwiftRolloutDeploy.infer",
            "SwiftRolloutDeploy.get_engine_type",
            "SwiftRolloutDeploy.get_world_size",
            "SwiftRolloutDeploy.get_model_state_keys",
            "SwiftRolloutDeploy.init_communicator",
            "SwiftRolloutDeploy.close_communicator",
            "SwiftRolloutDeploy.process_weights_after_loading",
            "SwiftRolloutDeploy.reset_prefix_cache",
            "SwiftRolloutDeploy.reset_encoder_cache",
            "SwiftRolloutDeploy.reset_mm_cache",
            "SwiftRolloutDeploy._register_rl_rollout_app",
        ),
        made_in="server/routes",
        symptom="The server cuts a batch into contiguous slices of equally many requests, whatever "
        "they cost. It blocks its event loop, and with it `/health`, while replicas work, without "
        "a bound. It says nothing of its plugin, of replicas that have ended, or of the weights "
        "that they have loaded.",
        upstream="ms-swift 4.6, pipelines/infer/rollout.py (`SwiftRolloutDeploy`)",
        until="ms-swift has hooks for dispatching, and for what a server says of itself.",
    ),
    Patch(
        names=(
            "rollout.llm_worker",
            "rollout.llm_worker_entry",
            "SwiftRolloutDeploy._start_data_parallel_workers",
        ),
        made_in="server/replicas",
        symptom="After one lost or late reply a replica answers every request with the reply "
        "before. One that was killed answers with an error while `/health` says that all is well; "
        "one that hangs is waited for without limit. What is lost is lost for the run.",
        upstream="ms-swift 4.6, pipelines/infer/rollout.py: a pipe and a process for each replica "
        "(one for all with the async engine), whose messages have no numbers",
        until="ms-swift pairs messages with replies, and watches its workers.",
    ),
    Patch(
        names=("SwiftRolloutDeploy._require_api_key",),
        made_in="server/routes",
        symptom="`--api_key` is printed with the command line and the arguments, and no training "
        "can use such a server: ms-swift's client sends no header.",
        upstream="ms-swift 4.6, pipelines/infer/rollout.py and rlhf_trainers/vllm_client.py",
        until="ms-swift's client sends a key, and its log leaves it out.",
    ),
    Patch(
        names=("vision_utils.requests", "vision_utils._load_audio_librosa"),
        made_in="media/paths",
        symptom="A public address may send a replica on to a private one, and a picture of 20 kB "
        "may become gigabytes.",
        upstream="ms-swift 4.6, template/vision_utils.py; pipelines/infer/rollout.py asks no rule",
        until="`swift rollout` asks `SafeUrlFetcher` for each hop of a fetch.",
    ),
    # --- weight updates without an accelerator ---
    Patch(
        names=(
            "vllm_client._broadcast_tensors_for_vllm_weight_sync",
            "vllm_client.broadcast_tensor_for_vllm_weight_sync",
            "vllm_client.synchronize",
            "rollout.broadcast_tensor_for_vllm_weight_sync",
            "rollout.synchronize",
        ),
        made_in="upstream/weight_sync, weights/receiver",
        symptom="NCCL cannot load, so that the broadcast sends nothing and the server waits for "
        "ever; `synchronize()` calls torch.cuda all the same.",
        upstream="ms-swift 4.6, rlhf_trainers/vllm_client.py and pipelines/infer/rollout.py",
        until="ms-swift has a communicator for CPU.",
    ),
    # --- vLLM on CPU ---
    Patch(
        names=("CPUModelRunner._sample", "CPUModelRunner._bookkeeping_sync"),
        made_in="upstream/vllm_repairs",
        symptom="`RuntimeError: CPU Generator does not use offset` ends the engine as soon as the "
        "prompt of a request with a seed does not fit into one step (`max_num_batched_tokens`).",
        upstream="vLLM 0.32, v1/worker/gpu_model_runner.py (`_bookkeeping_sync`): a step that "
        "computes a part of a prompt samples a token, throws it away, and takes the noise back by "
        "moving the generator's offset, which torch's CPU generators do not have",
        until="vLLM takes the noise back on CPU too.",
    ),
    Patch(
        names=("_CPUSHMDistributed.make_group_name",),
        made_in="upstream/vllm_repairs",
        symptom="`create shm in SHMManager failed. errno: 17`, where two runs with colocated "
        "tensor parallelism start at the same moment.",
        upstream="vLLM 0.32, v1/worker/cpu_worker.py: the memory's name is what follows the last "
        "colon of the rendezvous' address, `//` for every colocated engine's `env://`",
        until="vLLM's name differs from run to run.",
    ),
    Patch(
        names=("UnquantizedFusedMoEMethod._setup_kernel",),
        made_in="upstream/vllm_repairs",
        symptom="After its first weight update a mixture of experts samples from other weights "
        "than the trainer's (0.21 nats a token, the tiny Qwen3-VL-MoE), and nothing fails.",
        upstream="vLLM 0.32, model_executor/layers/fused_moe/unquantized_fused_moe_method.py: "
        "experts are packed for the CPU's kernel when they are loaded first, and never again",
        until="vLLM packs the experts that an update brings.",
    ),
    Patch(
        names=("utils.dispatch_cpu_unquantized_gemm",),
        made_in="upstream/vllm_repairs",
        symptom="Weights cannot be updated: `'Parameter' object has no attribute 'weight_loader'`.",
        upstream="vLLM 0.11, model_executor/layers/utils.py: layers are packed, the originals "
        "dropped, and `reload_weights` reads files only",
        until="vLLM 0.11 is supported no more.",
    ),
    Patch(
        names=("CPUWorker._get_autobind_cpu_ids",),
        made_in="upstream/vllm_repairs",
        symptom="`list index out of range`, where several ranks have engines on a machine with one "
        "NUMA node.",
        upstream="vLLM 0.11, v1/worker/cpu_worker.py",
        until="vLLM 0.11 is supported no more.",
    ),
    # --- vLLM anywhere ---
    Patch(
        names=("Processor.process_inputs",),
        made_in="upstream/vllm_repairs",
        symptom="Rollouts of a model whose vision tower is trained see images as the tower of an "
        "earlier update saw them (0.06 nats a token, the tiny model; found by the canary).",
        upstream="vLLM 0.11, v1/core/encoder_cache_manager.py keeps what its tower made of an "
        "image; ms-swift resets that from vLLM 0.16 on",
        until="vLLM before 0.16 is supported no more.",
    ),
    Patch(
        names=(
            "processor.get_processor",
            "processor.cached_get_processor",
            "ProcessorMixin._load_tokenizer_from_pretrained",
        ),
        made_in="upstream/vllm_repairs",
        symptom="An engine starts a second later, and its first request with an image waits for "
        "17 s (151,936 tokens of Qwen2.5-VL, one core): vLLM hands its tokenizer to a processor, "
        "which deep-copies its arguments five times, loads a tokenizer of its own, and throws all "
        "that away; a copy of vLLM's pool of tokenizers makes three tokenizers.",
        upstream="vLLM 0.32, transformers_utils/processor.py and tokenizers/hf.py; transformers "
        "5.19, processing_utils.py and tokenization_utils_base.py",
        until="vLLM or transformers copies and loads no tokenizer there.",
    ),
    # --- templates ---
    Patch(
        names=("vision_utils.load_vllm_video",),
        made_in="upstream/encoding",
        symptom="`No module named 'swift.vision_utils'` at the first video, with InternVL and "
        "others whose template leaves videos to the base class.",
        upstream="ms-swift 4.6, template/base.py (`replace_tag`); the module is "
        "template/vision_utils.py, and reads other frames there than training does",
        until="ms-swift finds its own module, and reads alike.",
    ),
)

NAMES = frozenset(name for entry in PATCHES for name in entry.names)
