"""Loaded: checkpoints that a script has loaded before protect(). No replacement may meet one that this job has written.

`torch.load` is looked at, and of what it returns only the names in it: that a file holds a model, or the state of an
optimizer. What the first holder of a rank has loaded is told to the core, as a result of `once`; a replacement that has
loaded something else computes other epochs and step numbers than the others do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from msgspec import Struct

from torchrelay.worker.data.cursor import PATH, Diverged
from torchrelay.worker.session import Session

NAME = "torchrelay: loaded before protect()"  # under which it is recorded; scripts use other names
_DEPTH = 3  # of dicts within one another that are looked into
_OPTIMIZER = "param_groups"


class File(Struct, array_like=True, frozen=True):
    """A file as it was when it was loaded."""

    path: str
    size: int
    written_ns: int


class Loaded:
    """What this process has loaded."""

    def __init__(self) -> None:
        self._found: list[tuple[File, frozenset[str]]] = []
        self._over = False

    def watch(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; what it loads is noted."""

        @functools.wraps(load)
        def loads(file: Any, *args: Any, **kwargs: Any) -> Any:
            before = None if self._over else _file(file)
            value = load(file, *args, **kwargs)
            if before is not None and (names := frozenset(_names(value, 0))):
                self._found.append((before, names))
            return value

        return loads

    def over(self, models: Iterable[torch.nn.Module]) -> list[File]:
        """The script joins: the files that hold the state of an optimizer, or of one of these models."""
        self._over = True
        keys = [frozenset(name for name, _ in model.named_parameters()) for model in models]
        found, self._found = self._found, []
        return [file for file, names in found if _OPTIMIZER in names or any(key and key <= names for key in keys)]


loaded = Loaded()


def install() -> None:
    """Stand in front of `torch.load`."""
    torch.load = loaded.watch(torch.load)


def tell(session: Session, files: list[File]) -> None:
    """By the first holder of a rank, at protect(): what a replacement will find changed, if it loads it again."""
    if files:
        session.record_once(NAME, msgspec.msgpack.encode(files))


def check(session: Session, files: list[File]) -> None:
    """By a replacement, when it has its place. Raises `Diverged` if it has loaded what the first holder had not."""
    recorded = dict(session.identity.wait().once)
    there = msgspec.msgpack.decode(recorded[NAME], type=list[File]) if NAME in recorded else []
    others = [file for file in files if file not in there]
    # Who uses once() for its start may load the file all the same, as its state is replaced.
    if others and not set(recorded) - {NAME}:
        raise Diverged(
            f"this worker takes over a rank, and its script has loaded {others[0].path}, which was written after the "
            f"job began. {PATH}"
        )


def _file(file: Any) -> File | None:
    try:
        path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        if not isinstance(path, str):
            return None
        seen = os.stat(path)
    except OSError:
        return None
    return File(os.path.abspath(path), seen.st_size, seen.st_mtime_ns)


def _names(value: Any, depth: int) -> Iterator[str]:
    """Keys of dicts, with and without DDP's prefix."""
    if not isinstance(value, Mapping) or depth > _DEPTH:
        return
    for key, entry in value.items():
        if isinstance(key, str):
            yield key
            yield key.removeprefix("module.")
        yield from _names(entry, depth + 1)
