"""Holdings: a digest of the data that a loader's objects hold. A replacement shows by it that it has the same rows.

The batch in progress may be equal by chance where other rows are not: a subset that was drawn without a seed, a query
that gives more rows by now. So the record of a loop has the digests of all tensors, arrays, tables and long containers
that its loader's objects had when it began, and a replacement compares its own before its first item.

What changes, such as a cache or a curriculum, is seen as loops begin and go on, and no longer told: by all loops and
loaders that come to the same place, from the first time that one of them saw it. Short containers, single values and
settings are not compared: they may name this process, its files or its time. Files behind paths are not opened.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import torch

from torchrelay.errors import UnprovedError
from torchrelay.worker.data import held, rows
from torchrelay.worker.data.held import DATA, Part
from torchrelay.worker.hidden_state import signatures
from torchrelay.worker.source.lines import Place, place_of
from torchrelay.worker.tensors import arguments

MOST = 32  # that are told of one loader: the longest
ROOM, MAPPED = 1 << 30, 64 << 20  # bytes of arrays of one loader that count as a whole: in memory, and in files
SHARE = 500  # all is read anew only if so many times as long has passed as it takes
REST = 20  # and a walk is made, likewise
REMEDY = (
    "Seed whatever chooses rows, and read them from a place that does not change while the job runs; "
    'or let the job begin with one choice for all of its life: rows = torchrelay.once("rows", choose)'
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, bytes]]).decode


class Holdings:
    """What the objects of one loader hold."""

    def __init__(self, parts: Callable[[], list[Part]], name: str, *, rests: bool = False) -> None:
        """`parts`: all there is. `name`: of what has it. `rests`: loops may begin in every step, so not each looks."""
        self._rests = rests
        self._parts = parts
        self._name = name
        self._steady: dict[str, tuple[Any, bytes]] | None = None  # by path: a glance at it, and its digest
        self._told = b""
        self._read_at = self._cost = 0.0
        self._walked_at = self._walk = 0.0

    def told(self) -> bytes:
        """As a loop begins, and now and then in it: the digests of what has never changed, by its path."""
        if self._rests and self._steady is not None and time.perf_counter() - self._walked_at < REST * self._walk:
            return self._told
        begin = time.perf_counter()
        parts = self._look()
        if self._steady is None:
            self._begin(parts)
        elif self._steady:
            self._compare(parts)
        assert self._steady is not None
        self._told = _encode([(path, found) for path, (_, found) in self._steady.items()]) if self._steady else b""
        self._walked_at = time.perf_counter()
        self._walk = self._walked_at - begin
        return self._told

    def see(self) -> None:
        """Just before a loop begins of which nothing is told: what is seen here first is what later looks compare."""
        if self._steady is None:
            self._begin(self._look())

    def check(self, recorded: bytes) -> None:
        """A replacement is about to enter a loop. Raises `UnprovedError` if it does not hold its predecessor's data."""
        parts = self._look()
        told = dict(_decode(recorded)) if recorded else {}
        own = self._read(parts, {path: found[:1] for path, found in told.items()})
        for path, found in told.items():
            if path in own and own[path] != found and not held.is_unfilled(parts[path].value):
                self._refuse(path)
            if path not in parts:
                self._refuse(path)
        if self._steady is None:  # what was told by its predecessor no longer has changed there
            self._keep(parts, own)

    def _refuse(self, path: str) -> None:
        raise UnprovedError(
            f"{path} of {self._name} is not what it was in the worker that was lost, though nothing has changed it "
            f"there since its first loop: later items would differ, even if the one in progress does not. {REMEDY}"
        )

    def _look(self) -> dict[str, Part]:
        return {part.path: part for part in self._parts()}

    def _begin(self, parts: dict[str, Part]) -> None:
        data = [(_size(part.value), path) for path, part in parts.items() if path == DATA or _counts(part.value)]
        largest = [path for _, path in sorted(data, reverse=True)][:MOST]
        short = parts.keys() - {path for _, path in data}  # a cache, maybe, of which there is nothing yet
        for path, digest in self._read(parts, dict.fromkeys(short, rows.WHOLE)).items():
            _places.is_steady(parts[path], digest)
        self._keep(parts, self._read(parts, _modes(parts, largest)))

    def _keep(self, parts: dict[str, Part], found: dict[str, bytes]) -> None:
        self._steady = {}
        for path, digest in found.items():
            if _places.is_steady(parts[path], digest):
                self._steady[path] = _glance(parts[path].value), digest

    def _compare(self, parts: dict[str, Part]) -> None:
        """Let go of what has changed."""
        assert self._steady is not None
        glances = {path: _glance(parts[path].value) if path in parts else None for path in self._steady}
        doubtful = [path for path, (glance, _) in self._steady.items() if glances[path] != glance]
        if time.perf_counter() - self._read_at > SHARE * self._cost:
            doubtful = list(self._steady)
        now = self._read(parts, {path: self._steady[path][1][:1] for path in doubtful})
        for path in doubtful:
            if now.get(path) != self._steady[path][1]:
                del self._steady[path]
                if path in parts:
                    _places.has_changed(parts[path])
            else:
                self._steady[path] = glances[path], now[path]
        for path in [path for path in self._steady if _places.was_seen_to_change(parts[path])]:
            del self._steady[path]

    def _read(self, parts: dict[str, Part], modes: dict[str, bytes]) -> dict[str, bytes]:
        """The digests of these paths; what raises when it is read has none."""
        begin = time.perf_counter()
        found = {}
        for path, mode in modes.items():
            if path in parts:
                try:
                    found[path] = rows.digest(parts[path].value, mode)
                except Exception:  # noqa: BLE001  of a script's own: whatever it raises, the script goes on
                    continue
        self._read_at = time.perf_counter()
        self._cost = max(self._cost, self._read_at - begin)
        return found


