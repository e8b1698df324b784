"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

Symptom: `import torchvision` dies with "operator torchvision::nms does not exist", and takes
transformers' image processors with it. The CUDA build's `_C.so` cannot load without CUDA, so nobody
defines the operators whose fake kernels torchvision registers on import. Image and video
processing never call them; their schemas are enough.

`fix_torchvision.py` copies this file into an environment where that import fails, with a `.pth`
file that runs it in every Python process. It can go when the package index serves CPU builds of
torchvision: nothing else knows of it.
"""

import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries = []  # torch drops a library's definitions when the object dies


class _DefineSchemasFirst:
    """A path hook that finds nothing, and defines the schemas when torchvision is first sought."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)


sys.meta_path.insert(0, _DefineSchemasFirst())
