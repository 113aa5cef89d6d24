"""Gradients: which there are between two calls, and what lies there from one call to the next.

A call that is made again begins with gradients of zero, as most scripts do: they clear them, and add up what one
update takes. Sums that are carried into the call that takes them are refused: DDP may not have averaged them yet.
Whoever reads them before that, such as the norm of the last step's, would read zeros: that is refused (`withhold`).
Those of one network that lie there while another one is trained, as in adversarial training, are kept and told, since
the script may read them, as clipping does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node, get_gradient_edge

from torchrelay.worker.parallel import fsdp, shards
from torchrelay.worker.parallel.shards import local
from torchrelay.worker.state.withheld import give_back, withhold
from torchrelay.worker.tensors import memory

Named = Sequence[tuple[str, torch.Tensor]]  # parameters, in the state's order


class Gradients(NamedTuple):
    """As they are at one moment."""

    there: bytes  # for each parameter, in order, whether it has one: 1 or 0
    lying: dict[str, torch.Tensor]  # copies of the local parts of those that lie there from an earlier call, by names
    cleared: bool = False  # whether all others were zeros at the entry of each call that was looked at


def there(parameters: Iterable[torch.Tensor]) -> bytes:
    """Which have a gradient.

    An optimizer steps a parameter with a gradient of zeros and not one without.
    """
    return bytes(parameter.grad is not None for parameter in parameters)


def look(parameters: Named, lying: Iterable[str]) -> Gradients:
    """As of now; `lying`: names of those of which the values count, if they have one."""
    kept = set(lying)
    found = {name: each.grad for name, each in parameters if name in kept and each.grad is not None}
    return Gradients(there(each for _, each in parameters), {name: copy(grad) for name, grad in found.items()})


def put(parameters: Named, gradients: Gradients) -> None:
    """Make them so: those that lie there have their values, the others are zeros. Again after DDP was renewed.

    Zeros are withheld if it is not known that scripts leave zeros.
    """
    unknown = []
    for (name, parameter), has in zip(parameters, gradients.there, strict=True):
        value = gradients.lying.get(name)
        if not has:
            parameter.grad = None
            continue
        if parameter.grad is None or parameter.grad.is_sparse or not shards.placed_alike(parameter.grad, parameter):
            parameter.grad = shards.like(parameter, memory.zeros_like(local(parameter).detach()))
        elif value is None:
            local(parameter.grad).detach().zero_()
        if value is not None:
            local(parameter.grad).detach().copy_(value)
        elif not gradients.cleared:
            unknown.append((name, parameter))
    give_back(each for _, each in parameters)
    for name, parameter in unknown:  # when all is written: they may be views of one, whose version counts for all
        withhold(name, parameter)


def size(grad: torch.Tensor) -> int:
    """Bytes of a copy, which is dense."""
    return grad.numel() * grad.element_size() if grad.is_sparse else memory.size(grad)


def copy(grad: torch.Tensor) -> torch.Tensor:
    """Of its local part."""
    return local(grad.to_dense() if grad.is_sparse else grad).detach().clone()


# ---------------------------------------------------------------- what is carried into a call

# It is found out by looking at what is there when the first gradient of a call is added.
#
# What a gradient holds at the entry says little: most scripts zero it inside the step. So we look just before backward
# adds to it: if it is to be updated it must be absent or zero by then.


class Carried(NamedTuple):
    """What a look has found."""

    refused: list[str]  # sums that this call's update, or one that is not known, takes
    lying: list[str]  # of parameters that this call does not update
    changed: list[str]  # those of them to which backward adds, or which the script changes, as clipping does


class CarriedGradients:
    """A look at one call, from its entry to its gate."""

    def __init__(
        self, parameters: Named, modules: Sequence[torch.nn.Module] = (), *, copies: Mapping[str, torch.Tensor] = {}
    ) -> None:
        """To be made at the entry, with the parameters and their names, and the modules that may have shards.

        `copies`: of gradients at the entry, if there is room for them.
        """
        self._copies = dict(copies)
        self._found: list[str] = ["a whole parameter"] if any(map(fsdp.accumulated, modules)) else []
        self._added: dict[str, int] = {}  # and the ids of their parameters
        self._names: dict[int, str] = {}  # of those to whose gradients FSDP2 adds, by id
        self._managed = fsdp.managed(modules)
        self._ends = [fsdp.before_reducing(module, self._look) for module in modules] if self._managed else []
        self._waiting: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        found = [each.grad for _, each in parameters if each.grad is not None]
        self.cleared = all(map(_is_zero, found)) if found else None  # at the entry; None: there are none
        self._hooks: list[Any] = []
        self._nodes: list[Node] = []  # without a reference the node, and our hook, would be gone before backward
        for name, parameter in parameters:
            if parameter.grad is not None and parameter.requires_grad and parameter.is_leaf:
                self._watch(name, parameter)

    def close(self, stepping: Iterable[torch.Tensor] = (), *, updates: bool = True) -> Carried:
        """At the gate. `stepping`: the parameters that are about to be updated, if this call `updates` any."""
        updated = {id(parameter) for parameter in stepping}
        for hook in self._hooks:
            hook.remove()
        for end in self._ends:
            end()
        self._nodes.clear()
        changed = [name for name, each in self._added.items() if updates and each not in updated]
        refused = self._found + [name for name in self._added if name not in changed]
        lying = list(changed)
        for name, is_changed in self._still_there():
            if id(self._waiting[name][0]) not in updated:
                lying.append(name)
                changed += [name] * is_changed
            elif not is_changed:  # else the script may have put another one there
                refused.append(name)
        return Carried(refused, lying, changed)

    def as_they_were(self, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of those that lie there, as they were at the entry, beside those that are `known`.

        Raises `LookupError` with the name of one that cannot be told any more.
        """
        found = {**self._copies, **known}
        for name, is_changed in self._still_there():
            grad = self._waiting[name][0].grad
            if name not in found and is_changed:
                raise LookupError(name)
            if name not in found and grad is not None:
                found[name] = copy(grad)
        return found

    def _still_there(self) -> list[tuple[str, bool]]:
        """Names of those that are not zero and that backward has not added to; whether the script has changed them."""
        found = []
        for name, (parameter, before) in self._waiting.items():
            now = stamp(parameter)
            if now[0] == before[0] and parameter.grad is not None and not _is_zero(parameter.grad):
                found.append((name, now != before))
        return found

    def _watch(self, name: str, parameter: torch.Tensor) -> None:
        self._waiting[name] = parameter, stamp(parameter)
        if id(parameter) in self._managed:
            self._names[id(parameter)] = name
            return

        def before_adding(_: tuple[torch.Tensor, ...]) -> None:
            self._is_added_to(name, parameter)

        node = get_gradient_edge(parameter).node
        self._nodes.append(node)
        self._hooks.append(node.register_prehook(before_adding))

    def _look(self, shards: list[torch.Tensor]) -> None:
        for shard in shards:
            if id(shard) in self._names:
                self._is_added_to(self._names[id(shard)], shard)

    def _is_added_to(self, name: str, parameter: torch.Tensor) -> None:
        if self._waiting.pop(name, None) is None:
            return  # a later backward of the same call: sums inside a call are its own affair
        if parameter.grad is not None and not _is_zero(parameter.grad):
            self._added[name] = id(parameter)
            self._copies.setdefault(name, copy(parameter.grad))