class _Places:
    """Which places hold what they held when they were seen first, whoever saw them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[str, bytes | None]]] = {}  # by the owner's id; None: it has changed

    def is_steady(self, part: Part, digest: bytes) -> bool:
        """Whether this place, which holds this now, was not seen with anything else."""
        names = self._of(part.owner)
        if names is None:
            return True
        first = names.setdefault(part.name, digest)
        if first is None or (first[:1] == digest[:1] and first != digest):
            names[part.name] = None
            return False
        return True

    def has_changed(self, part: Part) -> None:
        names = self._of(part.owner)
        if names is not None:
            names[part.name] = None

    def was_seen_to_change(self, part: Part) -> bool:
        names = self._of(part.owner)
        return names is not None and names.get(part.name, b"") is None

    def _of(self, owner: Any) -> dict[str, bytes | None] | None:
        number = id(owner)
        found = self._known.get(number)
        if found is not None and found[0]() is owner:
            return found[1]
        try:
            reference = weakref.ref(owner, partial(_forget, self._known, number))
        except TypeError:  # a list: nobody can tell whether it is the same one
            return None
        names: dict[str, bytes | None] = {}
        self._known[number] = reference, names
        return names


def _forget(known: dict[int, Any], number: int, _: object) -> None:
    known.pop(number, None)


_places = _Places()
_known: dict[int, tuple[Any, Holdings]] = {}  # by the loader's id, with a weak reference
_of_functions: dict[Place, Holdings] = {}


def of(loader: Any) -> Holdings:
    """Of this loader, from its first loop to its last."""
    number, name = id(loader), f"a {type(loader).__module__}.{type(loader).__qualname__}"
    found = _known.get(number)
    if found is not None and found[0]() is loader:
        return found[1]
    try:
        reference = weakref.ref(loader, partial(_forget, _known, number))
    except TypeError:  # a list: of it as it is now, and no longer
        return Holdings(lambda: held.of_loader(loader), name)
    holdings = Holdings(lambda: held.of_loader(reference()), name)
    _known[number] = reference, holdings
    return holdings


def of_functions(frame: FrameType) -> Holdings:
    """Of a loop without a loader: arrays and data sets that the functions around it use, such as a text in tokens.

    `frame`: of the function in which the loop is.
    """
    place = place_of(frame.f_code)
    found = _of_functions.get(place)
    if found is None:
        found = Holdings(held.of_functions, "the functions around a loop", rests=True)
        _of_functions[place] = found
    return found


# ---------------------------------------------------------------- looks that raise nothing


def _modes(parts: dict[str, Part], paths: Iterable[str]) -> dict[str, bytes]:
    """How much of each is to count, as there is room."""
    left, mapped = ROOM, MAPPED
    modes = {}
    for path in paths:
        value = parts[path].value
        size = _size(value)
        in_file = isinstance(value, np.memmap) or rows.is_table(value)
        fits = size <= (mapped if in_file else left)
        if fits and in_file:
            mapped -= size
        elif fits:
            left -= size
        modes[path] = rows.WHOLE if fits else rows.PIECES
    return modes


def _glance(value: Any) -> Any:
    """What tells in next to no time whether something has changed, but for a part of what is large."""
    try:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return value.shape, arguments.digest(value)
        return signatures.signature_of(value)
    except Exception:  # noqa: BLE001  as above
        return "unknown", id(value)


def _counts(value: Any) -> bool:
    try:
        return held.counts(value)
    except Exception:  # noqa: BLE001  as above
        return False


def _size(value: Any) -> int:
    try:
        return rows.size(value)
    except Exception:  # noqa: BLE001  as above
        return 0
