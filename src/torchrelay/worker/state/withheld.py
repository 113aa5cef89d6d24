"""Withheld: gradients whose values nobody has any more, until a script clears them, or backward adds to them.

They are zeros, and of a class that sees which functions of torch are called with them. The class of the very tensor is
changed, so that whoever has it has no other one. Nothing else is watched: what torch computes is as ever.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from torchrelay.errors import UnprovedError
from torchrelay.worker.parallel.shards import is_shard, local
from torchrelay.worker.parallel.torch_functions import LOOKS, name_of, tensors_in
from torchrelay.worker.tensors import absent

# What shows the whole of it: of a part nobody could tell whether the rest was cleared.
_WHOLE = frozenset(("data", "detach", "detach_", "view", "view_as", "reshape", "flatten", "t", "T", "mT", "contiguous"))
_CLEARS = frozenset(("zero_", "_foreach_zero_", "fill_", "copy_"))
_TIMES = frozenset(("mul_", "__imul__", "_foreach_mul_"))
_ASKS = LOOKS.union(
    ("is_sparse_csr", "is_pinned", "is_shared", "is_same_size", "type", "is_neg", "is_conj", "itemsize", "data_ptr")
)
_MADE_LIKE = frozenset(("full_like", "new_full", "new_tensor"))  # which may take values of what else they are given
_COMPILER = ("torch._dynamo", "torch._subclasses", "torch._functorch", "torch._inductor", "torch._guards", "torch.fx")
_ADDING = ("torch.distributed.fsdp", "torch.distributed.pipelining")  # what adds to gradients by functions of torch
_kinds: dict[type, type] = {}  # by the class of a tensor, the one that it has while it is withheld
_open: dict[int, weakref.ref[torch.Tensor]] = {}  # all that have such a class, by their ids


class _Seal:
    """On a gradient and what shows the same memory: until it is broken nobody may read them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken = False
        self.node: Any = None  # without a reference the node, and our hook, would be gone before backward
        self.hook: Any = None

    def close(self) -> None:
        """It is broken."""
        self.broken = True
        if self.hook is not None:
            self.hook.remove()
        self.node = self.hook = None


def withhold(name: str, parameter: torch.Tensor) -> None:
    """Nobody has the values of its gradient: who reads it before it is cleared or added to is refused."""
    grad = parameter.grad
    assert grad is not None
    seal = _Seal(name)
    _seal(grad, seal)
    if parameter.is_leaf and parameter.requires_grad and not is_shard(parameter):
        before = weakref.ref(grad)
        seal.node = get_gradient_edge(parameter).node
        seal.hook = seal.node.register_prehook(lambda _: _add_to(before()))


def _seal(grad: torch.Tensor, seal: _Seal) -> None:
    kind = type(_opened(grad))
    if kind not in _kinds:
        body = {"__slots__": (), "__torch_function__": classmethod(_asked)}
        _kinds[kind] = type(f"Withheld{kind.__name__}", (kind,), body)
    grad.__dict__["_torchrelay"] = seal, int(local(grad)._version)
    grad.__class__ = _kinds[kind]
    number = id(grad)
    _open[number] = weakref.ref(grad, lambda _: _open.pop(number, None))


def give_back(parameters: Iterable[torch.Tensor]) -> None:
    """From now on their gradients are what they seem to be: zeros, if nothing was added to them."""
    for parameter in parameters if _open else ():
        if parameter.grad is not None and id(parameter.grad) in _open:
            _opened(parameter.grad)


def _add_to(grad: torch.Tensor | None) -> None:
    """Something is about to be added to it, if it is still there."""
    if grad is not None:
        _opened(grad)


def _is_withheld(value: Any) -> bool:
    return id(value) in _open and type(value) in _kinds.values()


def _opened(grad: torch.Tensor) -> torch.Tensor:
    """The same, of its own class again."""
    if _is_withheld(grad):
        grad.__dict__.pop("_torchrelay")[0].close()
        grad.__class__ = next(kind for kind, withheld in _kinds.items() if withheld is type(grad))
        _open.pop(id(grad), None)
    return grad


def _is_sealed(value: torch.Tensor) -> bool:
    """Whether it may not be read. FSDP2 adds to its shards by ways that are not seen here, but their version moves."""
    seal, version = value.__dict__["_torchrelay"]
    return not seal.broken and (seal.hook is not None or int(local(value)._version) == version)


def _asked(_: type, func: Any, __: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """A function of torch is called with gradients, some of which may be withheld."""
    given = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        sealed = [each for each in tensors_in(args, given) if _is_withheld(each)]
        if not all(map(_is_sealed, sealed)):
            _open_all()
            sealed = [each for each in sealed if _is_withheld(each)]
        name = name_of(func)
        caller = sys._getframe(1)
        if sealed and not _reads_nothing(caller):
            if _clears(func, name, args, given, sealed) or caller.f_globals.get("__name__", "").startswith(_ADDING):
                for each in sealed:
                    _opened(each)
            elif name not in _WHOLE and not _only_asks(func, name, args, sealed):
                raise _unread(sealed[0])
        result = func(*args, **given)
        if name in _WHOLE and sealed:
            for each in tensors_in((result,), {}):
                if not _is_withheld(each):
                    _seal(each, sealed[0].__dict__["_torchrelay"][0])
        return result


def _open_all() -> None:
    """Of all that may be read: who goes through them goes by their classes."""
    for known in list(_open.values()):
        grad = known()
        if grad is not None and not _is_sealed(grad):
            _opened(grad)


def _clears(func: Any, name: str, args: tuple[Any, ...], given: Mapping[str, Any], sealed: list[torch.Tensor]) -> bool:
    """Whether this makes them what they were not, whatever they were."""
    others = tensors_in(args[1:], given)
    if not args or any(each is one for each in others for one in sealed):
        return False
    if name in _TIMES:  # by zero
        return len(args) == 2 and type(args[1]) in (int, float) and args[1] == 0
    if name == "__setitem__":
        return args[1] is ... or args[1] == slice(None)
    return name in _CLEARS or _sets(func, "data")


def _sets(func: Any, name: str) -> bool:
    return name_of(func) == "__set__" and getattr(func.__self__, "__name__", "") == name


def _only_asks(func: Any, name: str, args: tuple[Any, ...], sealed: list[torch.Tensor]) -> bool:
    """Whether this tells nothing of their values."""
    if name in _MADE_LIKE:
        return name != "new_tensor" and len(sealed) == 1 and bool(args) and args[0] is sealed[0]
    return name in _ASKS or _sets(func, "requires_grad")


def _reads_nothing(caller: FrameType) -> bool:
    """Whether this is our own looking round, or torch's compiler, which describes what a model has."""
    return absent.is_ours(caller) or caller.f_globals.get("__name__", "").startswith(_COMPILER)


def _unread(grad: torch.Tensor) -> UnprovedError:
    name = grad.__dict__["_torchrelay"][0].name
    why = UnprovedError(
        f"the script reads the gradient of {name} that an earlier step has left, before it is zeroed: a step that a "
        "fault has cut short, or the first one of a worker that takes over, does not have it. Keep what you need of "
        "it, such as its norm, in the step that makes it"
    )
    return absent.refuse("", why)
