"""Join the media of a training batch when they are read, and each once where they are not.

A collator lays the patches of all samples in a row: those of a group's image G times. They move to
the device like that, and stay there until the round is trained on. Where a frozen tower looks at
each image once (`encoder_cache`), nothing ever reads the G copies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
_EACH = (_aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.clone.default)
"""What may be done to each tensor alone."""


class LazyConcat(Tensor):
    """Tensors in a row, joined in dimension 0 by the first operation that needs them joined.

    To move it, to change its type, and to concatenate it with others joins nothing. Tensors that
    share their memory are held, moved and changed once. Gradients do not flow through it.

    Args:
        parts: of equal type, device, and size in all dimensions but the first.
    """

    distinct: list[Tensor]
    """The parts without repetitions."""

    order: list[int]
    """For each part its index in `distinct`."""

    _joined: Tensor | None

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor]) -> LazyConcat:
        numbers: dict[Any, int] = {}
        order = [numbers.setdefault(memory_of(part), len(numbers)) for part in parts]
        return cls._of([parts[order.index(number)] for number in range(len(numbers))], order)

    @classmethod
    def _of(cls, distinct: list[Tensor], order: list[int]) -> LazyConcat:
        first, rows = distinct[0], sum(len(distinct[number]) for number in order)
        shape = (rows, *first.shape[1:])
        # A tensor without memory: each operator on it arrives in `__torch_dispatch__`.
        make: Any = Tensor._make_wrapper_subclass
        self: LazyConcat = make(cls, shape, dtype=first.dtype, device=first.device)
        self.distinct, self.order, self._joined = distinct, order, None
        return self

    @property
    def parts(self) -> list[Tensor]:
        """The tensors in their order; equal ones are the same object."""
        return [self.distinct[number] for number in self.order]

    def join(self) -> Tensor:
        """Return what this tensor stands for, the same each time, so that what is written stays."""
        if self._joined is None:
            self._joined = torch.cat(self.parts)
            # From now on it holds the values: moves and pieces must show what is written to it.
            self.distinct, self.order = [self._joined], [0]
        return self._joined

    def split_parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return what `split` does, without joining where each piece lies within a part."""
        pieces, left = list[Tensor](), [*reversed(sizes)]
        for part in self.parts:
            start = 0
            while start < len(part):
                size = left.pop()
                pieces.append(part[start : start + size])
                start += size
            if start > len(part):  # a piece lies over the border of two parts
                return [*self.join().split([*sizes])]
        return pieces + [part[:0] for _ in left]  # pieces of size 0

    # These read memory, and ask no operator for it.
    def data_ptr(self) -> int:
        return self.join().data_ptr()

    def numpy(self, **kwargs: Any) -> Any:
        return self.join().numpy(**kwargs)

    def tolist(self) -> Any:
        return self.join().tolist()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.join().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __repr__(self, **_: Any) -> str:
        return f"LazyConcat({tuple(self.shape)}, {len(self.distinct)} of {len(self.order)} parts)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _EACH:
            self, *rest = args
            return cls._of([func(part, *rest, **kwargs) for part in self.distinct], self.order)
        if func is _aten.cat.default and _can_wait(*args, **kwargs):
            parts = (t.parts if isinstance(t, LazyConcat) else [t] for t in args[0])
            return cls([*chain.from_iterable(parts)])
        read: Any = pytree.tree_map_only(cls, cls.join, (args, kwargs))
        result = func(*read[0], **read[1])
        # What writes in place returns what it was given.
        return args[0] if args and result is read[0][0] else result


def memory_of(tensor: Tensor) -> Hashable:
    """Return what tensors have in common that show the same values of the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_rows(value: Any) -> bool:
    """Return whether it is a tensor that lies in memory by rows and has no gradient."""
    is_plain = type(value) is Tensor and value.layout == torch.strided and not value.is_nested
    return is_plain and value.ndim > 0 and not value.is_meta and not value.requires_grad


def _can_wait(tensors: Sequence[Tensor], dim: int = 0) -> bool:
    """Return whether `torch.cat` of these may be put off: else torch converts types, or refuses."""
    kinds = {(t.shape[1:], t.dtype, t.device, t.ndim > 0, t.requires_grad) for t in tensors}
    return dim == 0 and len(kinds) == 1 and not tensors[0].requires_grad
