"""What is done to the values of two ranks: sum, product, least, most, and bits.

Values of all ranks are always put together in the same order, so that a result has the same bits whenever and over
whatever paths they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_Combine = Callable[..., Any]

_COMBINES: dict[str, _Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Reduction:
    """One operation, over a number of ranks."""

    combine: _Combine
    average_of: int = 0  # 0: it is no average

    def into(self, result: torch.Tensor, earlier: torch.Tensor, later: torch.Tensor) -> None:
        """Put two values together. `result` may be one of them."""
        self.combine(earlier, later, out=result)

    def finish(self, result: torch.Tensor) -> None:
        """When the values of all ranks are in it."""
        if self.average_of:
            result.div_(self.average_of)


def reduction(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """The reduction for a c10d operation. Raises `ValueError` for one that cannot be done with this type."""
    name = _name(op)
    if name not in _COMBINES:
        raise ValueError(f"the operation {name} is not there for CPU tensors: use one of {', '.join(_COMBINES)}")
    if not _possible(name, dtype):
        raise ValueError(f"{name} cannot be done with {dtype}")
    return Reduction(_COMBINES[name], size if name == "AVG" else 0)


def _name(op: Any) -> str:
    for name in _COMBINES:
        if op == getattr(dist.ReduceOp, name):
            return name
    return str(op).rpartition(".")[2]


@cache
def _possible(name: str, dtype: torch.dtype) -> bool:
    """Whether torch can do it in place; asked before anything is sent, as the other ranks would wait for ever."""
    one = torch.zeros(1, dtype=dtype)
    try:
        _COMBINES[name](one, one, out=one)
        if name == "AVG":
            one.div_(2)
    except (RuntimeError, TypeError):
        return False
    return True
