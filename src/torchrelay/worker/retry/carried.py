"""Carried gradients: found out by looking at what is there when the first gradient of a call is added.

A step that is redone starts with gradients of zero, so a script must not carry sums of gradients from one call into
the next. What a gradient holds at the entry says little: most scripts zero it inside the step. So we look just before
backward adds to it: it must be absent or zero by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from torchrelay.worker.parallel import fsdp
from torchrelay.worker.parallel.shards import local


class CarriedGradients:
    """A look at one call, from its entry to its gate."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], modules: Sequence[torch.nn.Module] = ()) -> None:
        """To be made at the entry, with the parameters and their names, and the modules that may have shards."""
        self.found: list[str] = ["a whole parameter"] if any(map(fsdp.accumulated, modules)) else []
        self._names: dict[int, str] = {}  # of those to whose gradients FSDP2 adds, by id
        self._managed = fsdp.managed(modules)
        self._ends = [fsdp.before_reducing(module, self._look) for module in modules] if self._managed else []
        self._waiting: dict[str, tuple[torch.Tensor, int, int]] = {}
        self._hooks: list[Any] = []
        self._nodes: list[Node] = []  # without a reference the node, and our hook, would be gone before backward
        for name, parameter in parameters:
            if parameter.grad is not None and parameter.requires_grad and parameter.is_leaf:
                self._watch(name, parameter)

    def close(self, stepping: Iterable[torch.Tensor] = ()) -> list[str]:
        """At the gate: the names of those whose gradients were carried into this call.

        `stepping`: the parameters that are about to be updated. Gradients of others may lie there untouched.
        """
        updated = {id(parameter) for parameter in stepping}
        for hook in self._hooks:
            hook.remove()
        for end in self._ends:
            end()
        self._nodes.clear()
        for name, (parameter, address, version) in self._waiting.items():
            # Nothing was added, and nobody touched it: if it is not zero, the update is about to use it again.
            grad = parameter.grad
            if id(parameter) not in updated:
                continue
            if (
                grad is not None
                and _address(grad) == address
                and local(grad)._version == version
                and not _is_zero(grad)
            ):
                self.found.append(name)
        self._waiting.clear()
        return self.found

    def _watch(self, name: str, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None, "only parameters with a gradient are watched"
        self._waiting[name] = (parameter, _address(grad), local(grad)._version)
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
            self.found.append(name)


def _address(grad: torch.Tensor) -> int:
    return 0 if grad.is_sparse else local(grad).data_ptr()


def _is_zero(grad: torch.Tensor) -> bool:
    values = grad._values() if grad.is_sparse else local(grad)
    return not bool(values.count_nonzero())