def stamp(parameter: torch.Tensor) -> tuple[int, int]:
    """Tells whether its gradient is the same tensor, and was not written to."""
    grad = parameter.grad
    if grad is None:
        return -1, -1
    return 0 if grad.is_sparse else local(grad).data_ptr(), int(local(grad)._version)


def _is_zero(grad: torch.Tensor) -> bool:
    values = grad._values() if grad.is_sparse else local(grad)
    return not bool(values.count_nonzero())


# ---------------------------------------------------------------- what lies there


class Lying:
    """The gradients that lie there at the entry of a call, so that it can be made again."""

    def __init__(self) -> None:
        self._changed: set[str] = set()  # names of those that calls were seen to change
        self._copies: dict[str, torch.Tensor] = {}
        self._stamps: dict[str, tuple[int, int]] = {}

    def mark(self, known: Mapping[str, torch.Tensor]) -> None:
        """At the entry; `known`: the parameters, by their names, of which this is known. Others are few or none."""
        self._stamps = {name: stamp(parameter) for name, parameter in known.items()}
        changed = ((name, known[name].grad) for name in self._changed.intersection(known))
        self._copies = {name: copy(grad) for name, grad in changed if grad is not None}

    def learn(self, found: Carried) -> None:
        """At the gate of a call that was looked at."""
        self._changed.update(found.changed)

    def at_entry(self, known: Mapping[str, torch.Tensor], watched: CarriedGradients | None) -> dict[str, torch.Tensor]:
        """What they were at the entry, as copies. `watched`: a look that is under way.

        Raises `LookupError` with the name of one that cannot be told any more.
        """
        found = dict(self._copies)
        names = [name for name, before in self._stamps.items() if name not in found and before[0] >= 0]
        still = {name: known[name].grad for name in names if stamp(known[name]) == self._stamps[name]}
        found |= {name: copy(grad) for name, grad in still.items() if grad is not None}
        return found if watched is None else watched.as_they_were(found) | found
