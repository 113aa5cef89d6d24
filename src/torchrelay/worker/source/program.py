"""Program: the source files that this process has loaded; what runs is what the run has kept of them (`kept`).

Python's loader of source files asks here. What counts is what is not installed: the script, and all that it imports
that lies in no site-packages, in no standard library, and belongs to no package that the forkserver has loaded. Digests
of it are in each private record: a replacement that has other code under a name refuses to go on.

Bytecode that Python has cached is not used for these files: it is found by a time stamp, and can be older than its
source.
"""

from __future__ import annotations

import importlib.machinery
import linecache
import multiprocessing.spawn
import os
import runpy
import struct
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from torchrelay.errors import RefusedError
from torchrelay.wire.files.kept import MAIN, Kept, Load

FOLDER = "TORCHRELAY_CODE"  # where the run keeps its code
INSTALLED = ("site-packages", "dist-packages")
SPAWNED = "__mp_main__"  # the script's name in a process that multiprocessing has spawned
_PAIR = struct.Struct("<QQ")  # the key of a load, and the digest of the source


class Program:
    """The code of one process."""

    def __init__(self, kept: Kept | None = None, say: Callable[[str], object] | None = None) -> None:
        """`say`: for a line to the user."""
        self.kept = kept
        self._say = say or (lambda text: print(f"torchrelay: {text}", file=sys.stderr, flush=True))
        self._times: Counter[tuple[str, str]] = Counter()
        self.script = ""  # digest of the script that is run; empty if it is a module, or a folder
        self._loaded: dict[int, tuple[int, str]] = {}  # key of a load -> digest of the source, path
        self._told: set[str] = set()
        self._digests: bytes | None = b""
        self._root = {name.partition(".")[0] for name in sys.modules} - {MAIN}

    def own(self, module: str, path: str) -> bool:
        """Whether a file is the user's, and not installed."""
        if module.partition(".")[0] in self._root and module not in (MAIN, SPAWNED):
            return False
        return not (path.startswith(_LIBRARIES) or any(f"{os.sep}{name}{os.sep}" in path for name in INSTALLED))

    def source(self, module: str, path: str, found: bytes) -> bytes:
        """What is to be run of a file that has been found on the disk like this."""
        shown, path = path, os.path.abspath(path)
        module = MAIN if module == SPAWNED else module
        load = Load(module, path, self._times[module, path])
        self._times[module, path] += 1
        source = self._kept(load, found)
        if source != found:
            self._tell(path, f"{path} is not what it was when this run first loaded it: what it was then is run")
            # With no time stamp nobody compares it with the disk: tracebacks show the lines that are run.
            lines = source.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[shown] = linecache.cache[path] = (len(source), None, lines, path)
        self._loaded[load.key] = (xxhash.xxh3_64_intdigest(source), path)
        self._digests = None
        return source

    def _kept(self, load: Load, found: bytes) -> bytes:
        if self.kept is None:
            return found
        try:
            return self.kept.keep(load, found)
        except OSError as error:
            self._tell("", f"the code of this run could not be kept in {self.kept.folder}: {error.strerror}")
            return found

    def _tell(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._say(text)

    def digests(self) -> bytes:
        """Of all that was loaded so far: for private records."""
        if self._digests is None:
            self._digests = b"".join(_PAIR.pack(key, digest) for key, (digest, _) in self._loaded.items())
        return self._digests

    def check(self, theirs: bytes) -> None:
        """Compare with the digests of the rank's last holder. Raises `RefusedError`, naming the files that differ."""
        known = dict(_PAIR.iter_unpack(theirs))
        differing = [path for key, (digest, path) in self._loaded.items() if known.get(key, digest) != digest]
        if differing:
            raise RefusedError(
                f"{', '.join(sorted(set(differing))[:3])}: the rank's last holder ran other code than this worker has "
                "found, and the code of the start could not be kept",
                "leave the script and its modules alone while it runs, and keep the run's folder writable",
            )


def _library_folders() -> tuple[str, ...]:
    ours = str(Path(__file__).resolve().parents[2])
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} | {ours}
    return tuple(sorted(os.path.join(folder, "") for folder in found))


_LIBRARIES = _library_folders()


# ---------------------------------------------------------------- where Python asks


def begin(env: Mapping[str, str]) -> Program:
    """In a worker, before it runs the script."""
    folder = env.get(FOLDER)
    program = Program(None if folder is None else Kept(Path(folder)))
    install(program)
    return program


def install(program: Program) -> None:
    """From now on Python's loaders of source files ask this program what they are to run."""
    loader: Any = importlib.machinery.SourceFileLoader
    plain = loader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        path = self.get_filename(fullname)
        if not program.own(fullname, path):
            return plain(self, fullname)
        return self.source_to_code(program.source(fullname, path, self.get_data(path)), path)

    loader.get_code = get_code
    _stand_in_runpy(program)
    _stand_in_spawn(program)


def _stand_in_runpy(program: Program) -> None:
    """`runpy.run_path` reads files by itself: so do processes that are spawned, with the script."""
    stand_in: Any = runpy
    plain = stand_in._get_code_from_file

    def get_code_from_file(*args: str) -> Any:
        found = plain(*args)  # with the name of the module before the path, or, since Python 3.12, without
        path = os.fsdecode(args[-1])
        if not path.endswith(".py") or not program.own(SPAWNED, path):
            return found
        code = compile(program.source(SPAWNED, path, Path(path).read_bytes()), path, "exec", dont_inherit=True)
        return (code, *found[1:]) if isinstance(found, tuple) else code

    stand_in._get_code_from_file = get_code_from_file


def _stand_in_spawn(program: Program) -> None:
    """A process that is spawned begins anew: what it is told first makes it ask here, too."""
    if program.kept is None:
        return
    folder = str(program.kept.folder)
    spawn: Any = multiprocessing.spawn
    plain = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**plain(name), "torchrelay": _Unpacked(folder)}

    spawn.get_preparation_data = get_preparation_data


class _Unpacked:
    """To unpack it installs a program in the process that does so."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return install_spawned, (self._folder,)


def install_spawned(folder: str) -> None:
    """In a process that was spawned, before it loads the script."""
    install(Program(Kept(Path(folder))))
