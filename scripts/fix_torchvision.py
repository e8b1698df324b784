"""Makes `import torchvision` work in the running environment, if it does not already.

Symptom: beside a CPU build of torch, a CUDA build of torchvision dies on import with "operator
torchvision::nms does not exist", and takes transformers' image processors with it. Its `_C.so`
cannot load without CUDA, so nobody defines the operators whose fake kernels torchvision registers
on import. Image and video processing never call them; their schemas are enough.

Run as a script, this file copies itself into an environment where that import fails, with a `.pth`
file that imports it in every Python process: nothing that takes time stands at its top. It can go
when the package index serves CPU builds of torchvision: nothing else knows of it. Exit status 0:
torchvision can be imported.
"""

import sys

MODULE = "_torchvision_schemas"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # torch drops a library's definitions when the object dies


class _DefineSchemasFirst:
    """A path hook that finds nothing, and defines the schemas when torchvision is first sought."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
            _libraries.append(library)


def import_error() -> str:
    """Return what a fresh process says on `import torchvision`; nothing where it works."""
    import subprocess

    command = [sys.executable, "-c", "import torchvision"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def main() -> None:
    import shutil
    import sysconfig
    from pathlib import Path

    if "torchvision::nms" in import_error():
        site_packages = Path(sysconfig.get_paths()["purelib"])
        shutil.copyfile(__file__, site_packages / f"{MODULE}.py")
        (site_packages / f"{MODULE}.pth").write_text(f"import {MODULE}\n", encoding="utf-8")
        print("torchvision is a CUDA build beside a CPU torch: its operator schemas are defined.")
    if error := import_error():
        sys.exit(f"torchvision cannot be imported:\n{error}")


if __name__ == "__main__":
    main()
elif __name__ == MODULE:
    sys.meta_path.insert(0, _DefineSchemasFirst())
