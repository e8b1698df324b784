"""Prints the errors of ms-swift's Megatron pipelines that name the plugin, as JSON.

python -m tests.rig.megatron PLUGIN
"""

from __future__ import annotations

import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock


class MegatronPackages(MetaPathFinder, Loader):
    """Stands for Megatron's own packages, without which ms-swift's classes for it are not imported.
    They are not installed here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_one = name.partition(".")[0] in ("megatron", "mcore_bridge")
        return ModuleSpec(name, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__name__=spec.name, __path__=[], __spec__=spec, __version__="0.17.0")

    def exec_module(self, module: Any) -> None:
        """Do nothing: the module has any attribute."""


def main(plugin: str) -> None:
    sys.meta_path.insert(0, MegatronPackages())
    from swift.megatron.arguments import MegatronRLHFArguments
    from swift.ray.megatron.driver_utils import build_dataset_from_dict, parse_args_from_dict

    errors = {}
    for rlhf_type in ("dpo", "grpo", "gkd"):
        settings = {"rlhf_type": rlhf_type, "external_plugins": [plugin], "model": "/none"}
        for name, parse in {
            "Megatron": lambda given: parse_args_from_dict(MegatronRLHFArguments, given),
            "Megatron with Ray": lambda given: build_dataset_from_dict({**given, "use_ray": True}),
        }.items():
            try:
                parse(settings)
            except Exception as e:
                errors[f"{rlhf_type} {name}"] = f"{type(e).__name__}: {e}"
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])
