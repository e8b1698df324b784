"""What a run's settings name, looked up on this machine: plugins, packages, GPUs.

Only `swift-grpo-ext check` asks, in a process that ends with it: plugin files are imported as
`swift` imports them, so that names they register are known.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from swift_grpo_ext.checks import preflight
from swift_grpo_ext.checks.finding import Findings, did_you_mean, error
from swift_grpo_ext.tools.check.rules import PLUGIN
from swift_grpo_ext.tools.check.settings import Run, devices_of, plugins_of

PACKAGES: Mapping[str, Mapping[str, str]] = {
    "reward_funcs": {"accuracy": "math_verify", "cosine": "math_verify", "toolbench": "rouge"},
    "report_to": {"wandb": "wandb", "swanlab": "swanlab"},
}
"""Modules that a value of a setting needs, which ms-swift does not bring along, and asks for once
the model is loaded."""


def look_up(run: Run, gpus: Sequence[str] | None = None) -> Findings:
    """Check what a run's settings name.

    Args:
        run: the settings.
        gpus: the GPUs of this machine that processes will use; None: as the settings' ENV says.
    """
    from swift.utils import get_device_count

    for side, given in run.sides:
        yield from preflight.check_arguments(run.arguments(side), given)
    yield from check_names(run)
    yield from check_gpus(run, gpus, int(get_device_count()))


def check_names(run: Run) -> Findings:
    """Refuse rewards, schedulers and callbacks that nobody registers, or that lack a package."""
    from swift.callbacks import callbacks_map
    from swift.rewards import orms, rm_plugins
    from swift.rollout import multi_turns
    from swift.utils import import_external_file

    can_be_imported = True
    plugins = [plugin for _, settings in run.sides for plugin in plugins_of(settings)]
    for plugin in dict.fromkeys(plugins):
        path = Path(plugin).expanduser()
        problem = "" if path.is_file() else f"there is no such file in {Path.cwd()}."
        if not problem and path.name != PLUGIN:  # this one is ours, and changes ms-swift
            try:
                import_external_file(plugin)
            except Exception as e:  # a user's code raises anything
                problem = f"cannot be imported ({type(e).__name__}: {e})."
        if problem:
            yield error(f"external_plugins {plugin}", problem)
            can_be_imported = False

    named: dict[str, tuple[Iterable[str], Collection[str]]] = {
        "reward_funcs": (run.train("reward_funcs") or (), orms),
        "reward_model_plugin": (run.train("reward_model_plugin") or (), rm_plugins),
        "callbacks": (run.train("callbacks") or (), [*callbacks_map, "diversity"]),
        "multi_turn_scheduler": (
            {run.train("multi_turn_scheduler"), run.serve("multi_turn_scheduler")} - {None},
            multi_turns,
        ),
        "report_to": (run.train("report_to") or (), ()),  # transformers knows the names
    }
    for setting, (names, registered) in named.items():
        for name in names:
            if registered and name not in registered:
                if can_be_imported:  # else it may be registered there
                    near = did_you_mean(name, registered).replace("did", "Did", 1)
                    yield error(
                        f"{setting} {name}",
                        "is registered by neither ms-swift nor a file of external_plugins.",
                        near or f"Known: {', '.join(sorted(registered))}.",
                    )
                continue
            if setting == "reward_funcs" and not orms[name].__module__.startswith("swift."):
                continue  # the user's, by the same name
            module = PACKAGES.get(setting, {}).get(name)
            if module and importlib.util.find_spec(module) is None:
                text = f"needs the package {module}, which is not installed."
                yield error(f"{setting} {name}", text, f"pip install {module}")


def check_gpus(run: Run, gpus: Sequence[str] | None, present: int) -> Findings:
    """Refuse GPUs that are not there.

    Args:
        run: the settings.
        gpus: those that processes will use; None: as ENV says, unless the shell says otherwise.
        present: the number that this machine has.
    """
    if gpus is None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        gpus = [gpu for _, settings in run.sides for gpu in devices_of(settings)]
    absent = [gpu for gpu in gpus or () if not present or (gpu.isdecimal() and int(gpu) >= present)]
    if absent and not present:
        yield error(
            "CUDA_VISIBLE_DEVICES",
            f"GPUs {', '.join(gpus or ())} are to be used, and torch sees none on this machine.",
            "Without GPUs: swift-grpo-ext init cpu-run --preset cpu_2x6, with a tiny model.",
        )
    elif absent:
        text = f"GPUs {', '.join(absent)} are to be used, and this machine has {present}."
        yield error("CUDA_VISIBLE_DEVICES", text, "They are counted from 0.")
