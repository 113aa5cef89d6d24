"""Withheld: gradients whose values nobody has any more, until a script clears them, or backward adds to them.

They are zeros, and of a class that sees which functions of torch are called with them. The class of the very tensor is
changed, so that whoever has it has no other one. Nothing else is watched: what torch computes is as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from torchrelay.errors import UnprovedError
from torchrelay.worker.parallel.shards import local
from torchrelay.worker.parallel.torch_functions import LOOKS, name_of, tensors_in
from torchrelay.worker.tensors import absent


class _Seal:
    """On a gradient and what shows the same memory: until it is broken nobody may read them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken = False


_WHOLE = frozenset(("data", "detach", "detach_", "view", "view_as", "reshape", "flatten", "t", "T"))
_CLEARS = frozenset(("zero_", "_foreach_zero_", "fill_"))
_COMPILER = ("torch._dynamo", "torch._subclasses", "torch._functorch", "torch._inductor", "torch._guards", "torch.fx")
_kinds: dict[type, type] = {}  # by the class of a tensor, the one that it has while it is withheld


def withhold(name: str, grad: torch.Tensor, seal: _Seal | None = None) -> None:
    """Zeros stand for what nobody has any more: whoever reads them before they are cleared or added to is refused."""
    kind = type(grad)
    if kind in _kinds.values():
        grad = _opened(grad)
        kind = type(grad)
    if kind not in _kinds:
        _kinds[kind] = type(
            f"Withheld{kind.__name__}", (kind,), {"__slots__": (), "__torch_function__": classmethod(_asked)}
        )
    grad.__dict__["_torchrelay"] = seal or _Seal(name), int(local(grad)._version)
    grad.__class__ = _kinds[kind]


def give_back(parameters: Iterable[torch.Tensor]) -> None:
    """From now on their gradients are what they seem to be."""
    if _kinds:
        for parameter in parameters:
            if parameter.grad is not None and type(parameter.grad) in _kinds.values():
                _opened(parameter.grad)


def _opened(grad: torch.Tensor) -> torch.Tensor:
    grad.__dict__.pop("_torchrelay")[0].broken = True
    grad.__class__ = next(kind for kind, withheld in _kinds.items() if withheld is type(grad))
    return grad


def _is_sealed(value: Any) -> bool:
    """Whether it may not be read. Backward adds to it by ways that are not seen here, but its version moves."""
    if not isinstance(value, torch.Tensor) or type(value) not in _kinds.values():
        return False
    seal, version = value.__dict__["_torchrelay"]
    return not seal.broken and int(local(value)._version) == version


def _asked(_: type, func: Any, __: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """A function of torch is called with gradients, some of which may be withheld."""
    given = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        withheld = [each for each in tensors_in(args, given) if type(each) in _kinds.values()]
        sealed = [each for each in withheld if _is_sealed(each)]
        for each in withheld:
            if all(each is not one for one in sealed):
                _opened(each)
        name = name_of(func)
        if sealed and not _reads_nothing(sys._getframe(1)):
            if name in _CLEARS or (name == "copy_" and len(sealed) == 1 and sealed[0] is args[0]):
                for each in sealed:
                    _opened(each)
            elif name not in LOOKS and name not in _WHOLE:
                raise _unread(sealed[0])
        result = func(*args, **given)
        if name in _WHOLE and sealed and isinstance(result, torch.Tensor) and not _is_sealed(result):
            seal = sealed[0].__dict__["_torchrelay"][0]
            withhold(seal.name, result, seal)
        return result


def _reads_nothing(caller: FrameType) -> bool:
    """Whether this is our own looking round, or torch's compiler, which describes what a model has."""
    return absent.is_ours(caller) or caller.f_globals.get("__name__", "").startswith(_COMPILER)


def _unread(grad: torch.Tensor) -> UnprovedError:
    seal, _ = grad.__dict__["_torchrelay"]
    why = UnprovedError(
        f"the script reads the gradient of {seal.name} that an earlier step has left, before it is zeroed: a step that "
        "a fault has cut short, or the first one of a worker that takes over, does not have it. Keep what you need of "
        "it, such as its norm, in the step that makes it"
    )
    return absent.refuse("", why)
