"""Join the media of a training batch when they are read, and each once where they are not.

A collator lays the patches of all samples in a row: those of a group's image G times. They move to
the device like that, and stay there until the round is trained on. Where a frozen tower looks at
each image once (`encoder_cache`), nothing ever reads the G copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

KEYS = ("pixel_values", "pixel_values_videos")
"""What ms-swift's templates concatenate over the samples of a batch (template/base.py,
`_data_collator_mm_data`)."""

_aten = torch.ops.aten
_EACH = (_aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.clone.default)
"""What is done to each tensor alone."""


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
        make: Any = Tensor._make_wrapper_subclass
        self: LazyConcat = make(cls, shape, dtype=first.dtype, device=first.device)
        self.distinct, self.order, self._joined = distinct, order, None
        return self

    @property
    def parts(self) -> list[Tensor]:
        return [self.distinct[number] for number in self.order]

    def join(self) -> Tensor:
        """What this tensor stands for; the same each time, so that writing to it is kept."""
        if self._joined is None:
            self._joined = torch.cat(self.parts)
            self.distinct, self.order = [self._joined], [0]
        return self._joined

    def split_parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """As `split`, without joining where each piece lies within a part."""
        pieces, left = list[Tensor](), [*reversed(sizes)]
        for part in self.parts:
            start = 0
            while start < len(part):
                size = left.pop()
                pieces.append(part[start : start + size])
                start += size
            if start > len(part):
                return [*self.join().split([*sizes])]
        return pieces + [part[:0] for _ in left]

    # These read memory, and ask no operator for it.
    def data_ptr(self) -> int:
        return self.join().data_ptr()

    def numpy(self, **kwargs: Any) -> Any:
        return self.join().numpy(**kwargs)

    def tolist(self) -> Any:
        return self.join().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.join().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
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
            return cls([part for tensor in args[0] for part in _parts(tensor)])
        read: Any = pytree.tree_map_only(cls, cls.join, (args, kwargs))
        result = func(*read[0], **read[1])
        # What writes in place returns what it was given.
        return args[0] if args and result is read[0][0] else result


def memory_of(tensor: Tensor) -> Any:
    """What tensors have in common that show the same values of the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _parts(tensor: Tensor) -> list[Tensor]:
    return tensor.parts if isinstance(tensor, LazyConcat) else [tensor]


def _is_rows(value: Any) -> bool:
    """Whether a tensor's values lie in memory, row by row, and no gradient flows to it."""
    is_plain = type(value) is Tensor and value.layout == torch.strided and not value.is_nested
    return is_plain and value.ndim > 0 and not value.is_meta and not value.requires_grad


def _can_wait(tensors: Sequence[Tensor], dim: int = 0) -> bool:
    kinds = {(t.shape[1:], t.dtype, t.device, t.ndim > 0, t.requires_grad) for t in tensors}
    return dim == 0 and len(kinds) == 1 and not tensors[0].requires_grad


@contextmanager
def media_joined_late(template: Any) -> Iterator[None]:
    """Let what `template`, of ms-swift, collates within the block hold media as `LazyConcat`."""

    def late(batch: list[dict[str, Any]]) -> None:
        for encoded in batch:
            for key in KEYS:
                if _is_rows(value := encoded.get(key)):
                    encoded[key] = LazyConcat([value])

    with before_collating(template, late):
        yield


@contextmanager
def before_collating(
    template: Any, change: Callable[[list[dict[str, Any]]], None]
) -> Iterator[None]:
    """Call `change` with each batch that `template.data_collator` gets within the block."""
    collate, outer = template.data_collator, vars(template).get("data_collator")

    def data_collator(batch: list[dict[str, Any]], **kwargs: Any) -> Any:
        change(batch)
        return collate(batch, **kwargs)

    template.data_collator = data_collator
    try:
        yield
    finally:
        if outer is None:
            del template.data_collator
        else:
            template.data_collator = outer
