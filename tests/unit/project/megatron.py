"""Parses the arguments of a training of Megatron that names the plugin.

python -m tests.unit.project.megatron PLUGIN
"""

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
    from swift.ray.megatron.driver_utils import parse_args_from_dict

    settings = {"rlhf_type": "grpo", "external_plugins": [plugin], "model": "/none"}
    parse_args_from_dict(MegatronRLHFArguments, settings)


if __name__ == "__main__":
    main(sys.argv[1])
