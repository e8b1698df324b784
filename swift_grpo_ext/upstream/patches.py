"""Every change that we make to ms-swift, vLLM, transformers or torch, and the one way to make it.

`PATCHES` lists what lasts for the rest of a process, each with what goes wrong without it, where
upstream's cause lies, and when it can go. `apply(moment)` makes those of a moment, once. Functions
are named, not imported: each stands in the room that it belongs to, and imports what it changes.

`patch` is what these functions change upstream with; it refuses what no table of `pins.py` lists.
`replaced` and `wrapped` change something for a block. `tests/upstream/test_patches.py` finds what
goes around them. The places that ms-swift has for plugins need no patch: `registry.py` fills them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, wraps
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import Pin, mismatch


class Moment(Enum):
    """When patches are made."""

    REGISTRATION = "ms-swift has imported the plugin"
    TRAINING = "a training's arguments are complete, and no model is loaded yet"
    DETERMINISM = "the same, with --full_determinism true"
    TRAINER = "a trainer is about to be made; it may be connected to servers"
    ENGINE = "a process is about to make an engine"
    REPLICA = "the same, of a server's replica"
    WORKER = "a process holds a worker of an engine, and perhaps no engine"
    SERVER = "`swift rollout` is loaded, and has made no server yet"
    CALLED = "the module that has the object, or the setting, calls the function itself"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One lasting change of upstream."""

    function: str
    """The function that makes it, `module:name` within `swift_grpo_ext`."""

    moments: tuple[Moment, ...]
    """It is made at the first of them that comes."""

    symptom: str
    """What goes wrong without it."""

    upstream: str
    """Release and file of the cause."""

    until: str
    """When it can go: the end of a sentence that begins with "Can go when"."""

    needs: tuple[Pin, ...] = ()
    """A release that lacks one of these names has another cause, or none: it is left as it is."""

    @property
    def name(self) -> str:
        return self.function.partition(":")[2]


