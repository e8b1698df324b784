"""All lasting patches that only a machine without an accelerator needs."""

from __future__ import annotations

from swift_grpo_ext.cpu import pins
from swift_grpo_ext.upstream import patches
from swift_grpo_ext.upstream.patches import Moment, Patch

WORKERS = (Moment.ENGINE, Moment.WORKER)

CPU_PATCHES = [
    Patch(
        function="cpu.settings:count_no_devices",
        moments=(Moment.REGISTRATION,),
        symptom="`swift rollout` with several replicas finds too few devices.",
        upstream="ms-swift 4.6, arguments/rollout_args.py (`_check_device_count`) counts "
        "accelerators; replicas on CPU share cores and memory.",
        until="it counts none where there are none",
    ),
    Patch(
        function="cpu.settings:load_onto_ranks",
        moments=(Moment.TRAINING,),
        symptom="A resumed rank fails, as torch knows no location `cpu:0`.",
        upstream="transformers 4.57 to 5.16, trainer.py (`_load_optimizer_and_scheduler`).",
        until="transformers before 5.19 is no longer supported",
    ),
    Patch(
        function="cpu.gloo:send_through_gloo",
        moments=(Moment.TRAINER,),
        symptom="Weights never reach a server: without an accelerator NCCL cannot load, the "
        "broadcast sends nothing, and the server waits for ever; `synchronize()` calls "
        "torch.cuda all the same.",
        upstream="ms-swift 4.6, rlhf_trainers/vllm_client.py.",
        until="ms-swift has a communicator for CPU",
        needs=pins.NEEDED,
    ),
    Patch(
        function="cpu.gloo:receive_through_gloo",
        moments=(Moment.WORKER,),
        symptom="The same, at the end of a server's workers: no weights arrive.",
        upstream="ms-swift 4.6, pipelines/infer/rollout.py.",
        until="ms-swift has a communicator for CPU",
        needs=pins.NEEDED,
    ),
    Patch(
        function="cpu.engines:reload_colocated",
        moments=(Moment.TRAINER,),
        symptom="A colocated engine fails at the first weight update: its layers have packed "
        "their weights, which `load_weights` cannot fill.",
        upstream="vLLM 0.32, model_executor/layers/utils.py (`dispatch_cpu_unquantized_gemm`) "
        "packs weights and drops the originals; ms-swift 4.6, rlhf_trainers/rollout_mixin.py "
        "calls `load_weights`.",
        until="vLLM's `load_weights` fills packed layers",
    ),
    Patch(
        function="cpu.engines:serve_split_prompts",
        moments=WORKERS,
        symptom="`RuntimeError: CPU Generator does not use offset` ends the engine as soon as "
        "the prompt of a request with a seed does not fit into one step "
        "(`max_num_batched_tokens`).",
        upstream="vLLM 0.32, v1/worker/gpu_model_runner.py (`_bookkeeping_sync`) takes the noise "
        "of the thrown-away token back by moving the generator's offset, which CPU generators do "
        "not have.",
        until="vLLM takes the noise back on CPU too",
        needs=pins.SPLIT_PROMPTS,
    ),
    Patch(
        function="cpu.engines:name_shared_memory_by_run",
        moments=WORKERS,
        symptom="`create shm in SHMManager failed. errno: 17`, where two runs with colocated "
        "tensor parallelism start at the same moment, or one after another on the same port: the "
        "first one's memory stays in /dev/shm once its processes have ended (4 MB a rank).",
        upstream="vLLM 0.32, v1/worker/cpu_worker.py: the name is what follows the last colon of "
        "the rendezvous' address, `//` for every colocated engine's `env://`.",
        until="vLLM's name differs from run to run and does not outlast it",
        needs=pins.SHARED_MEMORY,
    ),
    Patch(
        function="cpu.engines:pack_experts_anew",
        moments=WORKERS,
        symptom="After its first weight update a mixture of experts samples from other weights "
        "than the trainer's (0.21 nats a token, the tiny Qwen3-VL-MoE), and nothing fails.",
        upstream="vLLM 0.32, model_executor/layers/fused_moe/unquantized_fused_moe_method.py "
        "packs experts for the CPU's kernel when they are loaded first, and never again.",
        until="vLLM packs the experts that an update brings",
        needs=pins.PACKED_EXPERTS,
    ),
    Patch(
        function="cpu.engines:keep_packed_convolutions",
        moments=WORKERS,
        symptom="After the first weight update the gated delta nets of Qwen3.5 keep a shorter "
        "history for their convolutions (1.07 nats a token, the tiny model), on CPUs with "
        "AVX512-BF16.",
        upstream="ms-swift 4.6, rlhf_trainers/utils.py (`finish_vllm_weight_reload`) has vLLM "
        "process all layers behind each update; vLLM 0.32, model_executor/layers/utils.py takes "
        "a convolution's packed weight, which has two dimensions, for a linear layer's, packs it "
        "again and drops it.",
        until="vLLM knows what it has packed",
        needs=pins.PACKED_CONVOLUTIONS,
    ),
    Patch(
        function="cpu.engines:keep_plain_weights",
        moments=WORKERS,
        symptom="Weights cannot be updated (`'Parameter' object has no attribute "
        "'weight_loader'`).",
        upstream="vLLM 0.11, model_executor/layers/utils.py packs layers and drops the "
        "originals, and `reload_weights` reads files only.",
        until="vLLM 0.11 is no longer supported",
        needs=pins.PLAIN_WEIGHTS,
    ),
    Patch(
        function="cpu.engines:leave_threads_unbound",
        moments=WORKERS,
        symptom="`list index out of range`, where several ranks have engines on a machine with "
        "one NUMA node.",
        upstream="vLLM 0.11, v1/worker/cpu_worker.py.",
        until="vLLM 0.11 is no longer supported",
        needs=pins.BOUND_THREADS,
    ),
    Patch(
        function="cpu.engines:return_routed_experts",
        moments=WORKERS,
        symptom="`AuxOutput Connector requires Model Runner V2` with "
        "`enable_return_routed_experts`.",
        upstream="vLLM 0.32, v1/worker/gpu/model_runner.py alone asks its connector what was "
        "captured; the runner of CPUs is a child of the first one.",
        until="CPUs have the second runner",
        needs=pins.ROUTED_EXPERTS,
    ),
]


def register() -> None:
    """Have these patches made at their moments, with all others."""
    patches.PATCHES.extend(each for each in CPU_PATCHES if each not in patches.PATCHES)
