"""What functions of torch do with tensors, by their names: which read none, which give values away, which write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchrelay.worker.parallel import shards

# What can be asked of a tensor without reading its values.
LOOKS = frozenset(
    (
        *("shape", "size", "dtype", "device", "layout", "ndim", "dim", "numel", "nelement", "stride", "storage_offset"),
        *("element_size", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_leaf"),
        *("is_contiguous", "is_floating_point", "is_complex", "requires_grad", "requires_grad_", "grad", "grad_fn"),
        *("names", "_backward_hooks", "_version", "register_hook", "is_nested", "is_mkldnn", "is_xla", "is_mps"),
        *("is_inference", "get_device", "has_names", "retains_grad", "_is_view", "__len__", "__hash__"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like"),
        *("full_like", "rand_like", "randn_like", "randint_like", "is_signed", "can_cast", "result_type"),
    )
)


# What gives another view of a tensor's memory: who reads that is seen. And how torch clears gradients.
HARMLESS = LOOKS | {"data", "detach", "detach_", "view", "view_as", "t", "T", "unsqueeze", "squeeze", "zero_"}


# What hands a tensor's values over to something that outlives this moment, such as a file.
GIVES_AWAY = frozenset(
    ("untyped_storage", "_typed_storage", "storage", "data_ptr", "numpy", "tolist", "__array__", "__reduce_ex__")
)


# What makes a value of the script's of a tensor.
TELLS = frozenset(
    (
        *("item", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "is_nonzero"),
        *("equal", "allclose", "__repr__", "__str__", "__format__"),
    )
)


_SETS = frozenset(("__setitem__", "__set__"))
_IN_PLACE = re.compile(r"\w*[a-z0-9]_|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")


def written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """The memory that a function of this name writes to, by torch's way of naming them."""
    if name in _SETS or _IN_PLACE.fullmatch(name):
        return set(map(storage_of, tensors_in(args[:1], {})))
    return {storage_of(kwargs["out"])} if isinstance(kwargs.get("out"), torch.Tensor) else set()


def name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def tensors_in(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return list(_found((*args, *kwargs.values()), 0))


def _found(values: Any, depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < 8 and isinstance(value, (list, tuple)):
            yield from _found(value, depth + 1)
        elif depth < 8 and isinstance(value, Mapping):
            yield from _found(value.values(), depth + 1)


def storage_of(tensor: torch.Tensor) -> int:
    """Where its memory is; 0 if it has none of its own."""
    try:
        return int(shards.local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
