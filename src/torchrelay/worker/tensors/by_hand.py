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
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch

from torchrelay.worker.parallel.of_state import is_free
from torchrelay.worker.tensors import absent, memory, values

_ALL_ZEROS, _NO_GRADIENT = b"zeros", b"none"
# How a gradient lay when a call returned.
_NONE, _ZEROS, _OTHER = "none", "of zeros", "another one"
LIMIT = 48 << 10  # bytes of all gradients of a record; further ones are absent
_CLEARS = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_"})
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
    """Stands for one that is not here; what backward() adds to it is not known either. Cleared, it is a plain tensor.

    Whoever else holds this very tensor has it absent, too: its class is another one for as long as that is so.
    """

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A function is named by itself, and what asks for an attribute by that one.
        name = getattr(getattr(func, "__self__", None), "__name__", "") or getattr(func, "__name__", "")
        cleared = [one for one in _within(args[:1]) if name in _CLEARS and isinstance(one, AbsentGradient)]
        for one in _within([*args[bool(cleared) :], *(kwargs or {}).values()]):
            harmless = name in _TELLS_NOTHING or absent.is_ours(sys._getframe(1))
            if isinstance(one, AbsentGradient) and not harmless:
                raise absent.refuse(one.path)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        for one in cleared:
            cast(Any, one).__class__ = torch.Tensor
        return found


def _within(some: Iterable[Any]) -> Iterator[Any]:
    for one in some:
        if isinstance(one, (list, tuple)):
            yield from _within(one)
        else:
            yield one


def let_be_absent(tensor: torch.Tensor, path: str) -> None:
    """The gradient of this tensor, at `path`, is not known. One that is there may be known elsewhere: it is made so."""
    gradient = tensor.grad
    if gradient is not None and _is_unknown(gradient):
        return
    if type(gradient) is not torch.Tensor or not memory.is_dense(gradient) or gradient.is_inference():
        gradient = torch.zeros_like(tensor.detach())
    with torch.no_grad():
        gradient.fill_(float("nan"))
    gradient.__class__ = AbsentGradient
    unknown = cast(AbsentGradient, gradient)
    unknown.path = f"{path}.grad"
    tensor.grad = unknown
    tensor.register_post_accumulate_grad_hook(_Again(path))  # type: ignore[no-untyped-call]


