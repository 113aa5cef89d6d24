"""Saved state: the other way of protect(), with the functions for checkpoints that a script already has.

    save() -> tree           and load(tree): the tree travels as it is
    save(path) -> anything   and load(path): whatever files it wrote travel

The files lie in memory (/dev/shm) and are gone as soon as they have been read.
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from torchrelay.errors import RefusedError, StateMismatchError, UnprovedError
from torchrelay.worker.state import random_state
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.tensors.landing import Landing
from torchrelay.worker.tensors.tree import Fields, Leaf, encode

Save = Callable[..., Any]
Load = Callable[[Any], Any]
MOST_DEPTH = 8  # of containers that are told apart in messages
_NAME = "state"  # of the path given to save() and load()


def memory_folder() -> Path:
    """A folder for short-lived files: /dev/shm if we can write there, else the system's temporary folder."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class SavedPart:
    """What save() returns, or the files it writes, as a part of the state."""

    def __init__(self, save: Save, load: Load, folder: Path | None = None) -> None:
        """`folder`: where files may lie for a moment. Raises `RefusedError` if the functions take other arguments."""
        self.path = "save()"
        self._save = save
        self._load = load
        self._folder = folder or memory_folder()
        self._by_path = _required(save, "save") == 1
        if _required(load, "load", given=1) > 1:
            raise RefusedError("load takes more than one argument", "let it take what save() returned, or a path")
        self._arrived: Any = None
        self._written: _Folder | None = None

    def held(self) -> Any:
        return self._save

    @property
    def is_tree(self) -> bool:
        """Whether save() returns what it saves, and writes no files."""
        return not self._by_path

    def look(self, besides: Collection[int] = ()) -> dict[str, str]:
        """A digest of each value that save() returns, by its path; of files, of each one. As of now.

        `besides`: addresses of tensors that are left out.
        """
        given = self.give()
        return dict(_digests(given["files"] if self._by_path else given["saved"], self.path, besides))

    def told_alike(self, besides: Collection[int] = ()) -> set[str]:
        """The paths that `look` tells alike, wherever random numbers are, and whenever it is asked."""
        before = random_state.capture()
        one = self.look(besides)
        random_state.draw()
        two = self.look(besides)
        random_state.restore(before)
        return {path for path, digest in one.items() if two.get(path) == digest}

    def give(self) -> Any:
        if not self._by_path:
            return Fields(saved=self._save())
        with _Folder(self._folder) as folder:
            self._save(str(folder / _NAME))
            return Fields(files=_map_files(folder))  # the maps outlive the files

    def take(self, tree: Any, landing: Landing) -> None:
        if ("files" in tree) != self._by_path:
            raise StateMismatchError("save() takes a path on one rank and none on another")
        if not self._by_path:
            self._arrived = landing.anyhow(tree["saved"], None, self.path)
            return
        self._written = _Folder(self._folder)
        for name, leaf in tree["files"].items():
            landing.anyhow(leaf, _create_file(self._written.path, name, leaf), name)

    def settle(self) -> None:
        if self._written is not None:
            with self._written as folder:
                self._load(str(folder / _NAME))
            self._written = None
        else:
            arrived, self._arrived = self._arrived, None
            self._load(arrived)


def _digests(value: Any, path: str, besides: Collection[int], depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, (dict, list, tuple)) and value and depth < MOST_DEPTH:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _digests(each, f"{path}[{key!r}]", besides, depth + 1)
        return
    if isinstance(value, torch.Tensor) and value.data_ptr() in besides:
        return
    digest = Digest()
    data, tensors = encode(value, path, canonical=True)
    digest.add(data)
    for tensor in tensors:
        digest.add_tensor(tensor)
    yield path, digest.text()


class BetweenCalls:
    """Of a replacement: whether what it has of the state is what its script had there, behind its last recorded call.

    A source is asked while it stands at its next call: what its script did since, such as stepping a schedule, has been
    done to that state. So it is put back as far as that is known, and done again here. Then both must be the same.
    """

    def __init__(self, part: SavedPart) -> None:
        """The state of the source is there."""
        self._part = part
        self._source = part.look()
        self._alike = part.told_alike()
        self._own: dict[str, str] = {}

    def begin(self) -> None:
        """What is this rank's own is there, too, such as its own running statistics."""
        self._own = self._part.look()

    def check(self) -> None:
        """At the next call. Raises `UnprovedError`."""
        now = self._part.look()
        kept = {path: {digest, self._own.get(path)} for path, digest in self._source.items() if path in self._alike}
        differing = [path for path, expected in kept.items() if now.get(path) not in expected]
        if differing:
            raise UnprovedError(
                f"{differing[0]} changes between two calls, and a worker that takes over a rank has only what it is "
                "afterwards: what the script reads there would be one change too far. Change it in the step, or pass "
                "model=, optimizer= and state= to protect() instead of save= and load="
            )


class _Folder:
    """A new folder that is removed when it is left, or when nobody holds it any more."""

    def __init__(self, parent: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="torchrelay-state-", dir=parent))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._remove()


def _required(function: Callable[..., Any], name: str, given: int = 0) -> int:
    """How many positional arguments the function must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RefusedError(f"the arguments of {name} cannot be seen ({error})", "pass an ordinary function") from error
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    variable = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if given and len(positional) < given and not variable:
        raise RefusedError(f"{name} takes no argument", "let it take what save() returned, or a path")
    required = sum(1 for one in positional if one.default is one.empty)
    if name == "save" and required > 1:
        raise RefusedError(
            f"save takes {required} arguments", "let it take none and return a state dict, or take a path"
        )
    return required


def _map_files(folder: Path) -> dict[str, torch.Tensor]:
    """The bytes of all files below the folder, by their names relative to it, mapped and not read."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise RefusedError("save(path) wrote nothing at its path", "let it write on every rank, not on rank 0 only")
    return {path.relative_to(folder).as_posix(): _map(path, path.stat().st_size, shared=False) for path in files}


def _create_file(folder: Path, name: str, leaf: Any) -> torch.Tensor:
    """A new file of the leaf's size below the folder, mapped. Raises `ValueError` if the name leads elsewhere."""
    relative = PurePosixPath(name)
    if not isinstance(leaf, Leaf) or leaf.dtype != torch.uint8 or len(leaf.shape) != 1:
        raise ValueError(f"{name!r} is no file")
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise ValueError(f"{name!r} is not the name of a file of the state")
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.truncate(leaf.shape[0])
    return _map(path, leaf.shape[0], shared=True)


def _map(path: Path, size: int, *, shared: bool) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)