PATCHES = [
    Patch(
        function="command_line:extend_arguments",
        moments=(Moment.REGISTRATION,),
        symptom="ms-swift refuses a plugin's flags as left-over arguments.",
        upstream="ms-swift 4.6, arguments/base_args/base_args.py and pipelines/base.py: plugins "
        "are imported once arguments are parsed.",
        until="ms-swift imports plugins before it parses arguments",
    ),
    # --- models and rows ---
    Patch(
        function="upstream.models:repair_gemma4",
        moments=(Moment.TRAINING,),
        symptom="`'tuple' object has no attribute 'to'` at the first image of Gemma 4, in "
        "training; `num_frames_per_video is required` at the first video. Where images look both "
        "ways (`use_bidirectional_attention: vision`), they do so in all layers, and not in "
        "those with windows only: the trained policy is none that vLLM, or transformers, knows.",
        upstream="ms-swift 4.6, model/models/gemma.py (`_patch_gemma4_forward`) was written "
        "against transformers 5.6; 5.19 (models/gemma4 and gemma4_unified) splits features by "
        "image and by video, and makes masks in `create_masks_for_vision_model`.",
        until="ms-swift does so, or leaves the forward to transformers",
        needs=pins.GEMMA4_FORWARD,
    ),
    Patch(
        function="upstream.models:place_glm_ocr_images",
        moments=(Moment.TRAINING,),
        symptom="Log-probabilities of rollout and training lie 0.2 nats apart (the tiny "
        "GLM-OCR), as training counts the positions of an image's tokens up, as those of words.",
        upstream="ms-swift 4.6, template/templates/glm.py: `GLMOCRTemplate` hands embeddings to "
        "the model, which cannot make positions of them; `GLM4VTemplate`'s collator makes them "
        "before.",
        until="`GLMOCRTemplate` makes them too",
        needs=pins.GLM_OCR_POSITIONS,
    ),
    Patch(
        function="upstream.models:place_what_follows_videos",
        moments=(Moment.TRAINING,),
        symptom="Behind a video with more frames than patches on its longer side, training of "
        "Qwen2-VL and Qwen2.5-VL has other positions than vLLM (0.024 nats in the mean, 0.58 at "
        "most, 6 frames of the tiny model). Ids are equal, so that nothing else tells.",
        upstream="transformers 5.3 to 5.19, models/qwen2_vl and qwen2_5_vl (`get_rope_index`) go "
        "on at the larger of height and width; 4.57, vLLM 0.32 and Qwen's own code at the "
        "maximum of all three. 5.12 also rounds a video's seconds down before it multiplies them "
        "(transformers 48669).",
        until="transformers does as vLLM does",
        needs=pins.QWEN_POSITIONS,
    ),
    Patch(
        function="upstream.models:join_internvl_videos",
        moments=(Moment.TRAINING,),
        symptom="In training of InternVL and Intern-S1, `stack expects each tensor to be equal "
        "size` where a row's videos differ in length or size; where they do not, `Number of "
        "elements of source < number of ones in mask`.",
        upstream="ms-swift 4.6, template/templates/internvl.py:246: one array holds all videos "
        "of a row, and of each but the first a frame is left out (`start` is one too far). vLLM "
        "0.32 takes videos one by one (interns1.py:395).",
        until="the template does so too",
        needs=pins.INTERNVL_VIDEOS,
    ),
    Patch(
        function="upstream.upright:load_upright",
        moments=(Moment.TRAINING, Moment.ENGINE),
        symptom="The policy is asked about a photograph that stands upright and trained on it "
        "lying down: log-probabilities are 0.08 to 1.2 nats apart (tiny models), and token ids "
        "agree where it is square.",
        upstream="ms-swift 4.6, template/vision_utils.py (`load_image`) leaves images as they "
        "are stored, in training and with its other engines; vLLM 0.32 turns them by their EXIF "
        "orientation, twice (multimodal/parse.py:773 and, for what its cache lacks, "
        "multimodal/processing/processor.py:1382, `normalize_image`).",
        until="ms-swift's `load_image` does so",
    ),
    Patch(
        function="upstream.rows:read_file_urls",
        moments=(Moment.TRAINING, Moment.ENGINE),
        symptom="`UnidentifiedImageError` in the first rollout, of a row with `file:///1.png`.",
        upstream="ms-swift 4.6, template/vision_utils.py (`load_file`) takes it for base64. All "
        "media of all templates pass through `StdTemplateInputs` (template/template_inputs.py), "
        "in training and in the engines.",
        until="`load_file` reads it",
    ),
    # --- training ---
    Patch(
        function="upstream.determinism:leave_the_environment",
        moments=(Moment.DETERMINISM,),
        symptom="A run with --full_determinism waits for each kernel, in every process that it "
        "starts, and cuBLAS has other settings than the user's, perhaps too late.",
        upstream="transformers 5.19, trainer_utils.py:154 (`enable_full_determinism`), called in "
        "trainer.py:420: sets `CUDA_LAUNCH_BLOCKING`, and `CUBLAS_WORKSPACE_CONFIG` once the "
        "model is loaded.",
        until="it leaves `CUDA_LAUNCH_BLOCKING` alone and sets the rest before CUDA is used",
        needs=pins.FULL_DETERMINISM,
    ),
    Patch(
        function="logits.router_replay:batch_routed_experts",
        moments=(Moment.CALLED,),
        symptom="Experts that vLLM returned are among the model's inputs, and change nothing, in "
        "silence; those of one sample missing, a batch's are dropped. With padding on the left, "
        "the experts of each token are those of the token before it.",
        upstream="ms-swift 4.6, rlhf_trainers/utils.py (`build_routed_experts_batch`): made for "
        "Megatron.",
        until="ms-swift's own trainer replays experts",
    ),
    Patch(
        function="logits.segments:read_by_segments",
        moments=(Moment.CALLED,),
        symptom="Attention and gated delta nets read a row of several samples as one text "
        "(--logps_shared_prompt).",
        upstream="transformers 5.19, modeling_utils.py (`AttentionInterface`): its packed "
        "sequences share no prompt.",
        until="an attention of transformers lets samples share a prompt",
    ),
    Patch(
        function="media.encoder_cache:FrozenTower",
        moments=(Moment.CALLED,),
        symptom="A frozen vision tower encodes an image again for each sample and pass.",
        upstream="transformers 5.19, models (each calls its tower in every forward); ms-swift "
        "4.6 gives it copies of an image's patches.",
        until="one of them encodes an image once",
    ),
    # --- engines ---
    Patch(
        function="rollout.engine:use_rollout_engine",
        moments=(Moment.SERVER, Moment.CALLED),
        symptom="ms-swift makes its own engine, which has no place for seeds, counts and stops "
        "of single requests.",
        upstream="ms-swift 4.6, rlhf_trainers/rollout_mixin.py imports `GRPOVllmEngine` by name.",
        until="ms-swift lets a plugin name the engine's class",
    ),
    Patch(
        function="rollout.engine:note_cuts",
        moments=(Moment.CALLED,),
        symptom="A turn that --max_length cuts is trained on whole, and nothing tells.",
        upstream="ms-swift 4.6, template/base.py (`_truncate`) cuts the turns of a conversation "
        "as it cuts prompts; training sees all of them.",
        until="an encoded prompt says that it was cut",
    ),
    Patch(
        function="rollout.positions:keep_positions",
        moments=(Moment.ENGINE,),
        symptom="Rollout and training place the same tokens otherwise, in silence.",
        upstream="vLLM 0.32, v1/engine/input_processor.py (`process_inputs`): no answer says "
        "where a prompt's tokens stood.",
        until="a request's output has its positions",
        needs=pins.POSITIONS,
    ),
    Patch(
        function="upstream.vllm_repairs:leave_out_broken_plugins",
        moments=(Moment.ENGINE,),
        symptom="`No module named 'vllm.model_executor.models.qwen3_5'` at the start of an engine.",
        upstream="ms-swift 4.6, model/models/qwen.py: vLLM 0.11 calls `register_uembed_model` in "
        "each of its processes, which imports that model.",
        until="vLLM 0.11 is no longer supported",
    ),
    Patch(
        function="upstream.vllm_repairs:name_media_by_request",
        moments=(Moment.ENGINE,),
        symptom="Rollouts of a model whose vision tower is trained see images as the tower of an "
        "earlier update saw them (0.06 nats a token, the tiny model).",
        upstream="vLLM 0.11, v1/core/encoder_cache_manager.py keeps what its tower made of an "
        "image; ms-swift resets that from vLLM 0.16 on.",
        until="vLLM before 0.16 is no longer supported",
        needs=pins.NAMED_MEDIA,
    ),
    Patch(
        function="upstream.vllm_repairs:load_processors_uncopied",
        moments=(Moment.ENGINE,),
        symptom="Each processor that an engine loads takes 5 s longer (Qwen2.5-VL's 151,936 "
        "tokens, one core), and up to three are loaded before the first image is answered.",
        upstream="vLLM 0.32, transformers_utils/processor.py; transformers 5.19, "
        "processing_utils.py deep-copies its arguments five times.",
        until="one of them does not",
        needs=pins.PROCESSOR_COPIES,
    ),
    Patch(
        function="upstream.encoding:supply_video_loader",
        moments=(Moment.ENGINE,),
        symptom="`No module named 'swift.vision_utils'` at the first video, with InternVL and "
        "others whose template leaves videos to the base class.",
        upstream="ms-swift 4.6, template/base.py (`replace_tag`); the module is "
        "template/vision_utils.py, and reads other frames there than training does.",
        until="ms-swift finds its own module, and reads alike",
    ),
    Patch(
        function="upstream.weight_sync:bounded_rendezvous",
        moments=(Moment.CALLED,),
        symptom="With a host of the weights' group that has stopped, all others wait without end.",
        upstream="vLLM 0.32, distributed/utils.py (`StatelessProcessGroup`): its store keeps no "
        "bound but its own host's; ms-swift 4.6 gives it none.",
        until="each wait of the group has the bound that it is given",
    ),
    Patch(
        function="upstream.vllm_repairs:hear_all",
        moments=(Moment.CALLED,),
        symptom="With --vllm_data_parallel_size above 1, weights that did not arrive at another "
        "replica than the first go unnoticed.",
        upstream="vLLM 0.32, v1/engine/core_client.py: `DPLBAsyncMPClient.call_utility_async` "
        "gathers all answers and returns the first.",
        until="`collective_rpc` answers for all",
    ),
    # --- servers ---
    Patch(
        function="media.paths:check_redirects",
        moments=(Moment.REPLICA,),
        symptom="A URL of a request leads to a private address, or to a file without end.",
        upstream="ms-swift 4.6, template/vision_utils.py (`load_file`) follows redirects that "
        "nobody judges, in a replica's process.",
        until="ms-swift judges each hop and what comes",
    ),
    Patch(
        function="server.replicas:number_messages",
        moments=(Moment.SERVER,),
        symptom="An answer of a replica that came late is taken for the next one's, and a "
        "replica that ended is waited for.",
        upstream="ms-swift 4.6, pipelines/infer/rollout.py: messages to workers have no numbers.",
        until="they have, and waits are bounded",
    ),
    Patch(
        function="server.routes:add_routes",
        moments=(Moment.SERVER,),
        symptom="A server splits groups over replicas, waits without a bound, and takes weights "
        "that it does not verify.",
        upstream="ms-swift 4.6, pipelines/infer/rollout.py (`SwiftRolloutDeploy`) takes no "
        "routes of a plugin, and names its engine when it loads, before plugins are imported.",
        until="a plugin can give a server routes and an engine",
    ),
]