class _Again:
    """A hook: what backward(create_graph=True) puts in the place of one that is absent is not known either."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, tensor: torch.Tensor) -> None:
        gradient = tensor.grad
        if type(gradient) is torch.Tensor and gradient.requires_grad and bool(gradient.isnan().all()):
            tensor.grad = None
            let_be_absent(tensor, self._path)


def _is_unknown(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, AbsentGradient)


def _is_small(gradient: torch.Tensor) -> bool:
    """Whether it is carried, and can be put back: by a copy."""
    if _is_unknown(gradient) or gradient.requires_grad or not memory.is_held(gradient):
        return False
    return gradient.nbytes <= memory.SMALL and memory.refusal(gradient) is None


class _Entry:
    """A tensor and its gradient when a call began."""

    __slots__ = ("_copy", "_gradient", "_is_zero", "_place", "_tensor", "_was_none")

    def __init__(self, place: Place, tensor: torch.Tensor, *, is_zero: bool) -> None:
        gradient = tensor.grad
        self._place, self._tensor, self._is_zero = place, weakref.ref(tensor), is_zero
        self._was_none = gradient is None
        self._copy: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        if gradient is not None and _is_small(gradient):  # a large one that the script lets go is freed
            self._copy, self._gradient = gradient.clone(), gradient

    def rewind(self) -> None:
        """Let it be as it was; or let it be absent, if it is large."""
        tensor = self._tensor()
        if tensor is None:  # the step has put another one in its place, and so have we
            tensor = self._place.read()
        if not isinstance(tensor, torch.Tensor) or not (tensor.requires_grad or tensor.is_leaf):
            return
        if not tensor.requires_grad:
            tensor.requires_grad_()
        if self._was_none:
            tensor.grad = None
        elif self._copy is not None and self._gradient is not None and self._gradient.shape == tensor.shape:
            memory.fill(self._gradient, self._copy)  # also if it was written to by what torch does not count
            tensor.grad = self._gradient
        elif self._is_zero and tensor.grad is not None and not _is_unknown(tensor.grad):
            tensor.grad.detach().zero_()
        elif self._is_zero:
            tensor.grad = torch.zeros_like(tensor.detach())
        else:
            let_be_absent(tensor, self._place.path)


class ByHand:
    """Of one rank."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._all_known = True
        self._entries: list[_Entry] = []
        self._at_gate: dict[str, bool] | None = None  # of the call under way once it has come there: whether one lay
        self._returns: dict[tuple[str, bool], set[str]] = {}  # by path and whether one lay at the gate: how at returns
        self._zeros: dict[str, tuple[int, int]] = {}  # those of zeros at the last one

    def know(self, places: Iterable[Place]) -> None:
        """All that was seen. Which of them are of the state is asked later: on a replacement it is not here yet."""
        tensors = (place for place in places if type(place.value) in (torch.Tensor, torch.nn.Parameter))
        self._places = [place for place in tensors if place.value.requires_grad and place.value.is_leaf]
        self._all_known = not self._places

    def __bool__(self) -> bool:
        """Whether any tensor is trained by hand."""
        return bool(self._places)

    def _there(self) -> Iterator[tuple[Place, torch.Tensor]]:
        if not self._all_known:
            read = ((place, place.read()) for place in self._places)
            self._places = [place for place, one in read if isinstance(one, torch.Tensor) and is_free(one)]
            self._all_known = True
        for place in self._places:
            tensor = place.read()
            if isinstance(tensor, torch.Tensor) and is_free(tensor):
                yield place, tensor

    def enter(self) -> None:
        """A call begins."""
        self._entries = []
        for place, tensor in self._there() if self._places else ():
            is_zero = tensor.grad is not None and self._zeros.get(place.path) == _state_of(tensor.grad)
            self._entries.append(_Entry(place, tensor, is_zero=is_zero))
        self._at_gate = None

    def pass_gate(self) -> None:
        """It is at its gate."""
        there = self._there() if self._places else ()
        self._at_gate = {place.path: tensor.grad is not None for place, tensor in there}

    def leave(self) -> None:
        """It has returned: what lay where, and what became of it after the gate."""
        before, self._at_gate, self._zeros = self._at_gate or {}, None, {}
        for place, tensor in self._there() if self._places else ():
            path, gradient, how = place.path, tensor.grad, _OTHER
            known = self._returns.setdefault((path, before.get(path, False)), set())
            if gradient is None:
                how = _NONE
            elif known <= {_ZEROS} and _is_zero(gradient):
                how, self._zeros[path] = _ZEROS, _state_of(gradient)
            known.add(how)

    def rewind(self) -> None:
        """Put them back, as they were when the call began."""
        for entry in self._entries:
            entry.rewind()

    # ------------------------------------------------------------ to tell and to take

    def tell(self) -> dict[str, bytes]:
        """By path, the gradient that a replacement has to have, or none: encoded, or empty where it is not known.

        What becomes of one after the gate is not known there, but where all calls before have cleared it.
        """
        found: dict[str, bytes] = {}
        room = LIMIT
        for place, tensor in self._there() if self._places else ():
            path, gradient = place.path, tensor.grad
            if self._at_gate is not None:
                how = self._returns.get((path, gradient is not None), {_OTHER} if gradient is not None else {_NONE})
                found[path] = _ALL_ZEROS if how == {_ZEROS} else _NO_GRADIENT if how == {_NONE} else b""
            elif gradient is None:
                found[path] = _NO_GRADIENT
            elif _is_small(gradient) and gradient.nbytes <= room:
                room -= gradient.nbytes
                found[path] = values.encode(memory.near(gradient), path)
            else:
                found[path] = _ALL_ZEROS if self._zeros.get(path) == _state_of(gradient) else b""
        return found

    def take(self, told: dict[str, bytes]) -> set[str]:
        """Give each tensor the gradient that its predecessor had. Returns the paths at which there is none."""
        missing = {path for path, gradient in told.items() if gradient != _NO_GRADIENT}
        for place, tensor in self._there():
            if place.path in told:
                _take(tensor, told[place.path], place.path)
                missing.discard(place.path)
        return missing


def _state_of(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), memory.version_of(gradient)


def _is_zero(gradient: torch.Tensor) -> bool:
    return not _is_unknown(gradient) and memory.is_dense(gradient) and not bool(gradient.detach().any())


def _take(tensor: torch.Tensor, told: bytes, path: str) -> None:
    """One that is there already may be known elsewhere, too: it is written to."""
    if told == _NO_GRADIENT:
        tensor.grad = None
        return
    gradient = torch.zeros_like(tensor.detach()) if told == _ALL_ZEROS else values.decode(told) if told else None
    if not isinstance(gradient, torch.Tensor) or (gradient.shape, gradient.dtype) != (tensor.shape, tensor.dtype):
        let_be_absent(tensor, path)
    elif tensor.grad is None or not memory.fill(tensor.grad, gradient):
        tensor.grad = gradient.to(tensor.device)
