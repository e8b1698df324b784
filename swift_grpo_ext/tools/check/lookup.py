"""What a run's settings name, looked up on this machine: plugins, rewards, GPUs, template.

Only `swift-grpo-ext check` asks, in a process that ends with it: plugin files are imported as
`swift` imports them, so that names they register are known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from swift_grpo_ext.checks import preflight, rules
from swift_grpo_ext.checks.finding import Findings, did_you_mean, error, ok, skipped, warning
from swift_grpo_ext.tools.check.glance import LOCAL, Side, plugins_of
from swift_grpo_ext.tools.check.rules import PLUGIN
from swift_grpo_ext.tools.check.settings import Run, devices_of, environment
from swift_grpo_ext.upstream.patches import Moment, apply

if TYPE_CHECKING:
    from swift.template import Template

UNKNOWN_MODEL = (ValueError, KeyError, OSError)
"""ms-swift raises these where it does not know a model, its template or its files."""


def look_up(run: Run, gpus: Sequence[str] | None = None) -> Findings:
    """Check the plugins, names and GPUs of a run, and all that its start would."""
    from swift.utils import get_device_count

    for side, given in run.sides:
        yield from rules.check_arguments(run.arguments(side), given)
    if run.has_servers:
        apart = run.train if run.rollout is None else run.serve
        yield from rules.check_adapters(run.arguments("training"), apart("vllm_enable_lora"))
    yield from check_names(run)
    env = {**environment(run.training), **os.environ}
    if "NNODES" not in env:
        yield from preflight.check_master_port(str(env.get("MASTER_PORT", "")))
    if gpus is None and "CUDA_VISIBLE_DEVICES" not in os.environ:  # which wins over ENV
        gpus = [gpu for _, settings in run.sides for gpu in devices_of(settings)]
    yield from check_gpus(gpus or (), int(get_device_count()))


def check_names(run: Run) -> Findings:
    """Refuse plugins that cannot be imported, and names that nobody registers; rewards are looked
    at beside the rows that they are given."""
    from swift.callbacks import callbacks_map
    from swift.rewards import rm_plugins
    from swift.rollout import multi_turns
    from swift.utils import import_external_file

    for plugin in dict.fromkeys(p for _, settings in run.sides for p in plugins_of(settings)):
        path = Path(plugin).expanduser()
        if not path.is_file():
            return  # was named at a glance; the other names may be registered there
        if path.name == PLUGIN:  # it is ours, and changes ms-swift
            continue
        try:
            import_external_file(plugin)
        except Exception as e:  # a user's code raises anything
            text = f"cannot be imported ({type(e).__name__}: {e})."
            yield error(f"external_plugins {plugin}", text)
            return
    schedulers = {run.train("multi_turn_scheduler"), run.serve("multi_turn_scheduler")} - {None}
    for setting, names, registered in (
        ("reward_model_plugin", run.train("reward_model_plugin") or (), rm_plugins),
        ("callbacks", run.train("callbacks") or (), {**callbacks_map, "diversity": None}),
        ("multi_turn_scheduler", schedulers, multi_turns),
    ):
        for name in names:
            if name not in registered:
                hint = did_you_mean(name, registered) or f"known: {', '.join(sorted(registered))}."
                text = "is registered by neither ms-swift nor a file of external_plugins;"
                yield error(f"{setting} {name}", text, hint)


def check_gpus(gpus: Sequence[str], present: int) -> Findings:
    """Refuse GPUs that are not there."""
    missing = [gpu for gpu in gpus if gpu.isdecimal() and int(gpu) >= present]
    if missing:
        yield error(
            "CUDA_VISIBLE_DEVICES",
            f"GPUs {', '.join(missing)} are to be used, counted from 0, and torch sees {present} "
            "on this machine.",
            "Without GPUs: swift-grpo-ext init cpu-run --preset cpu_2x6, with a tiny model.",
        )


def check_template(run: Run) -> Findings:
    """Say what ends a completion, and refuse stop words that the template would always emit."""
    from swift_grpo_ext.stops.templates import TemplateStops, check_stop_settings

    side: Side = "training" if run.training is not None else "rollout"
    args = run.arguments(side)
    folder = model_folder(args.model)
    if folder is None:
        if args.model and not args.model.startswith(LOCAL):
            text = "is not on this machine, so that no rows are encoded. Its weights are not needed"
            remedy = (
                f"modelscope download {args.model} --exclude '*.safetensors', then give the folder "
                "with --model."
            )
            yield skipped(f"model {args.model}", f"{text}:", remedy)
        return
    try:
        with run.environment(side):
            template = make_template(run, side, folder)
    except UNKNOWN_MODEL as e:
        text = f"{' '.join(str(e).split())[:300]} So no rows are encoded."
        remedy = "Give --model_type and --template, as for swift rlhf."
        found = preflight.unmatched(e) or warning("template", text, remedy)
        is_run = "rlhf_type" in (run.training or {}) or side == "rollout"  # else rows alone
        yield found if is_run else replace(found, level="warning")
        return
    vars(args).update(model_meta=template.model_meta, model_info=template.model_info)
    yield from preflight.check_model(args)
    words = args.stop_words or ()
    try:
        check_stop_settings(SimpleNamespace(stop_words=words, stop_token_ids=[]), template)
    except ValueError as e:
        yield error("template", str(e), "Change --stop_words.")
        return
    ends = template.tokenizer.convert_ids_to_tokens(sorted(TemplateStops(template).end_ids))
    yield ok(
        "template",
        f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}; stop "
        f"words: {', '.join(map(repr, words)) or 'none'}.",
    )


def make_template(run: Run, side: Side, folder: Path) -> Template:
    """Return ms-swift's template as a side's settings make it, once: a tokenizer loads for seconds;
    raises `UNKNOWN_MODEL`."""
    from swift.arguments import TemplateArguments
    from swift.model import get_processor
    from swift.model.model_meta import get_matched_model_meta
    from swift.template import get_template

    if made := run.templates.get(side):
        return made
    apply(Moment.TRAINING)
    args = run.arguments(side)
    meta = get_matched_model_meta(args.model)  # by the hub's name, which the cache lacks
    processor = get_processor(
        str(folder),
        model_type=args.model_type or (meta and meta.model_type),
        new_special_tokens=args.new_special_tokens,
    )
    given = {f.name: getattr(args, f.name) for f in fields(TemplateArguments)}
    if side == "training":  # defaults of GRPO (rlhf_args.py, `_init_grpo`, `_set_loss_scale`)
        given["truncation_strategy"] = args.truncation_strategy or "left"
        given["loss_scale"] = args.loss_scale or "last_round"
    if args.max_length is None:  # base_args.py
        given["max_length"] = processor.model_info.max_model_len
    settings = TemplateArguments(**given)
    settings.remove_unused_columns = False  # which its reader looks up
    template = get_template(processor, **settings.get_template_kwargs())
    template.set_mode("train")
    run.templates[side] = template
    return template


def model_folder(model: str | None) -> Path | None:
    """Return where a model's files are: its folder, or a hub's cache; None where nowhere here."""
    import huggingface_hub
    import modelscope

    if model is None:
        return None
    if (folder := Path(model).expanduser()).is_dir():
        return folder
    for hub in (modelscope, huggingface_hub):
        with suppress(Exception):  # each has a type of its own for what is in no cache
            return Path(hub.snapshot_download(model, local_files_only=True))
    return None