def apply(moment: Moment) -> None:
    """Make the patches of a moment that were not made yet, in their order."""
    for each in PATCHES:
        if moment in each.moments:
            _make(each)


def make(function: str) -> None:
    """Make one patch of the list by itself, unless it was made."""
    [each] = [each for each in PATCHES if each.function == function]
    _make(each)


@cache  # once in a process, whichever moment comes first
def _make(each: Patch) -> None:
    if not any(map(mismatch, each.needs)):
        # Imported here and not above: each module imports this one, and what it changes.
        resolve_name(f"swift_grpo_ext.{each.function}")()


def patch(owner: object, **values: object) -> None:
    """Replace attributes of an upstream module, class or object for the rest of this process.

    Raises:
        LookupError: no pin names one of them.
    """
    for name, value in values.items():
        _check_pinned(owner, name)
        setattr(owner, name, value)


def patch_entry(registry: MutableMapping[str, Any], name: str, value: object) -> None:
    """Replace an entry of an upstream registry for the rest of this process.

    Raises:
        LookupError: no pin names the registry's `__setitem__`.
    """
    _check_pinned(registry, "__setitem__")
    registry[name] = value


def _check_pinned(owner: object, name: str) -> None:
    needs = (pin for each in PATCHES for pin in each.needs)
    # `Class.name` or `module.name`, the module without the packages around it.
    pinned = {tuple(str(pin).split(".")[-2:]) for pin in (*pins.ALL, *pins.UNVERIFIED, *needs)}
    kinds = [owner] if isinstance(owner, (ModuleType, type)) else type(owner).__mro__
    own = kinds[0].__name__.rpartition(".")[2]
    if not any((kind.__name__.rpartition(".")[2], name) in pinned for kind in kinds):
        raise LookupError(f"{own}.{name} stands in no table of {pins.__name__}; list it there.")


