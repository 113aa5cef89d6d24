"""By hand: gradients of the tensors that a script trains by hand, or asks for gradients of; no module has them.

    with torch.no_grad():
        weight += rate * weight.grad        a multiplier of Lagrange
    du = torch.autograd.grad(u.sum(), x, create_graph=True)     x gets a gradient by backward() that nobody reads

The tensors themselves are carried as others are. A gradient that stays until the next call is carried if it is small.
In the place of a large one a replacement has one that refuses to be read until it is cleared.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from torchrelay.worker.parallel.of_state import is_free
from torchrelay.worker.tensors import absent, memory, values

_ALL_ZEROS = b"zeros"
# How a gradient lay when a call returned.
_NONE, _ZEROS, _SAME, _OTHER = "none", "of zeros", "as at the gate", "another one"
_CLEARS = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_", "set_"})
_TELLS_NOTHING = frozenset({
    "detach_", "requires_grad_", "size", "dim", "numel", "nelement", "stride", "is_contiguous", "element_size",
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "is_sparse", "is_cuda",
    "is_cpu", "is_nested", "is_quantized", "is_meta", "names", "itemsize", "nbytes", "is_complex",
    "is_floating_point", "output_nr",
})  # fmt: skip


class Place(Protocol):
    """Where such a tensor is."""

    path: str
    value: Any

    def read(self) -> Any: ...


class AbsentGradient(torch.Tensor):
    """Stands for one that is not here; what backward() adds to it is not known either. Cleared, it is one like any."""

    path: str
    is_known: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A function is named by itself, and what asks for an attribute by that one.
        name = getattr(getattr(func, "__self__", None), "__name__", "") or getattr(func, "__name__", "")
        cleared = [one for one in _within(args[:1]) if name in _CLEARS and isinstance(one, AbsentGradient)]
        for one in _within([*args, *(kwargs or {}).values()]):
            is_read = isinstance(one, AbsentGradient) and not one.is_known and all(one is not each for each in cleared)
            if is_read and name not in _TELLS_NOTHING and not absent.is_ours(sys._getframe(1)):
                raise absent.refuse(one.path)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        for one in cleared:
            one.is_known = True
        return found


def _within(some: Iterable[Any]) -> Iterator[Any]:
    for one in some:
        if isinstance(one, (list, tuple)):
            yield from _within(one)
        else:
            yield one


def absent_gradient(of: torch.Tensor, path: str) -> torch.Tensor:
    """Of this tensor, at `path`."""
    unknown = float("nan") if of.is_floating_point() or of.is_complex() else 0
    found = torch.full_like(of.detach(), unknown).as_subclass(AbsentGradient)
    found.path, found.is_known = f"{path}.grad", False
    return found


def _is_unknown(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, AbsentGradient) and not gradient.is_known


def _is_small(gradient: torch.Tensor) -> bool:
    """Whether it is carried, and can be put back: by a copy."""
    return memory.is_held(gradient) and gradient.nbytes <= memory.SMALL and not _is_unknown(gradient)


class _Entry:
    """A tensor and its gradient when a call began."""

    __slots__ = ("_copy", "_gradient", "_path", "_tensor", "_version", "_was_none", "_was_unknown")

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        gradient = tensor.grad
        self._path, self._tensor = path, weakref.ref(tensor)
        self._copy: torch.Tensor | None = None
        self._was_none = gradient is None
        self._was_unknown = gradient is not None and _is_unknown(gradient)
        self._gradient: Callable[[], torch.Tensor | None] = lambda: None
        self._version = 0
        if gradient is None:
            return
        self._version = memory.version_of(gradient)
        if _is_small(gradient):
            self._copy = _plain(gradient).clone()
            self._gradient = lambda: gradient
        else:  # a large one that the script lets go is freed
            self._gradient = weakref.ref(gradient)

    def rewind(self) -> None:
        """Let it be as it was; or let it be absent, if it was large and has changed."""
        tensor = self._tensor()
        if tensor is None:
            return
        if not tensor.requires_grad:
            tensor.requires_grad_()
        gradient = self._gradient()
        tensor.grad = gradient
        if gradient is not None and memory.version_of(gradient) != self._version:
            is_filled = self._copy is not None and memory.fill(_plain(gradient), self._copy)
            tensor.grad = gradient if is_filled else absent_gradient(tensor, self._path)
        elif gradient is None and not self._was_none:
            tensor.grad = absent_gradient(tensor, self._path)
        if self._was_unknown and isinstance(tensor.grad, AbsentGradient):
            tensor.grad.is_known = False


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.detach().as_subclass(torch.Tensor)


class ByHand:
    """Of one rank."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._all_known = True
        self._entries: list[_Entry] = []
        self._at_gate: dict[str, tuple[int, int]] | None = None  # of the call under way, once it has come there
        self._returns: dict[str, set[Any]] = {}  # by path, how it lay at returns
        self._zeros: dict[str, tuple[int, int]] = {}  # those of zeros at the last one

    def know(self, places: Iterable[Place]) -> None:
        """All that was seen. Which of them are of the state is asked later: on a replacement it is not here yet."""
        tensors = (place for place in places if type(place.value) in (torch.Tensor, torch.nn.Parameter))
        self._places = [place for place in tensors if place.value.requires_grad and place.value.is_leaf]
        self._all_known = not self._places

    def __bool__(self) -> bool:
        """Whether any tensor is trained by hand."""
        return bool(self._places)

    def _there(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._all_known:
            read = ((place, place.read()) for place in self._places)
            self._places = [place for place, one in read if isinstance(one, torch.Tensor) and is_free(one)]
            self._all_known = True
        for place in self._places:
            tensor = place.read()
            if isinstance(tensor, torch.Tensor) and is_free(tensor):
                yield place.path, tensor

    def enter(self) -> None:
        """A call begins."""
        self._entries = [_Entry(path, tensor) for path, tensor in self._there()] if self._places else []
        self._at_gate = None

    def pass_gate(self) -> None:
        """It is at its gate."""
        self._at_gate = {path: _state_of(tensor.grad) for path, tensor in self._there()} if self._places else {}

    def leave(self) -> None:
        """It has returned: what lay where is the same as at the gate, or is not for long."""
        before, self._at_gate, self._zeros = self._at_gate or {}, None, {}
        for path, tensor in self._there() if self._places else ():
            now, how = _state_of(tensor.grad), _OTHER
            if tensor.grad is None:
                how = _NONE
            elif before.get(path) == now:
                how = _SAME
            elif self._returns.get(path, {_ZEROS}) == {_ZEROS} and _is_zero(tensor.grad):
                how, self._zeros[path] = _ZEROS, now
            self._returns.setdefault(path, set()).add(how)

    def rewind(self) -> None:
        """Put them back, as they were when the call began."""
        for entry in self._entries:
            entry.rewind()

    # ------------------------------------------------------------ to tell and to take

    def tell(self) -> dict[str, bytes]:
        """By path, each gradient that a replacement has to have: encoded, or empty where it is not known.

        At a gate it is not known what becomes of it after the update, but by what became of it in all calls before.
        """
        found: dict[str, bytes] = {}
        for path, tensor in self._there() if self._places else ():
            gradient, how = tensor.grad, self._returns.get(path)
            if self._at_gate is not None and how != {_SAME}:
                if how != {_NONE} and not (how is None and gradient is None):
                    found[path] = _ALL_ZEROS if how == {_ZEROS} else b""
            elif gradient is not None and _is_small(gradient):
                found[path] = values.encode(memory.near(_plain(gradient)), path)
            elif gradient is not None:
                found[path] = _ALL_ZEROS if self._zeros.get(path) == _state_of(gradient) else b""
        return found


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), memory.version_of(gradient))


def _is_zero(gradient: torch.Tensor) -> bool:
    return not _is_unknown(gradient) and memory.is_dense(gradient) and not bool(_plain(gradient).any())


def take_gradient(tensor: torch.Tensor, told: bytes, path: str) -> None:
    """Give it the gradient that its predecessor had."""
    if told == _ALL_ZEROS:
        tensor.grad = torch.zeros_like(tensor.detach())
        return
    gradient = values.decode(told) if told else None
    if isinstance(gradient, torch.Tensor) and gradient.shape == tensor.shape and gradient.dtype == tensor.dtype:
        tensor.grad = gradient.to(tensor.device)
    else:
        tensor.grad = absent_gradient(tensor, path)
