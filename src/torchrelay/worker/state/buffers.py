"""Buffers of the modules, by name: those that stand there now, as a forward pass may bind others in their place."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem, is_
from typing import Any

import torch

from torchrelay.worker.parallel.shards import local


class Buffers:
    """All buffers of these modules; shared ones once.

    `self.center = 0.9 * self.center + ...` puts another tensor in the place of the buffer. What is known of buffers is
    known by their names; whoever has taken tensors asks `refresh` whether they are still the ones.
    """

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.now: dict[str, torch.Tensor] = {}
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._bound: list[torch.Tensor | None] = []
        seen: set[int] = set()
        for path, module in modules:
            for inner, submodule in module.named_modules(remove_duplicate=False):
                for name, buffer in submodule._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        self.now[".".join(filter(None, (path, inner, name)))] = local(buffer)
                        self._holders.append(submodule._buffers)
                        self._names.append(name)
                        self._bound.append(buffer)

    def refresh(self) -> set[str]:
        """See which stand there now; returns the names of those that are others. In the path of every step."""
        try:
            bound = list(map(getitem, self._holders, self._names))
        except KeyError:  # one is gone: what is known of it stays as it was
            bound = [holder.get(name) for holder, name in zip(self._holders, self._names, strict=True)]
        if all(map(is_, bound, self._bound)):
            return set()
        found = set()
        for path, new, old in zip(self.now, bound, self._bound, strict=True):
            if new is not old and new is not None:
                self.now[path] = local(new)
                found.add(path)
        self._bound = bound
        return found

    def bound(self) -> list[torch.Tensor | None]:
        """Those of the last `refresh`, for `bind`; None for one that was taken away."""
        return self._bound

    def bind(self, bound: Sequence[torch.Tensor | None]) -> None:
        """Let these stand there again."""
        for holder, name, buffer in zip(self._holders, self._names, bound, strict=True):
            if buffer is not None:
                holder[name] = buffer
        self.refresh()