_ABSENT = object()
_replacements: dict[tuple[int, str], list[object]] = {}
"""By the owner's id and the attribute's name: what the owner itself had, then what each block that
has not ended put there. An owner lives as long as its blocks."""

_lock = threading.RLock()  # a block that is garbage-collected may end within another's beginning


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let an attribute of an upstream module, class or object be `value` within the block.

    Blocks may overlap, and end in any order, in any thread: the attribute is that of the block
    which began last, and in the end what it was.
    """
    key = id(owner), name
    with _lock:
        held = _replacements.setdefault(key, [vars(owner).get(name, _ABSENT)])
        held.append(value)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            # Of two blocks with one value, either may end first: they are alike.
            del held[max(i for i, each in enumerate(held) if each is value)]
            if held[-1] is _ABSENT:
                delattr(owner, name)  # the class's own is seen again
            else:
                setattr(owner, name, held[-1])
            if len(held) == 1:
                del _replacements[key]


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Let `owner.NAME(...)` be `wrap(original, ...)` within the block."""
    original = getattr(owner, name)

    # A function, not an object: a copied or printed owner must not meet a live hook.
    @wraps(original)
    def replacement(*args: object, **kwargs: object) -> Any:
        return wrap(original, *args, **kwargs)

    with replaced(owner, name, replacement):
        yield
