"""Own: parts of `state=` whose values are each rank's own, such as a meter of the local loss.

Replicas tell one another in the first steps, and later now and then, what they hold. What differs is carried in the
rank's private record from then on, as no replica has it. What has no room there is refused in the first steps; later it
is said, and a replacement is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.parallel.shards import local
from torchrelay.worker.state.parts import (
    ArrayPart,
    ContainerPart,
    Part,
    StatefulPart,
    TensorPart,
)
from torchrelay.worker.tensors import memory, values

EACH = 16 << 10  # bytes of one part
TOO_LARGE = (
    "{} is each rank's own, and has more than {:,} bytes, or what cannot be told: no other rank has it when this one "
    "is lost",
    "keep in it what is alike on all ranks, such as reduced values; make it smaller; or keep it in a variable",
)

Carried = ContainerPart | StatefulPart | TensorPart | ArrayPart


class Own:
    """Of one rank."""

    def __init__(self, parts: Callable[[], Iterable[Part]] = tuple) -> None:
        """`parts`: of the state, containers opened."""
        self._parts = parts
        self._kept: dict[str, Carried] = {}
        self.lacking: set[str] = set()

    @property
    def paths(self) -> set[str]:
        """Of the parts that are each rank's own."""
        return {*self._kept, *self.lacking}

    def keep(self, paths: Iterable[str], *, early: bool) -> None:
        """These are. Raises `RefusedError` if one cannot be carried, and it is `early`."""
        for path, part in self._found(set(paths) - self.paths).items():
            if _told(part) is not None:
                self._kept[path] = part
                continue
            if early:
                raise RefusedError(TOO_LARGE[0].format(path, EACH), TOO_LARGE[1])
            self.lack({path}, EACH)

    def lack(self, paths: Iterable[str], limit: int) -> None:
        """These are, and have no room in `limit` bytes: a replacement will be refused."""
        for path in paths:
            self.lacking.add(path)
            what, remedy = TOO_LARGE
            print(f"torchrelay: {what.format(path, limit)}; {remedy}", file=sys.stderr, flush=True)

    def told(self) -> dict[str, bytes]:
        """The values now. What has become too large is lacking from now on."""
        found = {path: _told(part) for path, part in self._kept.items()}
        for path in [path for path, data in found.items() if data is None]:
            del self._kept[path]
            self.lack({path}, EACH)
        return {path: data for path, data in found.items() if data is not None}

    def take(self, told: dict[str, bytes], lacking: Iterable[str] = ()) -> None:
        """On a replacement: what its predecessor has told. Raises `UnprovedError` if something is lacking."""
        for path in lacking:
            raise UnprovedError(f"{TOO_LARGE[0].format(path, EACH)}. {TOO_LARGE[1].capitalize()}")
        for path, part in self._found(told).items():
            self._kept[path] = part
            _put(part, values.decode(told[path]))

    def _found(self, paths: Iterable[str]) -> dict[str, Carried]:
        wanted = set(paths)
        return {part.path: part for part in self._parts() if part.path in wanted and isinstance(part, Carried)}


def _told(part: Carried) -> bytes | None:
    """None if it cannot be carried."""
    told: Any
    if isinstance(part, TensorPart):
        told = local(part.tensor).detach()
    else:
        told = part.array if isinstance(part, ArrayPart) else part.told_values()
    if isinstance(told, torch.Tensor) and memory.size(told) > EACH:
        return None
    try:
        data = values.encode(told, part.path)
    except (TypeError, ValueError, RuntimeError):
        return None
    return data if len(data) <= EACH else None


def _put(part: Carried, told: object) -> None:
    if isinstance(part, TensorPart):
        assert isinstance(told, torch.Tensor), "of a tensor a tensor is told"
        with torch.no_grad():
            local(part.tensor).copy_(told)
    elif isinstance(part, ArrayPart):
        part.array[...] = told
    else:
        part.take_values(told)
